//! Streams and events outside captures.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cg_core::{Code, Device, Event, Stream, Work};

use crate::support::kernels::Kernels;
use crate::support::{
    Gate, all, axpy, code, is_foreign, memory, other_device, poisoned, random, random_word, words,
};

on_every_driver! {
    work_is_done_once_the_stream_is_synchronised,
    work_of_one_stream_runs_in_order,
    a_stream_waits_for_the_event_of_another,
    an_event_counts_its_last_record_only,
    an_event_that_was_never_recorded_holds_nobody_up,
    a_stream_is_idle_once_its_work_is_done,
    a_host_function_is_called_once_for_each_enqueue,
    a_kernel_touches_what_its_blocks_cover,
    a_launch_of_impossible_size_is_refused,
    an_event_of_another_device_is_refused,
    a_stream_outlives_its_handle_until_its_work_is_done,
}

fn work_is_done_once_the_stream_is_synchronised(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let x = memory(device, &random(1));
    let (set, copied, summed) = (
        poisoned(device),
        poisoned(device),
        memory(device, &random(2)),
    );
    stream
        .enqueue(&Work::memset(&set, 0x1234_5678).unwrap())
        .unwrap();
    stream.enqueue(&Work::memcpy(&copied, &x).unwrap()).unwrap();
    stream.enqueue(&kernels.axpy(3, &x, &summed)).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&set), all(0x1234_5678));
    assert_eq!(words(&copied), random(1));
    assert_eq!(words(&summed), axpy(3, &random(1), &random(2)));
}

fn work_of_one_stream_runs_in_order(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(3)), memory(device, &random(4)));
    let mut expected = random(4);
    for round in 1..20 {
        stream.enqueue(&kernels.axpy(round, &x, &y)).unwrap();
        stream.enqueue(&kernels.axpy(round, &y, &x)).unwrap();
        stream.enqueue(&Work::memcpy(&x, &y).unwrap()).unwrap();
        let x = if round == 1 {
            random(3)
        } else {
            expected.clone()
        };
        expected = axpy(round, &x, &expected);
    }
    stream.synchronize().unwrap();
    assert_eq!(words(&y), expected);
}

fn a_stream_waits_for_the_event_of_another(device: &Device) {
    let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, b) = (poisoned(device), poisoned(device));
    let (gate, event) = (Gate::new(), Event::new(device).unwrap());
    let value = random_word(1);
    first.enqueue(&gate.work()).unwrap();
    first.enqueue(&Work::memset(&a, value).unwrap()).unwrap();
    first.record(&event).unwrap();
    second.wait(&event).unwrap();
    second.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    gate.open();
    second.synchronize().unwrap();
    assert_eq!(words(&b), all(value));
}

fn an_event_counts_its_last_record_only(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (gate, event) = (Gate::new(), Event::new(device).unwrap());
    stream.record(&event).unwrap();
    event.synchronize().unwrap();
    assert!(event.is_reached().unwrap());
    stream.enqueue(&gate.work()).unwrap();
    stream.record(&event).unwrap();
    assert!(!event.is_reached().unwrap());
    gate.open();
    event.synchronize().unwrap();
    assert!(event.is_reached().unwrap());
}

fn an_event_that_was_never_recorded_holds_nobody_up(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, event) = (poisoned(device), Event::new(device).unwrap());
    assert!(event.is_reached().unwrap());
    stream.wait(&event).unwrap();
    stream.enqueue(&Work::memset(&a, 77).unwrap()).unwrap();
    event.synchronize().unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(77));
}

fn a_stream_is_idle_once_its_work_is_done(device: &Device) {
    let stream = Stream::new(device).unwrap();
    assert!(stream.is_idle().unwrap());
    let gate = Gate::new();
    stream.enqueue(&gate.work()).unwrap();
    assert!(!stream.is_idle().unwrap());
    gate.open();
    stream.synchronize().unwrap();
    assert!(stream.is_idle().unwrap());
}

fn a_host_function_is_called_once_for_each_enqueue(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let work = Work::host(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    for _ in 0..5 {
        stream.enqueue(&work).unwrap();
    }
    drop(work);
    stream.synchronize().unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 5);
}

fn a_kernel_touches_what_its_blocks_cover(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(5)), memory(device, &random(6)));
    let work = Kernels::load(device).axpy_blocks(9, &x, &y, 2);
    stream.enqueue(&work).unwrap();
    stream.synchronize().unwrap();
    let mut expected = random(6);
    expected[..256].copy_from_slice(&axpy(9, &random(5), &random(6))[..256]);
    assert_eq!(words(&y), expected);
}

fn a_launch_of_impossible_size_is_refused(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(7)), memory(device, &random(8)));
    let no_blocks = Kernels::load(device).axpy_blocks(9, &x, &y, 0);
    assert_eq!(code(stream.enqueue(&no_blocks)), Code::INVALID_VALUE);
    stream.synchronize().unwrap();
    assert_eq!(words(&y), random(8));
}

fn an_event_of_another_device_is_refused(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let event = Event::new(&other_device()).unwrap();
    assert!(is_foreign(stream.record(&event)));
    assert!(is_foreign(stream.wait(&event)));
}

fn a_stream_outlives_its_handle_until_its_work_is_done(device: &Device) {
    let (stream, last) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let event = Event::new(device).unwrap();
    let (a, b) = (memory(device, &random(9)), poisoned(device));
    stream
        .enqueue(&Kernels::load(device).slow_fill(&a, 5))
        .unwrap();
    stream.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    stream.record(&event).unwrap();
    drop((stream, a));
    last.wait(&event).unwrap();
    last.synchronize().unwrap();
    assert_eq!(words(&b), all(5));
}
