//! `Followers`: whether somebody has to see each operator, so that nothing may be replayed.

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::{self, TellsOfKey};

/// The transforms of `torch.func`, whose tensors have no memory of their own, and forward-mode
/// differentiation.
pub(super) struct Followers {
    native: Option<Native>,
    is_transformed: Py<PyAny>,
    /// The variables of `torch.autograd.forward_ad`.
    forward_ad: Py<PyDict>,
}

/// Without a call by Python, which takes forty times as long.
struct Native {
    is_included: TellsOfKey,
    /// The dispatch keys that a transform includes.
    transforms: Vec<u16>,
}

impl Followers {
    /// `is_transformed` is called where `is_included` is not among torch's own functions.
    pub(super) fn new(
        functions: &HashMap<String, usize>,
        transforms: Vec<u16>,
        is_transformed: Py<PyAny>,
        forward_ad: Py<PyDict>,
    ) -> Self {
        let address = functions.get("is_included").filter(|one| **one != 0);
        let native = address.filter(|_| !transforms.is_empty());
        Self {
            native: native.map(|address| Native {
                is_included: raw::tells_of_key(*address),
                transforms,
            }),
            is_transformed,
            forward_ad,
        }
    }

    /// Whether there is one on this thread.
    #[inline]
    pub(super) fn are_there(&self, py: Python<'_>) -> PyResult<bool> {
        let is_transformed = match &self.native {
            Some(native) => native.is_transformed(),
            None => self.is_transformed.bind(py).call0()?.is_truthy()?,
        };
        Ok(is_transformed || self.is_differentiated(py)?)
    }

    #[inline]
    fn is_differentiated(&self, py: Python<'_>) -> PyResult<bool> {
        let (variables, name) = (self.forward_ad.bind(py), intern!(py, "_current_level"));
        // Python has one object for -1, which stands for none: to read a number takes longer.
        if raw::is_item(variables, name, &PyInt::new(py, -1)) {
            return Ok(false);
        }
        let level = variables.get_item(name)?;
        level.map_or(Ok(false), |level| Ok(level.extract::<i64>()? >= 0))
    }

    /// Shows the garbage collector what this owns.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.is_transformed)?;
        visit.call(&self.forward_ad)
    }
}

impl Native {
    #[inline]
    fn is_transformed(&self) -> bool {
        let mut keys = self.transforms.iter();
        keys.any(|key| (self.is_included)(*key))
    }
}
