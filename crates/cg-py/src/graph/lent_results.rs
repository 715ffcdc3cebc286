//! `LentResults`: the static results of a pool that callers may still have.

use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::Attached;

/// The next replay of any graph of the pool may overwrite them. Autograd must know, which may have saved one.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct LentResults {
    /// Tensors that share their version with what the last replay has lent.
    lent: Attached<Option<Py<PyList>>>,
    /// Increments the version of each tensor of a list.
    increment: Py<PyAny>,
}

#[pymethods]
impl LentResults {
    #[new]
    fn new(increment: Py<PyAny>) -> Self {
        Self {
            lent: Attached::default(),
            increment,
        }
    }

    /// Note tensors in whose memory a caller has got results. A replay has overwritten all others before.
    #[inline]
    pub(crate) fn lend(&self, own: &Bound<'_, PyList>) {
        drop(self.lent.replace(own.py(), Some(own.clone().unbind())));
    }

    /// Note that a replay is about to overwrite all of them.
    #[inline]
    pub(crate) fn overwrite(&self, py: Python<'_>) -> PyResult<()> {
        match self.lent.take(py) {
            Some(lent) => self.increment.call1(py, (lent,)).map(drop),
            None => Ok(()),
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.lent.traverse(&visit, |lent, visit| visit.call(lent))?;
        visit.call(&self.increment)
    }

    fn __clear__(&self, py: Python<'_>) {
        drop(self.lent.take(py));
    }
}
