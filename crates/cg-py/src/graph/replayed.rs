//! `Replayed`: what calls replay, a graph or segments.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::outputs::To;
use super::replay_inputs::ReplayTensors;
use super::{Graph, Segments};

/// A graph, or graphs with what runs eagerly between them.
pub(crate) enum Replayed {
    Graph(Py<Graph>),
    Segments(Py<Segments>),
}

impl Replayed {
    /// Take a graph or segments; none for other objects.
    pub(crate) fn of(object: &Bound<'_, PyAny>) -> Option<Self> {
        if let Ok(graph) = object.cast::<Graph>() {
            return Some(Self::Graph(graph.clone().unbind()));
        }
        let segments = object.cast::<Segments>().ok()?;
        Some(Self::Segments(segments.clone().unbind()))
    }

    /// Enqueue one run, with these tensors copied into the static inputs first, and results copied there
    /// last; `stream` is as for [`Graph::run`].
    #[inline]
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        given: ReplayTensors<'_, '_>,
        to: To<'_>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        match self {
            Self::Graph(graph) => Graph::run(graph.bind(py), given, to, stream),
            Self::Segments(segments) => segments.get().run(py, given, to),
        }
    }

    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Graph(graph) => visit.call(graph),
            Self::Segments(segments) => visit.call(segments),
        }
    }
}
