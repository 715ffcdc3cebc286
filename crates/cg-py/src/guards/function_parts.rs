//! `FunctionParts`: the code and the defaults that a function had.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;
use pyo3::{PyTraverseError, PyVisit};

use super::object_access::address_of;
use crate::raw::{FunctionReader, watch_functions};

/// Code, defaults and defaults by name.
pub(super) struct FunctionParts {
    addresses: [usize; 3],
    /// Held, so that nothing else comes to be there.
    held: [Py<PyAny>; 3],
}

impl FunctionParts {
    /// None for what is no function of Python's.
    pub(super) fn of(function: &Bound<'_, PyAny>) -> Option<Self> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let py = function.py();
        let class = CLASS.import(py, "types", "FunctionType").ok()?;
        if !function.get_type().is(class) {
            return None;
        }
        let part = |name: &str| Some(function.getattr(name).ok()?.unbind());
        Some(Self {
            addresses: reader(py)?.parts(function),
            held: [
                part("__code__")?,
                part("__defaults__")?,
                part("__kwdefaults__")?,
            ],
        })
    }

    /// Return whether a function, which is the same, has these now.
    #[inline]
    pub(super) fn are_of(&self, function: &Bound<'_, PyAny>) -> bool {
        reader(function.py()).is_some_and(|reader| reader.parts(function) == self.addresses)
    }

    /// Return whether Python counts the changes to functions: see [`crate::raw::function_changes`].
    pub(super) fn are_watched(py: Python<'_>) -> bool {
        static ARE_WATCHED: PyOnceLock<bool> = PyOnceLock::new();
        let watch = || {
            let add = address_of(py, "PyFunction_AddWatcher");
            add.is_ok_and(|add| watch_functions(py, add))
        };
        *ARE_WATCHED.get_or_init(py, watch)
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.held.iter().try_for_each(|one| visit.call(one))
    }
}

fn reader(py: Python<'_>) -> Option<&FunctionReader> {
    static READER: PyOnceLock<Option<FunctionReader>> = PyOnceLock::new();
    let find = || {
        let mut addresses = [0; 3];
        for (address, name) in addresses.iter_mut().zip(FunctionReader::NAMES) {
            *address = address_of(py, name).ok()?;
        }
        Some(FunctionReader::new(addresses))
    };
    READER.get_or_init(py, find).as_ref()
}
