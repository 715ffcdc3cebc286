//! `PaddedGraph`: a graph whose calls have fewer rows than its static inputs.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::dispatch::Tensors;
use crate::enter::enter;
use crate::error::argument;
use crate::fed::Given;
use crate::fresh::{New, call_with};
use crate::graph::Graph;
use crate::inputs::Inputs;

/// Replays of a graph with the first rows of its static inputs.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct PaddedGraph {
    graph: Py<Graph>,
    inputs: Py<Inputs>,
    padding: cg_core::Padding,
    /// Replays with tensors that only torch can copy; it takes a tuple of them, and where there are new
    /// results, where these go and the tensors.
    otherwise: Py<PyAny>,
}

#[pymethods]
impl PaddedGraph {
    /// For tensors with the first `rows` rows of as many as `of` where `has_rows` is true. `fill` is
    /// what the others of a static input hold then: `"zero"` or `"repeat"`.
    #[new]
    #[expect(
        clippy::too_many_arguments,
        reason = "given once for each number of rows"
    )]
    fn new(
        py: Python<'_>,
        graph: Py<Graph>,
        inputs: Py<Inputs>,
        rows: u32,
        of: u32,
        fill: &str,
        has_rows: Vec<bool>,
        otherwise: Py<PyAny>,
    ) -> PyResult<Self> {
        let fill = match fill {
            "zero" => cg_core::Fill::Zeros,
            "repeat" => cg_core::Fill::LastRow,
            _ => return Err(argument("fill", fill, "zero or repeat")),
        };
        let padding = enter(py, || inputs.get().core().padding(rows, of, fill, has_rows))?;
        Ok(Self {
            graph,
            inputs,
            padding,
            otherwise,
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.graph)?;
        visit.call(&self.inputs)?;
        visit.call(&self.otherwise)
    }
}

impl PaddedGraph {
    /// Replays with tensors that fit the rows, and new results if there are some; `stream` is as for [`Graph::run`].
    #[inline]
    pub(crate) fn run<'py>(
        &self,
        py: Python<'py>,
        tensors: Tensors<'_, 'py>,
        new: Option<&New<'py>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        if self.inputs.get().can_copy(tensors) {
            let given = Given::Padded(tensors, &self.padding);
            return Graph::run(self.graph.bind(py), given, new.map(New::to), stream);
        }
        call_with(self.otherwise.bind(py), tensors, new).map(drop)
    }
}
