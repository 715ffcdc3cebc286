//! Copies of outputs, and that a replay without a delivery copies nothing.

use std::slice::from_ref;
use std::sync::Arc;

use cg_core::{
    Destination, Device, Exec, Inputs, Memory, Node, NodeDetail, Outputs, Result, Stream, Template,
    Transfer, Work,
};

use super::inputs::{instantiate, noise, plain};
use crate::support::kernels::Kernels;
use crate::support::raw::{deliver, feed};
use crate::support::{POISON, all, axpy, bytes, memory, poisoned, random, words};

on_every_driver! {
    results_of_any_number_size_and_alignment_are_copied,
    large_results_are_copied_whole,
    each_replay_copies_to_its_own_destinations,
    a_destination_takes_no_more_than_its_bytes,
    a_large_destination_takes_no_more_than_its_bytes,
    a_plain_replay_copies_nothing,
    a_result_that_is_delivered_to_itself_stays,
    all_former_leaves_run_before_the_copies,
    outputs_of_an_empty_template_copy_what_is_there,
    results_may_overlap,
    inputs_and_outputs_happen_in_one_replay,
    inputs_that_come_after_outputs_run_before_them,
    outputs_of_a_capture_run_after_it,
    every_exec_of_a_template_has_its_own_destinations,
    a_delivery_after_an_update_copies_again,
    an_update_takes_the_destinations_away,
    a_delivery_after_a_set_of_the_node_copies_again,
    a_replay_in_flight_keeps_its_destinations,
    an_exec_that_has_delivered_keeps_the_template,
    copies_of_a_template_copy_nothing,
}

/// More than the kernel copies.
pub(super) const LARGE: u64 = (4 << 20) + 1;

/// Return all bytes of some memory.
pub(super) fn whole(memory: &Memory) -> Destination {
    first(memory, memory.bytes())
}

/// Return the first bytes of some memory.
pub(super) fn first(memory: &Memory, bytes: u64) -> Destination {
    let address = memory.address();
    Destination { address, bytes }
}

pub(super) fn replay(exec: &Exec, outputs: &Outputs, to: &[Destination]) -> Result<()> {
    let stream = Stream::new(exec.device()).unwrap();
    exec.replay_with(&deliver(outputs, to)?, &stream)?;
    stream.synchronize()
}

pub(super) fn zeros(device: &Device, bytes: u64) -> Memory {
    let memory = Memory::new(device, bytes).unwrap();
    memory
        .write(&vec![0; usize::try_from(bytes).unwrap()])
        .unwrap();
    memory
}

fn noisy(device: &Device, seed: u64, bytes: u64) -> Memory {
    let memory = Memory::new(device, bytes).unwrap();
    memory.write(&noise(seed, bytes)).unwrap();
    memory
}

/// Return a template that sets a result to a word.
fn setting(device: &Device, result: &Memory, word: u32) -> Arc<Template> {
    let template = Arc::new(Template::new(device).unwrap());
    template
        .add(&Work::memset(result, word).unwrap(), &[])
        .unwrap();
    template
}

/// Return the nodes that outputs have added, which are the last.
pub(super) fn output_nodes(template: &Template) -> Vec<Node> {
    let mut nodes = template.nodes().unwrap();
    nodes.retain(|node| match template.detail(*node).unwrap() {
        NodeDetail::Kernel { name, .. } => name.is_some_and(|name| name.starts_with("cg_outputs_")),
        NodeDetail::Memcpy { bytes, .. } => bytes == 16,
        _ => false,
    });
    nodes
}

fn results_of_any_number_size_and_alignment_are_copied(device: &Device) {
    for count in [1, 4, 5, 11, 64, 67, 170, 171, 200] {
        let some = [1, 3, 16, 0, 64, 1000, 4096, 17, 8, 15, 8193, 32];
        let sizes: Vec<u64> = some.iter().copied().cycle().take(count).collect();
        let total = sizes.iter().map(|size| size + 64).sum();
        let (from, to) = (noisy(device, 1, total), Memory::new(device, total).unwrap());
        let before = noise(2, total);
        for (from_shifts, to_shifts) in [(&[0, 4][..], &[0][..]), (&[0, 1, 3, 8], &[0, 1, 4, 2, 8])]
        {
            to.write(&before).unwrap();
            let mut expected = before.clone();
            let (mut start, mut results, mut destinations) = (0, Vec::new(), Vec::new());
            for (i, size) in sizes.iter().enumerate() {
                let (a, b) = (
                    start + from_shifts[i % from_shifts.len()],
                    start + to_shifts[i % to_shifts.len()],
                );
                let (result, own) = (
                    from.slice(a..a + size).unwrap(),
                    to.slice(b..b + size).unwrap(),
                );
                let at = usize::try_from(b).unwrap();
                let bytes = result.read().unwrap();
                expected[at..at + bytes.len()].copy_from_slice(&bytes);
                destinations.push(whole(&own));
                results.push(result);
                start += (size + 48).next_multiple_of(16);
            }
            let template = Arc::new(Template::new(device).unwrap());
            let outputs = Outputs::add(&template, &results).unwrap();
            assert_eq!(outputs.len(), count);
            replay(&instantiate(&template), &outputs, &destinations).unwrap();
            assert!(to.read().unwrap() == expected, "{count} results");
        }
    }
}

fn large_results_are_copied_whole(device: &Device) {
    let sizes = [LARGE - 1, LARGE, 64, (9 << 20) + 5];
    let results: Vec<Memory> = (1..)
        .zip(sizes)
        .map(|(seed, size)| noisy(device, seed, size))
        .collect();
    let template = Arc::new(Template::new(device).unwrap());
    let outputs = Outputs::add(&template, &results).unwrap();
    assert_eq!(output_nodes(&template).len(), 1);
    let exec = instantiate(&template);
    for _ in 0..2 {
        let to: Vec<Memory> = sizes.iter().map(|size| zeros(device, *size)).collect();
        let destinations: Vec<_> = to.iter().map(whole).collect();
        replay(&exec, &outputs, &destinations).unwrap();
        for ((seed, size), to) in (1..).zip(sizes).zip(&to) {
            assert!(to.read().unwrap() == noise(seed, size), "{size} bytes");
        }
    }
}

fn each_replay_copies_to_its_own_destinations(device: &Device) {
    let (x, sum) = (memory(device, &random(1)), memory(device, &random(2)));
    let kernels = Kernels::load(device);
    let template = Arc::new(Template::new(device).unwrap());
    template.add(&kernels.axpy(3, &x, &sum), &[]).unwrap();
    let outputs = Outputs::add(&template, from_ref(&sum)).unwrap();
    let exec = instantiate(&template);
    let to: Vec<Memory> = (0..5).map(|_| poisoned(device)).collect();
    let stream = Stream::new(device).unwrap();
    for to in &to {
        let destination = [whole(to)];
        exec.replay_with(&deliver(&outputs, &destination).unwrap(), &stream)
            .unwrap();
    }
    stream.synchronize().unwrap();
    let mut expected = random(2);
    for to in &to {
        expected = axpy(3, &random(1), &expected);
        assert_eq!(words(to), expected);
    }
}

fn a_destination_takes_no_more_than_its_bytes(device: &Device) {
    let result = noisy(device, 1, 20_000);
    let template = Arc::new(Template::new(device).unwrap());
    let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
    let exec = instantiate(&template);
    for bytes in [0, 1, 4095, 16_384, 20_000, 7] {
        let to = zeros(device, 20_000);
        replay(&exec, &outputs, &[first(&to, bytes)]).unwrap();
        let (head, rest) = (usize::try_from(bytes).unwrap(), to.read().unwrap());
        assert!(rest[..head] == noise(1, 20_000)[..head]);
        assert!(rest[head..].iter().all(|byte| *byte == 0));
    }
}

fn a_large_destination_takes_no_more_than_its_bytes(device: &Device) {
    let result = noisy(device, 1, LARGE);
    let template = Arc::new(Template::new(device).unwrap());
    let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
    let exec = instantiate(&template);
    for bytes in [LARGE, 0, 100, LARGE - 1] {
        let to = zeros(device, LARGE);
        replay(&exec, &outputs, &[first(&to, bytes)]).unwrap();
        let (head, rest) = (usize::try_from(bytes).unwrap(), to.read().unwrap());
        assert!(rest[..head] == noise(1, LARGE)[..head]);
        assert!(rest[head..].iter().all(|byte| *byte == 0));
    }
}

fn a_plain_replay_copies_nothing(device: &Device) {
    for bytes in [64, LARGE] {
        let result = noisy(device, 1, bytes);
        let template = Arc::new(Template::new(device).unwrap());
        let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
        let exec = instantiate(&template);
        plain(&exec);
        let to = zeros(device, bytes);
        replay(&exec, &outputs, &[whole(&to)]).unwrap();
        assert!(to.read().unwrap() == noise(1, bytes));
        // The destination may go: no later replay writes it.
        drop(to);
        plain(&exec);
        plain(&exec);
        assert!(result.read().unwrap() == noise(1, bytes));
        let to = zeros(device, bytes);
        replay(&exec, &outputs, &[whole(&to)]).unwrap();
        assert!(to.read().unwrap() == noise(1, bytes));
    }
}

fn a_result_that_is_delivered_to_itself_stays(device: &Device) {
    let results = [
        noisy(device, 1, 64),
        noisy(device, 2, LARGE),
        noisy(device, 3, 64),
    ];
    let template = Arc::new(Template::new(device).unwrap());
    let outputs = Outputs::add(&template, &results).unwrap();
    let to = zeros(device, 64);
    let destinations = [outputs.source(0), outputs.source(1), whole(&to)];
    assert_eq!(destinations[1], whole(&results[1]));
    replay(&instantiate(&template), &outputs, &destinations).unwrap();
    assert!(to.read().unwrap() == noise(3, 64));
    assert!(results[1].read().unwrap() == noise(2, LARGE));
}

fn all_former_leaves_run_before_the_copies(device: &Device) {
    let results: Vec<Memory> = (0..200).map(|_| poisoned(device)).collect();
    let template = Arc::new(Template::new(device).unwrap());
    let first = template.add_empty(&[]).unwrap();
    let sources: Vec<Memory> = (0..200).map(|seed| memory(device, &random(seed))).collect();
    for (result, source) in results.iter().zip(&sources) {
        template
            .add(&Work::memcpy(result, source).unwrap(), &[first])
            .unwrap();
    }
    let large = noisy(device, 1, LARGE);
    let outputs = Outputs::add(&template, &[&results[..], &[large]].concat()).unwrap();
    let last = output_nodes(&template);
    let edges = template.edges().unwrap();
    assert_eq!(last.len(), 2);
    for node in &last {
        assert_eq!(edges.iter().filter(|edge| edge.to == *node).count(), 200);
        assert!(edges.iter().all(|edge| edge.from != *node));
    }
    let to: Vec<Memory> = (0..200).map(|_| poisoned(device)).collect();
    let mut destinations: Vec<_> = to.iter().map(whole).collect();
    destinations.push(outputs.source(200));
    replay(&instantiate(&template), &outputs, &destinations).unwrap();
    for (seed, to) in (0..).zip(&to) {
        assert_eq!(words(to), random(seed));
    }
}

fn outputs_of_an_empty_template_copy_what_is_there(device: &Device) {
    let (result, to) = (memory(device, &random(1)), poisoned(device));
    let template = Arc::new(Template::new(device).unwrap());
    let none = Outputs::add(&template, &[]).unwrap();
    assert!(none.is_empty());
    let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &none, &[]).unwrap();
    assert_eq!(words(&to), all(POISON));
    replay(&exec, &outputs, &[whole(&to)]).unwrap();
    assert_eq!(words(&to), random(1));
}

fn results_may_overlap(device: &Device) {
    let memory = noisy(device, 1, 64);
    let results = [0..48, 16..64].map(|range| memory.slice(range).unwrap());
    let template = Arc::new(Template::new(device).unwrap());
    let outputs = Outputs::add(&template, &results).unwrap();
    let to = [zeros(device, 48), zeros(device, 48)];
    replay(
        &instantiate(&template),
        &outputs,
        &[whole(&to[0]), whole(&to[1])],
    )
    .unwrap();
    assert_eq!(to[0].read().unwrap(), noise(1, 64)[..48]);
    assert_eq!(to[1].read().unwrap(), noise(1, 64)[16..]);
}

fn inputs_and_outputs_happen_in_one_replay(device: &Device) {
    let (slot, result) = (poisoned(device), poisoned(device));
    let template = Arc::new(Template::new(device).unwrap());
    template
        .add(&Work::memcpy(&result, &slot).unwrap(), &[])
        .unwrap();
    let inputs = Inputs::add(&template, from_ref(&slot), &[]).unwrap();
    let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
    let exec = instantiate(&template);
    let stream = Stream::new(device).unwrap();
    let sources: Vec<Memory> = (0..3).map(|seed| memory(device, &random(seed))).collect();
    let to: Vec<Memory> = (0..3).map(|_| poisoned(device)).collect();
    for (source, to) in sources.iter().zip(&to) {
        let (source, to) = ([source.address()], [whole(to)]);
        let feed = feed(&inputs, &source, &[]).unwrap();
        let delivery = deliver(&outputs, &to).unwrap();
        let both = Transfer::new(Some(&feed), Some(&delivery));
        exec.replay_with(both, &stream).unwrap();
    }
    // Each alone.
    let source = [sources[0].address()];
    let only = feed(&inputs, &source, &[]).unwrap();
    exec.replay_with(&only, &stream).unwrap();
    stream.synchronize().unwrap();
    for (seed, to) in (0..).zip(&to) {
        assert_eq!(words(to), random(seed));
    }
    slot.write(&bytes(&random(7))).unwrap();
    replay(&exec, &outputs, &[whole(&to[0])]).unwrap();
    assert_eq!(words(&to[0]), random(7));
    exec.replay_with(Transfer::default(), &stream).unwrap();
}

fn inputs_that_come_after_outputs_run_before_them(device: &Device) {
    let (shared, source, to) = (
        poisoned(device),
        memory(device, &random(1)),
        poisoned(device),
    );
    let template = Arc::new(Template::new(device).unwrap());
    let outputs = Outputs::add(&template, from_ref(&shared)).unwrap();
    let inputs = Inputs::add(&template, from_ref(&shared), &[]).unwrap();
    let exec = instantiate(&template);
    let (source, destination) = ([source.address()], [whole(&to)]);
    let feed = feed(&inputs, &source, &[]).unwrap();
    let delivery = deliver(&outputs, &destination).unwrap();
    let stream = Stream::new(device).unwrap();
    exec.replay_with(Transfer::new(Some(&feed), Some(&delivery)), &stream)
        .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&to), random(1));
}

fn outputs_of_a_capture_run_after_it(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let stream = Stream::new(device).unwrap();
    let capture = cg_core::Capture::begin(&stream, cg_core::CaptureMode::ThreadLocal).unwrap();
    stream.enqueue(&kernels.axpy(3, &x, &y)).unwrap();
    stream.enqueue(&kernels.axpy(5, &x, &y)).unwrap();
    let template = Arc::new(capture.finish().unwrap());
    let outputs = Outputs::add(&template, from_ref(&y)).unwrap();
    let to = poisoned(device);
    replay(&instantiate(&template), &outputs, &[whole(&to)]).unwrap();
    let sum = axpy(3, &random(1), &random(2));
    assert_eq!(words(&to), axpy(5, &random(1), &sum));
}

fn every_exec_of_a_template_has_its_own_destinations(device: &Device) {
    let result = poisoned(device);
    let template = setting(device, &result, 5);
    let outputs = Outputs::add(&template, from_ref(&result)).unwrap();
    let (first, second) = (instantiate(&template), instantiate(&template));
    let to = [poisoned(device), poisoned(device)];
    replay(&first, &outputs, &[whole(&to[0])]).unwrap();
    assert_eq!((words(&to[0]), words(&to[1])), (all(5), all(POISON)));
    replay(&second, &outputs, &[whole(&to[1])]).unwrap();
    to[0].write(&bytes(&random(1))).unwrap();
    plain(&second);
    assert_eq!((words(&to[0]), words(&to[1])), (random(1), all(5)));
}

fn a_delivery_after_an_update_copies_again(device: &Device) {
    let (result, large, to) = (poisoned(device), noisy(device, 1, LARGE), poisoned(device));
    let template = setting(device, &result, 5);
    let outputs = Outputs::add(&template, &[result, large]).unwrap();
    let mut exec = instantiate(&template);
    let copy = zeros(device, LARGE);
    let destinations = [whole(&to), whole(&copy)];
    replay(&exec, &outputs, &destinations).unwrap();
    exec.update(&template).unwrap();
    to.write(&bytes(&all(POISON))).unwrap();
    copy.write(&[0; 64]).unwrap();
    replay(&exec, &outputs, &destinations).unwrap();
    assert_eq!(words(&to), all(5));
    assert!(copy.read().unwrap() == noise(1, LARGE));
}

fn an_update_takes_the_destinations_away(device: &Device) {
    let (result, large, to) = (poisoned(device), noisy(device, 1, LARGE), poisoned(device));
    let template = setting(device, &result, 5);
    let outputs = Outputs::add(&template, &[result, large]).unwrap();
    let mut exec = instantiate(&template);
    let copy = zeros(device, LARGE);
    replay(&exec, &outputs, &[whole(&to), whole(&copy)]).unwrap();
    exec.update(&template).unwrap();
    to.write(&bytes(&random(1))).unwrap();
    copy.write(&[0; 64]).unwrap();
    plain(&exec);
    assert_eq!(words(&to), random(1));
    assert_eq!(copy.read().unwrap()[..64], [0; 64]);
}

fn a_delivery_after_a_set_of_the_node_copies_again(device: &Device) {
    let (result, large, to) = (poisoned(device), noisy(device, 1, LARGE), poisoned(device));
    let template = setting(device, &result, 5);
    let outputs = Outputs::add(&template, &[result.clone(), large]).unwrap();
    let mut exec = instantiate(&template);
    let copy = zeros(device, LARGE);
    let destinations = [whole(&to), whole(&copy)];
    replay(&exec, &outputs, &destinations).unwrap();
    for node in output_nodes(&template) {
        let work = Kernels::load(device).fill(&result, 6);
        exec.set(&template, node, &work).unwrap();
    }
    to.write(&bytes(&random(1))).unwrap();
    copy.write(&[0; 64]).unwrap();
    replay(&exec, &outputs, &destinations).unwrap();
    assert_eq!(words(&to), all(5));
    assert!(copy.read().unwrap() == noise(1, LARGE));
}

fn a_replay_in_flight_keeps_its_destinations(device: &Device) {
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let large = noisy(device, 1, LARGE);
    let kernels = Kernels::load(device);
    let template = Arc::new(Template::new(device).unwrap());
    template.add(&kernels.axpy(7, &x, &y), &[]).unwrap();
    let outputs = Outputs::add(&template, &[y.clone(), large]).unwrap();
    let exec = instantiate(&template);
    let stream = Stream::new(device).unwrap();
    stream.enqueue(&kernels.slow_fill(&y, 6)).unwrap();
    let to: Vec<(Memory, Memory)> = (0..3)
        .map(|_| (poisoned(device), zeros(device, LARGE)))
        .collect();
    for (small, large) in &to {
        let destinations = [whole(small), whole(large)];
        exec.replay_with(&deliver(&outputs, &destinations).unwrap(), &stream)
            .unwrap();
    }
    stream.synchronize().unwrap();
    let mut expected = all(6);
    for (small, large) in &to {
        expected = axpy(7, &random(1), &expected);
        assert_eq!(words(small), expected);
        assert!(large.read().unwrap() == noise(1, LARGE));
    }
}

fn an_exec_that_has_delivered_keeps_the_template(device: &Device) {
    let (result, to) = (poisoned(device), poisoned(device));
    let template = setting(device, &result, 5);
    let outputs = Outputs::add(&template, &[result]).unwrap();
    let exec = instantiate(&template);
    replay(&exec, &outputs, &[whole(&to)]).unwrap();
    let gone = Arc::downgrade(&template);
    drop((template, outputs));
    // The nodes must be set back by way of the template.
    to.write(&bytes(&random(1))).unwrap();
    plain(&exec);
    assert_eq!(words(&to), random(1));
    drop(exec);
    device.collect();
    assert!(gone.upgrade().is_none());
}

fn copies_of_a_template_copy_nothing(device: &Device) {
    let (result, large) = (poisoned(device), noisy(device, 1, LARGE));
    let template = setting(device, &result, 5);
    Outputs::add(&template, &[result.clone(), large]).unwrap();
    let outer = Template::new(device).unwrap();
    outer.add_child(&template, &[]).unwrap();
    for template in [&outer, &template.try_clone().unwrap()] {
        result.write(&bytes(&all(POISON))).unwrap();
        plain(&instantiate(template));
        assert_eq!(words(&result), all(5));
    }
}
