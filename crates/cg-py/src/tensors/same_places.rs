//! `SamePlaces`: tensors among the arguments of a call that must be, and lie, where they were.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use super::TensorReader;

/// Tensors, and where each lies.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct SamePlaces {
    reader: Py<TensorReader>,
    /// The place among the arguments, the tensor and the address of its first element.
    tensors: Vec<(usize, Py<PyAny>, u64)>,
}

#[pymethods]
impl SamePlaces {
    /// The tensors at these places of the arguments.
    #[new]
    fn new(
        reader: Bound<'_, TensorReader>,
        args: &Bound<'_, PyTuple>,
        places: Vec<usize>,
    ) -> PyResult<Self> {
        let found = places.into_iter().map(|place| {
            let tensor = args.get_item(place)?;
            let (address, _) = reader.get().location(&tensor)?;
            Ok((place, tensor.unbind(), address))
        });
        Ok(Self {
            tensors: found.collect::<PyResult<_>>()?,
            reader: reader.unbind(),
        })
    }

    /// Return the first place at which other arguments have another tensor, or one that lies elsewhere.
    fn moved(&self, args: &Bound<'_, PyTuple>) -> PyResult<Option<usize>> {
        let reader = self.reader.get();
        for (place, tensor, address) in &self.tensors {
            let given = args.get_borrowed_item(*place)?;
            if !given.is(tensor) || reader.location(&given)?.0 != *address {
                return Ok(Some(*place));
            }
        }
        Ok(None)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.reader)?;
        let mut tensors = self.tensors.iter();
        tensors.try_for_each(|(_, tensor, _)| visit.call(tensor))
    }
}
