//! `ClassVersions`: the classes that a guard looks into, and whether they are as they were.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

use super::object_access::of_class;
use super::watched_dicts::Marks;
use crate::raw::ClassTags;

/// The classes at places. A class that has changed, or one that it is derived from, has another tag.
#[derive(Default)]
pub(super) struct ClassVersions {
    all: Vec<Version>,
    /// True if one of them has another tag than when its names were looked up.
    are_old: bool,
}

/// A class and the tag that it had.
struct Version {
    class: Py<PyType>,
    place: usize,
    last: u32,
}

impl ClassVersions {
    /// Return whether tags tell of all changes in this Python.
    pub(super) fn are_known(py: Python<'_>) -> bool {
        tags(py).is_some()
    }

    pub(super) fn add(&mut self, class: Bound<'_, PyType>, place: usize) {
        self.all.push(Version {
            class: class.unbind(),
            place,
            last: 0,
        });
    }

    /// Mark the places of those that have changed.
    #[inline]
    pub(super) fn compare(&mut self, py: Python<'_>, marks: &Marks) {
        let Some(tags) = tags(py) else {
            return;
        };
        for one in &self.all {
            let now = tags.of(one.class.bind(py));
            if now != one.last || now == 0 {
                self.are_old = true;
                marks.put(one.place);
            }
        }
    }

    /// Note that all names have just been looked up, and fit.
    #[inline]
    pub(super) fn renew(&mut self, py: Python<'_>) {
        if !std::mem::take(&mut self.are_old) {
            return;
        }
        let Some(tags) = tags(py) else {
            return;
        };
        for one in &mut self.all {
            one.last = tags.of(one.class.bind(py));
        }
    }

    pub(super) fn traverse(&self, visit: &pyo3::PyVisit<'_>) -> Result<(), pyo3::PyTraverseError> {
        self.all.iter().try_for_each(|one| visit.call(&one.class))
    }
}

fn tags(py: Python<'_>) -> Option<ClassTags> {
    static TAGS: PyOnceLock<Option<ClassTags>> = PyOnceLock::new();
    let find = || ClassTags::new(py).filter(|tags| tell_all(py, *tags).unwrap_or(false));
    *TAGS.get_or_init(py, find)
}

/// Return whether each change gives a class another tag: of its own, of one that it is derived from, and of
/// those that it is derived from.
fn tell_all(py: Python<'_>, tags: ClassTags) -> PyResult<bool> {
    let names = PyDict::new(py);
    py.run(
        c"class Base: pass\nclass Other: pass\nclass Derived(Base): pass",
        Some(&names),
        None,
    )?;
    let class = |name: &str| -> PyResult<Bound<'_, PyType>> {
        Ok(names.as_any().get_item(name)?.cast_into::<PyType>()?)
    };
    let (base, derived) = (class("Base")?, class("Derived")?);
    let name = intern!(py, "value");
    let mut known = vec![0];
    let mut is_new = || {
        of_class(derived.as_any(), name);
        let tag = tags.of(&derived);
        let is_new = !known.contains(&tag) && tags.of(&derived) == tag;
        known.push(tag);
        is_new
    };
    let mut tells_all = is_new();
    for number in 0..4 {
        derived.setattr(name, number)?;
        tells_all &= is_new();
        base.setattr(name, number)?;
        tells_all &= is_new();
        derived.delattr(name)?;
        tells_all &= is_new();
    }
    derived.setattr(intern!(py, "__bases__"), (class("Other")?,))?;
    Ok(tells_all && is_new())
}
