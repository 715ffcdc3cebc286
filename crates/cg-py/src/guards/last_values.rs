//! `LastValues`: the objects last found at the places of a guard.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyWeakrefMethods, PyWeakrefReference};
use pyo3::{PyTraverseError, PyVisit};

use super::change_tracker::{ChangeTracker, Tracking};
use super::check::Check;
use super::class_versions::ClassVersions;
use super::object_access::attributes_of;
use super::place::{Looks, Places};
use crate::raw::{self, StillTensors, function_changes};
use crate::tensors::TensorReader;

/// The objects found at the places, which all fitted, and at those of arguments as long as these are held.
pub(super) struct LastValues {
    pub(super) places: Vec<LastValue>,
    pub(super) tracker: ChangeTracker,
    pub(super) classes: ClassVersions,
    /// Number of changes to functions at the last look.
    pub(super) functions: u64,
    /// True if another tensor has come to a place.
    pub(super) has_new_tensor: bool,
    /// In the order of the objects of `Guards`.
    pub(super) given: Vec<ArgumentObject>,
    /// True if the last look came to its end, so that what is known of absent names is of then.
    pub(super) has_fitted: bool,
    /// Objects found before: to drop them may run any code, so that comes last.
    pub(super) dropped: Vec<Py<PyAny>>,
    /// What stands for most of the places that nobody tells of; none until a call has found them as they were.
    pub(super) still: Option<StillPlaces>,
    /// Places that look into dictionaries which nobody tells of, as attributes that each thread has its own of.
    pub(super) untracked: Vec<usize>,
}

/// Tensors that lie where they lay, and the other places that nobody tells of.
pub(super) struct StillPlaces {
    pub(super) tensors: StillTensors,
    /// The reader of these tensors; none if there are none.
    pub(super) reader: Option<Py<TensorReader>>,
    /// By their numbers among `Places::untracked`.
    pub(super) others: Vec<usize>,
}

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

/// An object among the arguments.
#[derive(Default)]
pub(super) struct ArgumentObject {
    /// That of the last call.
    last: Option<Py<PyWeakrefReference>>,
    /// True if what was found in it is kept, as it has come twice in a row. What a call gives that is new
    /// each time does not live longer than the call.
    pub(super) is_held: bool,
}

impl LastValues {
    pub(super) fn new(py: Python<'_>, tracker: ChangeTracker, places: &Places) -> Self {
        let mut classes = ClassVersions::default();
        for (i, place) in places.all.iter().enumerate() {
            let looks_into = matches!(place.check, Check::Class(..))
                || place.places.iter().any(|one| places.all[*one].is_of_class);
            if let Some(class) = place.step.class_root(py).filter(|_| looks_into) {
                classes.add(class.clone(), i);
            }
        }
        Self {
            tracker,
            classes,
            functions: function_changes(),
            has_new_tensor: false,
            places: places.all.iter().map(|_| LastValue::default()).collect(),
            given: places
                .given
                .iter()
                .map(|_| ArgumentObject::default())
                .collect(),
            has_fitted: false,
            dropped: Vec::new(),
            still: None,
            untracked: Vec::new(),
        }
    }

    /// Forget what was found at a place.
    pub(super) fn forget(&mut self, py: Python<'_>, place: usize) {
        let last = &mut self.places[place];
        last.forget(py, place, &mut self.tracker, &mut self.dropped);
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tracker.traverse(visit)?;
        self.classes.traverse(visit)?;
        for last in &self.places {
            visit.call(&last.value)?;
            visit.call(&last.attributes)?;
        }
        let mut given = self.given.iter();
        given.try_for_each(|given| visit.call(&given.last))?;
        if let Some(still) = &self.still {
            still.tensors.traverse(visit)?;
        }
        self.dropped.iter().try_for_each(|one| visit.call(one))
    }
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
}

impl LastValue {
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

impl ArgumentObject {
    /// Take note of the object of a call; whether what was found in the one before is to be forgotten.
    pub(super) fn take(
        &mut self,
        object: Option<&Bound<'_, PyAny>>,
        held: Option<&Py<PyAny>>,
    ) -> ObjectChange {
        if let (true, Some(object), Some(held)) = (self.is_held, object, held)
            && object.is(held)
        {
            return ObjectChange::Held;
        }
        let was_held = std::mem::take(&mut self.is_held);
        let Some(object) = object else {
            self.last = None;
            return ObjectChange::New(was_held);
        };
        let py = object.py();
        let last = self.last.as_ref().and_then(|last| last.bind(py).upgrade());
        if !was_held && last.is_some_and(|last| last.is(object)) {
            self.is_held = true;
            return ObjectChange::Again;
        }
        let weak = PyWeakrefReference::new(object);
        self.last = weak.ok().map(Bound::unbind);
        ObjectChange::New(was_held)
    }
}

/// Relation of an object to the one of the last call.
pub(super) enum ObjectChange {
    /// The one whose insides are known.
    Held,
    /// The one that came the last time: its insides are kept from now on.
    Again,
    /// Another one, and whether the insides of the one before are known.
    New(bool),
}
