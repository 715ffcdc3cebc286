//! Look-ups in dictionaries, slots and classes that run no code of the user's.

use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::null_mut;

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString, PyType};

/// `_PyType_Lookup`.
type LookUp = unsafe extern "C" fn(*mut PyObject, *mut PyObject) -> *mut PyObject;

/// Looks a name up in the dictionaries of a class and of those that it is derived from.
pub(crate) struct ClassReader(LookUp);

impl ClassReader {
    /// By the address of Python's function.
    pub(crate) fn new(address: usize) -> Self {
        // SAFETY: the caller gives what `ctypes.pythonapi` has for `_PyType_Lookup`, which has taken a
        // class and a name, and returned a borrowed object, in all versions since Python 2.
        Self(unsafe { transmute::<*const c_void, LookUp>(address as *const c_void) })
    }

    /// Return what is there under a name, without its `__get__`.
    #[inline]
    pub(crate) fn get<'py>(
        &self,
        class: &Bound<'py, PyType>,
        name: &Bound<'py, PyString>,
    ) -> Option<Bound<'py, PyAny>> {
        let (class_address, name) = (class.as_ptr(), name.as_ptr());
        // SAFETY: a class and a string, both alive, and the interpreter is held. No error is left.
        let found = unsafe { (self.0)(class_address, name) };
        // SAFETY: null, or an object that the class holds; nothing has run since that might drop it.
        unsafe { Bound::from_borrowed_ptr_or_opt(class.py(), found) }
    }
}

/// Return the key and the value at a position of a dictionary, which is what [`position_of`] has found or any
/// other number, as addresses. It is the fastest look into a dictionary, and compares no keys.
#[inline]
pub(crate) fn entry_at(dict: &Bound<'_, PyDict>, position: isize) -> Option<(usize, usize)> {
    let (key, value, _) = next(dict, position)?;
    Some((key.addr(), value.addr()))
}

/// Return the value there, if the key there is this very object.
pub(crate) fn value_at<'py>(
    dict: &Bound<'py, PyDict>,
    position: isize,
    key: &Bound<'py, PyAny>,
) -> Option<Bound<'py, PyAny>> {
    let (found, value, _) = next(dict, position)?;
    if found != key.as_ptr() {
        return None;
    }
    // SAFETY: the dictionary holds its value, and nothing has run since it was read.
    unsafe { Bound::from_borrowed_ptr_or_opt(dict.py(), value) }
}

/// Return where a dictionary has a key that is this very object.
pub(crate) fn position_of(dict: &Bound<'_, PyDict>, key: &Bound<'_, PyAny>) -> Option<isize> {
    let mut position = 0;
    while let Some((found, _, after)) = next(dict, position) {
        if found == key.as_ptr() {
            return Some(position);
        }
        position = after;
    }
    None
}

/// Key and value at a position, or at the next one that has some, and the position behind it.
#[inline]
fn next(
    dict: &Bound<'_, PyDict>,
    mut position: isize,
) -> Option<(*mut PyObject, *mut PyObject, isize)> {
    let (mut key, mut value) = (null_mut(), null_mut());
    // SAFETY: the dictionary is alive and the interpreter is held, as `dict` shows; the others are
    // valid for one write each. Python compares any position with the bounds of what it has.
    let is_there = unsafe {
        ffi::PyDict_Next(
            dict.as_ptr(),
            &raw mut position,
            &raw mut key,
            &raw mut value,
        )
    };
    (is_there != 0).then_some((key, value, position))
}

/// Return the address of an item, 0 where there is none; none if the look-up has failed.
#[inline]
pub(crate) fn item_address(dict: &Bound<'_, PyDict>, key: &Bound<'_, PyAny>) -> Option<usize> {
    // SAFETY: both are alive and the interpreter is held. What is found is compared as an address.
    let found = unsafe { ffi::PyDict_GetItemWithError(dict.as_ptr(), key.as_ptr()) };
    (!found.is_null() || PyErr::take(dict.py()).is_none()).then_some(found.addr())
}

/// Return what a slot of an object holds; none if it is empty, or the object is none of the slot's class. The slot
/// is a `member_descriptor`.
pub(crate) fn slot<'py>(
    slot: &Bound<'py, PyAny>,
    object: &Bound<'py, PyAny>,
) -> Option<Bound<'py, PyAny>> {
    let py = object.py();
    // SAFETY: the class of an object that is alive; since Python 3.10 any class may be asked.
    let get = unsafe { ffi::PyType_GetSlot(slot.get_type_ptr(), ffi::Py_tp_descr_get) };
    if get.is_null() {
        return None;
    }
    // SAFETY: Python has functions of just this type in that slot.
    let get = unsafe { transmute::<*mut c_void, ffi::descrgetfunc>(get) };
    let class = object.get_type_ptr().cast();
    // SAFETY: a descriptor, an object and its class, all alive, and the interpreter is held. It
    // compares the object's class with its own before it reads.
    let value = unsafe { get(slot.as_ptr(), object.as_ptr(), class) };
    // SAFETY: a new reference, or null with an error set.
    unsafe { Bound::from_owned_ptr_or_err(py, value) }.ok()
}
