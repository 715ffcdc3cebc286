//! `Ladder`: graphs by key.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit, intern};

use super::replay_inputs::ReplayTensors;
use super::{FreshResults, NewResults, Replayed};
use crate::error::argument;

/// Graphs by key, each with the result that its replays write.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Ladder {
    /// [`Rung`]s by key.
    rungs: Py<PyDict>,
}

/// The graph of one key.
#[pyclass(frozen, subclass, module = "cgraph._core")]
pub(crate) struct Rung {
    /// None if Python does all.
    replayed: Option<Replayed>,
    result: Py<PyAny>,
    /// The number of tensors that a call may give, each for the static input of its place; none where Python
    /// has to look at them first.
    takes: Option<usize>,
    fresh: Option<Fresh>,
}

/// New results, which stand in place of the result.
struct Fresh {
    made: Py<FreshResults>,
    container: Container,
}

enum Container {
    Nothing,
    Tuple,
    List,
}

#[pymethods]
impl Ladder {
    /// A ladder without graphs; subclasses may take arguments.
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(
        py: Python<'_>,
        _args: &Bound<'_, PyTuple>,
        _kwargs: Option<&Bound<'_, PyDict>>,
    ) -> Self {
        Self {
            rungs: PyDict::new(py).unbind(),
        }
    }

    /// Let the rung of a key serve a call: natively, or by what a subclass does when it is called with a tuple
    /// of the arguments. `_rung` finds one for other keys, or raises.
    #[pyo3(signature = (key, /, *args))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        key: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let rung = match slf.get().rungs.bind(py).get_item(key)? {
            Some(rung) => rung,
            None => slf.call_method1(intern!(py, "_rung"), (key,))?,
        };
        match rung.cast::<Rung>()?.get().serve(args)? {
            Some(result) => Ok(result),
            None => rung.call1((args,)),
        }
    }

    /// All [`Rung`]s by key.
    #[getter]
    fn _rungs<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.rungs.bind(py).clone()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.rungs)
    }
}

#[pymethods]
impl Rung {
    /// `replayed` is what calls replay: a graph, segments, or `None` if Python does all. `result` is what it
    /// writes. `takes` is the number of tensors that a call may give instead of the static ones, or `None`.
    /// `fresh` makes new results, which are all that the function returns: in a tuple or a list, if `result`
    /// is one.
    #[new]
    fn new(
        replayed: &Bound<'_, PyAny>,
        result: Bound<'_, PyAny>,
        takes: Option<usize>,
        fresh: Option<Bound<'_, FreshResults>>,
    ) -> PyResult<Self> {
        let found = Replayed::of(replayed);
        if found.is_none() && !replayed.is_none() {
            let given = replayed.repr()?.to_string();
            return Err(argument("replayed", &given, "a graph, segments or None"));
        }
        let container = if result.is_exact_instance_of::<PyTuple>() {
            Container::Tuple
        } else if result.is_exact_instance_of::<PyList>() {
            Container::List
        } else {
            Container::Nothing
        };
        Ok(Self {
            replayed: found,
            result: result.unbind(),
            takes,
            fresh: fresh.map(|made| Fresh {
                made: made.unbind(),
                container,
            }),
        })
    }

    /// Return the result, in the memory that replays write.
    #[getter]
    fn result<'py>(&self, py: Python<'py>) -> Bound<'py, PyAny> {
        self.result.bind(py).clone()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Some(replayed) = &self.replayed {
            replayed.traverse(&visit)?;
        }
        if let Some(fresh) = &self.fresh {
            visit.call(&fresh.made)?;
        }
        visit.call(&self.result)
    }
}

impl Rung {
    /// Replay with these tensors, or none, and return the result; none if Python has to look at them.
    fn serve<'py>(&self, given: &Bound<'py, PyTuple>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = given.py();
        let Some(replayed) = &self.replayed else {
            return Ok(None);
        };
        if !(given.is_empty() || self.fits(given)?) {
            return Ok(None);
        }
        let new = self.fresh.as_ref().map(|fresh| fresh.made.get().make(py));
        let new = new.transpose()?;
        let (tensors, to) = (ReplayTensors::of(given), new.as_ref().map(NewResults::to));
        replayed.run(py, tensors, to, None)?;
        Ok(Some(match self.fresh.as_ref().zip(new) {
            Some((fresh, new)) => match fresh.container {
                Container::Tuple => PyTuple::new(py, new.tensors())?.into_any(),
                Container::List => PyList::new(py, new.tensors())?.into_any(),
                Container::Nothing => new.get(0),
            },
            None => self.result.bind(py).clone(),
        }))
    }

    /// Return whether these are as many tensors as a call may give.
    fn fits(&self, given: &Bound<'_, PyTuple>) -> PyResult<bool> {
        static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        if self.takes != Some(given.len()) {
            return Ok(false);
        }
        let class = TENSOR.import(given.py(), "torch", "Tensor")?;
        for one in given.iter_borrowed() {
            if !one.is_instance(class)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
