//! `Pool` and `Block`: memory of the simulator that torch's CPU tensors can lie in.

use cg_core::{Sim, SimMemory};
use pyo3::prelude::*;

use crate::device::Device;
use crate::enter::enter;
use crate::sim;
use crate::stream::Stream;

/// Segments that a set of captures allocates from.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Pool {
    pub(crate) core: cg_core::Pool,
    sim: Sim,
}

#[pymethods]
impl Pool {
    #[new]
    fn new(device: &Device, sim: &sim::Sim) -> Self {
        Self {
            core: cg_core::Pool::new(&device.core),
            sim: sim.core.clone(),
        }
    }

    /// A number that no other pool has.
    #[getter]
    fn id(&self) -> u64 {
        self.core.id()
    }

    /// Its device.
    #[getter]
    fn device(&self) -> Device {
        Device {
            core: self.core.device().clone(),
        }
    }

    /// A block for work on a stream; given back when the last reference to it goes.
    fn allocate(&self, py: Python<'_>, stream: &Stream, bytes: u64) -> PyResult<Block> {
        let memory = enter(py, || self.core.allocate(&stream.core, bytes))?;
        Ok(Block::new(&self.sim, memory))
    }

    /// The segments, whole.
    fn segments(&self) -> Vec<Block> {
        let segments = self.core.segments();
        segments
            .into_iter()
            .map(|memory| Block::new(&self.sim, memory))
            .collect()
    }

    /// Bytes: `in_use`, `peak`, `reserved`.
    fn stats(&self) -> (u64, u64, u64) {
        let stats = self.core.stats();
        (stats.in_use, stats.peak, stats.reserved)
    }
}

/// A range of simulated device memory, with the host memory behind it.
#[pyclass(frozen, weakref, module = "cgraph._core")]
pub(crate) struct Block {
    memory: cg_core::Memory,
    view: SimMemory,
}

impl Block {
    fn new(sim: &Sim, memory: cg_core::Memory) -> Self {
        let view = sim.view(memory.address(), memory.bytes());
        Self { memory, view }
    }
}

#[pymethods]
impl Block {
    /// Where it starts on the device.
    #[getter]
    fn address(&self) -> u64 {
        self.memory.address().0
    }

    /// Where the host memory behind it starts.
    #[getter]
    fn host_address(&self) -> usize {
        self.view.as_ptr().addr()
    }

    /// How many bytes it has.
    #[getter]
    fn nbytes(&self) -> usize {
        self.view.bytes()
    }

    /// Overwrites it with the simulator's poison.
    fn poison(&self) {
        self.view.copy_from(&vec![0xFF; self.view.bytes()]);
    }
}
