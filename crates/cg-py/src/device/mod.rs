//! `Device`: a GPU or a simulated one.

mod allocator;
mod capture;
mod current_stream;
mod pool;
mod saved;
mod sim;
mod stream;
mod template;

use cg_core::Address;
use pyo3::prelude::*;

use crate::detach::{detached, require_unforked as require};
use crate::raw;

pub(crate) use allocator::{settle_pools, take_refusal};
pub(crate) use capture::{Capture, Tracker, begin_and_hand_over, end_broken};
pub(crate) use current_stream::CurrentStream;
pub(crate) use pool::{Block, Checkpoint, Pool, lent_memory};
pub(crate) use saved::{SavedGraphs, SavedKernels, record_images};
pub(crate) use sim::{Sim, put_in_force};
pub(crate) use stream::{Event, Stream};
pub(crate) use template::{NodeAddress, Template};

/// One GPU, real or simulated.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Device {
    pub(crate) core: cg_core::Device,
}

#[pymethods]
impl Device {
    /// Return the GPU with this number.
    #[staticmethod]
    fn cuda(py: Python<'_>, ordinal: u32) -> PyResult<Self> {
        #[cfg(feature = "cuda")]
        let core = detached(py, || cg_core::Device::cuda(ordinal))?;
        #[cfg(not(feature = "cuda"))]
        let core = detached(py, || {
            Err(cg_core::Error::NoDriver {
                reason: format!("cgraph was built without CUDA; device {ordinal} is out of reach"),
                looked_for: Vec::new(),
            })
        })?;
        Ok(Self { core })
    }

    /// Return a simulated device.
    #[staticmethod]
    fn sim(sim: &Sim) -> Self {
        Self {
            core: cg_core::Device::sim(&sim.core),
        }
    }

    /// Return the driver and device, as in `cuda:0`.
    #[getter]
    fn name(&self) -> String {
        self.core.name()
    }

    /// Return the driver's version as CUDA numbers it.
    #[getter]
    fn driver_version(&self) -> u32 {
        self.core.driver().version()
    }

    /// Start and size of the allocation that an address lies in; none if nothing is there.
    fn memory_range(&self, py: Python<'_>, address: u64) -> PyResult<Option<(u64, u64)>> {
        let range = detached(py, || self.core.memory_range(Address(address)))?;
        Ok(range.map(|(base, bytes)| (base.0, bytes)))
    }

    /// Return the eight bytes at an address, as a number; none if nothing is there. The caller keeps the
    /// memory alive.
    fn word(&self, py: Python<'_>, address: u64) -> PyResult<Option<u64>> {
        detached(py, || match self.core.memory_range(Address(address))? {
            Some((base, bytes)) if address + 8 <= base.0 + bytes => {
                let bytes = raw::memory(&self.core, address, 8).read()?;
                Ok(bytes.try_into().ok().map(u64::from_le_bytes))
            }
            _ => Ok(None),
        })
    }

    /// Return whether a capture is open that cgraph knows of.
    fn has_captures(&self) -> bool {
        self.core.has_captures()
    }

    /// Say that others have begun a capture, until the result is dropped.
    fn mark_capture(&self) -> CaptureMark {
        CaptureMark {
            _core: self.core.mark_capture(),
        }
    }

    /// Drop what only finished work still used; return how many things wait.
    fn collect(&self, py: Python<'_>) -> usize {
        py.detach(|| self.core.collect())
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.core.driver().id() == other.core.driver().id()
    }

    fn __hash__(&self) -> u64 {
        self.core.driver().id()
    }

    fn __repr__(&self) -> String {
        format!("cgraph.Device({})", self.core.name())
    }
}

/// A capture that others have begun.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct CaptureMark {
    _core: cg_core::CaptureMark,
}

/// Tell cgraph that the interpreter exits: no object calls the driver any more.
#[pyfunction]
pub(crate) fn begin_exit() {
    cg_core::begin_exit();
}

/// Tell cgraph that the process was just forked.
#[pyfunction]
pub(crate) fn begin_forked() {
    cg_core::begin_forked();
}

/// Return whether the process is a fork of one that had used a driver.
#[pyfunction]
pub(crate) fn is_forked() -> bool {
    cg_core::is_forked()
}

/// Raise in a fork of a process that had used a driver.
#[pyfunction]
pub(crate) fn require_unforked() -> PyResult<()> {
    require()
}

/// Return the version of the native half.
#[pyfunction]
pub(crate) fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
