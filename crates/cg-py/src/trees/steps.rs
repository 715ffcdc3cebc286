//! `StepSource`: which step a call belongs to.

use cg_core::tree::Step;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::Attached;

/// Counters of steps, each an attribute of an object with the count that is forgotten: those of marks, and those
/// that count by themselves.
///
/// Once somebody has marked a step, only marks count.
#[pyclass(frozen, name = "StepSource", module = "cgraph._core")]
pub(crate) struct StepSource {
    marks: Attached<Py<PyList>>,
    counts: Attached<Py<PyList>>,
}

#[pymethods]
impl StepSource {
    #[new]
    fn new(py: Python<'_>) -> Self {
        let empty = || Attached::new(PyList::empty(py).unbind());
        Self {
            marks: empty(),
            counts: empty(),
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
        list.append((object, name, 0))
    }

    /// Let steps count by themselves again, until the next mark.
    fn forget_marks(&self, py: Python<'_>) -> PyResult<()> {
        let marks = self.marks.get(py).into_bound(py);
        for (place, one) in marks.iter().enumerate() {
            let counter = Counter::of(&one)?;
            counter.forget(&marks, place, counter.count()?)?;
        }
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
        let (mut marks, mut is_marked) = (0, false);
        for (place, one) in list.iter().enumerate() {
            let counter = Counter::of(&one)?;
            let (count, forgotten) = (counter.count()?, counter.forgotten()?);
            if count < forgotten {
                // torch has begun to count anew.
                counter.forget(&list, place, 0)?;
                is_marked |= count != 0;
            } else {
                is_marked |= count != forgotten;
            }
            marks += count;
        }
        if is_marked {
            return Ok(Step {
                number: -marks,
                is_marked,
            });
        }
        let counts = self.counts.get(py).into_bound(py);
        let counts = counts.iter().map(|one| Counter::of(&one)?.count());
        let number = counts.sum::<PyResult<i64>>()?;
        Ok(Step { number, is_marked })
    }
}

/// An attribute that counts, its object and what is forgotten of the count.
struct Counter<'a, 'py>(&'a Bound<'py, PyTuple>);

impl<'a, 'py> Counter<'a, 'py> {
    fn of(one: &'a Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(Self(one.cast()?))
    }

    /// How far it has counted; torch counts its marks down.
    fn count(&self) -> PyResult<i64> {
        let name = self.0.get_borrowed_item(1)?;
        let value = self
            .0
            .get_borrowed_item(0)?
            .getattr(name.cast::<PyString>()?)?;
        Ok(value.extract::<i64>()?.abs())
    }

    fn forgotten(&self) -> PyResult<i64> {
        self.0.get_borrowed_item(2)?.extract()
    }

    /// Put a counter in its place that forgets so much.
    fn forget(&self, list: &Bound<'_, PyList>, place: usize, forgotten: i64) -> PyResult<()> {
        let (object, name) = (self.0.get_item(0)?, self.0.get_item(1)?);
        list.set_item(place, (object, name, forgotten))
    }
}
