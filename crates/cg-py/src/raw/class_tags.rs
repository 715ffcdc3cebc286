//! `ClassTags`: the numbers by which Python's cache of attributes tells one state of a class from another.

use std::sync::atomic::{AtomicU32, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyType;

/// Reads the tag of a class. Any change of the class, or of one that it is derived from, takes the tag away; the
/// next look-up gives it one that no class has had.
#[derive(Clone, Copy)]
pub(crate) struct ClassTags(());

/// `PyTypeObject.tp_version_tag` of Python 3.10 to 3.14, behind as many words in all of these.
const TAG: usize = 48 * size_of::<usize>();

impl ClassTags {
    /// None in a Python that may have them elsewhere. The caller finds out by trying whether they change.
    pub(crate) fn new(py: Python<'_>) -> Option<Self> {
        ((3, 10)..(3, 15))
            .contains(&{
                let version = py.version_info();
                (version.major, version.minor)
            })
            .then_some(Self(()))
    }

    /// Return the tag of a class; 0 if it has none.
    #[inline]
    #[expect(
        clippy::unused_self,
        reason = "only where `new` has made one is it there"
    )]
    pub(crate) fn of(self, class: &Bound<'_, PyType>) -> u32 {
        // SAFETY: a class of such a Python has these words, and this one is alive.
        let tag = unsafe { class.as_ptr().byte_add(TAG) }.cast::<u32>();
        // SAFETY: as above. The word is at a multiple of eight, and who writes to it holds the interpreter, as
        // does who reads it here.
        unsafe { AtomicU32::from_ptr(tag) }.load(Ordering::Relaxed)
    }
}
