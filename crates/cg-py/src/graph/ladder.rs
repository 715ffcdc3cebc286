//! `Ladder`: graphs by key.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit, intern};

use super::replay_inputs::ReplayTensors;
use super::{FreshResults, Graph, NewResults, Segments};
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
    replayed: Replayed,
    result: Py<PyAny>,
    /// The number of tensors that a call may give, each for the static input of its place; none where Python
    /// has to look at them first.
    takes: Option<usize>,
    fresh: Option<Fresh>,
}

enum Replayed {
    Graph(Py<Graph>),
    Segments(Py<Segments>),
    /// By Python alone.
    Elsewhere,
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

    /// Replay the graph of a key, and return its result. Other calls are `_call`'s: of keys that there are
    /// not, and those that their rung cannot serve.
    #[pyo3(signature = (*args))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if !args.is_empty()
            && let Some(rung) = slf.get().rungs.bind(py).get_item(args.get_item(0)?)?
        {
            let given = args.get_slice(1, args.len());
            if let Some(result) = rung.cast::<Rung>()?.get().serve(&given)? {
                return Ok(result);
            }
        }
        slf.call_method1(intern!(py, "_call"), args)
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
        let replayed = if let Ok(graph) = replayed.cast::<Graph>() {
            Replayed::Graph(graph.clone().unbind())
        } else if let Ok(segments) = replayed.cast::<Segments>() {
            Replayed::Segments(segments.clone().unbind())
        } else if replayed.is_none() {
            Replayed::Elsewhere
        } else {
            let given = replayed.repr()?.to_string();
            return Err(argument("replayed", &given, "a graph, segments or None"));
        };
        let container = if result.is_exact_instance_of::<PyTuple>() {
            Container::Tuple
        } else if result.is_exact_instance_of::<PyList>() {
            Container::List
        } else {
            Container::Nothing
        };
        Ok(Self {
            replayed,
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
        match &self.replayed {
            Replayed::Graph(graph) => visit.call(graph)?,
            Replayed::Segments(segments) => visit.call(segments)?,
            Replayed::Elsewhere => {}
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
        let is_elsewhere = matches!(self.replayed, Replayed::Elsewhere);
        if is_elsewhere || !(given.is_empty() || self.fits(given)?) {
            return Ok(None);
        }
        let new = self.fresh.as_ref().map(|fresh| fresh.made.get().make(py));
        let new = new.transpose()?;
        let to = new.as_ref().map(NewResults::to);
        let tensors = ReplayTensors::of(given);
        match &self.replayed {
            Replayed::Graph(graph) => Graph::run(graph.bind(py), tensors, to, None)?,
            Replayed::Segments(segments) => segments.get().run(py, tensors, to)?,
            Replayed::Elsewhere => {}
        }
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
