//! Kernels of the nodes of inputs, and that each does all that it has room for.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{Address, Device, Inputs, Memory, NodeDetail, Pool, Stream, Template};

use super::inputs::{copying, input_nodes, instantiate, noise, plain, replay};
use crate::support::{bytes, memory, poisoned, random, random_word, words};

on_every_driver! {
    nodes_have_the_smallest_kernel_with_room_for_their_copies_and_stores,
    sources_of_any_number_come_from_far_apart_in_turn,
    a_feed_after_an_update_from_inputs_of_another_kernel_copies,
}

/// Return the names of the kernels of the input nodes.
fn kernels(template: &Template) -> Vec<String> {
    let detail = |node| template.detail(node).unwrap();
    let nodes = input_nodes(template).into_iter().map(detail);
    let names = nodes.filter_map(|detail| match detail {
        NodeDetail::Kernel { name, .. } => name,
        _ => None,
    });
    names.collect()
}

fn nodes_have_the_smallest_kernel_with_room_for_their_copies_and_stores(device: &Device) {
    let to = Memory::new(device, 16 * 512).unwrap();
    let from = memory(device, &random(1));
    for (copies, stores, expected) in [
        (4, 1, &[128][..]),
        (4, 2, &[256]),
        (5, 0, &[256]),
        (0, 7, &[128]),
        (0, 8, &[256]),
        (10, 0, &[256]),
        (20, 1, &[512]),
        (20, 2, &[1024]),
        (0, 31, &[512]),
        (42, 0, &[1024]),
        (42, 1, &[1600]),
        (64, 3, &[1600]),
        (66, 1, &[2560]),
        (106, 0, &[2560]),
        (107, 0, &[4096]),
        (170, 0, &[4096]),
        (170, 1, &[4096, 128]),
        (171, 0, &[4096, 128]),
        (200, 0, &[4096, 1024]),
        (340, 0, &[4096, 4096]),
        (0, 255, &[4096]),
        (0, 256, &[4096, 128]),
    ] {
        to.write(&noise(1, to.bytes())).unwrap();
        let all: Vec<Memory> = (0..copies + stores)
            .map(|i| to.slice(16 * i..16 * i + 8).unwrap())
            .collect();
        let (slots, words) = all.split_at(usize::try_from(copies).unwrap());
        let template = Arc::new(Template::new(device).unwrap());
        let inputs = Inputs::add(&template, slots, words).unwrap();
        let mut found = kernels(&template);
        found.sort_by_key(|name| !name.ends_with("4096"));
        let expected: Vec<String> = expected.iter().map(|n| format!("cg_inputs_{n}")).collect();
        assert_eq!(found, expected, "{copies} and {stores}");
        // Neighbours copy different bytes, so that a mixed up one shows.
        let source = |i: usize| 8 * (i as u64 % 4);
        let sources: Vec<Address> = (0..slots.len())
            .map(|i| from.address().offset(source(i)))
            .collect();
        let values: Vec<u64> = (0..stores).map(|i| u64::from(random_word(i)) * 3).collect();
        let exec = instantiate(&template);
        let before = to.read().unwrap();
        plain(&exec);
        assert!(to.read().unwrap() == before, "{copies} and {stores}");
        replay(&exec, &inputs, &sources, &values).unwrap();
        let mut after = before;
        for (i, part) in after.chunks_mut(16).enumerate() {
            if let Some(slot) = sources.get(i) {
                let at = usize::try_from(slot.0 - from.address().0).unwrap();
                part[..8].copy_from_slice(&from.read().unwrap()[at..at + 8]);
            } else if let Some(value) = values.get(i - sources.len()) {
                part[..8].copy_from_slice(&value.to_le_bytes());
            }
        }
        assert!(to.read().unwrap() == after, "{copies} and {stores}");
    }
}

fn sources_of_any_number_come_from_far_apart_in_turn(device: &Device) {
    let stream = Stream::new(device).unwrap();
    // Of two ranges, at different places: both halves of the addresses differ.
    let pools = [0x5100_0000_0000, 0x5200_0000_0000]
        .map(|base| Pool::builder(device).base(Address(base)).build());
    let from = pools.each_ref().map(|pool| {
        let from = pool.allocate(&stream, 16 * 31).unwrap();
        from.write(&noise(2, from.bytes())).unwrap();
        from
    });
    assert_ne!(from[0].address().0 >> 32, from[1].address().0 >> 32);
    for count in 1..=30 {
        let to = Memory::new(device, 16 * count).unwrap();
        let slots: Vec<Memory> = (0..count)
            .map(|i| to.slice(16 * i..16 * (i + 1)).unwrap())
            .collect();
        let template = Arc::new(Template::new(device).unwrap());
        let inputs = Inputs::add(&template, &slots, &[]).unwrap();
        let exec = instantiate(&template);
        for turn in 0..3 {
            let side = |i: u64| usize::try_from((i + turn) % 2).unwrap();
            let sources: Vec<Address> = (0..count)
                .map(|i| from[side(i)].address().offset(16 * (i + side(i) as u64)))
                .collect();
            to.write(&noise(1, to.bytes())).unwrap();
            replay(&exec, &inputs, &sources, &[]).unwrap();
            let contents = from.each_ref().map(|one| one.read().unwrap());
            let expected: Vec<u8> = (0..count)
                .flat_map(|i| {
                    let at = 16 * (usize::try_from(i).unwrap() + side(i));
                    contents[side(i)][at..at + 16].to_vec()
                })
                .collect();
            assert!(to.read().unwrap() == expected, "{count} in turn {turn}");
        }
    }
}

fn a_feed_after_an_update_from_inputs_of_another_kernel_copies(device: &Device) {
    let (a, b) = (memory(device, &random(1)), poisoned(device));
    let more: Vec<Memory> = (0..20).map(|_| poisoned(device)).collect();
    let all: Vec<Memory> = [a.clone()].into_iter().chain(more).collect();
    let [few, many] = [copying(device, &a, &b), copying(device, &a, &b)];
    let inputs = Inputs::add(&few, from_ref(&a), &[]).unwrap();
    Inputs::add(&many, &all, &[]).unwrap();
    assert_ne!(kernels(&few), kernels(&many));
    let mut exec = instantiate(&few);
    let source = memory(device, &random(2));
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    assert_eq!(words(&b), random(2));
    exec.update(&many).unwrap();
    a.write(&bytes(&random(3))).unwrap();
    plain(&exec);
    assert_eq!(words(&b), random(3));
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    assert_eq!(words(&b), random(2));
}
