//! `LastStream`: the stream that the entries of one pool were last replayed on.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::device::{CurrentStream, Device};
use crate::raw::{self, Attached};

/// Stands for no stream: none has this handle.
const NONE: u64 = u64::MAX;

/// Stands for a stream that may be gone, behind whose last replay there is an event.
const GONE: u64 = u64::MAX - 1;

/// Replays of graphs of one pool use the same memory, so they must come one after another: this
/// knows the stream of the last one.
#[pyclass(frozen, name = "LastStream", weakref, module = "cgraph._core")]
pub(crate) struct LastStream {
    current: CurrentStream,
    /// Called with the raw handle of the last stream, or an event behind its last replay, and the raw handle
    /// of the stream that is to wait for it.
    switch: Py<PyAny>,
    /// Called with the raw handle of a stream; returns an event behind its present work.
    record: Py<PyAny>,
    last: AtomicU64,
    /// An event behind the last replay, where that was on a stream that may be destroyed.
    passed: Attached<Option<Py<PyAny>>>,
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
        current: (Bound<'_, PyAny>, Py<PyAny>),
        ordinal: u32,
        switch: Py<PyAny>,
        record: Py<PyAny>,
    ) -> PyResult<Self> {
        Ok(Self {
            current: CurrentStream::new(current, ordinal)?,
            switch,
            record,
            passed: Attached::default(),
            last: AtomicU64::new(NONE),
            device,
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.current.traverse(&visit)?;
        visit.call(&self.device)?;
        visit.call(&self.switch)?;
        visit.call(&self.record)
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
    pub(crate) fn follow(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        let Some(now) = self.current.handle(py)? else {
            return Ok(None);
        };
        // Nobody else is here: the interpreter is held.
        let last = self.last.load(Ordering::Relaxed);
        self.last.store(now, Ordering::Relaxed);
        if last == now || last == NONE {
            return Ok(Some(now));
        }
        if last == GONE {
            let passed = self.passed.take(py);
            let waited = self.switch.call1(py, (&passed, now));
            if waited.is_err() {
                drop(self.passed.replace(py, passed));
                self.last.store(GONE, Ordering::Relaxed);
            }
            return waited.map(|_| Some(now));
        }
        let switched = self.switch.call1(py, (last, now));
        if switched.is_err() {
            // The next one is to wait instead.
            self.last.store(last, Ordering::Relaxed);
        }
        switched.map(|_| Some(now))
    }

    /// Keep an event behind a replay on the stream that [`Self::follow`] has returned, if its owner may
    /// destroy that stream.
    #[inline]
    pub(crate) fn leave(&self, py: Python<'_>, stream: Option<u64>) -> PyResult<()> {
        match stream {
            Some(handle) if !self.current.is_known(handle) && !raw::is_lasting(handle) => {
                self.record(py, handle)
            }
            Some(_) | None => Ok(()),
        }
    }

    #[cold]
    fn record(&self, py: Python<'_>, handle: u64) -> PyResult<()> {
        let event = self.record.call1(py, (handle,))?;
        drop(self.passed.replace(py, Some(event)));
        self.last.store(GONE, Ordering::Relaxed);
        Ok(())
    }
}
