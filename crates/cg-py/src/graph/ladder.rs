//! `Ladder`: graphs by key.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit, intern};

use super::replay_inputs::ReplayTensors;
use super::{Graph, Segments};

/// Graphs by key, each with the result that its replays write.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Ladder {
    /// The graph, or the segments, and the result of each key whose calls may be without arguments.
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

    /// Replay the graph of a key, and return its result; what has arguments, and what is not known, is
    /// `_call`'s.
    #[pyo3(signature = (*args))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        if args.len() == 1
            && let Some(rung) = slf.get().rungs.bind(py).get_item(args.get_item(0)?)?
        {
            let (graph, result): (Bound<'py, PyAny>, Bound<'py, PyAny>) = rung.extract()?;
            let nothing = ReplayTensors::Nothing;
            if let Ok(graph) = graph.cast::<Graph>() {
                Graph::run(graph, nothing, None, None)?;
            } else {
                graph.cast::<Segments>()?.get().run(py, nothing, None)?;
            }
            return Ok(result);
        }
        slf.call_method1(intern!(py, "_call"), args)
    }

    /// The graphs whose calls may be without arguments, by key: a graph or segments, and the result.
    #[getter]
    fn _rungs<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.rungs.bind(py).clone()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.rungs)
    }
}
