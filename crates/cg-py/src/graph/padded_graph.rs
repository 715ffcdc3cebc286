//! `PaddedGraph`: a graph whose calls have fewer rows than its static inputs.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::Graph;
use super::fresh_results::{NewResults, call_with};
use super::inputs::Inputs;
use super::replay_inputs::ReplayTensors;
use crate::arguments::MatchedTensors;
use crate::detach::detached;
use crate::error::argument;

/// Replays of a graph with the first rows of its static inputs.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct PaddedGraph {
    graph: Py<Graph>,
    inputs: Py<Inputs>,
    padding: cg_core::Padding,
    /// Replays with tensors that only torch can copy; it takes a tuple of them, and where there are new
    /// results, where these go.
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
        let padding = detached(py, || inputs.get().core().padding(rows, of, fill, has_rows))?;
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
    /// Replay with tensors that fit the rows, and new results if there are some; `stream` is as for [`Graph::run`].
    #[inline]
    pub(crate) fn run<'py>(
        &self,
        py: Python<'py>,
        tensors: MatchedTensors<'_, 'py>,
        new: Option<&NewResults<'py>>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        // A hook may give the tensors other memory.
        let has_hooks = self.graph.get().has_replay_hooks();
        if !has_hooks && self.inputs.get().can_copy(tensors) {
            let given = ReplayTensors::Padded(tensors, &self.padding);
            return Graph::run(self.graph.bind(py), given, new.map(NewResults::to), stream);
        }
        call_with(self.otherwise.bind(py), tensors, new).map(drop)
    }
}
