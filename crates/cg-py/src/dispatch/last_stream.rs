//! `LastStream`: the stream that the entries of one pool were last replayed on.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::device::{CurrentStream, Device};
use crate::raw;

/// No stream has this handle.
const NONE: u64 = u64::MAX;

/// Replays of graphs of one pool use the same memory, so they must come one after another: this
/// knows the stream of the last one.
#[pyclass(frozen, name = "LastStream", module = "cgraph._core")]
pub(crate) struct LastStream {
    current: CurrentStream,
    /// Called with the raw handles of the last stream, or none where that may be gone, and of the one that is
    /// to wait for it.
    switch: Py<PyAny>,
    last: AtomicU64,
    device: Py<Device>,
}

/// Number of open blocks in which a thread runs a function as it was written, and graphed functions
/// inside are not replayed. A thread asks Python whether it is one of them, so that its own count is all
/// that it must see.
static BUSY: AtomicUsize = AtomicUsize::new(0);

/// Count such a block that begins.
#[pyfunction]
pub(crate) fn enter_busy() {
    BUSY.fetch_add(1, Ordering::Relaxed);
}

/// Count one that has ended.
#[pyfunction]
pub(crate) fn leave_busy() {
    BUSY.fetch_sub(1, Ordering::Relaxed);
}

/// Return whether there is one.
#[pyfunction]
pub(crate) fn is_any_busy() -> bool {
    BUSY.load(Ordering::Relaxed) > 0
}

#[pymethods]
impl LastStream {
    /// `current` is as for [`CurrentStream::new`].
    #[new]
    fn new(
        device: Py<Device>,
        current: &Bound<'_, PyAny>,
        ordinal: u32,
        switch: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            current: CurrentStream::new(current, ordinal)?,
            switch,
            last: AtomicU64::new(NONE),
            device,
        })
    }

    /// Make the current stream the last one; it waits for the one before.
    #[pyo3(name = "follow")]
    fn py_follow(&self, py: Python<'_>) -> PyResult<()> {
        self.follow(py).map(drop)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.current.traverse(&visit)?;
        visit.call(&self.device)?;
        visit.call(&self.switch)
    }
}

impl LastStream {
    /// Return whether anything on the device may be capturing now, or some thread runs a function for a
    /// capture.
    #[inline]
    pub(crate) fn may_capture(&self) -> bool {
        self.device.get().core.has_captures() || is_any_busy()
    }

    /// Make the current stream wait for the last replay, if that was on another one; its raw handle.
    #[inline]
    pub(crate) fn follow(&self, py: Python<'_>) -> PyResult<u64> {
        let now = self.current.handle(py)?;
        // Nobody else is here: the interpreter is held.
        let last = self.last.load(Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
        if last == now || last == NONE {
            return Ok(now);
        }
        // Its owner may have destroyed another library's stream.
        let known = raw::is_lasting(last).then_some(last);
        let switched = self.switch.call1(py, (known, now));
        if switched.is_err() {
            // The next one is to wait instead.
            self.last.store(last, Ordering::Relaxed);
        }
        switched.map(|_| now)
    }
}
