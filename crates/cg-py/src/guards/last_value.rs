//! `LastValue`: the object last found at one place of a guard.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::change_tracker::{ChangeTracker, Tracking};
use super::check::Check;
use super::object_access::attributes_of;
use super::watched_dicts::Looks;
use crate::raw;

/// The object found at one place.
pub(super) struct LastValue {
    /// None where nothing was. It is held, so that no other object comes to be at its address.
    pub(super) value: Option<Py<PyAny>>,
    /// Its attributes, where somebody looks into them. They are held, too: Python 3.12 takes a dictionary that
    /// nobody else has away from its object when that is used, and lets another one come.
    pub(super) attributes: Option<Py<PyDict>>,
    /// Its position in a dictionary, see [`crate::raw::entry_at`]; -1 where that is not known.
    pub(super) position: isize,
    /// Number of items when names were found to be absent.
    pub(super) length: usize,
    attributes_tracking: Option<Tracking>,
    items_tracking: Option<Tracking>,
}

impl Default for LastValue {
    fn default() -> Self {
        Self {
            value: None,
            attributes: None,
            position: -1,
            length: usize::MAX,
            attributes_tracking: None,
            items_tracking: None,
        }
    }
}

impl LastValue {
    pub(super) fn forget(
        &mut self,
        py: Python<'_>,
        place: usize,
        tracker: &mut ChangeTracker,
        dropped: &mut Vec<Py<PyAny>>,
    ) {
        let before = std::mem::take(self);
        if let (Some(tracking), Some(dict)) = (before.attributes_tracking, &before.attributes) {
            tracker.end(dict.bind(py), place, tracking);
        }
        if let (Some(tracking), Some(dict)) = (before.items_tracking, &before.value)
            && let Ok(dict) = dict.bind(py).cast::<PyDict>()
        {
            tracker.end(dict, place, tracking);
        }
        dropped.extend(before.value);
        dropped.extend(before.attributes.map(Py::into_any));
    }

    /// Look for the attributes; whether they are those of all threads.
    pub(super) fn open(
        &mut self,
        py: Python<'_>,
        place: usize,
        tracker: &mut ChangeTracker,
        dropped: &mut Vec<Py<PyAny>>,
    ) -> bool {
        let value = self.value.as_ref();
        if let (Some(value), Some(attributes)) = (value, &self.attributes)
            && raw::has_attributes(value.bind(py), attributes.bind(py))
        {
            return true;
        }
        let now = value.and_then(|value| attributes_of(value.bind(py)));
        let are_of_all = now.as_ref().is_none_or(|now| now.are_of_all);
        let now = now.map(|now| now.dict);
        let is_same = match (&now, &self.attributes) {
            (Some(now), Some(before)) => now.is(before),
            (now, before) => now.is_none() && before.is_none(),
        };
        if !is_same {
            let before = std::mem::replace(&mut self.attributes, now.map(Bound::unbind));
            if let (Some(tracking), Some(before)) = (self.attributes_tracking.take(), &before) {
                tracker.end(before.bind(py), place, tracking);
            }
            self.length = usize::MAX;
            dropped.extend(before.map(Py::into_any));
        }
        are_of_all
    }

    /// See to it that changes of the dictionaries are told that others look into; whether they are.
    pub(super) fn tell(
        &mut self,
        py: Python<'_>,
        place: usize,
        tracker: &mut ChangeTracker,
        looks: &Looks,
    ) -> bool {
        if let (Some(keys), Some(dict), None) = (
            &looks.at_attributes,
            &self.attributes,
            &self.attributes_tracking,
        ) {
            self.attributes_tracking = tracker.begin(dict.bind(py), place, keys);
            if self.attributes_tracking.is_none() {
                return false;
            }
        }
        if let (Some(keys), Some(value), None) =
            (&looks.at_items, &self.value, &self.items_tracking)
            && let Ok(dict) = value.bind(py).cast::<PyDict>()
        {
            self.items_tracking = tracker.begin(dict, place, keys);
            return self.items_tracking.is_some();
        }
        true
    }

    /// Return whether names that a check wants to be absent are so. They are looked for only with `looks`, or if there
    /// are not as many items as when they were; `is_known` says that they were just now.
    pub(super) fn are_absent(
        &mut self,
        py: Python<'_>,
        check: &Check,
        is_known: bool,
        looks: bool,
    ) -> bool {
        let (Some(absent), Some(value)) = (check.absent(), &self.value) else {
            return true;
        };
        let attributes = self.attributes.as_ref().map(|dict| dict.bind(py));
        let dict = match check {
            Check::Dict(..) => value.bind(py).cast::<PyDict>().ok(),
            _ => attributes,
        };
        let Some(dict) = dict else {
            return true;
        };
        let is_as_long = dict.len() == self.length;
        if !is_known && (looks || !is_as_long) && !absent.are_absent(dict) {
            return false;
        }
        self.length = dict.len();
        true
    }
}
