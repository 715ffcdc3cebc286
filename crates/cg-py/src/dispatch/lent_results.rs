//! `LentResults`: the static results of a pool that callers may still have.

use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::Attached;

/// The next replay of any graph of the pool may overwrite them. Autograd must know, which may have saved one.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct LentResults {
    /// Tensors that share their version with what was lent.
    lent: Attached<Vec<Py<PyAny>>>,
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

    /// Note a tensor in whose memory a caller has got a result.
    pub(crate) fn lend(&self, own: &Bound<'_, PyAny>) {
        let py = own.py();
        let mut lent = self.lent.take(py);
        lent.push(own.clone().unbind());
        drop(self.lent.replace(py, lent));
    }

    /// Note that a replay is about to overwrite all of them.
    #[inline]
    pub(crate) fn overwrite(&self, py: Python<'_>) -> PyResult<()> {
        let lent = self.lent.take(py);
        if lent.is_empty() {
            return Ok(());
        }
        self.increment
            .call1(py, (PyList::new(py, lent)?,))
            .map(drop)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.lent.traverse(&visit, |lent, visit| {
            lent.iter().try_for_each(|one| visit.call(one))
        })?;
        visit.call(&self.increment)
    }

    fn __clear__(&self, py: Python<'_>) {
        drop(self.lent.take(py));
    }
}
