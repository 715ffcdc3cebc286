//! `SamePlaces`: tensors among the arguments of a call that must be, and lie, where they were.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use super::{Match, Signature, TensorReader};

/// Tensors, and where each lies.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct SamePlaces {
    reader: Py<TensorReader>,
    tensors: Vec<Known>,
}

struct Known {
    /// The place among the arguments.
    place: usize,
    tensor: Py<PyAny>,
    /// Its address and layout; none of a tensor that has no strides.
    signature: Option<Signature>,
    address: u64,
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
            Ok(Known {
                place,
                signature: Signature::new(&reader, &tensor).ok(),
                address: reader.get().location(&tensor)?.0,
                tensor: tensor.unbind(),
            })
        });
        Ok(Self {
            tensors: found.collect::<PyResult<_>>()?,
            reader: reader.unbind(),
        })
    }

    /// Return the first place at which other arguments have another tensor, or one that lies elsewhere or in
    /// another layout.
    fn moved(&self, args: &Bound<'_, PyTuple>) -> PyResult<Option<usize>> {
        let reader = self.reader.get();
        for known in &self.tensors {
            let given = args.get_borrowed_item(known.place)?;
            let is_same = given.is(&known.tensor)
                && match &known.signature {
                    Some(signature) => matches!(signature.fit(&given, 0), Ok(Match::Same)),
                    None => reader.location(&given)?.0 == known.address,
                };
            if !is_same {
                return Ok(Some(known.place));
            }
        }
        Ok(None)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.reader)?;
        let mut tensors = self.tensors.iter();
        tensors.try_for_each(|known| visit.call(&known.tensor))
    }
}
