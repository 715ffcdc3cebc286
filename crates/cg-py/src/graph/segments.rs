//! `Segments`: graphs and callables as one native replay.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::outputs::{To, destinations};
use super::replay_inputs::ReplayTensors;
use super::{FreshResults, Graph};
use crate::detach::require_unforked;
use crate::error::{argument, state};

/// Graphs, and what runs eagerly between them, in order.
///
/// The exec of a graph is known only at the replay, which its hooks may change, and the garbage collector
/// has to see the callables.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Segments {
    steps: Mutex<Steps>,
    modes: Modes,
}

/// A replay has its own reference: a step may take the steps away.
type Steps = Arc<[Step]>;

enum Step {
    Graph(Py<Graph>),
    Call(Py<PyAny>),
    Plain(Plain),
}

/// A call that needs nothing around it, as long as torch's modes are those of the capture.
struct Plain {
    /// Called under other modes.
    call: Py<PyAny>,
    function: Py<PyAny>,
    args: Py<PyTuple>,
    kwargs: Option<Py<PyDict>>,
    /// Gradient mode and inference mode of the capture; autocast is off.
    modes: (bool, bool),
    /// Takes the result.
    take: Py<PyAny>,
    /// True if `None` needs no taking.
    is_none: bool,
}

impl<'py> FromPyObject<'_, 'py> for Plain {
    type Error = PyErr;

    fn extract(from: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (call, function, args, kwargs, modes, take, is_none) = from.extract()?;
        let kwargs: Bound<'py, PyDict> = kwargs;
        Ok(Self {
            call,
            function,
            args,
            kwargs: (!kwargs.is_empty()).then(|| kwargs.unbind()),
            modes,
            take,
            is_none,
        })
    }
}

/// torch's functions that tell gradient mode, inference mode and autocast.
type Modes = (Py<PyAny>, Py<PyAny>, Py<PyAny>);

#[pymethods]
impl Segments {
    /// Steps in order, each a graph, a callable without arguments or, for one that can be called
    /// plainly, `(callable, function, args, kwargs, (grad, inference), take, is_none)`. `modes` are
    /// torch's functions that tell gradient mode, inference mode and autocast.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn new(steps: Vec<Bound<'_, PyAny>>, modes: Modes) -> PyResult<Self> {
        let steps = steps.iter().map(Step::new).collect::<PyResult<_>>()?;
        Ok(Self {
            steps: Mutex::new(steps),
            modes,
        })
    }

    /// Replay the graphs on the current stream and call the callables, each in its turn. What a
    /// step raises stops the run; the next replay begins with the first step.
    fn replay(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, ReplayTensors::Nothing, None)
    }

    /// As `replay`, with each tensor copied into the static input of its place in the first graph.
    fn _replay_with(&self, py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.run(py, ReplayTensors::Unchecked(tensors), None)
    }

    /// As `_replay_with`, or without tensors as `replay`, and the last graph copies its outputs to these
    /// destinations.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn _replay_into(
        &self,
        py: Python<'_>,
        tensors: Option<&Bound<'_, PyTuple>>,
        to: Vec<(u64, u64)>,
    ) -> PyResult<()> {
        let given = tensors.map_or(ReplayTensors::Nothing, ReplayTensors::Unchecked);
        self.run(py, given, Some(&destinations(&to)))
    }

    /// As `_replay_into`, to new tensors, which are returned.
    fn _replay_made<'py>(
        &self,
        py: Python<'py>,
        fresh: &Bound<'_, FreshResults>,
        tensors: &Bound<'_, PyTuple>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let new = fresh.get().make(py)?;
        self.run(py, ReplayTensors::of(tensors), Some(new.to()))?;
        Ok(new.tensors())
    }

    /// Return whether a replay is under way, as seen from a step or another thread.
    #[getter]
    fn _is_running(&self) -> bool {
        // Each replay has a reference of its own.
        Arc::strong_count(&self.lock()) > 1
    }

    /// Let the steps go.
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
            Step::Plain(plain) => plain.traverse(&visit),
        })
    }

    fn __clear__(&self) {
        drop(self.take());
    }
}

impl Segments {
    /// Enqueue one run of all steps; the first graph is given the tensors, and the last one where the
    /// results go.
    pub(crate) fn run(
        &self,
        py: Python<'_>,
        given: ReplayTensors<'_, '_>,
        to: To<'_>,
    ) -> PyResult<()> {
        require_unforked()?;
        let steps = Arc::clone(&self.lock());
        if steps.is_empty() {
            return Err(state(
                "replay() without a step: nothing was captured, or it was reset",
            ));
        }
        let is_graph = |step: &Step| matches!(step, Step::Graph(_));
        let last = to.and_then(|_| steps.iter().rposition(is_graph));
        let mut given = Some(given);
        let mut now = None;
        for (number, step) in steps.iter().enumerate() {
            match step {
                Step::Graph(graph) => {
                    let given = given.take().unwrap_or(ReplayTensors::Nothing);
                    let to = to.filter(|_| last == Some(number));
                    Graph::run(graph.bind(py), given, to, None)?;
                }
                Step::Call(call) => drop(call.call0(py)?),
                Step::Plain(plain) => {
                    let now = match now {
                        Some(now) => now,
                        None => *now.insert(self.modes_now(py)?),
                    };
                    plain.run(py, now)?;
                }
            }
        }
        Ok(())
    }

    /// Return the only step, if that is a graph.
    pub(crate) fn alone(&self, py: Python<'_>) -> Option<Py<Graph>> {
        match &**self.lock() {
            [Step::Graph(graph)] => Some(graph.clone_ref(py)),
            _ => None,
        }
    }

    /// Return whether gradients are recorded, and whether it is inference mode; none under autocast.
    fn modes_now(&self, py: Python<'_>) -> PyResult<Option<(bool, bool)>> {
        let is = |function: &Py<PyAny>| function.bind(py).call0()?.is_truthy();
        let (grad, inference, autocast) = &self.modes;
        Ok(if is(autocast)? {
            None
        } else {
            Some((is(grad)?, is(inference)?))
        })
    }

    /// Take the steps; to be dropped with no lock held.
    fn take(&self) -> Steps {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Steps> {
        self.steps.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Plain {
    #[inline]
    fn run(&self, py: Python<'_>, now: Option<(bool, bool)>) -> PyResult<()> {
        if now != Some(self.modes) {
            return self.call.call0(py).map(drop);
        }
        let kwargs = self.kwargs.as_ref().map(|kwargs| kwargs.bind(py));
        let result = self.function.bind(py).call(self.args.bind(py), kwargs)?;
        if self.is_none && result.is_none() {
            return Ok(());
        }
        self.take.call1(py, (result,)).map(drop)
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.call)?;
        visit.call(&self.function)?;
        visit.call(&self.args)?;
        visit.call(&self.kwargs)?;
        visit.call(&self.take)
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
        if step.is_instance_of::<PyTuple>() {
            return Ok(Self::Plain(step.extract()?));
        }
        let expected = "a graph, a callable without arguments or a plain call";
        Err(argument("step", &step.repr()?.to_string(), expected))
    }
}
