//! [`LastReplay`]: what is known of the last replay of an exec.

use std::sync::Arc;

use crate::driver::owned::{OwnedEvent, relaxed};
use crate::error::Result;
use crate::retain::Fence;
use crate::stream::Stream;

/// The point behind the last replay of an exec. Replays of one exec never overlap: where the last one
/// has finished, all have.
#[derive(Clone)]
pub struct LastReplay {
    point: Point,
}

#[derive(Clone)]
enum Point {
    /// Somewhere on a stream that outlives the exec.
    Stream(Stream),
    /// Behind the replay, on a stream that may be gone.
    Event(Arc<OwnedEvent>),
}

impl LastReplay {
    /// Prepare for a replay on a stream: nothing can fail behind the replay but [`Self::mark`].
    pub(super) fn on(stream: Stream) -> Result<Self> {
        let point = if stream.outlives_replays() {
            Point::Stream(stream)
        } else {
            let driver = Arc::clone(stream.device().driver());
            Point::Event(Arc::new(OwnedEvent::new(driver)?))
        };
        Ok(Self { point })
    }

    /// Mark the point behind a replay that was enqueued on the stream.
    pub(super) fn mark(&self, stream: &Stream) {
        if let Point::Event(event) = &self.point
            && event.record(stream.owned()).is_err()
        {
            // An event that was never recorded counts as reached, and so it must be. A stream that
            // cannot be waited for runs nothing that could be harmed.
            let _ = stream.owned().synchronize();
        }
    }

    /// Wait until the replay has finished.
    ///
    /// # Errors
    /// What the driver reports, also of the replay itself.
    #[doc(alias = "cuStreamSynchronize")]
    #[doc(alias = "cuEventSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        match &self.point {
            Point::Stream(stream) => stream.synchronize(),
            Point::Event(event) => event.synchronize(),
        }
    }

    /// Return whether the replay is known to have finished.
    #[must_use]
    #[doc(alias = "cuEventQuery")]
    pub fn has_finished(&self) -> bool {
        // Such questions end captures of other threads that allow none.
        let finished = match &self.point {
            Point::Stream(stream) => relaxed(&**stream.device().driver(), || stream.is_idle()),
            Point::Event(event) => relaxed(&**event.driver(), || event.query()),
        };
        matches!(finished, Ok(true))
    }

    /// Return the stream, if it outlives the exec.
    #[must_use]
    pub fn stream(&self) -> Option<&Stream> {
        match &self.point {
            Point::Stream(stream) => Some(stream),
            Point::Event(_) => None,
        }
    }

    pub(super) fn fence(&self) -> Fence {
        match &self.point {
            Point::Stream(stream) => Fence::Stream(Arc::clone(stream.owned())),
            Point::Event(event) => Fence::Event(Arc::clone(event)),
        }
    }
}
