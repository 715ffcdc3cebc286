//! Calls that break a capture, and the code of each.

use std::thread;

use cg_core::driver::CaptureStatus;
use cg_core::{
    Capture, CaptureMode, Code, Device, Error, Event, InstantiateFlags, Result, Stream, Template,
    Work,
};

use crate::support::{all, code, error, is_foreign, other_device, poisoned, raw, words};

on_every_driver! {
    a_stream_that_was_not_joined_breaks_the_capture,
    a_fork_without_work_needs_no_join,
    the_legacy_stream_cannot_capture,
    a_stream_that_captures_cannot_begin_again,
    only_a_stream_that_captures_can_end,
    a_forked_stream_cannot_end_the_capture,
    only_a_relaxed_capture_ends_on_another_thread,
    a_guard_on_another_thread_says_where_to_end,
    waiting_for_a_capturing_stream_breaks_the_capture,
    asking_whether_a_capturing_stream_is_idle_breaks_the_capture,
    uploading_on_a_capturing_stream_breaks_the_capture,
    nothing_is_recorded_once_the_capture_is_broken,
    captured_work_cannot_wait_for_work_outside,
    an_event_that_was_never_recorded_adds_no_edge,
    an_event_of_a_finished_capture_cannot_be_waited_for,
    two_captures_cannot_be_joined,
    the_legacy_stream_cannot_join_a_capture,
    asking_after_a_captured_event_breaks_the_capture,
    an_event_of_a_finished_capture_has_no_state,
    recording_an_event_again_outside_gives_it_a_state,
    a_forked_stream_may_be_dropped_before_the_capture_ends,
    foreign_work_does_not_break_the_capture,
}

const MODES: [CaptureMode; 3] = [
    CaptureMode::Global,
    CaptureMode::ThreadLocal,
    CaptureMode::Relaxed,
];

/// Finish a capture that must be broken.
fn assert_broken(capture: Capture) {
    let stream = capture.stream().clone();
    assert_eq!(raw::capture_status(&stream), CaptureStatus::Invalidated);
    let error = error(capture.finish());
    assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_INVALIDATED));
    assert!(matches!(error, Error::Capture { .. }));
    assert_works(&stream);
}

/// Check that a stream can capture and run again.
fn assert_works(stream: &Stream) {
    assert!(!stream.is_capturing().unwrap());
    let a = poisoned(stream.device());
    let template = record(stream, || stream.enqueue(&Work::memset(&a, 5).unwrap())).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(5));
}

fn record(stream: &Stream, body: impl FnOnce() -> Result<()>) -> Result<Template> {
    let capture = Capture::begin(stream, CaptureMode::Global)?;
    body()?;
    capture.finish()
}

/// Make the second stream part of the first one's capture.
fn fork(from: &Stream, to: &Stream) {
    let event = Event::new(from.device()).unwrap();
    from.record(&event).unwrap();
    to.wait(&event).unwrap();
}

fn a_stream_that_was_not_joined_breaks_the_capture(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let a = poisoned(device);
    let error = error(record(&main, || {
        fork(&main, &side);
        side.enqueue(&Work::memset(&a, 1).unwrap())
    }));
    assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_UNJOINED));
    assert!(error.to_string().contains("cuStreamEndCapture"));
    assert!(error.to_string().contains("wait for an event recorded"));
    assert_works(&main);
    assert_works(&side);
}

fn a_fork_without_work_needs_no_join(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let a = poisoned(device);
    let template = record(&main, || {
        main.enqueue(&Work::memset(&a, 1).unwrap())?;
        fork(&main, &side);
        Ok(())
    });
    assert_eq!(template.unwrap().nodes().unwrap().len(), 1);
    assert_works(&side);
}

fn the_legacy_stream_cannot_capture(device: &Device) {
    let legacy = raw::legacy_stream(device);
    let error = error(Capture::begin(&legacy, CaptureMode::Relaxed));
    assert!(error.to_string().contains("legacy default stream"));
    assert_eq!(
        code(raw::begin_capture(&legacy, CaptureMode::Relaxed)),
        Code::STREAM_CAPTURE_UNSUPPORTED
    );
}

fn a_stream_that_captures_cannot_begin_again(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let error = error(Capture::begin(&stream, CaptureMode::Global));
    assert!(error.to_string().contains("captures already"));
    let refused = raw::begin_capture(&stream, CaptureMode::Global);
    assert_eq!(code(refused), Code::ILLEGAL_STATE);
    // the refusal leaves the open capture as it is
    capture.finish().unwrap();
    assert_works(&stream);
}

fn only_a_stream_that_captures_can_end(device: &Device) {
    let stream = Stream::new(device).unwrap();
    assert_eq!(code(raw::end_capture(&stream)), Code::ILLEGAL_STATE);
    assert_works(&stream);
}

fn a_forked_stream_cannot_end_the_capture(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let capture = Capture::begin(&main, CaptureMode::Global).unwrap();
    fork(&main, &side);
    assert_eq!(
        code(raw::end_capture(&side)),
        Code::STREAM_CAPTURE_UNMATCHED
    );
    // the refusal breaks the capture
    assert_broken(capture);
    assert_works(&side);
}

fn only_a_relaxed_capture_ends_on_another_thread(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let elsewhere = || thread::scope(|s| s.spawn(|| raw::end_capture(&stream)).join().unwrap());
    for mode in [CaptureMode::Global, CaptureMode::ThreadLocal] {
        raw::begin_capture(&stream, mode).unwrap();
        assert_eq!(code(elsewhere()), Code::STREAM_CAPTURE_WRONG_THREAD);
        assert_eq!(
            code(raw::end_capture(&stream)),
            Code::ILLEGAL_STATE,
            "it is over"
        );
    }
    raw::begin_capture(&stream, CaptureMode::Relaxed).unwrap();
    elsewhere().unwrap();
    assert_works(&stream);
}

fn a_guard_on_another_thread_says_where_to_end(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let finish = |capture: Capture| {
        let finished = thread::scope(|s| s.spawn(|| capture.finish()).join());
        finished.unwrap()
    };
    let capture = Capture::begin(&stream, CaptureMode::ThreadLocal).unwrap();
    let error = error(finish(capture));
    assert_eq!(error.code(), Some(Code::STREAM_CAPTURE_WRONG_THREAD));
    assert!(
        error
            .to_string()
            .contains("end it on the thread it began on")
    );
    assert!(!stream.is_capturing().unwrap(), "the refusal ends it");
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    finish(capture).unwrap();
    assert_works(&stream);
}

fn waiting_for_a_capturing_stream_breaks_the_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for mode in MODES {
        let capture = Capture::begin(&stream, mode).unwrap();
        let refused = code(stream.synchronize());
        assert_eq!(refused, Code::STREAM_CAPTURE_UNSUPPORTED);
        assert_broken(capture);
    }
}

fn asking_whether_a_capturing_stream_is_idle_breaks_the_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for mode in MODES {
        let capture = Capture::begin(&stream, mode).unwrap();
        let refused = code(stream.is_idle());
        assert_eq!(refused, Code::STREAM_CAPTURE_UNSUPPORTED);
        assert_broken(capture);
    }
}

fn uploading_on_a_capturing_stream_breaks_the_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let template = record(&stream, || stream.enqueue(&Work::memset(&a, 1).unwrap())).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    let refused = code(exec.upload(&stream));
    assert_eq!(refused, Code::STREAM_CAPTURE_UNSUPPORTED);
    assert_broken(capture);
}

fn nothing_is_recorded_once_the_capture_is_broken(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, event) = (poisoned(device), Event::new(device).unwrap());
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    assert!(stream.synchronize().is_err());
    let set = Work::memset(&a, 1).unwrap();
    let invalidated = Code::STREAM_CAPTURE_INVALIDATED;
    assert_eq!(code(stream.enqueue(&set)), invalidated);
    assert_eq!(code(stream.record(&event)), invalidated);
    assert_eq!(code(stream.wait(&event)), invalidated);
    assert_broken(capture);
}

fn captured_work_cannot_wait_for_work_outside(device: &Device) {
    let (main, outside) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let event = Event::new(device).unwrap();
    outside.record(&event).unwrap();
    let capture = Capture::begin(&main, CaptureMode::Global).unwrap();
    assert_eq!(code(main.wait(&event)), Code::STREAM_CAPTURE_ISOLATION);
    assert_broken(capture);
}

fn an_event_that_was_never_recorded_adds_no_edge(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, event) = (poisoned(device), Event::new(device).unwrap());
    let template = record(&stream, || {
        stream.wait(&event)?;
        stream.enqueue(&Work::memset(&a, 1).unwrap())
    });
    assert!(template.unwrap().edges().unwrap().is_empty());
}

fn an_event_of_a_finished_capture_cannot_be_waited_for(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let event = Event::new(device).unwrap();
    record(&stream, || stream.record(&event)).unwrap();
    assert_eq!(code(stream.wait(&event)), Code::INVALID_VALUE);
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    assert_eq!(code(stream.wait(&event)), Code::INVALID_VALUE);
    drop(capture);
    assert_works(&stream);
}

fn two_captures_cannot_be_joined(device: &Device) {
    let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let event = Event::new(device).unwrap();
    let capture_first = Capture::begin(&first, CaptureMode::Global).unwrap();
    let capture_second = Capture::begin(&second, CaptureMode::Global).unwrap();
    first.record(&event).unwrap();
    assert_eq!(code(second.wait(&event)), Code::STREAM_CAPTURE_MERGE);
    // both are broken
    assert_eq!(raw::capture_status(&first), CaptureStatus::Invalidated);
    assert_eq!(raw::capture_status(&second), CaptureStatus::Invalidated);
    assert!(capture_first.finish().is_err());
    assert!(capture_second.finish().is_err());
    assert_works(&first);
    assert_works(&second);
}

fn the_legacy_stream_cannot_join_a_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (legacy, event) = (raw::legacy_stream(device), Event::new(device).unwrap());
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    stream.record(&event).unwrap();
    assert_eq!(code(legacy.wait(&event)), Code::STREAM_CAPTURE_IMPLICIT);
    assert_broken(capture);
}

fn asking_after_a_captured_event_breaks_the_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let ask: [fn(&Event) -> cg_core::Result<()>; 2] =
        [|event| event.is_reached().map(drop), Event::synchronize];
    for ask in ask {
        let event = Event::new(device).unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
        stream.record(&event).unwrap();
        assert_eq!(code(ask(&event)), Code::CAPTURED_EVENT);
        assert_broken(capture);
        assert_eq!(code(ask(&event)), Code::INVALID_VALUE);
    }
}

fn an_event_of_a_finished_capture_has_no_state(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let event = Event::new(device).unwrap();
    record(&stream, || stream.record(&event)).unwrap();
    assert_eq!(code(event.is_reached()), Code::INVALID_VALUE);
    assert_eq!(code(event.synchronize()), Code::INVALID_VALUE);
}

fn recording_an_event_again_outside_gives_it_a_state(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let event = Event::new(device).unwrap();
    record(&stream, || stream.record(&event)).unwrap();
    stream.record(&event).unwrap();
    event.synchronize().unwrap();
    assert!(event.is_reached().unwrap());
}

fn a_forked_stream_may_be_dropped_before_the_capture_ends(device: &Device) {
    let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, join) = (poisoned(device), Event::new(device).unwrap());
    let template = record(&main, || {
        fork(&main, &side);
        side.enqueue(&Work::memset(&a, 8).unwrap())?;
        side.record(&join)?;
        drop(side);
        main.wait(&join)
    });
    let exec = template
        .unwrap()
        .instantiate(InstantiateFlags::default())
        .unwrap();
    exec.replay(&main).unwrap();
    main.synchronize().unwrap();
    assert_eq!(words(&a), all(8));
}

fn foreign_work_does_not_break_the_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, there) = (poisoned(device), poisoned(&other_device()));
    let template = record(&stream, || {
        let foreign = Work::memset(&there, 1).unwrap();
        assert!(is_foreign(stream.enqueue(&foreign)));
        stream.enqueue(&Work::memset(&a, 1).unwrap())
    });
    assert_eq!(template.unwrap().nodes().unwrap().len(), 1);
}
