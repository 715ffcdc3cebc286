//! Refusals of outputs, and that a refusal changes nothing.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{Destination, Device, Memory, Outputs, Stream, Template};

use super::inputs::{instantiate, noise, plain};
use super::outputs::{LARGE, first, output_nodes, replay, whole, zeros};
use crate::support::raw::deliver;
use crate::support::{
    POISON, all, error, is_foreign, is_invalid, memory, other_device, poisoned, random, words,
};

on_every_driver! {
    outputs_of_another_template_are_refused,
    outputs_that_came_after_the_exec_are_refused,
    outputs_with_a_removed_node_are_refused,
    wrong_counts_and_sizes_are_refused,
    a_destination_that_is_copied_from_is_refused,
    results_of_another_device_are_refused,
}

fn empty(device: &Device) -> Arc<Template> {
    Arc::new(Template::new(device).unwrap())
}

fn outputs_of_another_template_are_refused(device: &Device) {
    let (result, to) = (memory(device, &random(1)), poisoned(device));
    let (template, other) = (empty(device), empty(device));
    let outputs = [&template, &other].map(|one| Outputs::add(one, from_ref(&result)).unwrap());
    let exec = instantiate(&template);
    assert!(is_foreign(replay(&exec, &outputs[1], &[whole(&to)])));
    assert_eq!(words(&to), all(POISON));
    replay(&exec, &outputs[0], &[whole(&to)]).unwrap();
    assert_eq!(words(&to), random(1));
}

fn outputs_that_came_after_the_exec_are_refused(device: &Device) {
    let (result, to) = (memory(device, &random(1)), poisoned(device));
    let template = empty(device);
    let exec = instantiate(&template);
    let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
    let refused = error(replay(&exec, &outputs, &[whole(&to)]));
    assert!(refused.to_string().contains("before they were added"));
    plain(&exec);
    assert_eq!(words(&to), all(POISON));
}

fn outputs_with_a_removed_node_are_refused(device: &Device) {
    for large in [false, true] {
        let result = if large {
            zeros(device, LARGE)
        } else {
            memory(device, &random(1))
        };
        let to = Memory::new(device, result.bytes()).unwrap();
        let template = empty(device);
        let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
        let (unused, used) = (instantiate(&template), instantiate(&template));
        replay(&used, &outputs, &[whole(&to)]).unwrap();
        for node in output_nodes(&template) {
            template.remove(node).unwrap();
        }
        for exec in [&unused, &used] {
            for to in [whole(&to), outputs.source(0)] {
                assert!(is_foreign(replay(exec, &outputs, &[to])));
            }
        }
        // It would go on copying to a destination that is nobody's any more.
        assert!(is_foreign(used.replay(&Stream::new(device).unwrap())));
        plain(&unused);
        plain(&instantiate(&template));
    }
}

fn wrong_counts_and_sizes_are_refused(device: &Device) {
    let (result, to) = (poisoned(device), zeros(device, 8192));
    let outputs = Outputs::add(&empty(device), from_ref(&result)).unwrap();
    assert!(is_invalid(deliver(&outputs, &[])));
    assert!(is_invalid(deliver(
        &outputs,
        &[first(&to, 16), first(&to, 0)]
    )));
    assert!(is_invalid(deliver(
        &outputs,
        &[first(&to, result.bytes() + 1)]
    )));
    assert!(deliver(&outputs, &[first(&to, result.bytes())]).is_ok());
}

fn a_destination_that_is_copied_from_is_refused(device: &Device) {
    for bytes in [64, LARGE] {
        let all = zeros(device, 3 * bytes);
        let results = [0..bytes, 2 * bytes..3 * bytes].map(|range| all.slice(range).unwrap());
        results[0].write(&noise(1, bytes)).unwrap();
        let template = empty(device);
        let outputs = Outputs::add(&template, &results).unwrap();
        let exec = instantiate(&template);
        let at = |offset| Destination {
            address: all.address().offset(offset),
            bytes,
        };
        let good = zeros(device, bytes);
        for offset in [bytes - 1, bytes + 1, 2 * bytes] {
            let to = [at(offset), whole(&good)];
            assert!(is_invalid(replay(&exec, &outputs, &to)), "{offset}");
        }
        plain(&exec);
        assert!(results[1].read().unwrap().iter().all(|byte| *byte == 0));
        replay(&exec, &outputs, &[at(bytes), whole(&good)]).unwrap();
        let copied = all.slice(bytes..2 * bytes).unwrap().read().unwrap();
        assert!(copied == noise(1, bytes));
        // Fewer bytes may end before it.
        let fewer = Destination {
            bytes: 1,
            ..at(bytes + 1)
        };
        replay(&exec, &outputs, &[fewer, whole(&good)]).unwrap();
    }
}

fn results_of_another_device_are_refused(device: &Device) {
    let there = poisoned(&other_device());
    assert!(is_foreign(Outputs::add(&empty(device), &[there])));
}
