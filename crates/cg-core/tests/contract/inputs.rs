//! Copies, stores and refusals of inputs.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{
    Address, Device, Exec, Inputs, InstantiateFlags, Memory, Node, NodeDetail, Result, Stream,
    Template, Work,
};

use crate::support::kernels::Kernels;
use crate::support::raw::feed;
use crate::support::{POISON, all, axpy, bytes, memory, poisoned, random, random_word, words};

on_every_driver! {
    inputs_of_any_number_size_and_alignment_are_copied,
    large_inputs_are_copied_whole,
    each_replay_copies_from_its_own_sources,
    the_sources_contents_are_those_of_the_replay,
    a_plain_replay_copies_and_stores_nothing,
    a_plain_replay_after_a_feed_copies_and_stores_nothing,
    a_slot_fed_with_itself_keeps_what_it_holds,
    stores_set_eight_bytes_each,
    more_stores_than_a_node_has_room_for_happen,
    all_former_roots_run_after_the_copies,
    inputs_of_an_empty_template_copy,
    inputs_of_a_capture_run_before_it,
    inputs_added_twice_are_fed_by_turns,
    every_exec_of_a_template_has_its_own_sources,
    a_feed_after_an_update_copies_again,
    an_update_takes_the_sources_away,
    a_feed_after_a_set_of_the_node_copies_again,
    a_replay_in_flight_keeps_its_sources,
    a_fed_exec_keeps_the_template,
}

pub(super) fn instantiate(template: &Template) -> Exec {
    template.instantiate(InstantiateFlags::default()).unwrap()
}

pub(super) fn replay(
    exec: &Exec,
    inputs: &Inputs,
    sources: &[Address],
    values: &[u64],
) -> Result<()> {
    let stream = Stream::new(exec.device()).unwrap();
    exec.replay_with(&feed(inputs, sources, values)?, &stream)?;
    stream.synchronize()
}

pub(super) fn plain(exec: &Exec) {
    let stream = Stream::new(exec.device()).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
}

fn addresses(of: &[Memory]) -> Vec<Address> {
    of.iter().map(Memory::address).collect()
}

/// Return a template that copies slot `a` to `b`.
pub(super) fn copying(device: &Device, a: &Memory, b: &Memory) -> Arc<Template> {
    let template = Arc::new(Template::new(device).unwrap());
    template.add(&Work::memcpy(b, a).unwrap(), &[]).unwrap();
    template
}

/// Bytes that look random.
pub(super) fn noise(seed: u64, bytes: u64) -> Vec<u8> {
    let words = (0..bytes.div_ceil(4)).map(|i| random_word(seed << 32 | i));
    let mut noise: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    noise.truncate(usize::try_from(bytes).unwrap());
    noise
}

/// Return slices of `bytes` bytes of one memory, with a gap behind each, at a multiple of 16 plus the
/// given shifts by turns.
fn slices(within: &Memory, sizes: &[u64], shifts: &[u64]) -> Vec<Memory> {
    let mut start = 0;
    let mut slices = Vec::new();
    for (size, shift) in sizes.iter().zip(shifts.iter().cycle()) {
        slices.push(within.slice(start + shift..start + shift + size).unwrap());
        start += (size + 48).next_multiple_of(16);
    }
    slices
}

fn inputs_of_any_number_size_and_alignment_are_copied(device: &Device) {
    for count in [1, 4, 5, 20, 21, 64, 67, 170, 171, 200] {
        let some = [1, 3, 16, 0, 64, 1000, 4096, 17, 8, 15, 8193, 32];
        let sizes: Vec<u64> = some.iter().copied().cycle().take(count).collect();
        let total = sizes.iter().map(|size| size + 64).sum();
        let (to, from) = (
            Memory::new(device, total).unwrap(),
            Memory::new(device, total).unwrap(),
        );
        let before = noise(1, total);
        from.write(&noise(2, total)).unwrap();
        // Both aligned alike and not, and on nothing at all.
        for (to_shifts, from_shifts) in [
            (&[0, 4][..], &[0][..]),
            (&[0, 1, 3, 8], &[0, 1, 4, 2, 8]),
            (&[5], &[5]),
        ] {
            to.write(&before).unwrap();
            let slots = slices(&to, &sizes, to_shifts);
            let sources = slices(&from, &sizes, from_shifts);
            let template = Arc::new(Template::new(device).unwrap());
            let inputs = Inputs::add(&template, &slots, &[]).unwrap();
            replay(&instantiate(&template), &inputs, &addresses(&sources), &[]).unwrap();
            let mut expected = before.clone();
            for (slot, source) in slots.iter().zip(&sources) {
                let at = usize::try_from(slot.address().0 - to.address().0).unwrap();
                let bytes = source.read().unwrap();
                expected[at..at + bytes.len()].copy_from_slice(&bytes);
            }
            assert!(
                to.read().unwrap() == expected,
                "{count} inputs, {to_shifts:?}"
            );
        }
    }
}

fn large_inputs_are_copied_whole(device: &Device) {
    // More than all blocks do at once, so that each goes round several times.
    for (bytes, shift) in [(20 << 20, 0), ((9 << 20) + 5, 4), ((9 << 20) + 3, 1)] {
        let memory = [(); 2].map(|()| Memory::new(device, bytes + shift).unwrap());
        let [slot, source] = memory.map(|memory| memory.slice(shift..bytes + shift).unwrap());
        source.write(&noise(shift, bytes)).unwrap();
        let template = Arc::new(Template::new(device).unwrap());
        let inputs = Inputs::add(&template, from_ref(&slot), &[]).unwrap();
        replay(&instantiate(&template), &inputs, &[source.address()], &[]).unwrap();
        assert!(slot.read().unwrap() == noise(shift, bytes), "{bytes} bytes");
    }
}

fn each_replay_copies_from_its_own_sources(device: &Device) {
    let (a, b, c, result) = (
        poisoned(device),
        poisoned(device),
        poisoned(device),
        memory(device, &random(1)),
    );
    let template = Arc::new(Template::new(device).unwrap());
    let kernels = Kernels::load(device);
    let sum = template.add(&kernels.axpy(3, &a, &result), &[]).unwrap();
    template.add(&kernels.axpy(5, &b, &result), &[sum]).unwrap();
    let inputs = Inputs::add(&template, &[a, b, c.clone()], &[]).unwrap();
    let exec = instantiate(&template);
    let sources: Vec<Memory> = (10..14).map(|seed| memory(device, &random(seed))).collect();
    let stream = Stream::new(device).unwrap();
    let mut expected = random(1);
    for (i, j) in [(0, 1), (0, 1), (2, 1), (3, 2), (0, 3), (1, 1)] {
        let three = [&sources[i], &sources[j], &c].map(Memory::address);
        exec.replay_with(&feed(&inputs, &three, &[]).unwrap(), &stream)
            .unwrap();
        expected = axpy(3, &random(10 + i as u64), &expected);
        expected = axpy(5, &random(10 + j as u64), &expected);
    }
    stream.synchronize().unwrap();
    assert_eq!((words(&result), words(&c)), (expected, all(POISON)));
}

fn the_sources_contents_are_those_of_the_replay(device: &Device) {
    let (a, b, source) = (poisoned(device), poisoned(device), poisoned(device));
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, &[a], &[]).unwrap();
    let exec = instantiate(&template);
    let stream = Stream::new(device).unwrap();
    let (sources, value) = ([source.address()], random_word(1));
    for value in [random_word(2), value] {
        let set = Work::memset(&source, value).unwrap();
        stream.enqueue(&set).unwrap();
        exec.replay_with(&feed(&inputs, &sources, &[]).unwrap(), &stream)
            .unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(words(&b), all(value));
}

fn a_plain_replay_copies_and_stores_nothing(device: &Device) {
    let (a, b) = (memory(device, &random(1)), poisoned(device));
    let store = memory(device, &[7, 8]);
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, from_ref(&a), from_ref(&store)).unwrap();
    assert_eq!((inputs.slots(), inputs.stores()), (1, 1));
    plain(&instantiate(&template));
    assert_eq!((words(&a), words(&b)), (random(1), random(1)));
    assert_eq!(*words(&store), [7, 8]);
}

fn a_plain_replay_after_a_feed_copies_and_stores_nothing(device: &Device) {
    let (a, b, source) = (poisoned(device), poisoned(device), poisoned(device));
    let store = memory(device, &[7, 8]);
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, from_ref(&a), from_ref(&store)).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &inputs, &[source.address()], &[1]).unwrap();
    // The source may go: no later replay reads it.
    drop(source);
    a.write(&bytes(&random(3))).unwrap();
    store.write(&bytes(&[9, 9])).unwrap();
    plain(&exec);
    assert_eq!((words(&a), words(&b)), (random(3), random(3)));
    assert_eq!(*words(&store), [9, 9]);
    let other = memory(device, &random(4));
    replay(&exec, &inputs, &[other.address()], &[1]).unwrap();
    assert_eq!((words(&b), &**words(&store)), (random(4), &[1, 0][..]));
}

fn a_slot_fed_with_itself_keeps_what_it_holds(device: &Device) {
    let (a, b, other) = (
        memory(device, &random(1)),
        poisoned(device),
        poisoned(device),
    );
    let source = memory(device, &random(2));
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, &[a.clone(), other.clone()], &[]).unwrap();
    let exec = instantiate(&template);
    let sources = [a.address(), source.address()];
    replay(&exec, &inputs, &sources, &[]).unwrap();
    assert_eq!((words(&b), words(&other)), (random(1), random(2)));
    assert!(!inputs.conflicts(0, a.address()));
}

fn stores_set_eight_bytes_each(device: &Device) {
    let target = memory(device, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let stores = [8..16, 24..32].map(|range| target.slice(range).unwrap());
    let template = Arc::new(Template::new(device).unwrap());
    let inputs = Inputs::add(&template, &[], &stores).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &inputs, &[], &[u64::MAX, 5 << 32 | 6]).unwrap();
    let set = [1, 2, u32::MAX, u32::MAX, 5, 6, 6, 5];
    assert_eq!(*words(&target), set);
    replay(&exec, &inputs, &[], &[u64::MAX, 0]).unwrap();
    assert_eq!(words(&target)[6..], [0, 0]);
}

fn more_stores_than_a_node_has_room_for_happen(device: &Device) {
    let target = Memory::new(device, 8 * 600).unwrap();
    let (slot, source) = (poisoned(device), memory(device, &random(1)));
    let stores: Vec<Memory> = (0..600)
        .map(|i| target.slice(8 * i..8 * i + 8).unwrap())
        .collect();
    let template = Arc::new(Template::new(device).unwrap());
    let inputs = Inputs::add(&template, from_ref(&slot), &stores).unwrap();
    assert_eq!(template.nodes().unwrap().len(), 3);
    let values: Vec<u64> = (0..600).map(|i| u64::from(random_word(i)) * 3).collect();
    let exec = instantiate(&template);
    replay(&exec, &inputs, &[source.address()], &values).unwrap();
    let found = target.read().unwrap();
    let found: Vec<u64> = found
        .chunks(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()))
        .collect();
    assert_eq!((found, words(&slot)), (values, random(1)));
}

fn all_former_roots_run_after_the_copies(device: &Device) {
    let slots: Vec<Memory> = (0..200).map(|_| poisoned(device)).collect();
    let results: Vec<Memory> = slots.iter().map(|_| poisoned(device)).collect();
    let template = Arc::new(Template::new(device).unwrap());
    for (slot, result) in slots.iter().zip(&results) {
        let copy = Work::memcpy(result, slot).unwrap();
        template.add(&copy, &[]).unwrap();
    }
    let roots = template.nodes().unwrap();
    let other = poisoned(device);
    let set = Work::memset(&other, random_word(1)).unwrap();
    let last = template.add(&set, &roots[..1]).unwrap();
    let inputs = Inputs::add(&template, &slots, &[]).unwrap();
    let edges = template.edges().unwrap();
    let before = |node: &Node| edges.iter().filter(|edge| edge.to == *node).count();
    assert_eq!(template.nodes().unwrap().len(), roots.len() + 3);
    assert!(roots.iter().all(|root| before(root) == 2));
    assert_eq!(before(&last), 1);
    let sources: Vec<Memory> = (0..200).map(|i| memory(device, &random(i))).collect();
    let exec = instantiate(&template);
    replay(&exec, &inputs, &addresses(&sources), &[]).unwrap();
    for (seed, result) in (0..).zip(&results) {
        assert_eq!(words(result), random(seed));
    }
}

fn inputs_of_an_empty_template_copy(device: &Device) {
    let (slot, source) = (poisoned(device), memory(device, &random(1)));
    let template = Arc::new(Template::new(device).unwrap());
    let none = Inputs::add(&template, &[], &[]).unwrap();
    let inputs = Inputs::add(&template, from_ref(&slot), &[]).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &none, &[], &[]).unwrap();
    assert_eq!(words(&slot), all(POISON));
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    assert_eq!(words(&slot), random(1));
}

fn inputs_of_a_capture_run_before_it(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y, source) = (
        poisoned(device),
        memory(device, &random(1)),
        memory(device, &random(2)),
    );
    let stream = Stream::new(device).unwrap();
    let capture = cg_core::Capture::begin(&stream, cg_core::CaptureMode::ThreadLocal).unwrap();
    stream.enqueue(&kernels.axpy(3, &x, &y)).unwrap();
    stream.enqueue(&kernels.axpy(1, &y, &x)).unwrap();
    let template = Arc::new(capture.finish().unwrap());
    let inputs = Inputs::add(&template, from_ref(&x), &[]).unwrap();
    replay(&instantiate(&template), &inputs, &[source.address()], &[]).unwrap();
    let sum = axpy(3, &random(2), &random(1));
    assert_eq!(words(&x), axpy(1, &sum, &random(2)));
}

fn inputs_added_twice_are_fed_by_turns(device: &Device) {
    let (a, b) = (memory(device, &random(1)), memory(device, &random(2)));
    let source = memory(device, &random(3));
    let template = Arc::new(Template::new(device).unwrap());
    let first = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let second = Inputs::add(&template, from_ref(&b), &[]).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &first, &[source.address()], &[]).unwrap();
    assert_eq!((words(&a), words(&b)), (random(3), random(2)));
    a.write(&bytes(&random(4))).unwrap();
    replay(&exec, &second, &[source.address()], &[]).unwrap();
    assert_eq!((words(&a), words(&b)), (random(4), random(3)));
}

fn every_exec_of_a_template_has_its_own_sources(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let sources = [1, 2].map(|seed| memory(device, &random(seed)));
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, &[a], &[]).unwrap();
    let (first, second) = (instantiate(&template), instantiate(&template));
    replay(&first, &inputs, &[sources[0].address()], &[]).unwrap();
    replay(&second, &inputs, &[sources[1].address()], &[]).unwrap();
    assert_eq!(words(&b), random(2));
    replay(&first, &inputs, &[sources[0].address()], &[]).unwrap();
    assert_eq!(words(&b), random(1));
}

fn a_feed_after_an_update_copies_again(device: &Device) {
    let (a, b, source) = (
        poisoned(device),
        poisoned(device),
        memory(device, &random(1)),
    );
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let mut exec = instantiate(&template);
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    exec.update(&template).unwrap();
    a.write(&bytes(&all(POISON))).unwrap();
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    assert_eq!(words(&b), random(1));
}

fn an_update_takes_the_sources_away(device: &Device) {
    let (a, b, source) = (
        poisoned(device),
        poisoned(device),
        memory(device, &random(1)),
    );
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let mut exec = instantiate(&template);
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    exec.update(&template).unwrap();
    a.write(&bytes(&random(2))).unwrap();
    plain(&exec);
    assert_eq!(words(&b), random(2));
}

/// Return the nodes that run the kernel of inputs.
pub(super) fn input_nodes(template: &Template) -> Vec<Node> {
    let mut nodes = template.nodes().unwrap();
    nodes.retain(|node| {
        let detail = template.detail(*node).unwrap();
        matches!(detail, NodeDetail::Kernel { name: Some(name), .. } if name.starts_with("cg_inputs_"))
    });
    nodes
}

fn a_feed_after_a_set_of_the_node_copies_again(device: &Device) {
    let (a, b, source) = (
        poisoned(device),
        poisoned(device),
        memory(device, &random(1)),
    );
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let mut exec = instantiate(&template);
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    let fill = Kernels::load(device).fill(&a, 5);
    exec.set(&template, input_nodes(&template)[0], &fill)
        .unwrap();
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    assert_eq!(words(&b), random(1));
}

fn a_replay_in_flight_keeps_its_sources(device: &Device) {
    let (a, sum) = (poisoned(device), memory(device, &random(1)));
    let sources = [2, 3].map(|seed| memory(device, &random(seed)));
    let kernels = Kernels::load(device);
    let template = Arc::new(Template::new(device).unwrap());
    template.add(&kernels.axpy(7, &a, &sum), &[]).unwrap();
    let inputs = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let exec = instantiate(&template);
    let stream = Stream::new(device).unwrap();
    stream.enqueue(&kernels.slow_fill(&a, 6)).unwrap();
    for source in &sources {
        let address = [source.address()];
        let feed = feed(&inputs, &address, &[]).unwrap();
        exec.replay_with(&feed, &stream).unwrap();
    }
    stream.synchronize().unwrap();
    let first = axpy(7, &random(2), &random(1));
    assert_eq!(words(&sum), axpy(7, &random(3), &first));
}

fn a_fed_exec_keeps_the_template(device: &Device) {
    let (a, b, source) = (
        poisoned(device),
        poisoned(device),
        memory(device, &random(1)),
    );
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, &[a], &[]).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &inputs, &[source.address()], &[]).unwrap();
    let gone = Arc::downgrade(&template);
    drop((template, inputs));
    // The nodes must be set back by way of the template.
    plain(&exec);
    assert_eq!(words(&b), random(1));
    drop(exec);
    device.collect();
    assert!(gone.upgrade().is_none());
}
