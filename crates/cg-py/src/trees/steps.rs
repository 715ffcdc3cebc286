//! `StepSource`: which step a call belongs to.

use std::sync::atomic::{AtomicI64, Ordering};

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
    /// The marks that are forgotten.
    forgotten: AtomicI64,
}

#[pymethods]
impl StepSource {
    #[new]
    fn new(py: Python<'_>) -> Self {
        let empty = || Attached::new(PyList::empty(py).unbind());
        Self {
            marks: empty(),
            counts: empty(),
            forgotten: AtomicI64::new(0),
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
        let marks = sum(&self.marks.get(py).into_bound(py))?;
        self.forgotten.store(marks, Ordering::Relaxed);
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
        let marks = sum(&self.marks.get(py).into_bound(py))?;
        let mut forgotten = self.forgotten.load(Ordering::Relaxed);
        if marks < forgotten {
            // torch has begun to count anew.
            forgotten = 0;
            self.forgotten.store(0, Ordering::Relaxed);
        }
        let is_marked = marks != forgotten;
        let number = if is_marked {
            -marks
        } else {
            sum(&self.counts.get(py).into_bound(py))?
        };
        Ok(Step { number, is_marked })
    }
}

fn sum(attributes: &Bound<'_, PyList>) -> PyResult<i64> {
    let mut all = 0;
    for one in attributes.iter() {
        let one = one.cast::<PyTuple>()?;
        let name = one.get_borrowed_item(1)?;
        let value = one
            .get_borrowed_item(0)?
            .getattr(name.cast::<PyString>()?)?;
        all += value.extract::<i64>()?.abs();
    }
    Ok(all)
}
