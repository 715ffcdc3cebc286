//! `Capture`, `Tracker`, and the two calls that put another capture in the place of torch's.

use std::sync::{Mutex, PoisonError};

use cg_core::CaptureMode;
use pyo3::prelude::*;

use super::stream::Stream;
use super::template::Template;
use crate::detach::detached;
use crate::error::{argument, state, to_py};
use crate::raw;

/// An open capture on a stream.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Capture {
    core: Mutex<Option<cg_core::Capture>>,
}

#[pymethods]
impl Capture {
    /// Begin a capture. `mode` is `"global"`, `"thread_local"` or `"relaxed"`.
    #[staticmethod]
    fn begin(py: Python<'_>, stream: &Stream, mode: &str) -> PyResult<Self> {
        let mode = parse_mode(mode)?;
        let core = detached(py, || cg_core::Capture::begin(&stream.core, mode))?;
        Ok(Self {
            core: Mutex::new(Some(core)),
        })
    }

    /// Take over a capture that somebody else began.
    #[staticmethod]
    fn take_over(py: Python<'_>, stream: &Stream) -> PyResult<Self> {
        let core = detached(py, || cg_core::Capture::take_over(&stream.core))?;
        Ok(Self {
            core: Mutex::new(Some(core)),
        })
    }

    /// End the capture and make the template.
    fn finish(&self, py: Python<'_>) -> PyResult<Template> {
        let core = self.take().ok_or_else(|| {
            state("the capture is over already: begin a new one before you finish it")
        })?;
        let core = detached(py, || core.finish())?;
        Ok(Template::new(core))
    }
}

impl Capture {
    fn take(&self) -> Option<cg_core::Capture> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.take()
    }
}

/// Follows an open capture: which nodes are new in it.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Tracker {
    core: Mutex<cg_core::Tracker>,
}

#[pymethods]
impl Tracker {
    /// Follow the capture that is open on the stream.
    #[new]
    fn new(py: Python<'_>, stream: &Stream) -> PyResult<Self> {
        let core = detached(py, || cg_core::Tracker::new(&stream.core))?;
        Ok(Self {
            core: Mutex::new(core),
        })
    }

    /// Return the nodes of the capture that no earlier look has returned; none if `current` is not one of
    /// its streams.
    fn new_nodes(&self, py: Python<'_>, current: &Stream) -> PyResult<Vec<u64>> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        raw::new_nodes(py, &mut core, &current.core).map_err(|error| to_py(py, &error))
    }
}

/// Begin a relaxed capture that somebody else ends. It has a node that does nothing.
#[pyfunction]
pub(crate) fn begin_and_hand_over(py: Python<'_>, stream: &Stream) -> PyResult<()> {
    detached(py, || {
        cg_core::Capture::begin_with_node(&stream.core, CaptureMode::Relaxed)?.hand_over();
        Ok(())
    })
}

/// End a capture that somebody else began, if the stream captures, and throw its work away.
#[pyfunction]
pub(crate) fn end_broken(py: Python<'_>, stream: &Stream) -> PyResult<()> {
    detached(py, || {
        if stream.core.is_capturing()? {
            drop(cg_core::Capture::take_over(&stream.core)?);
        }
        Ok(())
    })
}

fn parse_mode(mode: &str) -> PyResult<CaptureMode> {
    match mode {
        "global" => Ok(CaptureMode::Global),
        "thread_local" => Ok(CaptureMode::ThreadLocal),
        "relaxed" => Ok(CaptureMode::Relaxed),
        _ => {
            let expected = "\"global\", \"thread_local\" or \"relaxed\"";
            Err(argument("capture mode", &format!("{mode:?}"), expected))
        }
    }
}
