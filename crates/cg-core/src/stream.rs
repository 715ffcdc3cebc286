//! [`Stream`] and [`Event`], as CUDA has them.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::driver::handle::{EventHandle, StreamHandle};
use crate::driver::owned::{OwnedEvent, OwnedGraph, OwnedStream, same_driver};
use crate::driver::{CaptureStatus, is_exiting};
use crate::error::Result;
use crate::retain::{Fence, Retained};
use crate::work::Work;

/// So many retained things of a stream are handed over to a fence at once.
const PENDING_LIMIT: usize = 1024;

/// A queue of work. Clones are the same stream.
#[derive(Clone)]
pub struct Stream {
    inner: Arc<Inner>,
}

struct Inner {
    owned: Arc<OwnedStream>,
    outlives_replays: bool,
    device: Device,
    /// Held while something is enqueued or a capture begins or ends, so that what is enqueued is
    /// retained for the capture that records it.
    order: Mutex<()>,
    /// Things that were enqueued and may not have been passed.
    pending: Mutex<Vec<Retained>>,
}

impl Stream {
    /// Create a stream that does not synchronise with the legacy default stream.
    #[doc(alias = "cuStreamCreate")]
    pub fn new(device: &Device) -> Result<Self> {
        let owned = OwnedStream::new(Arc::clone(device.driver()))?;
        Ok(Self::with_owned(device, owned, true))
    }

    /// Return a stream of somebody else: torch's, another crate's, or zero for the legacy default stream.
    ///
    /// # Safety
    /// `handle` is a live stream of the device, the same in all threads (not
    /// `CU_STREAM_PER_THREAD`), and stays so as long as the result, its clones, and every exec that
    /// was replayed on one of them.
    #[must_use]
    #[expect(
        unsafe_code,
        reason = "the caller vouches for a handle that nobody here owns"
    )]
    pub unsafe fn from_raw(device: &Device, handle: StreamHandle) -> Self {
        let owned = OwnedStream::borrowed(Arc::clone(device.driver()), handle);
        Self::with_owned(device, owned, true)
    }

    /// Return a stream of somebody else, who may destroy it while what was replayed on it lives: an
    /// exec keeps an event behind each replay on it, and not the stream.
    ///
    /// # Safety
    /// `handle` is a live stream of the device, the same in all threads (not
    /// `CU_STREAM_PER_THREAD`), and stays so as long as the result and its clones.
    #[must_use]
    #[expect(
        unsafe_code,
        reason = "the caller vouches for a handle that nobody here owns"
    )]
    pub unsafe fn from_foreign(device: &Device, handle: StreamHandle) -> Self {
        let owned = OwnedStream::borrowed(Arc::clone(device.driver()), handle);
        Self::with_owned(device, owned, false)
    }

    /// Return its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Return the raw stream.
    #[must_use]
    pub fn handle(&self) -> StreamHandle {
        self.inner.owned.handle()
    }

    /// Enqueue one operation, or record it if the stream captures.
    ///
    /// # Errors
    /// [`crate::Error::Foreign`] for work of another device; [`crate::Error::Paused`] for work on
    /// memory of a paused pool; what the driver reports.
    pub fn enqueue(&self, work: &Work) -> Result<()> {
        work.check(&self.inner.device)?;
        let _open = work.gates().pass()?;
        let _order = self.order();
        let status = self.inner.owned.capture_status()?;
        self.inner.owned.enqueue(work.spec())?;
        self.retain(status, work.retained());
        Ok(())
    }

    /// Record the event behind all work enqueued so far.
    #[doc(alias = "cuEventRecord")]
    pub fn record(&self, event: &Event) -> Result<()> {
        event.check(&self.inner.device)?;
        let _order = self.order();
        let status = self.inner.owned.capture_status()?;
        event.owned.record(&self.inner.owned)?;
        self.retain(status, &[Arc::clone(&event.owned) as Retained]);
        Ok(())
    }

    /// Make later work wait for the event. If the event was recorded in a capture, the stream
    /// joins that capture.
    #[doc(alias = "cuStreamWaitEvent")]
    pub fn wait(&self, event: &Event) -> Result<()> {
        event.check(&self.inner.device)?;
        let _order = self.order();
        let before = self.inner.owned.capture_status()?;
        self.inner.owned.wait_event(&event.owned)?;
        // The wait itself may have made the stream join a capture.
        let status = self.inner.owned.capture_status().unwrap_or(before);
        self.retain(status, &[Arc::clone(&event.owned) as Retained]);
        Ok(())
    }

    /// Wait until all work has finished.
    #[doc(alias = "cuStreamSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        let enqueued = std::mem::take(&mut *self.pending());
        let result = self.inner.owned.synchronize();
        if result.is_err() {
            self.pending().extend(enqueued);
        }
        self.inner.device.collect();
        result
    }

    /// Return whether all work has finished.
    #[doc(alias = "cuStreamQuery")]
    pub fn is_idle(&self) -> Result<bool> {
        self.inner.owned.query()
    }

    /// Return whether it captures.
    #[doc(alias = "cuStreamIsCapturing")]
    pub fn is_capturing(&self) -> Result<bool> {
        Ok(self.inner.owned.capture_status()? != CaptureStatus::None)
    }

    /// Return how many nodes the capture that is open on it has recorded; none if it does not capture, or its
    /// capture was made unusable.
    ///
    /// # Errors
    /// What the driver reports.
    ///
    /// # Safety
    /// No other thread ends or breaks the capture during the call, which would take the graph away
    /// that is looked at.
    #[expect(
        unsafe_code,
        reason = "the caller vouches for a graph that the driver owns"
    )]
    #[doc(alias = "cuStreamGetCaptureInfo")]
    pub unsafe fn captured_nodes(&self) -> Result<Option<usize>> {
        let Some(info) = self.owned().capture_info()? else {
            return Ok(None);
        };
        let driver = Arc::clone(self.device().driver());
        OwnedGraph::borrowed(driver, info.graph).count().map(Some)
    }

    /// Keep others from enqueuing, and from beginning or ending captures.
    pub(crate) fn order(&self) -> MutexGuard<'_, ()> {
        let order = self.inner.order.lock();
        order.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn owned(&self) -> &Arc<OwnedStream> {
        &self.inner.owned
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Keep things until the stream has passed what is enqueued, or for the template that the
    /// capture makes.
    pub(crate) fn retain(&self, status: CaptureStatus, retained: &[Retained]) {
        if retained.is_empty() {
            return;
        }
        if let CaptureStatus::Active(id) = status {
            self.inner.device.retain_captured(id, retained);
            return;
        }
        let mut pending = self.pending();
        pending.extend_from_slice(retained);
        if pending.len() > PENDING_LIMIT {
            let full = std::mem::take(&mut *pending);
            drop(pending);
            let limbo = self.inner.device.limbo();
            limbo.park(
                [Fence::Stream(Arc::clone(&self.inner.owned))],
                Box::new(full),
            );
            limbo.collect();
        }
    }

    /// Return whether it outlives what was replayed on it.
    pub(crate) fn outlives_replays(&self) -> bool {
        self.inner.outlives_replays
    }

    fn with_owned(device: &Device, owned: OwnedStream, outlives_replays: bool) -> Self {
        Self {
            inner: Arc::new(Inner {
                owned: Arc::new(owned),
                outlives_replays,
                device: device.clone(),
                order: Mutex::new(()),
                pending: Mutex::new(Vec::new()),
            }),
        }
    }

    fn pending(&self) -> MutexGuard<'_, Vec<Retained>> {
        self.inner
            .pending
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let pending = self
            .pending
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        let pending = std::mem::take(pending);
        if is_exiting() {
            std::mem::forget(pending);
            return;
        }
        // A stream that was forked into a capture lives until that capture ends.
        let forked = !self.owned.is_borrowed()
            && !matches!(self.owned.capture_status(), Ok(CaptureStatus::None));
        if forked || !pending.is_empty() {
            let limbo = self.device.limbo();
            limbo.park([Fence::Stream(Arc::clone(&self.owned))], Box::new(pending));
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Stream({:#x} of {})",
            self.handle().0,
            self.device().name()
        )
    }
}

impl fmt::Display for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "stream {:#x} of {}",
            self.handle().0,
            self.device().name()
        )
    }
}

/// A point in a stream's work that others can wait for. Clones are the same event.
#[derive(Debug, Clone)]
pub struct Event {
    owned: Arc<OwnedEvent>,
}

impl Event {
    /// Create an event, without timing.
    #[doc(alias = "cuEventCreate")]
    pub fn new(device: &Device) -> Result<Self> {
        let owned = OwnedEvent::new(Arc::clone(device.driver()))?;
        Ok(Self {
            owned: Arc::new(owned),
        })
    }

    /// Return whether the work before the last record has finished.
    #[doc(alias = "cuEventQuery")]
    pub fn is_reached(&self) -> Result<bool> {
        self.owned.query()
    }

    /// Wait until the work before the last record has finished.
    #[doc(alias = "cuEventSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        self.owned.synchronize()
    }

    pub(crate) fn handle(&self) -> EventHandle {
        self.owned.handle()
    }

    pub(crate) fn retained(&self) -> Retained {
        Arc::clone(&self.owned) as Retained
    }

    /// Fail unless the event is of this device.
    pub(crate) fn check(&self, device: &Device) -> Result<()> {
        same_driver(&**device.driver(), &**self.owned.driver(), "event")
    }
}
