//! `Pool` and `Block`: segments for torch, and memory of the simulator that CPU tensors can lie in.

use cg_core::{Address, Keep, Sim, SimMemory};
use pyo3::prelude::*;

use super::Device;
use super::allocator::Lease;
use super::sim;
use super::stream::Stream;
use crate::detach::detached;
use crate::error::{argument, state, to_py};
use crate::raw;

/// Segments that a set of captures allocates from.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Pool {
    pub(crate) core: cg_core::Pool,
    /// The simulator, for a simulated device; torch takes segments only on others.
    sim: Option<Sim>,
    lease: Option<Lease>,
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (device, *, sim=None, limit=None, base=None, range_bytes=None))]
    fn new(
        py: Python<'_>,
        device: &Device,
        sim: Option<&sim::Sim>,
        limit: Option<u64>,
        base: Option<u64>,
        range_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let mut builder = cg_core::Pool::builder(&device.core);
        if let Some(limit) = limit {
            builder = builder.limit(limit);
        }
        if let Some(base) = base {
            builder = builder.base(Address(base));
        }
        if let Some(bytes) = range_bytes {
            builder = builder.range_bytes(bytes);
        }
        let core = builder.build();
        let lease = match sim {
            None => Some(Lease::new(py, &core)?),
            Some(_) => None,
        };
        Ok(Self {
            core,
            sim: sim.map(|sim| sim.core.clone()),
            lease,
        })
    }

    /// Return a number that no other pool has.
    #[getter]
    fn id(&self) -> u64 {
        self.core.id()
    }

    /// Return its device.
    #[getter]
    fn device(&self) -> Device {
        Device {
            core: self.core.device().clone(),
        }
    }

    /// Return the most bytes that its segments may have.
    #[getter]
    fn limit(&self) -> Option<u64> {
        self.core.limit()
    }

    /// Return whether its memory is given back.
    #[getter]
    fn is_paused(&self, py: Python<'_>) -> bool {
        py.detach(|| self.core.is_paused())
    }

    /// Return a number for the functions that torch's allocator is to call, and their addresses; of a CUDA
    /// device only.
    fn functions(&self) -> PyResult<(usize, usize, usize)> {
        let lease = self.lease.as_ref();
        let lease = lease.ok_or_else(|| state("torch takes no segments of the simulator"))?;
        Ok(lease.functions())
    }

    /// Return a block for work on a stream; given back when the last reference to it goes. Of the simulator
    /// only.
    fn allocate(&self, py: Python<'_>, stream: &Stream, bytes: u64) -> PyResult<Block> {
        let sim = self.sim.as_ref();
        let sim = sim.ok_or_else(|| state("blocks of a CUDA pool are torch's"))?;
        let memory = detached(py, || self.core.allocate(&stream.core, bytes))?;
        Ok(Block::new(sim, memory))
    }

    /// Return the segments of the simulator, whole.
    fn segments(&self) -> Vec<Block> {
        // While it is paused, there is nothing to look at.
        let awake = self.sim.iter().filter(|_| !self.core.is_paused());
        let views = awake.flat_map(|sim| {
            let segments = self.core.segments();
            segments.into_iter().map(|memory| Block::new(sim, memory))
        });
        views.collect()
    }

    /// Note which blocks are in use. Of the simulator only.
    fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            core: self.core.checkpoint(),
        }
    }

    /// Make the blocks in use those of a checkpoint again; those that were given back since then. Of the
    /// simulator only.
    fn restore(&self, checkpoint: &Checkpoint) -> PyResult<Vec<Block>> {
        let back = self.core.restore(&checkpoint.core);
        let back = back.map_err(|error| Python::attach(|py| to_py(py, &error)))?;
        let of_sim = |memory| Some(Block::new(self.sim.as_ref()?, memory));
        Ok(back.into_iter().filter_map(of_sim).collect())
    }

    /// Bytes of its segments.
    #[getter]
    fn reserved(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.core.reserved())
    }

    /// Bytes by name, as `cg_core::PoolStats` has them.
    fn stats(&self, py: Python<'_>) -> [(&'static str, u64); 7] {
        let stats = py.detach(|| self.core.stats());
        [
            ("in_use", stats.in_use),
            ("peak", stats.peak),
            ("reserved", stats.reserved),
            ("mapped", stats.mapped),
            ("leaving", stats.leaving),
            ("kept", stats.kept),
            ("addresses", stats.addresses),
        ]
    }

    /// Address, bytes and bytes in use of each segment.
    fn segment_stats(&self, py: Python<'_>) -> Vec<(u64, u64, u64)> {
        let segments = py.detach(|| self.core.stats().segments);
        let sizes = segments
            .iter()
            .map(|segment| (segment.address.0, segment.bytes, segment.in_use));
        sizes.collect()
    }

    /// Return whether an address lies in one of its segments.
    fn covers(&self, py: Python<'_>, address: u64) -> bool {
        py.detach(|| self.core.covers(Address(address)))
    }

    /// Start and bytes of each range of addresses.
    fn ranges(&self, py: Python<'_>) -> Vec<(u64, u64)> {
        let ranges = py.detach(|| self.core.ranges());
        ranges
            .iter()
            .map(|(start, bytes)| (start.0, *bytes))
            .collect()
    }

    /// Give wholly free segments back; how many bytes that were.
    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        // What Python kept for work in flight goes once this thread has the interpreter again.
        detached(py, || self.core.device().synchronize())?;
        detached(py, || self.core.trim())
    }

    /// Give all memory back: `discard` or `host` says what becomes of the contents.
    fn pause(&self, py: Python<'_>, keep: &str) -> PyResult<()> {
        let keep = match keep {
            "discard" => Keep::Discard,
            "host" => Keep::Host,
            other => {
                let given = format!("{other:?}");
                return Err(argument("keep", &given, "\"discard\" or \"host\""));
            }
        };
        detached(py, || self.core.pause(keep))
    }

    /// Map memory at the same addresses again.
    fn resume(&self, py: Python<'_>) -> PyResult<()> {
        if !self.is_paused(py) {
            let (id, device) = (self.core.id(), self.core.device().name());
            let text = format!("pool {id} of {device} is not paused: call its pause() first");
            return Err(state(text));
        }
        detached(py, || self.core.resume())
    }
}

/// Which blocks of a pool were in use.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Checkpoint {
    core: cg_core::Checkpoint,
}

/// Return a DLPack capsule of a tensor, which keeps an object, and a pool's memory, until its last tensor is
/// gone. `elements` are DLPack's code and the bits of one, sizes and strides. The device is `cuda:ordinal`, or
/// without a number the host.
#[pyfunction]
#[pyo3(signature = (address, elements, ordinal, owner, pool=None))]
pub(crate) fn lent_memory<'py>(
    py: Python<'py>,
    address: u64,
    elements: ((u8, u8), Vec<i64>, Vec<i64>),
    ordinal: Option<i32>,
    owner: Py<PyAny>,
    pool: Option<&Pool>,
) -> PyResult<Bound<'py, PyAny>> {
    let retained = pool.map(|pool| pool.core.retained());
    let (dtype, shape, strides) = elements;
    let elements = raw::Elements {
        dtype,
        shape: shape.into(),
        strides: strides.into(),
    };
    raw::lend(py, address, elements, ordinal, (owner, retained))
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
    /// Return where it starts on the device.
    #[getter]
    fn address(&self) -> u64 {
        self.memory.address().0
    }

    /// Return where the host memory behind it starts.
    #[getter]
    fn host_address(&self) -> usize {
        self.view.as_ptr().addr()
    }

    /// Return how many bytes it has.
    #[getter]
    fn nbytes(&self) -> usize {
        self.view.bytes()
    }

    /// Overwrite it with the simulator's poison.
    fn poison(&self) {
        self.view.copy_from(&vec![0xFF; self.view.bytes()]);
    }
}
