//! `Recording`: what calls replay, and what they return.

use pyo3::prelude::*;
use pyo3::types::PyBool;
use pyo3::{PyTraverseError, PyVisit};

use super::fresh_results::{NewResults, call_with};
use super::lent_results::LentResults;
use super::padded_graph::PaddedGraph;
use super::replay_inputs::ReplayTensors;
use super::results::{Results, Returned};
use super::{Graph, Segments};
use crate::arguments::MatchedTensors;
use crate::error::argument;

/// What calls replay, with the tensors of a call as static inputs, and what they return then.
pub(crate) struct Recording {
    replayed: Replayed,
    results: Results,
}

enum Replayed {
    Graph(Py<Graph>),
    /// A graph with fewer rows.
    Padded(Py<PaddedGraph>),
    /// A graph with breaks.
    Segments(Py<Segments>),
    /// A callable that takes a tuple of tensors, and for fresh results where these go, and returns `True` if it
    /// did not replay.
    Callable(Py<PyAny>),
}

/// The answer to a call.
pub(crate) struct Served {
    pub(crate) result: Py<PyAny>,
    /// True if a callable has made the call without a replay.
    pub(crate) is_eager: bool,
}

impl Recording {
    /// Take a graph, a padded one, segments or a callable, and what is returned, see [`Results::new`].
    pub(crate) fn new(
        replayed: &Bound<'_, PyAny>,
        (leaves, build, warn): Returned<'_>,
    ) -> PyResult<Self> {
        Ok(Self {
            results: Results::new(&leaves, &build, warn)?,
            replayed: Replayed::new(replayed)?,
        })
    }

    /// Replay with these tensors, and return what the function would. `stream` is as for [`Graph::run`], and
    /// `lent` gets to know the static results.
    #[inline]
    pub(crate) fn serve<'py>(
        &self,
        py: Python<'py>,
        given: ReplayTensors<'_, 'py>,
        stream: Option<u64>,
        lent: Option<&LentResults>,
    ) -> PyResult<Served> {
        self.results.warn_if_held(py)?;
        let new = self.results.new_results(py)?;
        if let Some(lent) = lent {
            lent.overwrite(py)?;
        }
        let tensors = given.matched().unwrap_or(MatchedTensors::Each(&[]));
        let to = new.as_ref().map(NewResults::to);
        let mut is_eager = false;
        match &self.replayed {
            Replayed::Graph(graph) => Graph::run(graph.bind(py), given, to, stream)?,
            Replayed::Padded(padded) => padded.get().run(py, tensors, new.as_ref(), stream)?,
            Replayed::Segments(segments) => segments.get().run(py, given, to)?,
            Replayed::Callable(replay) => {
                let answer = call_with(replay.bind(py), tensors, new.as_ref())?;
                is_eager = answer.is(PyBool::new(py, true));
            }
        }
        let result = self.results.result(py, tensors, new.as_ref(), lent)?;
        Ok(Served { result, is_eager })
    }

    /// Return whether it is a graph or segments, which take tensors that nobody has compared.
    pub(crate) fn is_of_graphs(&self) -> bool {
        matches!(self.replayed, Replayed::Graph(_) | Replayed::Segments(_))
    }

    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.results.traverse(visit)?;
        match &self.replayed {
            Replayed::Graph(graph) => visit.call(graph),
            Replayed::Padded(padded) => visit.call(padded),
            Replayed::Segments(segments) => visit.call(segments),
            Replayed::Callable(replay) => visit.call(replay),
        }
    }
}

impl Replayed {
    fn new(replayed: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(graph) = replayed.cast::<Graph>() {
            return Ok(Self::Graph(graph.clone().unbind()));
        }
        if let Ok(padded) = replayed.cast::<PaddedGraph>() {
            return Ok(Self::Padded(padded.clone().unbind()));
        }
        if let Ok(segments) = replayed.cast::<Segments>() {
            let alone = segments.get().alone(replayed.py());
            let whole = || Self::Segments(segments.clone().unbind());
            return Ok(alone.map_or_else(whole, Self::Graph));
        }
        if replayed.is_callable() {
            return Ok(Self::Callable(replayed.clone().unbind()));
        }
        let given = replayed.repr()?.to_string();
        Err(argument(
            "replayed",
            &given,
            "a graph, padded or not, segments or a callable",
        ))
    }
}
