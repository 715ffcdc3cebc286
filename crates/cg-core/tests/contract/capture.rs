//! The nodes that a capture records.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cg_core::{
    Capture, CaptureMode, Code, Device, Error, Event, InstantiateFlags, Stream, Template, Work,
};

use crate::support::kernels::Kernels;
use crate::support::{
    Gate, POISON, all, axpy, code, edges, memory, poisoned, random, random_word, raw, words,
};

on_every_driver! {
    captured_work_does_not_run,
    captured_work_runs_at_each_replay,
    a_replay_is_enqueued_and_not_waited_for,
    work_of_every_kind_is_recorded,
    work_of_one_stream_is_recorded_as_a_chain,
    a_fork_and_its_join_are_recorded_as_edges,
    a_wait_joins_all_that_was_recorded_before_the_event,
    an_empty_capture_makes_an_empty_template,
    a_capture_that_begins_with_a_node_has_that_node_and_nothing_waits_for_it,
    a_stream_can_capture_again,
    two_streams_capture_side_by_side,
    a_dropped_capture_leaves_the_stream_usable,
    what_captured_work_names_lives_as_long_as_the_template,
    a_replay_on_a_capturing_stream_is_refused_and_breaks_the_capture,
    a_capture_can_be_left_to_somebody_else,
    an_open_capture_tells_its_nodes_until_it_is_broken,
}

fn captured_work_does_not_run(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    assert!(stream.is_capturing().unwrap());
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    let template = capture.finish().unwrap();
    assert!(!stream.is_capturing().unwrap());
    stream.synchronize().unwrap();
    assert_eq!(template.nodes().unwrap().len(), 1);
    assert_eq!(words(&a), all(POISON));
}

fn captured_work_runs_at_each_replay(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&kernels.axpy(7, &x, &y)).unwrap();
    let template = capture.finish().unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let mut expected = random(2);
    for _ in 0..4 {
        exec.replay(&stream).unwrap();
        expected = axpy(7, &random(1), &expected);
    }
    stream.synchronize().unwrap();
    assert_eq!(words(&y), expected);
}

fn a_replay_is_enqueued_and_not_waited_for(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, gate) = (poisoned(device), Gate::new());
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&Work::memset(&a, 3).unwrap()).unwrap();
    let template = capture.finish().unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.upload(&stream).unwrap();
    stream.synchronize().unwrap();
    stream.enqueue(&gate.work()).unwrap();
    exec.replay(&stream).unwrap();
    assert_eq!(words(&a), all(POISON));
    gate.open();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(3));
}

fn work_of_every_kind_is_recorded(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(3)), poisoned(device));
    let calls = Arc::new(AtomicU32::new(0));
    let counted = Arc::clone(&calls);
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
    stream.enqueue(&Work::memcpy(&y, &x).unwrap()).unwrap();
    stream.enqueue(&kernels.axpy(5, &x, &y)).unwrap();
    stream.enqueue(&Work::memset(&x, 9).unwrap()).unwrap();
    let count = move || {
        counted.fetch_add(1, Ordering::Relaxed);
    };
    stream.enqueue(&Work::host(count)).unwrap();
    let template = capture.finish().unwrap();

    let data = template.data().unwrap();
    let kinds: Vec<&str> = data.nodes.iter().map(|node| node.kind.as_str()).collect();
    assert_eq!(kinds, ["memcpy", "kernel", "memset", "host"]);
    assert_eq!(data.nodes[1].name.as_deref(), Some("axpy"));

    template
        .instantiate(InstantiateFlags::default())
        .unwrap()
        .replay(&stream)
        .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(5, &random(3), &random(3)));
    assert_eq!(words(&x), all(9));
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

fn work_of_one_stream_is_recorded_as_a_chain(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    for memory in [&a, &b, &c] {
        stream.enqueue(&Work::memset(memory, 1).unwrap()).unwrap();
    }
    let template = capture.finish().unwrap();
    let names = [(&a, "a"), (&b, "b"), (&c, "c")];
    assert_eq!(edges(&template, &names), ["a b", "b c"]);
}

fn a_fork_and_its_join_are_recorded_as_edges(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (fork, join) = (Event::new(device).unwrap(), Event::new(device).unwrap());
    let (a, b) = (poisoned(device), poisoned(device));
    let (c, d) = (poisoned(device), poisoned(device));
    let (in_side, in_main) = (random_word(1), random_word(2));
    let capture = Capture::begin(&main, CaptureMode::Global).unwrap();
    main.enqueue(&Work::memset(&a, in_side).unwrap()).unwrap();
    main.record(&fork).unwrap();
    side.wait(&fork).unwrap();
    assert!(side.is_capturing().unwrap());
    side.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    main.enqueue(&Work::memset(&c, in_main).unwrap()).unwrap();
    side.record(&join).unwrap();
    main.wait(&join).unwrap();
    main.enqueue(&Work::memcpy(&d, &b).unwrap()).unwrap();
    let template = capture.finish().unwrap();
    assert!(!side.is_capturing().unwrap());

    let names = [(&a, "a"), (&b, "b"), (&c, "c"), (&d, "d")];
    assert_eq!(edges(&template, &names), ["a b", "a c", "b d", "c d"]);
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&side).unwrap();
    side.synchronize().unwrap();
    assert_eq!(words(&d), all(in_side));
    assert_eq!(words(&c), all(in_main));
}

fn a_wait_joins_all_that_was_recorded_before_the_event(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let event = Event::new(device).unwrap();
    let (a, b) = (poisoned(device), poisoned(device));
    let (c, d) = (poisoned(device), poisoned(device));
    let capture = Capture::begin(&main, CaptureMode::Global).unwrap();
    main.record(&event).unwrap();
    side.wait(&event).unwrap();
    side.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    main.enqueue(&Work::memset(&b, 2).unwrap()).unwrap();
    side.record(&event).unwrap();
    side.enqueue(&Work::memset(&c, 3).unwrap()).unwrap();
    main.wait(&event).unwrap();
    side.record(&event).unwrap();
    main.enqueue(&Work::memset(&d, 4).unwrap()).unwrap();
    main.wait(&event).unwrap();
    let template = capture.finish().unwrap();
    let names = [(&a, "a"), (&b, "b"), (&c, "c"), (&d, "d")];
    assert_eq!(edges(&template, &names), ["a c", "a d", "b d"]);
}

fn an_empty_capture_makes_an_empty_template(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    let template = capture.finish().unwrap();
    assert!(template.nodes().unwrap().is_empty());
    assert!(template.edges().unwrap().is_empty());
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
}

fn a_capture_that_begins_with_a_node_has_that_node_and_nothing_waits_for_it(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let value = random_word(2);
    let capture = Capture::begin_with_node(&stream, CaptureMode::Relaxed).unwrap();
    stream.enqueue(&Work::memset(&a, value).unwrap()).unwrap();
    let template = capture.finish().unwrap();
    let data = template.data().unwrap();
    let kinds: Vec<&str> = data.nodes.iter().map(|node| node.kind.as_str()).collect();
    assert_eq!(kinds, ["empty", "memset"]);
    assert!(template.edges().unwrap().is_empty());
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(value));

    let captures = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    let refused = Capture::begin_with_node(&stream, CaptureMode::Relaxed);
    assert!(matches!(refused, Err(Error::Capture { .. })));
    captures.finish().unwrap();
}

fn a_stream_can_capture_again(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    for value in [random_word(3), random_word(4)] {
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        stream.enqueue(&Work::memset(&a, value).unwrap()).unwrap();
        let template = capture.finish().unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        exec.replay(&stream).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(words(&a), all(value));
    }
}

fn two_streams_capture_side_by_side(device: &Device) {
    let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, b) = (poisoned(device), poisoned(device));
    let capture_first = Capture::begin(&first, CaptureMode::Global).unwrap();
    let capture_second = Capture::begin(&second, CaptureMode::ThreadLocal).unwrap();
    first.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    second.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    first.enqueue(&Work::memset(&a, 2).unwrap()).unwrap();
    let template = capture_first.finish().unwrap();
    assert!(second.is_capturing().unwrap());
    assert_eq!(template.nodes().unwrap().len(), 2);
    assert_eq!(capture_second.finish().unwrap().nodes().unwrap().len(), 1);
}

fn a_dropped_capture_leaves_the_stream_usable(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, event) = (poisoned(device), Event::new(device).unwrap());
    let capture = Capture::begin(&main, CaptureMode::Global).unwrap();
    main.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    main.record(&event).unwrap();
    side.wait(&event).unwrap();
    side.enqueue(&Work::memset(&a, 2).unwrap()).unwrap();
    drop(capture);
    for stream in [&main, &side] {
        assert!(!stream.is_capturing().unwrap());
        stream.synchronize().unwrap();
    }
    assert_eq!(words(&a), all(POISON));
    side.enqueue(&Work::memset(&a, 3).unwrap()).unwrap();
    side.synchronize().unwrap();
    assert_eq!(words(&a), all(3));
}

fn what_captured_work_names_lives_as_long_as_the_template(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let y = memory(device, &random(5));
    let (x, kernels) = (memory(device, &random(6)), Kernels::load(device));
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&kernels.axpy(11, &x, &y)).unwrap();
    drop((x, kernels));
    let template = capture.finish().unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    drop(template);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(11, &random(6), &random(5)));
}

fn a_replay_on_a_capturing_stream_is_refused_and_breaks_the_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let inner = Template::new(device).unwrap();
    inner.add(&Work::memset(&a, 1).unwrap(), &[]).unwrap();
    let exec = inner.instantiate(InstantiateFlags::default()).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    let refused = exec.replay(&stream).unwrap_err();
    assert!(matches!(refused, Error::Capture { .. }), "{refused}");
    assert_eq!(refused.code(), Some(Code::STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(code(capture.finish()), Code::STREAM_CAPTURE_INVALIDATED);
    assert_eq!(words(&a), all(POISON));
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(1));
}

fn a_capture_can_be_left_to_somebody_else(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    raw::begin_capture(&stream, CaptureMode::Global).unwrap();
    let capture = Capture::take_over(&stream).unwrap();
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    assert_eq!(capture.finish().unwrap().nodes().unwrap().len(), 1);

    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    capture.hand_over();
    assert!(stream.is_capturing().unwrap());
    raw::end_capture(&stream).unwrap();
    assert!(!stream.is_capturing().unwrap());
    assert!(Capture::take_over(&stream).is_err());
}

fn an_open_capture_tells_its_nodes_until_it_is_broken(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    assert_eq!(raw::captured_nodes(&stream).unwrap(), None);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    for count in 0..3 {
        assert_eq!(raw::captured_nodes(&stream).unwrap(), Some(count));
        stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    }
    assert!(stream.synchronize().is_err());
    assert_eq!(raw::captured_nodes(&stream).unwrap(), None);
    assert!(capture.finish().is_err());
    assert_eq!(raw::captured_nodes(&stream).unwrap(), None);
}
