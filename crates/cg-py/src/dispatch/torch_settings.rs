//! `TorchSettings`: torch's global settings, which decide what operators a call runs and how.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::GlobalSettings;

/// torch's global settings: those for determinism, precision, attention and libraries, and the default dtype.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct TorchSettings {
    native: Option<GlobalSettings>,
    /// Returns a number for all that the native functions do not tell.
    also: Option<Py<PyAny>>,
}

#[pymethods]
impl TorchSettings {
    /// `context`, `flags`, `precision` and `dtype` are the addresses of torch's own functions, `precision` 0 where
    /// torch has no such function; `also` tells more, or all if one of them is 0.
    #[new]
    #[expect(clippy::needless_pass_by_value, reason = "given once")]
    fn new(
        context: usize,
        flags: Vec<usize>,
        precision: usize,
        dtype: usize,
        also: Option<Py<PyAny>>,
    ) -> Self {
        Self {
            native: GlobalSettings::new(context, &flags, precision, dtype),
            also,
        }
    }

    /// Return a number that is another one for other settings.
    pub(super) fn now(&self, py: Python<'_>) -> PyResult<u64> {
        let native = self.native.as_ref().map_or(0, GlobalSettings::read);
        let Some(also) = &self.also else {
            return Ok(native);
        };
        let also: u64 = also.call0(py)?.extract(py)?;
        Ok(native.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ also)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.also)
    }
}
