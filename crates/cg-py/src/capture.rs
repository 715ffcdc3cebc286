//! `Capture`, and the two calls that repair a capture which torch could not end.

use std::sync::{Mutex, PoisonError};

use cg_core::CaptureMode;
use pyo3::prelude::*;

use crate::enter::enter;
use crate::error::{argument, state};
use crate::stream::Stream;
use crate::template::Template;

/// An open capture on a stream.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Capture {
    core: Mutex<Option<cg_core::Capture>>,
}

#[pymethods]
impl Capture {
    /// Begins a capture. `mode` is `"global"`, `"thread_local"` or `"relaxed"`.
    #[staticmethod]
    fn begin(py: Python<'_>, stream: &Stream, mode: &str) -> PyResult<Self> {
        let mode = parse_mode(mode)?;
        let core = enter(py, || cg_core::Capture::begin(&stream.core, mode))?;
        Ok(Self {
            core: Mutex::new(Some(core)),
        })
    }

    /// Ends the capture and makes the template.
    fn finish(&self, py: Python<'_>) -> PyResult<Template> {
        let core = self.take().ok_or_else(|| {
            state("the capture is over already: begin a new one before you finish it")
        })?;
        let core = enter(py, || core.finish())?;
        Ok(Template::new(core))
    }
}

impl Capture {
    fn take(&self) -> Option<cg_core::Capture> {
        let mut core = self.core.lock().unwrap_or_else(PoisonError::into_inner);
        core.take()
    }
}

/// Begins a relaxed capture that somebody else ends.
#[pyfunction]
pub(crate) fn begin_and_hand_over(py: Python<'_>, stream: &Stream) -> PyResult<()> {
    enter(py, || {
        cg_core::Capture::begin(&stream.core, CaptureMode::Relaxed)?.hand_over();
        Ok(())
    })
}

/// Ends a capture that somebody else began, if the stream captures, and throws its work away.
#[pyfunction]
pub(crate) fn end_broken(py: Python<'_>, stream: &Stream) -> PyResult<()> {
    enter(py, || {
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
