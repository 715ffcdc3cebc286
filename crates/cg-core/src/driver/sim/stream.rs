//! Simulated streams and events: queues in program order.
#![expect(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe for other drivers"
)]

use std::collections::VecDeque;

use super::exec::Replay;
use super::work::Work;
use super::{Sim, State, capture, run};
use crate::code::Call;
use crate::driver::handle::{
    Address, EventHandle, ExecHandle, GraphHandle, NodeHandle, StreamHandle,
};
use crate::driver::spec::WorkSpec;
use crate::driver::{CaptureInfo, CaptureMode, CaptureStatus, StreamCalls};
use crate::error::Result;

/// An operation that waits in a stream.
pub(super) enum Item {
    Work(Work),
    /// Marks this record of the event as reached.
    Record(u64, u64),
    /// Waits until this record of the event is reached.
    Wait(u64, u64),
    Replay(Replay),
}

#[derive(Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Item>,
    /// An operation was taken from the head and is running.
    pub(super) busy: bool,
    pub(super) delayed: bool,
    /// Destroyed, but not empty yet.
    pub(super) dying: bool,
    pub(super) capture: Option<Captured>,
}

/// A stream's part in a capture.
pub(super) struct Captured {
    pub(super) id: u64,
    /// The nodes that the next one comes after.
    pub(super) frontier: Vec<NodeHandle>,
}

#[derive(Default)]
pub(super) struct Event {
    /// Number of times it was recorded, and the last record that was reached.
    pub(super) recorded: u64,
    pub(super) reached: u64,
    /// The capture in which it was last recorded.
    pub(super) captured: Option<Captured>,
}

pub(super) fn get(state: &mut State, stream: StreamHandle) -> &mut Stream {
    match state.streams.get_mut(&stream.0) {
        Some(found) if !found.dying => found,
        _ => panic!("{stream:?} is not live"),
    }
}

pub(super) fn event(state: &mut State, event: EventHandle) -> &mut Event {
    match state.events.get_mut(&event.0) {
        Some(found) => found,
        None => panic!("{event:?} is not live"),
    }
}

/// Enqueue an operation, or record it where the stream captures.
pub(super) fn enqueue(
    state: &mut State,
    stream: StreamHandle,
    work: Work,
    call: Call,
) -> Result<()> {
    if get(state, stream).capture.is_some() {
        return capture::record(state, stream, work.into(), call);
    }
    run::check_failure(state, call)?;
    get(state, stream).queue.push_back(Item::Work(work));
    Ok(())
}

/// Return what is in flight on a range of memory, in words.
pub(super) fn in_flight_on(state: &State, address: Address, bytes: u64) -> Option<String> {
    let end = address.0 + bytes;
    let touches = |work: &Work| {
        work.ranges()
            .iter()
            .any(|(start, size)| *start < end && address.0 < start + size)
    };
    state.streams.iter().find_map(|(handle, stream)| {
        let work = stream.queue.iter().find_map(|item| match item {
            Item::Work(work) => touches(work).then(|| work.to_string()),
            Item::Replay(replay) => replay.pending().find(|w| touches(w)).map(Work::to_string),
            Item::Record(..) | Item::Wait(..) => None,
        })?;
        Some(format!("{work} on stream {handle:#x}"))
    })
}

/// Return the stream on which a replay of the exec is in flight.
pub(super) fn replaying(state: &State, exec: ExecHandle) -> Option<u64> {
    let found = state.streams.iter().find(|(_, stream)| {
        let mut items = stream.queue.iter();
        items.any(|item| matches!(item, Item::Replay(replay) if replay.exec == exec))
    });
    found.map(|(handle, _)| *handle)
}

impl StreamCalls for Sim {
    fn stream_create(&self) -> Result<StreamHandle> {
        let mut state = self.enter(Call::StreamCreate)?;
        let handle = state.fresh();
        state.streams.insert(handle, Stream::default());
        Ok(StreamHandle(handle))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) {
        let mut state = self.enter_infallible(Call::StreamDestroy);
        assert!(
            get(&mut state, stream).capture.is_none(),
            "{stream:?} destroyed while it captures"
        );
        // As on a GPU the work still finishes; nobody may wait for that here.
        get(&mut state, stream).dying = true;
        run::retire(&mut state);
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        let mut state = self.enter_unsafe(Call::StreamSynchronize)?;
        capture::refuse_capturing(&mut state, stream, Call::StreamSynchronize)?;
        drop(state);
        run::drive_stream(self, stream, Call::StreamSynchronize)
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        let mut state = self.enter_unsafe(Call::StreamQuery)?;
        capture::refuse_capturing(&mut state, stream, Call::StreamQuery)?;
        run::check_failure(&state, Call::StreamQuery)?;
        let stream = get(&mut state, stream);
        Ok(stream.queue.is_empty() && !stream.busy)
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, handle: EventHandle) -> Result<()> {
        let mut state = self.enter(Call::StreamWaitEvent)?;
        if capture::wait(&mut state, stream, handle)? {
            return Ok(());
        }
        let record = event(&mut state, handle).recorded;
        let item = Item::Wait(handle.0, record);
        get(&mut state, stream).queue.push_back(item);
        Ok(())
    }

    unsafe fn stream_enqueue(&self, stream: StreamHandle, work: &WorkSpec) -> Result<()> {
        let call = match work {
            WorkSpec::Kernel { .. } => Call::LaunchKernel,
            WorkSpec::Memcpy { .. } => Call::MemcpyAsync,
            WorkSpec::Memset { .. } => Call::MemsetAsync,
            WorkSpec::Host(_) => Call::LaunchHostFunc,
        };
        let mut state = self.enter(call)?;
        let work = Work::resolve(&state, work, call)?;
        enqueue(&mut state, stream, work, call)
    }

    unsafe fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> Result<()> {
        let mut state = self.enter(Call::StreamBeginCapture)?;
        capture::begin(&mut state, stream, mode)
    }

    unsafe fn stream_end_capture(&self, stream: StreamHandle) -> Result<GraphHandle> {
        let mut state = match self.enter(Call::StreamEndCapture) {
            Ok(state) => state,
            Err(fault) => {
                // Whatever the code, a capture that ended is over.
                capture::abandon(&mut self.state(), stream);
                return Err(fault);
            }
        };
        capture::end(&mut state, stream)
    }

    unsafe fn stream_capture_status(&self, stream: StreamHandle) -> Result<CaptureStatus> {
        let mut state = self.enter(Call::StreamGetCaptureInfo)?;
        Ok(capture::status(&mut state, stream))
    }

    unsafe fn stream_capture_info(&self, stream: StreamHandle) -> Result<Option<CaptureInfo>> {
        let mut state = self.enter(Call::StreamGetCaptureInfo)?;
        Ok(capture::info(&mut state, stream))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let mut state = self.enter(Call::ThreadExchangeCaptureMode)?;
        let thread = std::thread::current().id();
        let before = state.thread_modes.insert(thread, mode);
        Ok(before.unwrap_or(CaptureMode::Global))
    }

    fn event_create(&self) -> Result<EventHandle> {
        let mut state = self.enter(Call::EventCreate)?;
        let handle = state.fresh();
        state.events.insert(handle, Event::default());
        Ok(EventHandle(handle))
    }

    unsafe fn event_destroy(&self, handle: EventHandle) {
        let mut state = self.enter_infallible(Call::EventDestroy);
        let removed = state.events.remove(&handle.0);
        assert!(removed.is_some(), "event_destroy of {handle:?}, not live");
    }

    unsafe fn event_record(&self, handle: EventHandle, stream: StreamHandle) -> Result<()> {
        let mut state = self.enter(Call::EventRecord)?;
        if capture::record_event(&mut state, stream, handle)? {
            return Ok(());
        }
        let event = event(&mut state, handle);
        event.captured = None;
        event.recorded += 1;
        let item = Item::Record(handle.0, event.recorded);
        get(&mut state, stream).queue.push_back(item);
        Ok(())
    }

    unsafe fn event_query(&self, handle: EventHandle) -> Result<bool> {
        let mut state = self.enter_unsafe(Call::EventQuery)?;
        run::check_failure(&state, Call::EventQuery)?;
        capture::refuse_captured(&mut state, handle, Call::EventQuery)?;
        let event = event(&mut state, handle);
        Ok(event.reached >= event.recorded)
    }

    unsafe fn event_synchronize(&self, handle: EventHandle) -> Result<()> {
        let mut state = self.enter_unsafe(Call::EventSynchronize)?;
        capture::refuse_captured(&mut state, handle, Call::EventSynchronize)?;
        let record = event(&mut state, handle).recorded;
        drop(state);
        run::drive_until(self, Call::EventSynchronize, |state| {
            state
                .events
                .get(&handle.0)
                .is_none_or(|event| event.reached >= record)
        })
    }
}
