//! The parts of functions, and Python's own watcher of their changes, which it has since version 3.12.

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use super::count;

/// `PyFunction_WatchCallback`: an event, the function, and the new value.
type Callback = unsafe extern "C" fn(c_int, *mut PyObject, *mut PyObject) -> c_int;
/// `PyFunction_AddWatcher`.
type Add = unsafe extern "C" fn(Callback) -> c_int;
/// `PyFunction_GetCode`, `PyFunction_GetDefaults` and `PyFunction_GetKwDefaults`.
type Get = unsafe extern "C" fn(*mut PyObject) -> *mut PyObject;

/// Number of changes to functions that Python has told of.
static CHANGES: AtomicU64 = AtomicU64::new(0);

// The events as `PyFunction_WatchEvent` numbers them: of a function that is new, and of one that dies.
const CREATED: c_int = 0;
const DESTROYED: c_int = 1;

/// Reads code, defaults and defaults by name of functions.
pub(crate) struct FunctionReader([Get; 3]);

impl FunctionReader {
    /// The names of Python's functions, in the order of their addresses.
    pub(crate) const NAMES: [&str; 3] = [
        "PyFunction_GetCode",
        "PyFunction_GetDefaults",
        "PyFunction_GetKwDefaults",
    ];

    /// By the addresses of these functions.
    pub(crate) fn new(addresses: [usize; 3]) -> Self {
        Self(addresses.map(|address| {
            // SAFETY: the caller gives what `ctypes.pythonapi` has for these names: functions of Python's
            // public interface, which take a function and return a borrowed object or null.
            unsafe { transmute::<*const c_void, Get>(address as *const c_void) }
        }))
    }

    /// Return the addresses of the parts, 0 for none; none if the object is no function.
    #[inline]
    pub(crate) fn parts(&self, function: &Bound<'_, PyAny>) -> [usize; 3] {
        self.0.map(|get| {
            // SAFETY: an object that is alive, and the interpreter is held. For what is no function Python
            // sets an error, which the caller rules out.
            unsafe { get(function.as_ptr()) }.addr()
        })
    }
}

/// Let Python tell of changes to all functions; whether it does. `add` is the address of its function.
pub(crate) fn watch_functions(py: Python<'_>, add: usize) -> bool {
    // SAFETY: the caller gives what `ctypes.pythonapi` has for `PyFunction_AddWatcher`.
    let add = unsafe { transmute::<*const c_void, Add>(add as *const c_void) };
    // SAFETY: the interpreter is held, and the callback may be called as long as there is a process.
    let is_added = unsafe { add(note) } >= 0;
    if !is_added {
        drop(PyErr::take(py));
    }
    is_added
}

/// Return how many changes Python has told of.
#[inline]
pub(crate) fn function_changes() -> u64 {
    CHANGES.load(Ordering::Relaxed)
}

/// Count a change. Python calls it, on a thread that holds the interpreter.
unsafe extern "C" fn note(event: c_int, _: *mut PyObject, _: *mut PyObject) -> c_int {
    if !matches!(event, CREATED | DESTROYED) {
        count(&CHANGES);
    }
    0
}
