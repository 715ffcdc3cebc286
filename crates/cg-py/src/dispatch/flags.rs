//! `Flags`: which modules were training at one moment.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw;

/// Modules, and whether each was training. Many entries share one.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Flags {
    /// The modules' dictionaries.
    modules: Vec<(Py<PyDict>, bool)>,
    values: Py<PyTuple>,
}

#[pymethods]
impl Flags {
    /// What the dictionaries of modules say now.
    #[new]
    fn new(py: Python<'_>, modules: Vec<Bound<'_, PyDict>>) -> PyResult<Self> {
        let modules: Vec<_> = modules
            .into_iter()
            .map(|module| {
                let is_training = is_training(&module);
                (module.unbind(), is_training)
            })
            .collect();
        let values = PyTuple::new(py, modules.iter().map(|(_, training)| *training))?.unbind();
        Ok(Self { modules, values })
    }

    /// Whether each was training.
    #[getter]
    fn values(&self, py: Python<'_>) -> Py<PyTuple> {
        self.values.clone_ref(py)
    }

    /// Whether the dictionaries still say so.
    #[inline]
    pub(super) fn are_same(&self, py: Python<'_>) -> bool {
        let name = intern!(py, "training");
        self.modules.iter().all(|(module, training)| {
            let (module, flag) = (module.bind(py), PyBool::new(py, *training));
            raw::is_item(module, name, &flag) || is_training(module) == *training
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for (module, _) in &self.modules {
            visit.call(module)?;
        }
        Ok(())
    }
}

/// Whether the flag of a module counts as set, whatever it is.
fn is_training(module: &Bound<'_, PyDict>) -> bool {
    let flag = module.get_item(intern!(module.py(), "training"));
    flag.ok()
        .flatten()
        .is_some_and(|flag| flag.is_truthy().unwrap_or(false))
}
