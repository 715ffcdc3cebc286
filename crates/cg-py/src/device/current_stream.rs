//! `CurrentStream`: how torch's current stream is found.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::{self, CurrentWorkStream};

/// A way to find the current stream.
pub(crate) enum CurrentStream {
    Handle(HandleSource),
    /// A callable that returns a [`Stream`](super::Stream).
    Object(Py<PyAny>),
}

/// A way to find the raw handle of the current stream of a device.
pub(crate) struct HandleSource {
    find: Find,
    ordinal: u32,
    /// A callable that takes the device's number and tells whether its current stream is torch's own.
    is_own: Py<PyAny>,
    /// The last handle that was found and is torch's own; zero, the default stream's, at first.
    own: AtomicU64,
}

enum Find {
    /// DLPack's C function.
    Dlpack(CurrentWorkStream),
    /// A callable that takes the device's number.
    Raw(Py<PyAny>),
}

impl CurrentStream {
    /// Take a `dlpack_exchange_api` capsule, or a callable that takes the device's number and returns the raw
    /// handle, and a callable that tells of the same device whether its current stream is torch's own.
    pub(crate) fn new(
        (current, is_own): (Bound<'_, PyAny>, Py<PyAny>),
        ordinal: u32,
    ) -> PyResult<Self> {
        let find = match current.cast::<PyCapsule>() {
            Ok(capsule) => Find::Dlpack(CurrentWorkStream::new(capsule, ordinal)?),
            Err(_) => Find::Raw(current.unbind()),
        };
        Ok(Self::Handle(HandleSource {
            find,
            ordinal,
            is_own,
            own: AtomicU64::new(0),
        }))
    }

    /// Return the raw handle; none where there is a stream only as an object.
    #[inline]
    pub(crate) fn handle(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        match self {
            Self::Handle(source) => source.handle(py).map(Some),
            Self::Object(_) => Ok(None),
        }
    }

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Handle(source) => {
                visit.call(&source.is_own)?;
                match &source.find {
                    Find::Dlpack(_) => Ok(()),
                    Find::Raw(current) => visit.call(current),
                }
            }
            Self::Object(current) => visit.call(current),
        }
    }
}

impl HandleSource {
    #[inline]
    fn handle(&self, py: Python<'_>) -> PyResult<u64> {
        let handle = match &self.find {
            Find::Dlpack(current) => current.get(py)?,
            Find::Raw(current) => current.call1(py, (self.ordinal,))?.extract(py)?,
        };
        if handle != self.own.load(Ordering::Relaxed) {
            self.note(py, handle)?;
        }
        Ok(handle)
    }

    /// Note whether a handle is of a stream of torch's, which torch never destroys.
    #[cold]
    fn note(&self, py: Python<'_>, handle: u64) -> PyResult<()> {
        if !raw::is_lasting(handle) {
            if !self.is_own.call1(py, (self.ordinal,))?.is_truthy(py)? {
                return Ok(());
            }
            raw::note_lasting(handle);
        }
        self.own.store(handle, Ordering::Relaxed);
        Ok(())
    }
}
