//! `Segments`: graphs and callables as one native replay.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use crate::error::{argument, state};
use crate::fed::Given;
use crate::graph::Graph;

/// Graphs, and what runs eagerly between them, in order.
///
/// Not made of `cg_core::Segments`: the exec of a graph is known only at the replay, which its hooks
/// may change, and the garbage collector has to see the callables, which a closure would hide.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Segments {
    steps: Mutex<Steps>,
}

/// A replay has its own reference: a step may take the steps away.
type Steps = Arc<[Step]>;

enum Step {
    Graph(Py<Graph>),
    Call(Py<PyAny>),
}

#[pymethods]
impl Segments {
    /// Steps in order, each a graph or a callable without arguments.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn new(steps: Vec<Bound<'_, PyAny>>) -> PyResult<Self> {
        let steps = steps.iter().map(Step::new).collect::<PyResult<_>>()?;
        Ok(Self {
            steps: Mutex::new(steps),
        })
    }

    /// Replays the graphs on the current stream and calls the callables, each in its turn. What a
    /// step raises stops the run; the next replay begins with the first step.
    fn replay(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Given::Nothing)
    }

    /// As `replay`, with each tensor copied into the static input of its place in the first graph.
    fn replay_with(&self, py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.run(py, Given::Tensors(tensors))
    }

    /// Lets the steps go.
    fn _clear(&self) {
        drop(self.take());
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(steps) = self.steps.try_lock() else {
            return Ok(());
        };
        steps.iter().try_for_each(|step| match step {
            Step::Graph(graph) => visit.call(graph),
            Step::Call(call) => visit.call(call),
        })
    }

    fn __clear__(&self) {
        drop(self.take());
    }
}

impl Segments {
    /// Enqueues one run of all steps; the first graph is given the tensors.
    pub(crate) fn run(&self, py: Python<'_>, given: Given<'_, '_>) -> PyResult<()> {
        let steps = Arc::clone(&self.lock());
        if steps.is_empty() {
            return Err(state(
                "replay() without a step: nothing was captured, or it was reset",
            ));
        }
        let mut given = Some(given);
        for step in steps.iter() {
            match step {
                Step::Graph(graph) => {
                    let given = given.take().unwrap_or(Given::Nothing);
                    Graph::run(graph.bind(py), given)?;
                }
                Step::Call(call) => drop(call.call0(py)?),
            }
        }
        Ok(())
    }

    /// Takes the steps; to be dropped with no lock held.
    fn take(&self) -> Steps {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Step {
    fn new(step: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(graph) = step.cast::<Graph>() {
            return Ok(Self::Graph(graph.clone().unbind()));
        }
        if step.is_callable() {
            return Ok(Self::Call(step.clone().unbind()));
        }
        let expected = "a graph or a callable without arguments";
        Err(argument("step", &step.repr()?.to_string(), expected))
    }
}
