//! `Ladder`: graphs by key.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit, intern};

use super::replay_inputs::ReplayTensors;
use super::{Graph, Segments};

/// Graphs by key, each with the result that its replays write.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Ladder {
    /// By key, a tuple of the graph or the segments that a call without arguments replays, or None, of its
    /// result, and of what only Python knows.
    rungs: Py<PyDict>,
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

    /// Replay the graph of a key, and return its result. Other calls are `_call`'s: with arguments, of keys
    /// that there are not, and of those that have nothing to replay here.
    #[pyo3(signature = (*args))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if args.len() == 1
            && let Some(rung) = slf.get().rungs.bind(py).get_item(args.get_item(0)?)?
        {
            let rung = rung.cast_into::<PyTuple>()?;
            let replayed = rung.get_item(0)?;
            let nothing = ReplayTensors::Nothing;
            if let Ok(graph) = replayed.cast::<Graph>() {
                Graph::run(graph, nothing, None, None)?;
                return rung.get_item(1);
            }
            if let Ok(segments) = replayed.cast::<Segments>() {
                segments.get().run(py, nothing, None)?;
                return rung.get_item(1);
            }
        }
        slf.call_method1(intern!(py, "_call"), args)
    }

    /// All graphs by key: a graph or segments that a call without arguments replays, or None, the result of
    /// that, and anything else.
    #[getter]
    fn _rungs<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.rungs.bind(py).clone()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.rungs)
    }
}
