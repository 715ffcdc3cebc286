//! The one door out of the interpreter.

use pyo3::prelude::*;

use crate::error::to_py;

/// Run `work` without holding the interpreter, so that other threads go on and host functions
/// that need it cannot deadlock; maps the error.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> cg_core::Result<T> + Send,
) -> PyResult<T> {
    py.detach(work).map_err(|error| to_py(py, &error))
}
