//! `CurrentStream`: how torch's current stream is found.

use std::sync::atomic::{AtomicU64, Ordering};

use cg_core::{Device, Stream};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use pyo3::{PyTraverseError, PyVisit};

use super::Sim;
use crate::raw::{self, CurrentWorkStream};

/// A way to find the current stream.
pub(crate) enum CurrentStream {
    Torch(HandleSource),
    Simulated(Py<Sim>),
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
    /// Take a simulator; or a tuple of a `dlpack_exchange_api` capsule, or a callable that takes the device's
    /// number and returns the raw handle, and a callable that tells of the same device whether its current
    /// stream is torch's own.
    pub(crate) fn new(current: &Bound<'_, PyAny>, ordinal: u32) -> PyResult<Self> {
        if let Ok(sim) = current.cast::<Sim>() {
            return Ok(Self::Simulated(sim.clone().unbind()));
        }
        let (current, is_own): (Bound<'_, PyAny>, Py<PyAny>) = current.extract()?;
        let find = match current.cast::<PyCapsule>() {
            Ok(capsule) => Find::Dlpack(CurrentWorkStream::new(capsule, ordinal)?),
            Err(_) => Find::Raw(current.unbind()),
        };
        Ok(Self::Torch(HandleSource {
            find,
            ordinal,
            is_own,
            own: AtomicU64::new(0),
        }))
    }

    /// Return its raw handle.
    #[inline]
    pub(crate) fn handle(&self, py: Python<'_>) -> PyResult<u64> {
        match self {
            Self::Torch(source) => source.handle(py),
            Self::Simulated(sim) => sim.get().stream_of_replay(),
        }
    }

    /// Return the stream of such a handle.
    pub(crate) fn stream(&self, device: &Device, handle: u64) -> cg_core::Result<Stream> {
        match self {
            Self::Torch(_) => raw::stream(device, handle),
            Self::Simulated(sim) => {
                let current = sim.get().current(handle);
                current.map_or_else(|| raw::stream(device, handle), Ok)
            }
        }
    }

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Torch(source) => {
                visit.call(&source.is_own)?;
                match &source.find {
                    Find::Dlpack(_) => Ok(()),
                    Find::Raw(current) => visit.call(current),
                }
            }
            Self::Simulated(sim) => visit.call(sim),
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
