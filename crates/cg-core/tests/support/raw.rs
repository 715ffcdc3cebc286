//! Driver calls that the safe layers never make in this order, on live objects.
#![expect(unsafe_code, reason = "calls the driver directly")]

use cg_core::driver::handle::{GraphHandle, NodeHandle};
use cg_core::driver::{CaptureInfo, CaptureStatus};
use cg_core::{
    Address, CaptureMode, Delivery, Destination, Device, Feed, Inputs, Outputs, Padding, Result,
    Stream, StreamHandle, Template, Tracker,
};

/// Return the legacy default stream.
pub(crate) fn legacy_stream(device: &Device) -> Stream {
    // SAFETY: it lives as long as the device.
    unsafe { Stream::from_raw(device, StreamHandle::LEGACY) }
}

/// Return a stream that `owner` may destroy.
pub(crate) fn foreign_stream(owner: &Stream) -> Stream {
    // SAFETY: the callers drop the result before `owner`.
    unsafe { Stream::from_foreign(owner.device(), owner.handle()) }
}

/// Begin a capture without a guard.
pub(crate) fn begin_capture(stream: &Stream, mode: CaptureMode) -> Result<()> {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    unsafe { driver.stream_begin_capture(stream.handle(), mode) }
}

/// Make the second stream part of the first one's capture, as code that is not ours does.
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

/// End a capture and throw the graph away.
pub(crate) fn end_capture(stream: &Stream) -> Result<()> {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    let graph = unsafe { driver.stream_end_capture(stream.handle()) }?;
    destroy_graph(stream.device(), graph);
    Ok(())
}

/// Return whether and how the stream captures.
pub(crate) fn capture_status(stream: &Stream) -> CaptureStatus {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    unsafe { driver.stream_capture_status(stream.handle()) }.unwrap()
}

/// Return what the stream captures.
pub(crate) fn capture_info(stream: &Stream) -> Option<CaptureInfo> {
    let driver = stream.device().driver();
    // SAFETY: the stream is live as long as `stream`.
    unsafe { driver.stream_capture_info(stream.handle()) }.unwrap()
}

/// Return what a node comes directly after.
pub(crate) fn dependencies(device: &Device, node: NodeHandle) -> Vec<NodeHandle> {
    // SAFETY: the callers pass nodes of templates and captures that they hold open.
    unsafe { device.driver().node_dependencies(node) }.unwrap()
}

/// Return how many nodes a graph has.
pub(crate) fn node_count(device: &Device, graph: GraphHandle) -> usize {
    // SAFETY: the callers pass graphs of captures that they hold open.
    unsafe { device.driver().graph_node_count(graph) }.unwrap()
}

/// Return the copy of a node in a copied graph.
pub(crate) fn find_in_clone(copy: &Template, node: NodeHandle) -> Result<NodeHandle> {
    let driver = copy.device().driver();
    // SAFETY: the callers hold the template of the node.
    unsafe { driver.node_find_in_clone(node, copy.handle()) }
}

/// Return what the capture has recorded since the last look.
pub(crate) fn new_nodes(tracker: &mut Tracker, current: &Stream) -> Result<Vec<NodeHandle>> {
    // SAFETY: no other thread of a test uses the stream.
    unsafe { tracker.new_nodes(current) }
}

/// Return how many nodes the stream's open capture has.
pub(crate) fn captured_nodes(stream: &Stream) -> Result<Option<usize>> {
    // SAFETY: no other thread of a test uses the stream.
    unsafe { stream.captured_nodes() }
}

/// A template over a graph that somebody else owns and destroys after `with`.
pub(crate) fn with_borrowed_graph(device: &Device, with: impl FnOnce(&Template)) {
    let graph = device.driver().graph_create().unwrap();
    // SAFETY: the graph is destroyed only after `with`, and its execs die there.
    let template = unsafe { Template::from_raw(device, graph, None) };
    with(&template);
    drop(template);
    destroy_graph(device, graph);
}

fn destroy_graph(device: &Device, graph: GraphHandle) {
    // SAFETY: the callers own the graph, and it is no child's.
    unsafe { device.driver().graph_destroy(graph) }
}

/// Return what a replay is to copy and store.
pub(crate) fn feed<'a>(
    inputs: &'a Inputs,
    sources: &'a [Address],
    values: &'a [u64],
) -> Result<Feed<'a>> {
    // SAFETY: the tests keep the memory of their sources until the replays have passed.
    unsafe { inputs.feed(sources, values) }
}

/// Return what one replay copies, where sources have fewer rows.
pub(crate) fn feed_padded<'a>(
    inputs: &'a Inputs,
    sources: &'a [Address],
    values: &'a [u64],
    padding: &'a Padding,
) -> Result<Feed<'a>> {
    // SAFETY: as for `feed`; tests give sources that have the rows of the padding.
    unsafe { inputs.feed_padded(sources, values, padding) }
}

/// Return where one replay copies to.
pub(crate) fn deliver<'a>(outputs: &'a Outputs, to: &'a [Destination]) -> Result<Delivery<'a>> {
    // SAFETY: the tests keep the memory of their destinations until the replays have passed, and
    // give none that overlaps another one.
    unsafe { outputs.deliver(to) }
}

/// Return what this thread's capture mode is.
pub(crate) fn thread_mode(device: &Device) -> CaptureMode {
    let driver = device.driver();
    let mode = driver.exchange_capture_mode(CaptureMode::Relaxed).unwrap();
    driver.exchange_capture_mode(mode).unwrap();
    mode
}
