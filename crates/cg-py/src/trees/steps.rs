//! `StepSource`: which step a call belongs to.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cg_core::tree::Step;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::Attached;

/// Counters of steps, each an attribute of an object: those of marks, and those that count by themselves.
///
/// Once somebody has marked a step, only marks count.
#[pyclass(frozen, name = "StepSource", module = "cgraph._core")]
pub(crate) struct StepSource {
    marks: Attached<Py<PyList>>,
    counts: Attached<Py<PyList>>,
    /// The marks that are forgotten, of each attribute.
    forgotten: Mutex<Vec<i64>>,
}

#[pymethods]
impl StepSource {
    #[new]
    fn new(py: Python<'_>) -> Self {
        let empty = || Attached::new(PyList::empty(py).unbind());
        Self {
            marks: empty(),
            counts: empty(),
            forgotten: Mutex::default(),
        }
    }

    /// Follow an attribute: of marks, or of steps that are counted without them.
    fn follow(
        &self,
        object: Bound<'_, PyAny>,
        name: Bound<'_, PyString>,
        is_mark: bool,
    ) -> PyResult<()> {
        let py = object.py();
        let list = if is_mark { &self.marks } else { &self.counts };
        let list = list.get(py).into_bound(py);
        list.append((object, name))
    }

    /// Let steps count by themselves again, until the next mark.
    fn forget_marks(&self, py: Python<'_>) -> PyResult<()> {
        let marks = self.marks.get(py).into_bound(py);
        *self.forgotten() = values(&marks).collect::<PyResult<_>>()?;
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.marks
            .traverse(&visit, |list, visit| visit.call(list))?;
        self.counts.traverse(&visit, |list, visit| visit.call(list))
    }
}

impl StepSource {
    /// The step now. Marks have other numbers than counts: they count down.
    #[inline]
    pub(super) fn step(&self, py: Python<'_>) -> PyResult<Step> {
        let list = self.marks.get(py).into_bound(py);
        let mut forgotten = self.forgotten();
        let (mut marks, mut is_marked) = (0, false);
        for (place, value) in values(&list).enumerate() {
            let value = value?;
            if let Some(before) = forgotten.get_mut(place) {
                if value < *before {
                    // torch has begun to count anew.
                    *before = 0;
                }
                is_marked |= value != *before;
            } else {
                is_marked |= value != 0;
            }
            marks += value;
        }
        let number = if is_marked {
            -marks
        } else {
            let counts = self.counts.get(py).into_bound(py);
            values(&counts).sum::<PyResult<i64>>()?
        };
        Ok(Step { number, is_marked })
    }

    fn forgotten(&self) -> MutexGuard<'_, Vec<i64>> {
        self.forgotten
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Return how far each attribute has counted; torch counts its marks down.
fn values(attributes: &Bound<'_, PyList>) -> impl Iterator<Item = PyResult<i64>> {
    attributes.iter().map(|one| {
        let one = one.cast::<PyTuple>()?;
        let name = one.get_borrowed_item(1)?;
        let value = one
            .get_borrowed_item(0)?
            .getattr(name.cast::<PyString>()?)?;
        Ok(value.extract::<i64>()?.abs())
    })
}
