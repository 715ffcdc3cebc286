//! `Hooks` and `HookHandle`: Python callables in cg-core's registry, visible to the garbage
//! collector, so that a hook that refers to its own graph does not keep it alive for ever.

use std::sync::Arc;

use cg_core::hook::{self, Phase, Policy, Registry};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use crate::error::argument;

/// The ordered hooks of one owner. The first hook that raises stops the others.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Hooks {
    registry: Registry<Arc<Py<PyAny>>, PyErr>,
}

#[pymethods]
impl Hooks {
    #[new]
    fn new() -> Self {
        Self {
            registry: Registry::new(Policy::Propagate),
        }
    }

    /// Adds a callable behind the others. `phase` is `"capture_end"` or `"instantiate"`.
    fn register(&self, phase: &str, hook: Bound<'_, PyAny>) -> PyResult<HookHandle> {
        let phase = parse_phase(phase)?;
        if !hook.is_callable() {
            let given = hook.repr()?;
            return Err(PyTypeError::new_err(format!(
                "hook is {given}, expected a callable that takes the graph"
            )));
        }
        Ok(HookHandle {
            core: self.registry.register(phase, Arc::new(hook.unbind())),
        })
    }

    /// Calls the hooks of a phase with the graph, in order.
    fn run(&self, py: Python<'_>, phase: &str, graph: &Bound<'_, PyAny>) -> PyResult<()> {
        self.registry.run(parse_phase(phase)?, |hook| {
            hook.call1(py, (graph,)).map(|_| ())
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.registry
            .hooks()
            .iter()
            .try_for_each(|hook| visit.call(&**hook))
    }

    fn __clear__(&self) {
        self.registry.clear();
    }
}

/// Removes a hook: `remove()`, or at the end of a `with` block.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct HookHandle {
    core: hook::HookHandle,
}

#[pymethods]
impl HookHandle {
    /// A number that no other hook has.
    #[getter]
    fn id(&self) -> u64 {
        self.core.id()
    }

    /// Removes the hook; nothing happens if it is gone.
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

fn parse_phase(phase: &str) -> PyResult<Phase> {
    match phase {
        "capture_end" => Ok(Phase::CaptureEnd),
        "instantiate" => Ok(Phase::Instantiate),
        _ => {
            let expected = "\"capture_end\" or \"instantiate\"";
            Err(argument("phase", &format!("{phase:?}"), expected))
        }
    }
}
