//! Calls that a capture forbids, by its mode and by the thread's: the rules of
//! `cuThreadExchangeStreamCaptureMode`.

use std::thread;

use cg_core::{
    Capture, CaptureMode, Code, Device, Event, InstantiateFlags, Memory, Stream, Template, Work,
};

use crate::support::{code, poisoned, random, raw, words};

on_every_driver! {
    a_global_capture_forbids_allocating_to_every_thread,
    a_thread_local_capture_forbids_allocating_to_its_own_thread,
    a_relaxed_capture_forbids_allocating_to_nobody,
    a_relaxed_thread_may_allocate_beside_its_own_capture,
    a_thread_local_thread_is_bound_by_its_own_captures_only,
    the_capture_mode_belongs_to_the_thread,
    a_global_capture_forbids_asking_for_any_event,
    a_global_capture_forbids_waiting_for_any_stream,
    copies_with_the_host_break_no_capture,
    a_global_capture_allows_making_objects,
    dropping_things_breaks_no_capture,
}

/// Results of an allocation beside a capture, and of the capture: the code of either,
/// or none.
type Outcome = (Option<Code>, Option<Code>);

const ALLOWED: Outcome = (None, None);
const FORBIDDEN: Outcome = (
    Some(Code::STREAM_CAPTURE_UNSUPPORTED),
    Some(Code::STREAM_CAPTURE_INVALIDATED),
);

/// Allocate on this thread while `mode` captures here.
fn beside_own(device: &Device, mode: CaptureMode) -> Outcome {
    let stream = Stream::new(device).unwrap();
    let capture = Capture::begin(&stream, mode).unwrap();
    let allocated = Memory::new(device, 4096);
    let finished = capture.finish();
    (code_of(&allocated), code_of(&finished))
}

/// Allocate on another thread, in mode `own`, while `mode` captures here.
fn beside_others(device: &Device, mode: CaptureMode, own: CaptureMode) -> Outcome {
    let stream = Stream::new(device).unwrap();
    let capture = Capture::begin(&stream, mode).unwrap();
    let allocate = || {
        device.driver().exchange_capture_mode(own).unwrap();
        Memory::new(device, 4096)
    };
    let allocated = thread::scope(|s| s.spawn(allocate).join().unwrap());
    let finished = capture.finish();
    (code_of(&allocated), code_of(&finished))
}

fn code_of<T>(result: &cg_core::Result<T>) -> Option<Code> {
    result.as_ref().err().and_then(cg_core::Error::code)
}

/// Run `with` in this thread's capture mode `mode`.
fn in_mode<T>(device: &Device, mode: CaptureMode, with: impl FnOnce() -> T) -> T {
    let before = device.driver().exchange_capture_mode(mode).unwrap();
    let result = with();
    let found = device.driver().exchange_capture_mode(before).unwrap();
    assert_eq!(found, mode);
    result
}

fn a_global_capture_forbids_allocating_to_every_thread(device: &Device) {
    let global = CaptureMode::Global;
    assert_eq!(beside_own(device, global), FORBIDDEN);
    assert_eq!(beside_others(device, global, global), FORBIDDEN);
}

fn a_thread_local_capture_forbids_allocating_to_its_own_thread(device: &Device) {
    let thread_local = CaptureMode::ThreadLocal;
    assert_eq!(beside_own(device, thread_local), FORBIDDEN);
    assert_eq!(
        beside_others(device, thread_local, CaptureMode::Global),
        ALLOWED
    );
}

fn a_relaxed_capture_forbids_allocating_to_nobody(device: &Device) {
    let relaxed = CaptureMode::Relaxed;
    assert_eq!(beside_own(device, relaxed), ALLOWED);
    assert_eq!(beside_others(device, relaxed, CaptureMode::Global), ALLOWED);
}

fn a_relaxed_thread_may_allocate_beside_its_own_capture(device: &Device) {
    let outcome = in_mode(device, CaptureMode::Relaxed, || {
        beside_own(device, CaptureMode::Global)
    });
    assert_eq!(outcome, ALLOWED);
    let outcome = beside_others(device, CaptureMode::Global, CaptureMode::Relaxed);
    assert_eq!(outcome, ALLOWED);
}

fn a_thread_local_thread_is_bound_by_its_own_captures_only(device: &Device) {
    let (global, thread_local) = (CaptureMode::Global, CaptureMode::ThreadLocal);
    assert_eq!(beside_others(device, global, thread_local), ALLOWED);
    let own = |mode| in_mode(device, thread_local, || beside_own(device, mode));
    assert_eq!(own(global), FORBIDDEN);
    assert_eq!(own(CaptureMode::Relaxed), ALLOWED);
}

fn the_capture_mode_belongs_to_the_thread(device: &Device) {
    assert_eq!(raw::thread_mode(device), CaptureMode::Global);
    let elsewhere = in_mode(device, CaptureMode::ThreadLocal, || {
        thread::scope(|s| s.spawn(|| raw::thread_mode(device)).join().unwrap())
    });
    assert_eq!(elsewhere, CaptureMode::Global);
    assert_eq!(raw::thread_mode(device), CaptureMode::Global);
}

fn a_global_capture_forbids_asking_for_any_event(device: &Device) {
    let (stream, outside) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let event = Event::new(device).unwrap();
    outside.record(&event).unwrap();
    event.synchronize().unwrap();
    let ask: [fn(&Event) -> cg_core::Result<()>; 2] =
        [|event| event.is_reached().map(drop), Event::synchronize];
    for ask in ask {
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        assert_eq!(code(ask(&event)), Code::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(code(capture.finish()), Code::STREAM_CAPTURE_INVALIDATED);
        let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
        ask(&event).unwrap();
        capture.finish().unwrap();
    }
}

fn a_global_capture_forbids_waiting_for_any_stream(device: &Device) {
    let (stream, outside) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let ask: [fn(&Stream) -> cg_core::Result<()>; 2] =
        [|stream| stream.is_idle().map(drop), Stream::synchronize];
    for ask in ask {
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        assert_eq!(code(ask(&outside)), Code::STREAM_CAPTURE_UNSUPPORTED);
        assert_eq!(code(capture.finish()), Code::STREAM_CAPTURE_INVALIDATED);
        let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
        ask(&outside).unwrap();
        capture.finish().unwrap();
    }
}

fn copies_with_the_host_break_no_capture(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let data: Vec<u8> = random(1)
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    a.write(&data).unwrap();
    assert_eq!(words(&a), random(1));
    capture.finish().unwrap();
}

fn a_global_capture_allows_making_objects(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let template = Template::new(device).unwrap();
    template.add(&Work::memset(&a, 1).unwrap(), &[]).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    Stream::new(device).unwrap();
    Event::new(device).unwrap();
    Template::new(device).unwrap();
    template.try_clone().unwrap();
    template.instantiate(InstantiateFlags::default()).unwrap();
    capture.finish().unwrap();
}

fn dropping_things_breaks_no_capture(device: &Device) {
    let (stream, outside) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, b) = (poisoned(device), poisoned(device));
    let event = Event::new(device).unwrap();
    let template = Template::new(device).unwrap();
    template.add(&Work::memset(&a, 1).unwrap(), &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&outside).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    drop((exec, template, event, outside, a, b));
    device.collect();
    capture.finish().unwrap();
}
