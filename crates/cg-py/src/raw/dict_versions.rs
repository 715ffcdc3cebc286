//! `DictVersions`: the numbers by which Python told changes of dictionaries before it had watchers.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::ffi::PyObject;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Reads the version of a dictionary, by PEP 509: each change of any one gives it a number that no
/// dictionary has had.
#[derive(Clone, Copy)]
pub(crate) struct DictVersions(());

// A dictionary of Python 3.10 or 3.11 has, after what all objects have, the number of its items and then its
// version.
const COUNT: usize = size_of::<PyObject>();
const VERSION: usize = COUNT + size_of::<isize>();

impl DictVersions {
    /// None in a Python that has no versions, or has them elsewhere.
    pub(crate) fn new(py: Python<'_>) -> Option<Self> {
        // There are none before 3.10 that this crate runs in.
        if py.version_info() >= (3, 12) {
            return None;
        }
        let new = Self(());
        let sample = PyDict::new(py);
        for count in 0..9 {
            sample.set_item(count, count).ok()?;
            if new.word(&sample, COUNT) != count + 1 {
                return None;
            }
        }
        Some(new)
    }

    /// Return the version of a dictionary.
    #[inline]
    pub(crate) fn of(self, dict: &Bound<'_, PyDict>) -> u64 {
        self.word(dict, VERSION)
    }

    #[inline]
    #[expect(
        clippy::unused_self,
        reason = "only where `new` has made one are the words where the constants say"
    )]
    fn word(self, dict: &Bound<'_, PyDict>, place: usize) -> u64 {
        // SAFETY: a dictionary of such a Python has at least these words, and this one is alive.
        let word = unsafe { dict.as_ptr().byte_add(place) }.cast::<u64>();
        // SAFETY: as above. The word is at a multiple of one, and who writes to it holds the interpreter,
        // as does who reads it here.
        unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed)
    }
}
