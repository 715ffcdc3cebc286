//! Which kernels the nodes of inputs have, and that each does all that it has room for.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{Address, Device, Inputs, Memory, NodeDetail, Template};

use super::inputs::{copying, input_nodes, instantiate, noise, plain, replay};
use crate::support::{bytes, memory, poisoned, random, random_word, words};

on_every_driver! {
    nodes_have_the_smallest_kernel_with_room_for_their_copies_and_stores,
    a_feed_after_an_update_from_inputs_of_another_kernel_copies,
}

/// The names of the kernels of the input nodes.
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
    const SMALL: &str = "cg_inputs_512";
    const MIDDLE: &str = "cg_inputs_1024";
    const LARGE: &str = "cg_inputs_4096";
    let to = Memory::new(device, 16 * 512).unwrap();
    let from = memory(device, &random(1));
    for (copies, stores, expected) in [
        (15, 1, &[SMALL][..]),
        (15, 2, &[MIDDLE]),
        (16, 0, &[MIDDLE]),
        (31, 1, &[MIDDLE]),
        (31, 2, &[LARGE]),
        (32, 0, &[LARGE]),
        (127, 1, &[LARGE]),
        (127, 2, &[LARGE, SMALL]),
        (128, 0, &[LARGE, SMALL]),
        (143, 0, &[LARGE, MIDDLE]),
        (159, 0, &[LARGE, LARGE]),
        (0, 31, &[SMALL]),
        (0, 32, &[MIDDLE]),
        (0, 63, &[MIDDLE]),
        (0, 64, &[LARGE]),
        (0, 256, &[LARGE, SMALL]),
    ] {
        to.write(&noise(1, to.bytes())).unwrap();
        let all: Vec<Memory> = (0..copies + stores)
            .map(|i| to.slice(16 * i..16 * i + 8).unwrap())
            .collect();
        let (slots, words) = all.split_at(usize::try_from(copies).unwrap());
        let template = Arc::new(Template::new(device).unwrap());
        let inputs = Inputs::add(&template, slots, words).unwrap();
        let mut found = kernels(&template);
        found.sort_by_key(|name| name != LARGE);
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
