//! `Stream` and `Event`.

use pyo3::prelude::*;

use super::Device;
use crate::detach::detached;
use crate::error::to_py;
use crate::raw;

/// A queue of work on a device.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Stream {
    pub(crate) core: cg_core::Stream,
}

#[pymethods]
impl Stream {
    /// Return a new stream, or with `handle` an existing one, which must outlive the result.
    #[new]
    #[pyo3(signature = (device, *, handle=None))]
    fn new(py: Python<'_>, device: &Device, handle: Option<u64>) -> PyResult<Self> {
        let core = match handle {
            Some(handle) => detached(py, || raw::stream(&device.core, handle))?,
            None => detached(py, || cg_core::Stream::new(&device.core))?,
        };
        Ok(Self { core })
    }

    /// Return the raw stream; zero is the legacy default stream.
    #[getter]
    fn handle(&self) -> u64 {
        self.core.handle().0
    }

    /// Return its device.
    #[getter]
    fn device(&self) -> Device {
        Device {
            core: self.core.device().clone(),
        }
    }

    /// Wait until all work has finished.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.core.synchronize())
    }

    /// Return whether all work has finished.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.core.is_idle())
    }

    /// Return whether it captures.
    fn is_capturing(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.core.is_capturing())
    }

    /// Return how many nodes the open capture of others has; none if it is unusable, or there is none.
    fn captured_nodes(&self, py: Python<'_>) -> PyResult<Option<usize>> {
        raw::captured_nodes(py, &self.core).map_err(|error| to_py(py, &error))
    }

    /// Make later work wait for what is enqueued on another stream now.
    fn wait_stream(&self, py: Python<'_>, stream: &Self) -> PyResult<()> {
        detached(py, || {
            let event = cg_core::Event::new(stream.core.device())?;
            stream.core.record(&event)?;
            self.core.wait(&event)
        })
    }

    /// Make later work wait for the event.
    fn wait_event(&self, py: Python<'_>, event: &Event) -> PyResult<()> {
        detached(py, || self.core.wait(&event.core))
    }

    /// Record the event behind all work enqueued so far.
    fn record_event(&self, py: Python<'_>, event: &Event) -> PyResult<()> {
        detached(py, || self.core.record(&event.core))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.core.handle() == other.core.handle()
            && self.core.device().driver().id() == other.core.device().driver().id()
    }

    fn __hash__(&self) -> u64 {
        self.core.handle().0
    }

    fn __repr__(&self) -> String {
        format!("cgraph.{:?}", self.core)
    }
}

/// A point in a stream's work that others can wait for.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Event {
    core: cg_core::Event,
}

#[pymethods]
impl Event {
    #[new]
    fn new(py: Python<'_>, device: &Device) -> PyResult<Self> {
        let core = detached(py, || cg_core::Event::new(&device.core))?;
        Ok(Self { core })
    }

    /// Return whether the work before the last record has finished.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        detached(py, || self.core.is_reached())
    }

    /// Wait until the work before the last record has finished.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.core.synchronize())
    }
}
