//! `CurrentStream`: how torch's current stream is found.

use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::CurrentWorkStream;

/// A way to find the current stream.
pub(crate) enum CurrentStream {
    /// DLPack's C function.
    Dlpack(CurrentWorkStream),
    /// A callable that takes the device's number and returns the raw handle.
    Raw(Py<PyAny>, u32),
    /// A callable that returns a [`Stream`](super::Stream).
    Object(Py<PyAny>),
}

impl CurrentStream {
    /// Take a `dlpack_exchange_api` capsule, or a callable that takes the device's number.
    pub(crate) fn new(current: Bound<'_, PyAny>, ordinal: u32) -> PyResult<Self> {
        Ok(match current.cast::<PyCapsule>() {
            Ok(capsule) => Self::Dlpack(CurrentWorkStream::new(capsule, ordinal)?),
            Err(_) => Self::Raw(current.unbind(), ordinal),
        })
    }

    /// Return the raw handle; none where there is a stream only as an object.
    #[inline]
    pub(crate) fn handle(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        Ok(match self {
            Self::Dlpack(current) => Some(current.get(py)?),
            Self::Raw(current, ordinal) => Some(current.call1(py, (*ordinal,))?.extract(py)?),
            Self::Object(_) => None,
        })
    }

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Dlpack(_) => Ok(()),
            Self::Raw(current, _) | Self::Object(current) => visit.call(current),
        }
    }
}
