//! The work of the nodes of each kind.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cg_core::{
    Capture, CaptureMode, Device, Dim3, Event, Exec, InstantiateFlags, NodeDetail, Stream,
    Template, Work,
};

use crate::support::kernels::Kernels;
use crate::support::{
    Gate, POISON, all, axpy, is_foreign, memory, other_device, poisoned, random, random_word, words,
};

on_every_driver! {
    a_kernel_node_runs_its_kernel,
    a_memcpy_node_copies,
    a_memset_node_sets,
    a_host_node_is_called_once_for_each_replay,
    an_event_record_node_records,
    an_event_wait_node_waits,
    an_empty_node_orders_those_around_it,
    a_child_node_runs_a_copy_of_its_template,
    a_child_of_a_child_runs_too,
    a_child_keeps_what_its_nodes_name,
    nodes_of_every_kind_work_together,
    a_node_of_another_device_is_refused,
}

fn run(template: &Template, stream: &Stream) -> Exec {
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(stream).unwrap();
    stream.synchronize().unwrap();
    exec
}

fn a_kernel_node_runs_its_kernel(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let template = Template::new(device).unwrap();
    let work = Kernels::load(device).axpy(12, &x, &y);
    let node = template.add(&work, &[]).unwrap();
    drop(work);
    let detail = NodeDetail::Kernel {
        name: Some("axpy".to_owned()),
        grid: Dim3::from(8),
        block: Dim3::from(128),
        shared_bytes: 0,
    };
    assert_eq!(template.detail(node).unwrap(), detail);
    run(&template, &stream);
    assert_eq!(words(&y), axpy(12, &random(1), &random(2)));
}

fn a_memcpy_node_copies(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (src, dst) = (memory(device, &random(3)), poisoned(device));
    let (part, target) = (src.slice(40..120).unwrap(), dst.slice(400..480).unwrap());
    let template = Template::new(device).unwrap();
    let work = Work::memcpy(&target, &part).unwrap();
    let node = template.add(&work, &[]).unwrap();
    let detail = NodeDetail::Memcpy {
        dst: target.address(),
        src: part.address(),
        bytes: 80,
    };
    assert_eq!(template.detail(node).unwrap(), detail);
    run(&template, &stream);
    let mut expected = all(POISON);
    expected[100..120].copy_from_slice(&random(3)[10..30]);
    assert_eq!(words(&dst), expected);
}

fn a_memset_node_sets(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (whole, value) = (memory(device, &random(4)), random_word(1));
    let part = whole.slice(400..800).unwrap();
    let template = Template::new(device).unwrap();
    let node = template.add(&Work::memset(&part, value).unwrap(), &[]);
    let detail = NodeDetail::Memset {
        dst: part.address(),
        value,
        element_bytes: 4,
        count: 100,
    };
    assert_eq!(template.detail(node.unwrap()).unwrap(), detail);
    run(&template, &stream);
    let mut expected = random(4);
    expected[100..200].fill(value);
    assert_eq!(words(&whole), expected);
}

fn a_host_node_is_called_once_for_each_replay(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let template = Template::new(device).unwrap();
    let work = Work::host(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let node = template.add(&work, &[]).unwrap();
    template.add(&work, &[node]).unwrap();
    drop(work);
    assert!(matches!(
        template.detail(node).unwrap(),
        NodeDetail::Host { .. }
    ));
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    drop(template);
    for _ in 0..3 {
        exec.replay(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 6);
}

fn an_event_record_node_records(device: &Device) {
    let (stream, other) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, b) = (poisoned(device), poisoned(device));
    let (gate, event) = (Gate::new(), Event::new(device).unwrap());
    let value = random_word(2);
    let template = Template::new(device).unwrap();
    let set = template
        .add(&Work::memset(&a, value).unwrap(), &[])
        .unwrap();
    let record = template.add_event_record(&event, &[set]).unwrap();
    assert!(matches!(
        template.detail(record).unwrap(),
        NodeDetail::EventRecord(_)
    ));
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();

    exec.upload(&stream).unwrap();
    stream.synchronize().unwrap();
    stream.enqueue(&gate.work()).unwrap();
    exec.replay(&stream).unwrap();
    other.wait(&event).unwrap();
    other.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    gate.open();
    other.synchronize().unwrap();
    assert!(event.is_reached().unwrap());
    assert_eq!(words(&b), all(value));
}

fn an_event_wait_node_waits(device: &Device) {
    let (stream, other) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, b) = (poisoned(device), poisoned(device));
    let (gate, event) = (Gate::new(), Event::new(device).unwrap());
    let value = random_word(3);
    let template = Template::new(device).unwrap();
    let wait = template.add_event_wait(&event, &[]).unwrap();
    template
        .add(&Work::memcpy(&b, &a).unwrap(), &[wait])
        .unwrap();
    assert!(matches!(
        template.detail(wait).unwrap(),
        NodeDetail::EventWait(_)
    ));
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();

    exec.upload(&stream).unwrap();
    stream.synchronize().unwrap();
    other.enqueue(&gate.work()).unwrap();
    other.enqueue(&Work::memset(&a, value).unwrap()).unwrap();
    other.record(&event).unwrap();
    exec.replay(&stream).unwrap();
    gate.open();
    stream.synchronize().unwrap();
    assert_eq!(words(&b), all(value));
}

fn an_empty_node_orders_those_around_it(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, b) = (poisoned(device), poisoned(device));
    let (c, d) = (poisoned(device), poisoned(device));
    let (in_a, in_b) = (random_word(4), random_word(5));
    let template = Template::new(device).unwrap();
    let first = template.add(&Work::memset(&a, in_a).unwrap(), &[]).unwrap();
    let second = template.add(&Work::memset(&b, in_b).unwrap(), &[]).unwrap();
    let meet = template.add_empty(&[first, second]).unwrap();
    assert_eq!(template.detail(meet).unwrap(), NodeDetail::Empty);
    for (to, from) in [(&c, &b), (&d, &a)] {
        let copy = Work::memcpy(to, from).unwrap();
        template.add(&copy, &[meet]).unwrap();
    }
    run(&template, &stream);
    assert_eq!((words(&c), words(&d)), (all(in_b), all(in_a)));
}

fn a_child_node_runs_a_copy_of_its_template(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(5)), memory(device, &random(6)));
    let inner = Template::new(device).unwrap();
    let first = inner.add(&kernels.axpy(2, &x, &y), &[]).unwrap();
    let outer = Template::new(device).unwrap();
    let child = outer.add_child(&inner, &[]).unwrap();
    outer.add(&kernels.axpy(5, &y, &y), &[child]).unwrap();
    assert!(matches!(outer.detail(child).unwrap(), NodeDetail::Child(_)));

    inner.add(&kernels.axpy(3, &x, &y), &[first]).unwrap();
    assert_eq!(outer.data().unwrap().count(), 3);
    drop(inner);
    run(&outer, &stream);
    let once = axpy(2, &random(5), &random(6));
    assert_eq!(words(&y), axpy(5, &once, &once));
}

fn a_child_of_a_child_runs_too(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(7)), memory(device, &random(8)));
    let mut template = Template::new(device).unwrap();
    let mut expected = random(8);
    for depth in 2..6 {
        let outer = Template::new(device).unwrap();
        let before = outer.add(&kernels.axpy(depth, &y, &y), &[]).unwrap();
        let child = outer.add_child(&template, &[before]).unwrap();
        outer.add(&kernels.axpy(depth, &x, &y), &[child]).unwrap();
        template = outer;
    }
    for depth in (2..6).rev() {
        expected = axpy(depth, &expected, &expected);
    }
    for depth in 2..6 {
        expected = axpy(depth, &random(7), &expected);
    }
    assert_eq!(template.data().unwrap().count(), 4 * 3);
    run(&template, &stream);
    assert_eq!(words(&y), expected);
}

fn a_child_keeps_what_its_nodes_name(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let y = memory(device, &random(9));
    let outer = Template::new(device).unwrap();
    {
        let x = memory(device, &random(10));
        let inner = Template::new(device).unwrap();
        let work = Kernels::load(device).axpy(4, &x, &y);
        inner.add(&work, &[]).unwrap();
        outer.add_child(&inner, &[]).unwrap();
    }
    run(&outer, &stream);
    assert_eq!(words(&y), axpy(4, &random(10), &random(9)));
}

fn nodes_of_every_kind_work_together(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y, out) = (
        memory(device, &random(11)),
        poisoned(device),
        poisoned(device),
    );
    let (event, calls) = (Event::new(device).unwrap(), Arc::new(AtomicU32::new(0)));
    let (counted, value) = (Arc::clone(&calls), random_word(6));
    let child = Template::new(device).unwrap();
    child.add(&kernels.axpy(3, &x, &y), &[]).unwrap();

    let template = Template::new(device).unwrap();
    let set = template
        .add(&Work::memset(&y, value).unwrap(), &[])
        .unwrap();
    let record = template.add_event_record(&event, &[set]).unwrap();
    let child = template.add_child(&child, &[record]).unwrap();
    let meet = template.add_empty(&[child]).unwrap();
    let kernel = template.add(&kernels.axpy(5, &x, &y), &[meet]).unwrap();
    let copy = template
        .add(&Work::memcpy(&out, &y).unwrap(), &[kernel])
        .unwrap();
    let host = Work::host(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    template.add(&host, &[copy]).unwrap();

    let data = template.data().unwrap();
    let kinds: Vec<&str> = data.nodes.iter().map(|node| node.kind.as_str()).collect();
    let expected = [
        "memset",
        "event_record",
        "child",
        "empty",
        "kernel",
        "memcpy",
        "host",
    ];
    assert_eq!(kinds, expected);
    run(&template, &stream);
    assert_eq!(words(&out), axpy(3 + 5, &random(11), &all(value)));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

fn a_node_of_another_device_is_refused(device: &Device) {
    let other = other_device();
    let template = Template::new(device).unwrap();
    let work = Work::memset(&poisoned(&other), 1).unwrap();
    assert!(is_foreign(template.add(&work, &[])));
    let event = Event::new(&other).unwrap();
    assert!(is_foreign(template.add_event_record(&event, &[])));
    assert!(is_foreign(template.add_event_wait(&event, &[])));
    let child = Template::new(&other).unwrap();
    assert!(is_foreign(template.add_child(&child, &[])));
    assert!(template.nodes().unwrap().is_empty());

    let stream = Stream::new(&other).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    assert!(is_foreign(exec.replay(&stream)));
    assert!(is_foreign(exec.upload(&stream)));
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    assert!(is_foreign(exec.replay(&stream)));
    capture.finish().unwrap();
}
