//! `DictWatchers`: Python's own watchers of dictionaries, which it has since version 3.12.

use std::ffi::{c_int, c_void};
use std::mem::transmute;
use std::sync::OnceLock;

use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// `PyDict_WatchCallback`: an event, the dictionary, the key and the new value.
type Callback = unsafe extern "C" fn(c_int, *mut PyObject, *mut PyObject, *mut PyObject) -> c_int;
/// `PyDict_AddWatcher`, and `PyDict_Watch` and `PyDict_Unwatch`.
type Add = unsafe extern "C" fn(Callback) -> c_int;
type Set = unsafe extern "C" fn(c_int, *mut PyObject) -> c_int;

/// Is told of a change: of which dictionary, by its address. It runs no code of Python's.
pub(crate) type Listener = fn(Python<'_>, usize, Change);

static LISTENER: OnceLock<Listener> = OnceLock::new();

/// Tells a listener of changes of dictionaries.
pub(crate) struct DictWatchers {
    number: c_int,
    watch: Set,
    unwatch: Set,
}

/// A change that is about to happen to a dictionary.
#[derive(Clone, Copy)]
pub(crate) enum Change {
    /// An item is added or deleted whose key has this hash.
    Count(isize),
    /// An item gets another value whose key has this hash.
    Value(isize),
    /// Anything else, as for a key that is no string of Python's own class.
    Any,
}

// The events as `PyDict_WatchEvent` numbers them; the others concern the dictionary as a whole.
const ADDED: c_int = 0;
const MODIFIED: c_int = 1;
const DELETED: c_int = 2;

impl DictWatchers {
    /// The names of Python's functions, in the order of their addresses.
    pub(crate) const NAMES: [&str; 3] = ["PyDict_AddWatcher", "PyDict_Watch", "PyDict_Unwatch"];

    /// By the addresses of these functions; none if Python has no number left for one more.
    pub(crate) fn new(
        py: Python<'_>,
        [add, watch, unwatch]: [usize; 3],
        listener: Listener,
    ) -> Option<Self> {
        LISTENER.get_or_init(|| listener);
        let set = |address: usize| {
            // SAFETY: the caller gives what `ctypes.pythonapi` has for these names: functions of
            // Python's public interface, which take a number and a dictionary.
            unsafe { transmute::<*const c_void, Set>(address as *const c_void) }
        };
        // SAFETY: as above; this one takes a callback.
        let add = unsafe { transmute::<*const c_void, Add>(add as *const c_void) };
        // SAFETY: the interpreter is held, and the callback may be called as long as there is a
        // process: modules are never unloaded.
        let number = unsafe { add(note) };
        if number < 0 {
            drop(PyErr::take(py));
            return None;
        }
        Some(Self {
            number,
            watch: set(watch),
            unwatch: set(unwatch),
        })
    }

    /// Begin to tell of a dictionary; whether that is possible.
    pub(crate) fn watch(&self, dict: &Bound<'_, PyDict>) -> bool {
        self.set(self.watch, dict)
    }

    /// Tell of it no more.
    pub(crate) fn unwatch(&self, dict: &Bound<'_, PyDict>) {
        self.set(self.unwatch, dict);
    }

    fn set(&self, set: Set, dict: &Bound<'_, PyDict>) -> bool {
        // SAFETY: the number is the watcher's, the dictionary is alive and the interpreter is held.
        let is_done = unsafe { set(self.number, dict.as_ptr()) } == 0;
        if !is_done {
            drop(PyErr::take(dict.py()));
        }
        is_done
    }
}

/// Tell the listener. Python calls it, maybe in the middle of anything: it takes no reference, and calls nothing of Python's
/// but for the hash of a string, which runs no other code.
unsafe extern "C" fn note(
    event: c_int,
    dict: *mut PyObject,
    key: *mut PyObject,
    _value: *mut PyObject,
) -> c_int {
    let of_one = matches!(event, ADDED | MODIFIED | DELETED) && !key.is_null();
    // SAFETY: Python holds the key of an item during the call.
    let change = if of_one && unsafe { ffi::PyUnicode_CheckExact(key) } != 0 {
        // SAFETY: as above; the hash of such a string cannot fail.
        let hash = unsafe { ffi::PyObject_Hash(key) };
        if event == MODIFIED {
            Change::Value(hash)
        } else {
            Change::Count(hash)
        }
    } else {
        Change::Any
    };
    // SAFETY: Python calls this on a thread that holds the interpreter, and this is used only here.
    let py = unsafe { Python::assume_attached() };
    if let Some(listener) = LISTENER.get() {
        listener(py, dict.addr(), change);
    }
    0
}
