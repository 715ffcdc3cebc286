//! `Attached`: a value that is used only by who holds the interpreter.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

// Where several threads may hold the interpreter at a time, objects have more than a count and a class.
const _: () = assert!(
    size_of::<pyo3::ffi::PyObject>() == 2 * size_of::<usize>(),
    "in a Python without its lock `Attached` has to be one"
);

/// Count one more; how many there were. Who counts holds the interpreter, so that nobody else does at
/// the same time: an atomic addition takes as long as a lock.
#[inline]
pub(crate) fn count(count: &AtomicU64) -> u64 {
    let before = count.load(Ordering::Relaxed);
    count.store(before + 1, Ordering::Relaxed);
    before
}

/// A value that is exchanged as a whole. A lock would do as well, but takes 20 ns for each use, and
/// a call of a graphed function uses ten of these.
#[derive(Default)]
pub(crate) struct Attached<T>(UnsafeCell<T>);

// SAFETY: all methods that touch the value through a shared reference ask for the interpreter, which
// one thread at a time holds, and return before anything can run that lets it go.
unsafe impl<T: Send> Sync for Attached<T> {}

impl<T> Attached<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self(UnsafeCell::new(value))
    }

    /// Put a value in; what was there. To drop that may run any code.
    #[inline]
    pub(crate) fn replace(&self, _py: Python<'_>, value: T) -> T {
        // SAFETY: no other reference exists: the interpreter is held, as `_py` shows, and nobody who
        // holds it keeps one beyond a method of this type, none of which calls foreign code but
        // `traverse`, inside which nothing of this crate is called.
        let current = unsafe { &mut *self.0.get() };
        std::mem::replace(current, value)
    }

    /// Show the garbage collector what this owns, by `each`, which does nothing else.
    pub(crate) fn traverse(
        &self,
        visit: &PyVisit<'_>,
        each: impl FnOnce(&T, &PyVisit<'_>) -> Result<(), PyTraverseError>,
    ) -> Result<(), PyTraverseError> {
        // SAFETY: the garbage collector holds the interpreter and runs no code of Python's meanwhile.
        each(unsafe { &*self.0.get() }, visit)
    }
}

impl<T: Default> Attached<T> {
    /// Take the value out.
    #[inline]
    pub(crate) fn take(&self, py: Python<'_>) -> T {
        self.replace(py, T::default())
    }
}

impl<T> Attached<Py<T>> {
    /// Return the object that is there now.
    #[inline]
    pub(crate) fn get(&self, py: Python<'_>) -> Py<T> {
        // SAFETY: as in `replace`; to count a reference runs no code of Python's.
        unsafe { &*self.0.get() }.clone_ref(py)
    }
}
