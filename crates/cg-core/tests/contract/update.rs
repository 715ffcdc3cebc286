//! Updates of an exec from a template or of one node, and its refusals.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cg_core::{
    Device, Error, Exec, InstantiateFlags, Memory, Node, Result, Stream, Template, Work,
};

use crate::support::kernels::Kernels;
use crate::support::{
    Gate, POISON, all, axpy, error, is_foreign, memory, other_device, poisoned, random,
    random_word, words,
};

on_every_driver! {
    an_update_takes_over_addresses_and_arguments,
    an_update_keeps_what_the_template_names,
    an_update_with_another_node_is_refused,
    an_update_with_another_edge_is_refused,
    an_update_with_another_kind_is_refused,
    a_replay_in_flight_does_not_see_an_update,
    a_kernel_node_takes_other_arguments,
    a_kernel_node_takes_another_grid,
    a_kernel_node_takes_another_kernel,
    a_memcpy_node_takes_other_addresses,
    a_memset_node_takes_another_address_and_value,
    a_host_node_takes_another_function,
    a_node_keeps_its_kind,
    a_node_keeps_what_it_was_changed_to_name,
    a_node_that_is_off_does_nothing,
    a_host_node_cannot_be_switched_off,
    a_node_of_a_template_that_the_exec_is_not_of_is_refused,
    objects_of_another_device_are_refused,
}

fn instantiate(template: &Template) -> Exec {
    template.instantiate(InstantiateFlags::default()).unwrap()
}

fn replay(exec: &Exec, device: &Device) {
    let stream = Stream::new(device).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
}

/// Return a template of a memset of `a` and a copy to `b` after it.
fn set_and_copy(device: &Device, value: u32, a: &Memory, b: &Memory) -> (Template, Node, Node) {
    let template = Template::new(device).unwrap();
    let set = template.add(&Work::memset(a, value).unwrap(), &[]).unwrap();
    let copy = template.add(&Work::memcpy(b, a).unwrap(), &[set]).unwrap();
    (template, set, copy)
}

/// Why an update was refused.
fn reason(result: Result<()>) -> String {
    match error(result) {
        Error::Update { reason, .. } => reason,
        other => panic!("{other}"),
    }
}

fn an_update_takes_over_addresses_and_arguments(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let (x2, y2) = (memory(device, &random(3)), memory(device, &random(4)));
    let chain = |a, x: &Memory, y: &Memory| {
        let template = Template::new(device).unwrap();
        let first = template.add(&kernels.axpy(a, x, y), &[]).unwrap();
        template
            .add(&Work::memcpy(x, y).unwrap(), &[first])
            .unwrap();
        template
    };
    let mut exec = instantiate(&chain(3, &x, &y));
    exec.update(&chain(17, &x2, &y2)).unwrap();
    replay(&exec, device);
    assert_eq!((words(&x), words(&y)), (random(1), random(2)));
    let expected = axpy(17, &random(3), &random(4));
    assert_eq!((words(&x2), words(&y2)), (expected.clone(), expected));
}

fn an_update_keeps_what_the_template_names(device: &Device) {
    let (a, b, c) = (
        poisoned(device),
        poisoned(device),
        memory(device, &random(5)),
    );
    let mut exec = instantiate(&set_and_copy(device, 1, &a, &b).0);
    exec.update(&set_and_copy(device, 2, &poisoned(device), &c).0)
        .unwrap();
    drop((a, b));
    replay(&exec, device);
    assert_eq!(words(&c), all(2));
}

fn an_update_with_another_node_is_refused(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let mut exec = instantiate(&set_and_copy(device, 7, &a, &b).0);
    let (bigger, _, copy) = set_and_copy(device, 8, &b, &a);
    bigger.add(&Work::memset(&b, 9).unwrap(), &[copy]).unwrap();
    assert!(reason(exec.update(&bigger)).contains("different nodes or edges"));
    replay(&exec, device);
    assert_eq!((words(&a), words(&b)), (all(7), all(7)));
}

fn an_update_with_another_edge_is_refused(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let mut exec = instantiate(&set_and_copy(device, 7, &a, &b).0);
    let (apart, ..) = set_and_copy(device, 8, &b, &a);
    apart.remove_edge(apart.edges().unwrap()[0]).unwrap();
    assert!(reason(exec.update(&apart)).contains("different nodes or edges"));
    replay(&exec, device);
    assert_eq!((words(&a), words(&b)), (all(7), all(7)));
}

fn an_update_with_another_kind_is_refused(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let mut exec = instantiate(&set_and_copy(device, 7, &a, &b).0);
    let other = Template::new(device).unwrap();
    let first = other.add(&Work::memset(&a, 8).unwrap(), &[]).unwrap();
    other.add(&Work::memset(&b, 9).unwrap(), &[first]).unwrap();
    assert!(reason(exec.update(&other)).contains("kind changed"));
    replay(&exec, device);
    assert_eq!((words(&a), words(&b)), (all(7), all(7)));
}

fn a_replay_in_flight_does_not_see_an_update(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(6)), memory(device, &random(7)));
    let one_kernel = |a| {
        let template = Template::new(device).unwrap();
        let node = template.add(&kernels.axpy(a, &x, &y), &[]).unwrap();
        (template, node)
    };
    let (template, node) = one_kernel(2);
    let updated = one_kernel(5).0;
    let mut exec = instantiate(&template);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();

    let gate = Gate::new();
    stream.enqueue(&gate.work()).unwrap();
    exec.replay(&stream).unwrap();
    exec.set(&template, node, &kernels.axpy(3, &x, &y)).unwrap();
    exec.replay(&stream).unwrap();
    exec.update(&updated).unwrap();
    exec.replay(&stream).unwrap();
    gate.open();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(2 + 2 + 3 + 5, &random(6), &random(7)));
}

fn a_kernel_node_takes_other_arguments(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(8)), memory(device, &random(9)));
    let z = memory(device, &random(10));
    let template = Template::new(device).unwrap();
    let node = template.add(&kernels.axpy(2, &x, &y), &[]).unwrap();
    let mut exec = instantiate(&template);
    exec.set(&template, node, &kernels.axpy(9, &x, &z)).unwrap();
    replay(&exec, device);
    assert_eq!(words(&y), random(9));
    assert_eq!(words(&z), axpy(9, &random(8), &random(10)));
    replay(&instantiate(&template), device);
    assert_eq!(words(&y), axpy(2, &random(8), &random(9)));
}

fn a_kernel_node_takes_another_grid(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(11)), memory(device, &random(12)));
    let template = Template::new(device).unwrap();
    let node = template
        .add(&kernels.axpy_blocks(2, &x, &y, 1), &[])
        .unwrap();
    let mut exec = instantiate(&template);
    exec.set(&template, node, &kernels.axpy_blocks(2, &x, &y, 3))
        .unwrap();
    replay(&exec, device);
    let mut expected = random(12);
    expected[..384].copy_from_slice(&axpy(2, &random(11), &random(12))[..384]);
    assert_eq!(words(&y), expected);
}

fn a_kernel_node_takes_another_kernel(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(13)), memory(device, &random(14)));
    let template = Template::new(device).unwrap();
    let node = template.add(&kernels.axpy(2, &x, &y), &[]).unwrap();
    let mut exec = instantiate(&template);
    exec.set(&template, node, &kernels.fill(&x, 21)).unwrap();
    replay(&exec, device);
    assert_eq!((words(&x), words(&y)), (all(21), random(14)));

    let filling = Template::new(device).unwrap();
    filling.add(&kernels.fill(&y, 22), &[]).unwrap();
    let mut exec = instantiate(&template);
    exec.update(&filling).unwrap();
    replay(&exec, device);
    assert_eq!((words(&x), words(&y)), (all(21), all(22)));
}

fn a_memcpy_node_takes_other_addresses(device: &Device) {
    let (a, b) = (memory(device, &random(15)), memory(device, &random(16)));
    let (c, d) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let node = template.add(&Work::memcpy(&c, &a).unwrap(), &[]).unwrap();
    let mut exec = instantiate(&template);
    exec.set(&template, node, &Work::memcpy(&d, &b).unwrap())
        .unwrap();
    replay(&exec, device);
    assert_eq!((words(&c), words(&d)), (all(POISON), random(16)));
}

fn a_memset_node_takes_another_address_and_value(device: &Device) {
    let (a, b, value) = (poisoned(device), poisoned(device), random_word(1));
    let template = Template::new(device).unwrap();
    let node = template.add(&Work::memset(&a, 1).unwrap(), &[]).unwrap();
    let mut exec = instantiate(&template);
    exec.set(&template, node, &Work::memset(&b, value).unwrap())
        .unwrap();
    replay(&exec, device);
    assert_eq!((words(&a), words(&b)), (all(POISON), all(value)));
}

/// Return a host function that adds to a number.
fn adding(to: &Arc<AtomicU32>, what: u32) -> Work {
    let to = Arc::clone(to);
    Work::host(move || {
        to.fetch_add(what, Ordering::Relaxed);
    })
}

fn a_host_node_takes_another_function(device: &Device) {
    let sum = Arc::new(AtomicU32::new(0));
    let template = Template::new(device).unwrap();
    let node = template.add(&adding(&sum, 1), &[]).unwrap();
    let mut exec = instantiate(&template);
    replay(&exec, device);
    exec.set(&template, node, &adding(&sum, 10)).unwrap();
    drop(template);
    replay(&exec, device);
    replay(&exec, device);
    assert_eq!(sum.load(Ordering::Relaxed), 1 + 10 + 10);
}

fn a_node_keeps_its_kind(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let (template, set, copy) = set_and_copy(device, 4, &a, &b);
    let mut exec = instantiate(&template);
    let (to_copy, to_set) = (Work::memcpy(&a, &b).unwrap(), Work::memset(&b, 1).unwrap());
    assert!(reason(exec.set(&template, set, &to_copy)).contains("memcpy"));
    assert!(reason(exec.set(&template, copy, &to_set)).contains("memset"));
    let kernel = Kernels::load(device).fill(&a, 1);
    assert!(reason(exec.set(&template, set, &kernel)).contains("kernel"));
    replay(&exec, device);
    assert_eq!((words(&a), words(&b)), (all(4), all(4)));
}

fn a_node_keeps_what_it_was_changed_to_name(device: &Device) {
    let y = memory(device, &random(17));
    let template = Template::new(device).unwrap();
    let work = Kernels::load(device).axpy(2, &poisoned(device), &poisoned(device));
    let node = template.add(&work, &[]).unwrap();
    let mut exec = instantiate(&template);
    {
        // From a module of its own, which nothing else keeps loaded.
        let work = Kernels::load(device).axpy(5, &memory(device, &random(18)), &y);
        exec.set(&template, node, &work).unwrap();
    }
    replay(&exec, device);
    assert_eq!(words(&y), axpy(5, &random(18), &random(17)));
}

fn a_node_that_is_off_does_nothing(device: &Device) {
    let kernels = Kernels::load(device);
    let (a, b) = (poisoned(device), poisoned(device));
    let (template, set, copy) = set_and_copy(device, 3, &a, &b);
    let sum = template.add(&kernels.axpy(1, &a, &b), &[copy]).unwrap();
    let mut exec = instantiate(&template);
    for node in [set, copy, sum] {
        assert!(exec.is_enabled(&template, node).unwrap());
        exec.set_enabled(&template, node, false).unwrap();
        assert!(!exec.is_enabled(&template, node).unwrap());
    }
    replay(&exec, device);
    assert_eq!((words(&a), words(&b)), (all(POISON), all(POISON)));
    for node in [set, sum] {
        exec.set_enabled(&template, node, true).unwrap();
    }
    replay(&exec, device);
    let added = POISON.wrapping_add(3);
    assert_eq!((words(&a), words(&b)), (all(3), all(added)));
}

fn a_host_node_cannot_be_switched_off(device: &Device) {
    let sum = Arc::new(AtomicU32::new(0));
    let template = Template::new(device).unwrap();
    let node = template.add(&adding(&sum, 1), &[]).unwrap();
    let mut exec = instantiate(&template);
    let refused = exec.set_enabled(&template, node, false);
    assert!(reason(refused).contains("only kernels, memcpys and memsets"));
    replay(&exec, device);
    assert_eq!(sum.load(Ordering::Relaxed), 1);
}

fn a_node_of_a_template_that_the_exec_is_not_of_is_refused(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let (template, set, _) = set_and_copy(device, 5, &a, &b);
    let (other, other_set, _) = set_and_copy(device, 6, &a, &b);
    let mut exec = instantiate(&template);
    let work = Work::memset(&a, 7).unwrap();
    assert!(is_foreign(exec.set(&other, other_set, &work)));
    assert!(is_foreign(exec.set(&template, other_set, &work)));
    assert!(is_foreign(exec.set(&other, set, &work)));
    assert!(is_foreign(exec.set_enabled(&other, other_set, false)));
    assert!(is_foreign(exec.is_enabled(&other, other_set)));
    replay(&exec, device);
    assert_eq!(words(&b), all(5));
}

fn objects_of_another_device_are_refused(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let (template, set, _) = set_and_copy(device, 5, &a, &b);
    let mut exec = instantiate(&template);
    let there = other_device();
    let (c, d) = (poisoned(&there), poisoned(&there));
    assert!(is_foreign(exec.update(&set_and_copy(&there, 6, &c, &d).0)));
    assert!(is_foreign(exec.set(
        &template,
        set,
        &Work::memset(&c, 6).unwrap()
    )));
    replay(&exec, device);
    assert_eq!(words(&b), all(5));
}
