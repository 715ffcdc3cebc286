//! `Key`: the place of an item in a dictionary, a list, a tuple or a deque.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::object_access::Deque;
use crate::raw;

/// A key of a dictionary, or a place in a list, a tuple or a deque.
pub(super) struct Key {
    object: Py<PyAny>,
    place: Option<u32>,
    /// True if to look it up runs no code of others: they are found as the very same objects.
    is_plain: bool,
}

/// A dictionary is looked through for where a key has got to only if it has no more items.
const MOST_ITEMS: usize = 64;

impl Key {
    pub(super) fn new(key: &Bound<'_, PyAny>) -> Self {
        let is_place = key.is_exact_instance_of::<PyInt>();
        Self {
            place: is_place.then(|| key.extract().ok()).flatten(),
            is_plain: is_plain(key),
            object: key.clone().unbind(),
        }
    }

    /// Return what a change of an item tells of its key: the hash, if it is a string of Python's own class.
    pub(super) fn hash(&self, py: Python<'_>) -> Option<isize> {
        let key = self.object.bind(py);
        let is_string = key.is_exact_instance_of::<PyString>();
        is_string.then(|| key.hash().ok()).flatten()
    }

    /// Return whether a dictionary has the object at this address by it, where 0 is none, as far as that is known
    /// at once. `position` is where it was the last time.
    #[inline]
    pub(super) fn is_at(
        &self,
        dict: &Bound<'_, PyDict>,
        position: &mut isize,
        address: usize,
    ) -> bool {
        if *position >= 0
            && let Some((key, value)) = raw::entry_at(dict, *position)
            && key == self.object.as_ptr().addr()
        {
            return value == address;
        }
        self.is_found_at(dict, position, address)
    }

    /// The same by a look-up.
    fn is_found_at(&self, dict: &Bound<'_, PyDict>, position: &mut isize, address: usize) -> bool {
        if !self.is_plain || raw::item_address(dict, self.object.bind(dict.py())) != Some(address) {
            return false;
        }
        if *position >= 0 && address != 0 {
            *position = if dict.len() > MOST_ITEMS {
                -1
            } else {
                self.position(dict)
            };
        }
        true
    }

    /// Return what a dictionary has by it.
    pub(super) fn find<'py>(&self, dict: &Bound<'py, PyDict>) -> Option<Bound<'py, PyAny>> {
        let key = self.object.bind(dict.py());
        if self.is_plain {
            return dict.get_item(key).ok().flatten();
        }
        raw::value_at(dict, raw::position_of(dict, key)?, key)
    }

    /// Return where a dictionary has it; -1 if it has none, or an equal one.
    pub(super) fn position(&self, dict: &Bound<'_, PyDict>) -> isize {
        raw::position_of(dict, self.object.bind(dict.py())).unwrap_or(-1)
    }

    /// Return what a container has by it.
    pub(super) fn item_of<'py>(&self, container: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        if let Ok(dict) = container.cast::<PyDict>() {
            return self.find(dict);
        }
        let place = self.place? as usize;
        if let Ok(list) = container.cast::<PyList>() {
            return list.get_item(place).ok();
        }
        if let Ok(tuple) = container.cast::<PyTuple>() {
            return tuple.get_item(place).ok();
        }
        Deque::of(container)?.item(place)
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.object)
    }
}

/// Return whether a key is of Python's own classes, as are its items.
pub(super) fn is_plain(key: &Bound<'_, PyAny>) -> bool {
    if let Ok(tuple) = key.cast_exact::<PyTuple>() {
        return tuple.iter().all(|item| is_plain(&item));
    }
    key.is_exact_instance_of::<PyString>()
        || key.is_exact_instance_of::<PyInt>()
        || key.is_exact_instance_of::<PyBool>()
        || key.is_exact_instance_of::<PyFloat>()
        || key.is_exact_instance_of::<PyBytes>()
        || key.is_none()
}
