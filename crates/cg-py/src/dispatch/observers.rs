//! `Observers`: modes and transforms that have to see each operator, so that nothing may be replayed.

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::{self, Tells, TellsOfKey};

/// Transforms of `torch.func`, modes of dispatch and of functions, `torch.jit.trace`, and forward-mode
/// differentiation.
pub(crate) struct Observers {
    native: Option<Native>,
    is_intercepted: Py<PyAny>,
    /// The variables of `torch.autograd.forward_ad`.
    forward_ad: Py<PyDict>,
}

/// Without a call by Python, which takes forty times as long.
struct Native {
    is_function_mode: Tells,
    is_included: TellsOfKey,
    /// The dispatch keys that the others include.
    keys: Vec<u16>,
}

impl Observers {
    /// `is_intercepted` is called where there may be one, and where torch's own functions are not known.
    pub(crate) fn new(
        functions: &HashMap<String, usize>,
        keys: Vec<u16>,
        is_intercepted: Py<PyAny>,
        forward_ad: Py<PyDict>,
    ) -> Self {
        let address = |name| raw::address(functions, name);
        let addresses = address("is_function_mode").zip(address("is_included"));
        let native = addresses.filter(|_| !keys.is_empty());
        Self {
            native: native.map(|(is_function_mode, is_included)| Native {
                is_function_mode: raw::tells(is_function_mode),
                is_included: raw::tells_of_key(is_included),
                keys,
            }),
            is_intercepted,
            forward_ad,
        }
    }

    /// Return whether there is one on this thread.
    #[inline]
    pub(crate) fn are_there(&self, py: Python<'_>) -> PyResult<bool> {
        let may_be = self.native.as_ref().is_none_or(Native::may_be);
        let is_intercepted = may_be && self.is_intercepted.bind(py).call0()?.is_truthy()?;
        Ok(is_intercepted || self.is_differentiated(py)?)
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

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.is_intercepted)?;
        visit.call(&self.forward_ad)
    }
}

impl Native {
    /// Return whether there may be one; a default device is a mode as well.
    #[inline]
    fn may_be(&self) -> bool {
        (self.is_function_mode)() || self.keys.iter().any(|key| (self.is_included)(*key))
    }
}
