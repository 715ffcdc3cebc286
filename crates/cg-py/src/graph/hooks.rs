//! Hooks: Python callables in cg-core's registry, visible to the garbage collector, so that a hook
//! that refers to its own graph does not keep it alive for ever.

use std::sync::{Arc, LazyLock};

use cg_core::hook::{self, Phase, Policy, Registry};
use pyo3::exceptions::{PyException, PyTypeError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::error::argument;

/// A callable.
pub(crate) type Hook = Arc<Py<PyAny>>;

/// The ordered hooks of one graph. The first hook that raises stops the others.
pub(crate) struct Hooks {
    registry: Registry<Hook, PyErr>,
}

/// The hooks of all graphs. What one raises goes to `sys.unraisablehook`, and the others run.
static OF_ALL: LazyLock<Registry<Hook, (PyErr, Hook)>> =
    LazyLock::new(|| Registry::new(Policy::Report(Box::new(report))));

impl Default for Hooks {
    fn default() -> Self {
        Self {
            registry: Registry::new(Policy::Propagate),
        }
    }
}

impl Hooks {
    /// Add a callable behind the others.
    pub(crate) fn register(&self, phase: &str, hook: &Bound<'_, PyAny>) -> PyResult<HookHandle> {
        let phase = parse_phase(phase)?;
        let hook = callable(hook, "a callable that takes the graph")?;
        Ok(HookHandle::new(self.registry.register(phase, hook)))
    }

    /// Return whether a hook of the phase is to run, of this graph or of all; takes no lock.
    #[inline]
    pub(crate) fn has(&self, phase: Phase) -> bool {
        self.registry.has(phase) || OF_ALL.has(phase)
    }

    /// Call the hooks of all graphs and then this graph's with the graph.
    pub(crate) fn run(&self, phase: Phase, graph: &Bound<'_, PyAny>) -> PyResult<()> {
        run_of_all(graph.py(), phase, graph)?;
        self.registry
            .run(phase, |hook| hook.call1(graph.py(), (graph,)).map(drop))
    }

    /// Show the garbage collector the callables.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let hooks = self.registry.hooks();
        hooks.iter().try_for_each(|hook| visit.call(&**hook))
    }

    /// Remove all.
    pub(crate) fn clear(&self) {
        drop(self.registry.take());
    }
}

/// Add a callable to the hooks of all graphs.
#[pyfunction]
pub(crate) fn register_for_all(phase: &str, hook: &Bound<'_, PyAny>) -> PyResult<HookHandle> {
    let phase = parse_phase(phase)?;
    let takes = match phase {
        Phase::Destroy => "a callable that takes a set of graph ids",
        _ => "a callable that takes the graph",
    };
    let hook = callable(hook, takes)?;
    Ok(HookHandle::new(OF_ALL.register(phase, hook)))
}

/// Call the hooks of all graphs with an argument.
pub(crate) fn run_of_all(py: Python<'_>, phase: Phase, with: &Bound<'_, PyAny>) -> PyResult<()> {
    let call = |hook: &Hook| {
        let called = hook.call1(py, (with,));
        called.map(drop).map_err(|error| (error, Arc::clone(hook)))
    };
    OF_ALL.run(phase, call).map_err(|(error, _)| error)
}

/// Send what a callable raised to `sys.unraisablehook`; gives back what is no `Exception`, such as
/// `KeyboardInterrupt`.
pub(crate) fn report((error, hook): (PyErr, Hook)) -> Result<(), (PyErr, Hook)> {
    Python::attach(|py| {
        if !error.is_instance_of::<PyException>(py) {
            return Err((error, hook));
        }
        error.write_unraisable(py, Some(hook.bind(py)));
        Ok(())
    })
}

/// Return a callable, or a `TypeError` that says what was given.
pub(crate) fn callable(hook: &Bound<'_, PyAny>, expected: &str) -> PyResult<Hook> {
    if hook.is_callable() {
        return Ok(Arc::new(hook.clone().unbind()));
    }
    let given = hook.repr()?;
    Err(PyTypeError::new_err(format!(
        "hook is {given}, expected {expected}"
    )))
}

/// Takes back a registration: `remove()`, or at the end of a `with` block.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct HookHandle {
    core: hook::HookHandle,
}

impl HookHandle {
    pub(crate) fn new(core: hook::HookHandle) -> Self {
        Self { core }
    }
}

#[pymethods]
impl HookHandle {
    /// Return a number that no other registration has.
    #[getter]
    fn id(&self) -> u64 {
        self.core.id()
    }

    /// Take the registration back; nothing happens if it is gone.
    fn remove(&self) {
        self.core.remove();
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.core.remove();
    }
}

pub(crate) fn parse_phase(phase: &str) -> PyResult<Phase> {
    match phase {
        "capture_start" => Ok(Phase::CaptureStart),
        "capture_end" => Ok(Phase::CaptureEnd),
        "instantiate" => Ok(Phase::Instantiate),
        "replay_start" => Ok(Phase::ReplayStart),
        "replay_end" => Ok(Phase::ReplayEnd),
        "destroy" => Ok(Phase::Destroy),
        _ => {
            let expected = "\"capture_start\", \"capture_end\", \"instantiate\", \
                            \"replay_start\", \"replay_end\" or \"destroy\"";
            Err(argument("phase", &format!("{phase:?}"), expected))
        }
    }
}
