//! Refusals of inputs, and that a refusal changes nothing.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{Device, Inputs, Memory, Result, Stream, Template};

use super::inputs::{copying, input_nodes, instantiate, plain, replay};
use crate::support::raw::feed;
use crate::support::{
    POISON, all, bytes, error, is_foreign, is_invalid, memory, other_device, poisoned, random,
    words,
};

on_every_driver! {
    inputs_of_another_template_are_refused,
    inputs_that_came_after_the_exec_are_refused,
    inputs_with_a_removed_node_are_refused,
    wrong_counts_are_refused,
    destinations_that_overlap_are_refused,
    a_source_that_is_written_is_refused,
    a_source_that_is_the_slot_of_any_other_is_refused,
    a_store_that_is_no_word_is_refused,
    memory_of_another_device_is_refused,
}

fn inputs_of_another_template_are_refused(device: &Device) {
    let (a, b) = (memory(device, &random(1)), poisoned(device));
    let source = memory(device, &random(2));
    let (template, other) = (copying(device, &a, &b), copying(device, &a, &b));
    let inputs = [&template, &other].map(|t| Inputs::add(t, from_ref(&a), &[]).unwrap());
    let exec = instantiate(&template);
    assert!(is_foreign(replay(
        &exec,
        &inputs[1],
        &[source.address()],
        &[]
    )));
    assert_eq!(words(&b), all(POISON));
    replay(&exec, &inputs[0], &[source.address()], &[]).unwrap();
    assert_eq!(words(&b), random(2));
}

fn inputs_that_came_after_the_exec_are_refused(device: &Device) {
    let (a, b) = (memory(device, &random(1)), poisoned(device));
    let template = copying(device, &a, &b);
    let exec = instantiate(&template);
    let inputs = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let refused = replay(&exec, &inputs, &[a.address()], &[]);
    assert!(
        error(refused)
            .to_string()
            .contains("before they were added")
    );
    plain(&exec);
    assert_eq!(words(&b), random(1));
}

fn inputs_with_a_removed_node_are_refused(device: &Device) {
    let (a, b, source) = (
        memory(device, &random(1)),
        poisoned(device),
        poisoned(device),
    );
    let template = copying(device, &a, &b);
    let inputs = Inputs::add(&template, from_ref(&a), &[]).unwrap();
    let (unfed, fed) = (instantiate(&template), instantiate(&template));
    replay(&fed, &inputs, &[source.address()], &[]).unwrap();
    template.remove(input_nodes(&template)[0]).unwrap();
    for exec in [&unfed, &fed] {
        for source in [&a, &source] {
            assert!(is_foreign(replay(exec, &inputs, &[source.address()], &[])));
        }
    }
    // It would go on copying from a source that is nobody's any more.
    let stream = Stream::new(device).unwrap();
    assert!(is_foreign(fed.replay(&stream)));
    plain(&unfed);
    plain(&instantiate(&template));
    assert!(is_foreign(replay(
        &instantiate(&template),
        &inputs,
        &[a.address()],
        &[]
    )));
}

fn wrong_counts_are_refused(device: &Device) {
    let (a, store) = (poisoned(device), memory(device, &[1, 2]));
    let template = Arc::new(Template::new(device).unwrap());
    let inputs = Inputs::add(&template, from_ref(&a), &[store]).unwrap();
    assert!(is_invalid(feed(&inputs, &[], &[1])));
    assert!(is_invalid(feed(&inputs, &[a.address(); 2], &[1])));
    assert!(is_invalid(feed(&inputs, &[a.address()], &[])));
    assert!(is_invalid(feed(&inputs, &[a.address()], &[1, 2])));
    assert!(feed(&inputs, &[a.address()], &[1]).is_ok());
}

fn destinations_that_overlap_are_refused(device: &Device) {
    let a = poisoned(device);
    let template = Arc::new(Template::new(device).unwrap());
    let parts = [0..16, 8..24, 16..24].map(|range| a.slice(range).unwrap());
    assert!(is_invalid(Inputs::add(&template, &parts[..2], &[])));
    assert!(is_invalid(Inputs::add(
        &template,
        &parts[1..2],
        &parts[2..]
    )));
    assert_eq!(template.node_count().unwrap(), 0);
    Inputs::add(&template, &parts[..1], &parts[2..]).unwrap();
}

fn a_source_that_is_written_is_refused(device: &Device) {
    let (a, source) = (memory(device, &random(1)), memory(device, &random(2)));
    let slots = [0..16, 32..48].map(|range| a.slice(range).unwrap());
    let store = a.slice(64..72).unwrap();
    let template = Arc::new(Template::new(device).unwrap());
    let inputs = Inputs::add(&template, &slots, &[store]).unwrap();
    let exec = instantiate(&template);
    let (start, good) = (a.address(), source.address());
    for (offset, conflicts) in [(16, false), (31, true), (4, true), (50, true), (72, false)] {
        let sources = [start.offset(offset), good];
        assert_eq!(inputs.conflicts(0, sources[0]), conflicts, "{offset}");
        assert_eq!(
            is_ok_or_invalid(replay(&exec, &inputs, &sources, &[0])),
            !conflicts
        );
    }
    a.write(&bytes(&random(1))).unwrap();
    replay(&exec, &inputs, &[slots[0].address(), good], &[0]).unwrap();
    let (now, mut expected) = (words(&a), random(1));
    expected[8..12].copy_from_slice(&random(2)[..4]);
    expected[16..18].copy_from_slice(&[0, 0]);
    assert_eq!(now, expected);
}

fn a_source_that_is_the_slot_of_any_other_is_refused(device: &Device) {
    // The counts at which kernels change or a node is added.
    for count in [15, 16, 31, 32, 127, 128] {
        let to = Memory::new(device, 8 * count).unwrap();
        let slots: Vec<Memory> = (0..count)
            .map(|i| to.slice(8 * i..8 * i + 8).unwrap())
            .collect();
        let source = memory(device, &random(1));
        let template = Arc::new(Template::new(device).unwrap());
        let inputs = Inputs::add(&template, &slots, &[]).unwrap();
        let exec = instantiate(&template);
        let good = vec![source.address(); slots.len()];
        let before = to.read().unwrap();
        for (slot, other) in [(0, slots.len() - 1), (slots.len() - 1, 0)] {
            let mut sources = good.clone();
            sources[slot] = slots[other].address();
            assert!(inputs.conflicts(slot, sources[slot]));
            assert!(is_invalid(replay(&exec, &inputs, &sources, &[])));
            plain(&exec);
            assert!(to.read().unwrap() == before, "{count} slots");
        }
        replay(&exec, &inputs, &good, &[]).unwrap();
        let expected = source.slice(0..8).unwrap().read().unwrap();
        assert!(to.read().unwrap() == expected.repeat(slots.len()));
    }
}

/// Return whether it succeeded; otherwise an argument was refused.
fn is_ok_or_invalid(result: Result<()>) -> bool {
    result.is_ok() || !is_invalid(result)
}

fn a_store_that_is_no_word_is_refused(device: &Device) {
    let a = poisoned(device);
    let template = Arc::new(Template::new(device).unwrap());
    for range in [0..4, 4..12, 0..16] {
        let store = a.slice(range).unwrap();
        assert!(is_invalid(Inputs::add(&template, &[], &[store])));
    }
}

fn memory_of_another_device_is_refused(device: &Device) {
    let there = poisoned(&other_device());
    let word = there.slice(0..8).unwrap();
    let template = Arc::new(Template::new(device).unwrap());
    assert!(is_foreign(Inputs::add(&template, &[there], &[])));
    assert!(is_foreign(Inputs::add(&template, &[], &[word])));
}
