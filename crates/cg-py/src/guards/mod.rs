//! `Guards`: true if a function finds the same outside of its arguments, and inside of these, again.

mod change_source;
mod change_tracker;
mod check;
mod class_versions;
mod compare;
mod function_parts;
mod guarded_tensor;
mod key;
mod last_value;
mod last_values;
mod object_access;
mod place;
mod plain_value;
mod step;
mod watched_dicts;

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use change_source::ChangeSource;
use change_tracker::ChangeTracker;
use last_values::LastValues;
use place::Places;
use watched_dicts::Marks;

use crate::raw::Attached;
use crate::tensors::TensorReader;

/// Places, and what must be there. Where Python tells of changes of dictionaries, a call looks only at what
/// it does not tell of; else at all places.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Guards {
    places: Places,
    /// True if Python tells of changes.
    is_tracked: bool,
    /// Places that have changed.
    marks: Arc<Marks>,
    /// None while a call looks at it.
    state: Attached<Option<Box<LastValues>>>,
}

/// Return whether Python tells of changes of dictionaries, so that not all have to be looked at.
#[pyfunction]
pub(crate) fn watches_dictionaries(py: Python<'_>) -> bool {
    matches!(
        change_source::find_change_source(py),
        Some(ChangeSource::Watchers(_))
    )
}

/// A place that differs: its number, what is there, and whether anything is.
type Changed<'py> = (usize, Option<Bound<'py, PyAny>>, bool);

#[pymethods]
impl Guards {
    /// Read places, each `(parent, step, check)`: see [`Step::parse`](step::Step::parse) and
    /// [`Check::parse`](check::Check::parse). Parents come first; that of a root is -1.
    #[new]
    #[pyo3(signature = (places, reader=None))]
    #[expect(clippy::needless_pass_by_value, reason = "given once for each capture")]
    fn new(
        py: Python<'_>,
        places: Vec<(isize, Bound<'_, PyTuple>, Bound<'_, PyTuple>)>,
        reader: Option<Py<TensorReader>>,
    ) -> PyResult<Self> {
        let places = Places::parse(py, &places, reader.as_ref())?;
        let marks = Arc::new(Marks::new(places.all.len()));
        let tracker = ChangeTracker::new(py, &marks);
        let is_tracked = tracker.is_there();
        let state = LastValues::new(py, tracker, &places);
        Ok(Self {
            is_tracked,
            marks,
            state: Attached::new(Some(Box::new(state))),
            places,
        })
    }

    /// Return whether all places are as they must be. `objects` are those of the call.
    #[pyo3(name = "fits", signature = (objects=Vec::new()))]
    #[expect(clippy::needless_pass_by_value, reason = "a sequence of Python's")]
    fn fits_in_python(&self, py: Python<'_>, objects: Vec<Bound<'_, PyAny>>) -> bool {
        self.fits(py, &objects, |_| {})
    }

    /// Return the first place that differs; with `all` each one whose parents do not.
    #[pyo3(signature = (objects=Vec::new(), *, all=false))]
    #[expect(clippy::needless_pass_by_value, reason = "a sequence of Python's")]
    fn changed<'py>(
        &self,
        py: Python<'py>,
        objects: Vec<Bound<'py, PyAny>>,
        all: bool,
    ) -> Vec<Changed<'py>> {
        let mut found: Vec<Option<Bound<'py, PyAny>>> = Vec::new();
        let mut differ: Vec<bool> = Vec::new();
        let mut changed = Vec::new();
        for (i, place) in self.places.all.iter().enumerate() {
            let does_parent_differ = place.parent.is_some_and(|parent| differ[parent]);
            let container = place.parent.and_then(|parent| found[parent].as_ref());
            let now = if does_parent_differ {
                None
            } else {
                place.step.find(py, container, &objects)
            };
            let differs = !does_parent_differ && !place.check.fits(now.as_ref());
            if differs {
                changed.push((i, now.clone(), now.is_some()));
                if !all {
                    break;
                }
            }
            differ.push(differs || does_parent_differ);
            found.push(now);
        }
        if changed.is_empty() {
            let found_at = |place: usize| found[place].as_ref();
            changed.extend(self.places.shared_otherwise(found_at).map(|place| {
                let now = found[place].clone();
                (place, now, true)
            }));
        }
        changed
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for place in &self.places.all {
            place.step.traverse(&visit)?;
            place.check.traverse(&visit)?;
        }
        // What a call looks at just now counts as held by somebody else.
        self.state.traverse(&visit, |state, visit| {
            let mut state = state.iter();
            state.try_for_each(|state| state.traverse(visit))
        })
    }
}

impl Drop for Guards {
    fn drop(&mut self) {
        let forget = |py: Python<'_>| {
            let Some(mut state) = self.state.take(py) else {
                return;
            };
            for place in 0..self.places.all.len() {
                state.forget(py, place);
            }
        };
        // None when the interpreter has come to its end.
        Python::try_attach(forget);
    }
}
