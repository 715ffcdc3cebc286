//! Driver calls that the safe layers never make in this order, on live objects.
#![expect(unsafe_code, reason = "calls the driver directly")]

use cg_core::driver::CaptureStatus;
use cg_core::driver::handle::GraphHandle;
use cg_core::{Address, CaptureMode, Device, Feed, Inputs, Result, Stream, StreamHandle, Template};

/// The legacy default stream.
pub(crate) fn legacy_stream(device: &Device) -> Stream {
    // SAFETY: it lives as long as the device.
    unsafe { Stream::from_raw(device, StreamHandle::LEGACY) }
}

/// Begins a capture without a guard.
pub(crate) fn begin_capture(stream: &Stream, mode: CaptureMode) -> Result<()> {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    unsafe { driver.stream_begin_capture(stream.handle(), mode) }
}

/// Makes the second stream part of the first one's capture, as code that is not ours does.
pub(crate) fn fork(from: &Stream, to: &Stream) {
    let driver = from.device().driver();
    let event = driver.event_create().unwrap();
    // SAFETY: the event is live, and the stream as long as `from`.
    unsafe { driver.event_record(event, from.handle()) }.unwrap();
    // SAFETY: the event is live, and the stream as long as `to`.
    unsafe { driver.stream_wait_event(to.handle(), event) }.unwrap();
    // SAFETY: the event is live, and nothing names it any more.
    unsafe { driver.event_destroy(event) };
}

/// Ends a capture and throws the graph away.
pub(crate) fn end_capture(stream: &Stream) -> Result<()> {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    let graph = unsafe { driver.stream_end_capture(stream.handle()) }?;
    destroy_graph(stream.device(), graph);
    Ok(())
}

/// Whether and how the stream captures.
pub(crate) fn capture_status(stream: &Stream) -> CaptureStatus {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    unsafe { driver.stream_capture_status(stream.handle()) }.unwrap()
}

/// A template over a graph that somebody else owns and destroys after `with`.
pub(crate) fn with_borrowed_graph(device: &Device, with: impl FnOnce(&Template)) {
    let graph = device.driver().graph_create().unwrap();
    // SAFETY: the graph is destroyed only after `with`, and its execs die there.
    let template = unsafe { Template::from_raw(device, graph) };
    with(&template);
    drop(template);
    destroy_graph(device, graph);
}

fn destroy_graph(device: &Device, graph: GraphHandle) {
    // SAFETY: the callers own the graph, and it is no child's.
    unsafe { device.driver().graph_destroy(graph) }
}

/// What a replay is to copy and store.
pub(crate) fn feed<'a>(
    inputs: &'a Inputs,
    sources: &'a [Address],
    values: &'a [u64],
) -> Result<Feed<'a>> {
    // SAFETY: the tests keep the memory of their sources until the replays have passed.
    unsafe { inputs.feed(sources, values) }
}

/// What this thread's capture mode is.
pub(crate) fn thread_mode(device: &Device) -> CaptureMode {
    let driver = device.driver();
    let mode = driver.exchange_capture_mode(CaptureMode::Relaxed).unwrap();
    driver.exchange_capture_mode(mode).unwrap();
    mode
}
