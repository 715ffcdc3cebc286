//! Keeping things alive until the streams that use them have passed.

use std::any::Any;
use std::sync::{Arc, Mutex, PoisonError};

use crate::driver::owned::{OwnedEvent, OwnedStream, relaxed};
use crate::driver::{CaptureStatus, is_exiting, is_forked};

/// Something that work names, kept alive as long as the work may use it.
pub type Retained = Arc<dyn Any + Send + Sync>;

/// Things whose last user is gone, but which work in flight may still touch.
///
/// Waiting for that work happens here and not at each replay: a replay costs no event.
#[derive(Default)]
pub(crate) struct Limbo {
    parked: Mutex<Vec<Parked>>,
}

struct Parked {
    fences: Vec<Fence>,
    _what: Box<dyn Any + Send>,
}

/// Something that is reached when a stream has passed what was enqueued on it.
pub(crate) enum Fence {
    Event(Arc<OwnedEvent>),
    /// The stream itself, before an event is recorded, or where none can be: it captures, or the call failed.
    Stream(Arc<OwnedStream>),
}

impl Limbo {
    /// Drop `what` as soon as the fences are reached: those of streams, when they have passed all that is
    /// enqueued on them now.
    pub(crate) fn park(&self, fences: impl IntoIterator<Item = Fence>, what: Box<dyn Any + Send>) {
        if is_exiting() {
            // Work in flight may use it to the very end.
            std::mem::forget(what);
            return;
        }
        let fences: Vec<Fence> = fences.into_iter().filter_map(still_ahead).collect();
        if !fences.is_empty() {
            let parked = Parked {
                fences,
                _what: what,
            };
            self.lock().push(parked);
        }
    }

    /// Drop what the streams have passed by now; how many things are still parked.
    pub(crate) fn collect(&self) -> usize {
        if is_forked() {
            return 0;
        }
        if is_exiting() {
            return self.lock().len();
        }
        let mut parked = std::mem::take(&mut *self.lock());
        let mut passed = Vec::new();
        parked = parked
            .into_iter()
            .filter_map(|mut entry| {
                entry.fences = entry.fences.into_iter().filter_map(still_ahead).collect();
                if entry.fences.is_empty() {
                    passed.push(entry);
                    return None;
                }
                Some(entry)
            })
            .collect();
        let mut now = self.lock();
        now.append(&mut parked);
        let waiting = now.len();
        drop(now);
        // Dropping runs foreign code, which may come back here or panic: the lock is open, and what
        // still waits is back in its place.
        drop(passed);
        waiting
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Parked>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Limbo {
    fn drop(&mut self) {
        let parked = self.parked.get_mut();
        let parked = std::mem::take(parked.unwrap_or_else(PoisonError::into_inner));
        if is_exiting() {
            std::mem::forget(parked);
            return;
        }
        for fence in parked.iter().flat_map(|entry| &entry.fences) {
            // A device that cannot be waited for runs nothing that could be harmed.
            let _ = match fence {
                Fence::Event(event) => event.synchronize(),
                Fence::Stream(stream) => stream.synchronize(),
            };
        }
    }
}

/// Return a fence behind all that is enqueued; none if the stream is idle.
fn fence(stream: Arc<OwnedStream>) -> Option<Fence> {
    let driver = Arc::clone(stream.driver());
    relaxed(&*driver, || {
        if !matches!(stream.capture_status(), Ok(CaptureStatus::None)) {
            return Some(Fence::Stream(stream));
        }
        if matches!(stream.query(), Ok(true)) {
            return None;
        }
        let event = OwnedEvent::new(Arc::clone(&driver)).and_then(|event| {
            event.record(&stream)?;
            Ok(event)
        });
        Some(event.map_or(Fence::Stream(stream), |event| Fence::Event(Arc::new(event))))
    })
}

/// Return the fence, unless it is reached.
fn still_ahead(before: Fence) -> Option<Fence> {
    match before {
        Fence::Stream(stream) => fence(stream),
        Fence::Event(event) => {
            let driver = Arc::clone(event.driver());
            let reached = relaxed(&*driver, || matches!(event.query(), Ok(true)));
            (!reached).then_some(Fence::Event(event))
        }
    }
}
