//! `LastValues`: the objects last found at the places of a guard.

use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use pyo3::{PyTraverseError, PyVisit};

use super::change_tracker::ChangeTracker;
use super::check::Check;
use super::class_versions::ClassVersions;
use super::last_value::LastValue;
use super::place::Places;
use crate::raw::{StillTensors, function_changes};
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
