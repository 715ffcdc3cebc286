//! `Fixed`: the tensors of modules that a graph reads where they lie.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use pyo3::{PyTraverseError, PyVisit};

/// Dictionaries of modules, as they were at the capture, and where their tensors lay.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Fixed {
    owners: Vec<Owner>,
    tensors: Py<PyList>,
    addresses: Py<PyList>,
    places: Py<PyList>,
    /// torch's comparison of the addresses of the tensors at some places with those of a list.
    are_equal: Py<PyAny>,
}

struct Owner {
    dict: Py<PyDict>,
    values: Vec<Py<PyAny>>,
}

#[pymethods]
impl Fixed {
    /// What the dictionaries hold now; the tensors and their addresses.
    #[new]
    fn new(
        owners: Vec<Bound<'_, PyDict>>,
        tensors: Bound<'_, PyList>,
        addresses: Bound<'_, PyList>,
        are_equal: Py<PyAny>,
    ) -> PyResult<Self> {
        let places = PyList::new(tensors.py(), 0..tensors.len())?.unbind();
        let owners = owners.into_iter().map(|dict| Owner {
            values: dict.values().iter().map(Bound::unbind).collect(),
            dict: dict.unbind(),
        });
        Ok(Self {
            owners: owners.collect(),
            tensors: tensors.unbind(),
            addresses: addresses.unbind(),
            places,
            are_equal,
        })
    }

    /// Whether the dictionaries hold the same objects, and the tensors lie where they lay.
    pub(crate) fn is_in_place(&self, py: Python<'_>) -> PyResult<bool> {
        if !self.owners.iter().all(|owner| owner.is_same(py)) {
            return Ok(false);
        }
        let lists = (&self.tensors, &self.addresses, &self.places);
        self.are_equal.bind(py).call1(lists)?.is_truthy()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for owner in &self.owners {
            visit.call(&owner.dict)?;
            owner
                .values
                .iter()
                .try_for_each(|value| visit.call(value))?;
        }
        visit.call(&self.tensors)
    }
}

impl Owner {
    #[inline]
    fn is_same(&self, py: Python<'_>) -> bool {
        let dict = self.dict.bind(py);
        dict.len() == self.values.len()
            && dict
                .iter()
                .zip(&self.values)
                .all(|((_, now), then)| now.is(then))
    }
}
