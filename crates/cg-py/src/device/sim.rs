//! `Sim`: the simulated driver, and Python callables as its kernels.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use cg_core::driver::Driver;
use cg_core::{Call, Code};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::stream::Stream;
use crate::detach::detached;
use crate::error::{argument, foreign, state};
use crate::raw;

/// A simulated device and its driver.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Sim {
    pub(crate) core: cg_core::Sim,
    /// The exception of the last failed kernel.
    raised: Arc<Mutex<Option<PyErr>>>,
    /// The streams that were made current, by thread.
    current: Mutex<HashMap<ThreadId, Py<Stream>>>,
    is_asynchronous: bool,
    is_default: AtomicBool,
}

/// What [`IN_FORCE`] is while no driver was put in force, and while one was that is no simulator.
const NOTHING: u64 = 0;
const OTHER: u64 = u64::MAX;

/// The number of the simulator in force.
static IN_FORCE: AtomicU64 = AtomicU64::new(NOTHING);

/// Note that a driver was put in force, which may be a simulator, or that none is any more.
pub(crate) fn put_in_force(is_any: bool, sim: Option<&Sim>) {
    let none = if is_any { OTHER } else { NOTHING };
    IN_FORCE.store(sim.map_or(none, |sim| sim.core.id()), Ordering::Relaxed);
}

#[pymethods]
impl Sim {
    #[new]
    #[pyo3(signature = (*, seed=0, memory=16 << 30, driver_version=13_000, asynchronous=false))]
    fn new(seed: u64, memory: u64, driver_version: u32, asynchronous: bool) -> Self {
        let core = cg_core::Sim::builder()
            .seed(seed)
            .memory(memory)
            .driver_version(driver_version)
            .host_memory(raw::OF_PROCESS)
            .build();
        Self {
            core,
            raised: Arc::default(),
            current: Mutex::default(),
            is_asynchronous: asynchronous,
            is_default: AtomicBool::new(false),
        }
    }

    /// The current stream of this thread; none for the default one.
    #[getter]
    fn current_stream(&self, py: Python<'_>) -> Option<Py<Stream>> {
        let stream = self.streams().get(&thread::current().id())?.clone_ref(py);
        Some(stream)
    }

    #[setter(current_stream)]
    fn set_current_stream(&self, stream: Option<Py<Stream>>) {
        let thread = thread::current().id();
        let before = match stream {
            Some(stream) => self.streams().insert(thread, stream),
            None => self.streams().remove(&thread),
        };
        // Its end may run any code: the lock is open.
        drop(before);
    }

    /// Return whether it is in force where no driver was put in force.
    #[getter]
    fn is_default(&self) -> bool {
        self.is_default.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_is_default(&self, is_default: bool) {
        self.is_default.store(is_default, Ordering::Relaxed);
    }

    /// Enqueue a callable as a kernel, or record it where the stream captures.
    fn launch(
        &self,
        py: Python<'_>,
        stream: &Stream,
        name: &str,
        kernel: Py<PyAny>,
    ) -> PyResult<()> {
        let raised = Arc::clone(&self.raised);
        let closure = move |_: &cg_core::KernelCall<'_>| {
            Python::attach(|py| {
                kernel.call0(py).map(|_| ()).map_err(|error| {
                    let text = error.to_string();
                    *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                    text
                })
            })
        };
        let handle = stream.core.handle();
        detached(py, || {
            self.core.launch_closure(handle, name, Arc::new(closure))
        })
    }

    /// Raise what the last failed kernel raised, and make the device usable again.
    pub(crate) fn raise_failure(&self) -> PyResult<()> {
        let text = self.core.take_failure();
        let raised = self
            .raised
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match (text, raised) {
            (_, Some(error)) => Err(error),
            (Some(text), None) => Err(state(text)),
            (None, None) => Ok(()),
        }
    }

    /// Run one ready operation; false if there is none.
    fn step(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || Ok(self.core.step()))
    }

    /// Run until nothing is in flight.
    fn drive(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || {
            self.core.drive();
            Ok(())
        })
    }

    /// Hold a stream's work back until nothing else can run.
    fn delay(&self, stream: &Stream, delayed: bool) {
        self.core.delay(stream.core.handle(), delayed);
    }

    /// Make the next call of this CUDA name fail with this code.
    fn fail_next(&self, call: &str, code: u32) -> PyResult<()> {
        let found = Call::ALL.iter().find(|known| known.symbol() == call);
        let found =
            found.ok_or_else(|| argument("call", call, "the CUDA name of a call cgraph makes"))?;
        self.core.fail_next(*found, Code(code));
        Ok(())
    }

    /// Make the n-th fallible call from now fail with this code; zero is the next one.
    fn fail_call(&self, n: usize, code: u32) {
        self.core.fail_call(n, Code(code));
    }

    /// Take back faults that have not happened.
    fn clear_faults(&self) {
        self.core.clear_faults();
    }

    /// Return how many objects of each kind exist.
    fn live<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let live = self.core.live();
        let counts = PyDict::new(py);
        counts.set_item("memory", live.memory)?;
        counts.set_item("ranges", live.ranges)?;
        counts.set_item("pages", live.pages)?;
        counts.set_item("pinned", live.pinned)?;
        counts.set_item("modules", live.modules)?;
        counts.set_item("streams", live.streams)?;
        counts.set_item("events", live.events)?;
        counts.set_item("graphs", live.graphs)?;
        counts.set_item("execs", live.execs)?;
        Ok(counts)
    }

    /// CUDA's names of the calls made so far.
    fn calls(&self) -> Vec<&'static str> {
        self.core.calls().iter().map(|call| call.symbol()).collect()
    }
}

impl Sim {
    /// Return the raw handle of the current stream for a replay.
    ///
    /// # Errors
    /// If another driver is in force.
    pub(crate) fn stream_of_replay(&self) -> PyResult<u64> {
        let is_in_force = match IN_FORCE.load(Ordering::Relaxed) {
            NOTHING => self.is_default(),
            id => id == self.core.id(),
        };
        if !is_in_force {
            let name = self.core.name();
            return Err(foreign(format!(
                "a replay of a graph of {name}, which is not in force: replay it inside `with \
                 cgraph.sim.use(simulator):`"
            )));
        }
        let current = self.streams();
        let current = current.get(&thread::current().id());
        Ok(current.map_or(0, |stream| stream.get().core.handle().0))
    }

    /// Return a stream by its handle, if it is the current one of this thread.
    pub(crate) fn current(&self, handle: u64) -> Option<cg_core::Stream> {
        let current = self.streams();
        let stream = &current.get(&thread::current().id())?.get().core;
        (stream.handle().0 == handle).then(|| stream.clone())
    }

    /// Drive earlier replays on a stream to their end, if this one moves tensors: what torch copies for it is
    /// copied at once.
    pub(crate) fn before_replay(
        &self,
        py: Python<'_>,
        stream: &cg_core::Stream,
        moves_tensors: bool,
    ) -> PyResult<()> {
        // The replay itself is refused inside a capture, with advice.
        if moves_tensors && self.is_asynchronous && !detached(py, || stream.is_capturing())? {
            self.finish(py, stream)?;
        }
        Ok(())
    }

    /// Drive a replay to its end, unless it may stay in flight: no operator of torch's waits for a simulated
    /// stream, and nobody else keeps the memory of a tensor that it moves.
    pub(crate) fn after_replay(
        &self,
        py: Python<'_>,
        stream: &cg_core::Stream,
        moves_tensors: bool,
    ) -> PyResult<()> {
        if moves_tensors || !self.is_asynchronous {
            self.finish(py, stream)?;
        }
        Ok(())
    }

    fn finish(&self, py: Python<'_>, stream: &cg_core::Stream) -> PyResult<()> {
        let finished = detached(py, || stream.synchronize());
        if finished.is_err() {
            // The wait itself may have failed; the memory of tensors goes all the same.
            self.drive(py)?;
        }
        self.raise_failure()?;
        finished
    }

    fn streams(&self) -> MutexGuard<'_, HashMap<ThreadId, Py<Stream>>> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
