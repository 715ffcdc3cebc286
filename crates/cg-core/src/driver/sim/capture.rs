//! Simulated captures: what CUDA's state machine allows, refuses and invalidates.

use std::collections::HashSet;
use std::thread::ThreadId;

use super::stream::{self, Captured};
use super::template::{self, NodeWork};
use super::{State, refuse};
use crate::code::{Call, Code};
use crate::driver::handle::{EventHandle, GraphHandle, NodeHandle, StreamHandle};
use crate::driver::{CaptureInfo, CaptureMode, CaptureStatus};
use crate::error::Result;

pub(super) struct Capture {
    graph: GraphHandle,
    origin: StreamHandle,
    mode: CaptureMode,
    thread: ThreadId,
    invalidated: bool,
}

/// Refuse a potentially unsafe call where a capture forbids it, and invalidate that capture:
/// the rules of `cuThreadExchangeStreamCaptureMode`.
pub(super) fn check_unsafe(state: &mut State, call: Call) -> Result<()> {
    let thread = std::thread::current().id();
    let own = state
        .thread_modes
        .get(&thread)
        .copied()
        .unwrap_or(CaptureMode::Global);
    let forbids = |capture: &Capture| match own {
        CaptureMode::Relaxed => false,
        CaptureMode::ThreadLocal => {
            capture.thread == thread && capture.mode != CaptureMode::Relaxed
        }
        CaptureMode::Global => match capture.mode {
            CaptureMode::Global => true,
            CaptureMode::ThreadLocal => capture.thread == thread,
            CaptureMode::Relaxed => false,
        },
    };
    let mut refused = false;
    for capture in state.captures.values_mut().filter(|c| forbids(c)) {
        capture.invalidated = true;
        refused = true;
    }
    if refused {
        return Err(refuse(call, Code::STREAM_CAPTURE_UNSUPPORTED));
    }
    Ok(())
}

/// Refuse to wait for the whole device while something captures, and invalidate all captures.
pub(super) fn refuse_any(state: &mut State, call: Call) -> Result<()> {
    for capture in state.captures.values_mut() {
        capture.invalidated = true;
    }
    if state.captures.is_empty() {
        return Ok(());
    }
    Err(refuse(call, Code::STREAM_CAPTURE_UNSUPPORTED))
}

/// Refuse a call that cannot be captured on a capturing stream, and invalidate the capture.
pub(super) fn refuse_capturing(state: &mut State, stream: StreamHandle, call: Call) -> Result<()> {
    match id_of(state, stream) {
        None => Ok(()),
        Some(id) => Err(invalidate(
            state,
            id,
            call,
            Code::STREAM_CAPTURE_UNSUPPORTED,
        )),
    }
}

pub(super) fn status(state: &mut State, stream: StreamHandle) -> CaptureStatus {
    match id_of(state, stream) {
        None => CaptureStatus::None,
        Some(id) if open(state, id).invalidated => CaptureStatus::Invalidated,
        Some(id) => CaptureStatus::Active(id),
    }
}

pub(super) fn info(state: &mut State, stream: StreamHandle) -> Option<CaptureInfo> {
    let CaptureStatus::Active(id) = status(state, stream) else {
        return None;
    };
    Some(CaptureInfo {
        id,
        graph: open(state, id).graph,
        after: frontier(state, stream).clone(),
    })
}

/// Refuse to take anything away from a graph that a capture records into.
pub(super) fn refuse_recording(state: &State, graph: GraphHandle, what: &str) {
    assert!(
        state
            .captures
            .values()
            .all(|capture| capture.graph != graph),
        "{what} of {graph:?} while a capture records into it"
    );
}

pub(super) fn begin(state: &mut State, stream: StreamHandle, mode: CaptureMode) -> Result<()> {
    if stream == StreamHandle::LEGACY {
        return Err(refuse(
            Call::StreamBeginCapture,
            Code::STREAM_CAPTURE_UNSUPPORTED,
        ));
    }
    if id_of(state, stream).is_some() {
        return Err(refuse(Call::StreamBeginCapture, Code::ILLEGAL_STATE));
    }
    let id = state.fresh();
    let capture = Capture {
        graph: template::create(state),
        origin: stream,
        mode,
        thread: std::thread::current().id(),
        invalidated: false,
    };
    state.captures.insert(id, capture);
    stream::get(state, stream).capture = Some(Captured {
        id,
        frontier: Vec::new(),
    });
    Ok(())
}

pub(super) fn end(state: &mut State, stream: StreamHandle) -> Result<GraphHandle> {
    let Some(id) = id_of(state, stream) else {
        return Err(refuse(Call::StreamEndCapture, Code::ILLEGAL_STATE));
    };
    let capture = open(state, id);
    if capture.origin != stream {
        return Err(invalidate(
            state,
            id,
            Call::StreamEndCapture,
            Code::STREAM_CAPTURE_UNMATCHED,
        ));
    }
    if capture.mode != CaptureMode::Relaxed && capture.thread != std::thread::current().id() {
        let capture = close(state, id);
        template::destroy(state, capture.graph);
        return Err(refuse(
            Call::StreamEndCapture,
            Code::STREAM_CAPTURE_WRONG_THREAD,
        ));
    }
    let joined = joined(state, id, stream);
    let capture = close(state, id);
    let code = if capture.invalidated {
        Some(Code::STREAM_CAPTURE_INVALIDATED)
    } else if joined {
        None
    } else {
        Some(Code::STREAM_CAPTURE_UNJOINED)
    };
    if let Some(code) = code {
        template::destroy(state, capture.graph);
        return Err(refuse(Call::StreamEndCapture, code));
    }
    Ok(capture.graph)
}

/// End the capture that began on the stream, if one is open, and throw its graph away.
pub(super) fn abandon(state: &mut State, stream: StreamHandle) {
    if let Some(id) = id_of(state, stream)
        && open(state, id).origin == stream
    {
        let capture = close(state, id);
        template::destroy(state, capture.graph);
    }
}

/// Record a node on a capturing stream.
pub(super) fn record(
    state: &mut State,
    stream: StreamHandle,
    work: NodeWork,
    call: Call,
) -> Result<()> {
    let id = id_of(state, stream).expect("the caller has found that the stream captures");
    if open(state, id).invalidated {
        return Err(refuse(call, Code::STREAM_CAPTURE_INVALIDATED));
    }
    let node = NodeHandle(state.fresh());
    let after = frontier(state, stream).clone();
    let graph = open(state, id).graph;
    template::insert(template::get(state, graph), node, work, &after);
    *frontier(state, stream) = vec![node];
    Ok(())
}

/// Record an event on a capturing stream; false if the stream does not capture.
pub(super) fn record_event(
    state: &mut State,
    stream: StreamHandle,
    event: EventHandle,
) -> Result<bool> {
    let Some(id) = id_of(state, stream) else {
        return Ok(false);
    };
    if open(state, id).invalidated {
        return Err(refuse(Call::EventRecord, Code::STREAM_CAPTURE_INVALIDATED));
    }
    let frontier = frontier(state, stream).clone();
    stream::event(state, event).captured = Some(Captured { id, frontier });
    Ok(true)
}

/// Refuse to ask after an event that was last recorded in a capture: it has no state outside, and
/// the question breaks the capture.
pub(super) fn refuse_captured(state: &mut State, event: EventHandle, call: Call) -> Result<()> {
    let Some(id) = stream::event(state, event).captured.as_ref().map(|c| c.id) else {
        return Ok(());
    };
    match state.captures.get(&id) {
        Some(capture) if !capture.invalidated => {
            Err(invalidate(state, id, call, Code::CAPTURED_EVENT))
        }
        _ => Err(refuse(call, Code::INVALID_VALUE)),
    }
}

/// Make a stream wait for an event inside a capture; false if neither is part of one.
pub(super) fn wait(state: &mut State, stream: StreamHandle, event: EventHandle) -> Result<bool> {
    let call = Call::StreamWaitEvent;
    let of_stream = id_of(state, stream);
    let found = stream::event(state, event);
    let recorded = found.recorded;
    let of_event = found
        .captured
        .as_ref()
        .map(|captured| (captured.id, captured.frontier.clone()));
    if of_event
        .as_ref()
        .is_some_and(|(id, _)| !state.captures.contains_key(id))
    {
        return Err(refuse(call, Code::INVALID_VALUE));
    }
    match (of_stream, of_event) {
        (None, None) => Ok(false),
        (Some(id), None) if recorded == 0 => {
            if open(state, id).invalidated {
                return Err(refuse(call, Code::STREAM_CAPTURE_INVALIDATED));
            }
            Ok(true)
        }
        (Some(id), None) => Err(invalidate(state, id, call, Code::STREAM_CAPTURE_ISOLATION)),
        (Some(id), Some((other, _))) if id != other => {
            open(state, other).invalidated = true;
            Err(invalidate(state, id, call, Code::STREAM_CAPTURE_MERGE))
        }
        (_, Some((id, nodes))) => {
            if open(state, id).invalidated {
                return Err(refuse(call, Code::STREAM_CAPTURE_INVALIDATED));
            }
            if stream == StreamHandle::LEGACY {
                return Err(invalidate(state, id, call, Code::STREAM_CAPTURE_IMPLICIT));
            }
            let captured = stream::get(state, stream).capture.get_or_insert(Captured {
                id,
                frontier: Vec::new(),
            });
            for node in nodes {
                if !captured.frontier.contains(&node) {
                    captured.frontier.push(node);
                }
            }
            Ok(true)
        }
    }
}

fn id_of(state: &mut State, stream: StreamHandle) -> Option<u64> {
    stream::get(state, stream).capture.as_ref().map(|c| c.id)
}

fn open(state: &mut State, id: u64) -> &mut Capture {
    state
        .captures
        .get_mut(&id)
        .expect("a stream leaves its capture when the capture closes")
}

fn frontier(state: &mut State, stream: StreamHandle) -> &mut Vec<NodeHandle> {
    let captured = stream::get(state, stream).capture.as_mut();
    &mut captured.expect("the stream captures").frontier
}

fn invalidate(state: &mut State, id: u64, call: Call, code: Code) -> crate::error::Error {
    open(state, id).invalidated = true;
    refuse(call, code)
}

fn close(state: &mut State, id: u64) -> Capture {
    for stream in state.streams.values_mut() {
        if stream.capture.as_ref().is_some_and(|c| c.id == id) {
            stream.capture = None;
        }
    }
    state
        .captures
        .remove(&id)
        .expect("the caller has found the capture open")
}

/// Return whether the last nodes of every stream of the capture come before the end of its first stream.
fn joined(state: &mut State, id: u64, origin: StreamHandle) -> bool {
    let mut reached: HashSet<NodeHandle> = HashSet::new();
    let mut open_nodes = frontier(state, origin).clone();
    let graph = open(state, id).graph;
    let graph = template::get(state, graph);
    while let Some(node) = open_nodes.pop() {
        if reached.insert(node) {
            open_nodes.extend(graph.before(node));
        }
    }
    state.streams.values().all(|stream| {
        stream
            .capture
            .as_ref()
            .is_none_or(|c| c.id != id || c.frontier.iter().all(|node| reached.contains(node)))
    })
}
