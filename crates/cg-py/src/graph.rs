//! `Graph`: the state machine behind `cgraph.CUDAGraph`, with `replay()` as one native call.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cg_core::InstantiateFlags;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use crate::enter::enter;
use crate::error::state;
use crate::raw::CurrentWorkStream;
use crate::replay::{Current, Ready};
use crate::sim::Sim;
use crate::template::Template;

/// A captured graph: a template, an exec, or both.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Graph {
    keep_graph: AtomicBool,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    template: Option<Arc<cg_core::Template>>,
    ready: Option<Arc<Ready>>,
    environment: Option<Environment>,
}

/// What a capture leaves for the execs that are made of it.
struct Environment {
    current: Arc<Current>,
    check: Option<Py<PyAny>>,
    random_step: Option<Py<PyAny>>,
    drive: Option<Py<Sim>>,
    /// Kept alive until the last stream has passed the last replay.
    retained: Arc<Py<PyAny>>,
}

#[pymethods]
impl Graph {
    #[new]
    #[pyo3(signature = (keep_graph=false, *_args, **_kwargs))]
    fn new(
        keep_graph: bool,
        _args: &Bound<'_, PyTuple>,
        _kwargs: Option<&Bound<'_, PyDict>>,
    ) -> Self {
        Self {
            keep_graph: AtomicBool::new(keep_graph),
            state: Mutex::default(),
        }
    }

    /// Enqueues one run of the graph on the current stream and returns.
    fn replay(slf: &Bound<'_, Self>) -> PyResult<()> {
        let ready = slf.get().state().ready.clone();
        if let Some(ready) = ready {
            return ready.replay(slf.py());
        }
        // The graph is not instantiated: Python decides whether it may be now.
        slf.call_method0("_instantiate_for_replay")?;
        let ready = slf.get().state().ready.clone();
        let ready = ready.ok_or_else(|| state("the graph was reset while it replayed"))?;
        ready.replay(slf.py())
    }

    /// Whether the template outlives the capture.
    #[getter]
    fn _keep_graph(&self) -> bool {
        self.keep_graph.load(Ordering::Relaxed)
    }

    #[setter(_keep_graph)]
    fn set_keep_graph(&self, keep: bool) {
        self.keep_graph.store(keep, Ordering::Relaxed);
    }

    /// Takes over a captured template.
    ///
    /// `current` finds the stream of a replay: a `dlpack_exchange_api` capsule, or a callable that
    /// takes `ordinal`, or without `ordinal` one that returns a `Stream`. Before each replay
    /// `check` and then `random_step` are called, `sim` is driven after it, and `retained` is kept
    /// until no replay is in flight.
    #[pyo3(signature = (template, *, current, ordinal, check, random_step, sim, retained))]
    #[expect(
        clippy::too_many_arguments,
        reason = "one call takes over all that a capture left"
    )]
    fn _adopt(
        &self,
        template: &Template,
        current: Bound<'_, PyAny>,
        ordinal: Option<u32>,
        check: Option<Py<PyAny>>,
        random_step: Option<Py<PyAny>>,
        sim: Option<Py<Sim>>,
        retained: Py<PyAny>,
    ) -> PyResult<()> {
        let current = match (current.cast::<PyCapsule>(), ordinal) {
            (Ok(capsule), Some(ordinal)) => {
                Current::Dlpack(CurrentWorkStream::new(capsule, ordinal)?)
            }
            (_, Some(ordinal)) => Current::Raw(current.unbind(), ordinal),
            (_, None) => Current::Object(current.unbind()),
        };
        let adopted = State {
            template: Some(Arc::clone(&template.core)),
            ready: None,
            environment: Some(Environment {
                current: Arc::new(current),
                check,
                random_step,
                drive: sim,
                retained: Arc::new(retained),
            }),
        };
        let before = std::mem::replace(&mut *self.state(), adopted);
        // Dropping may run any code, also some that comes back here: the lock is open.
        drop(before);
        Ok(())
    }

    /// Instantiates the template; the exec before is dropped once the new one exists.
    fn _instantiate(&self, py: Python<'_>) -> PyResult<()> {
        let template = self.template()?;
        let exec = enter(py, || template.instantiate(InstantiateFlags::default()))?;
        let mut locked = self.state();
        let environment = locked
            .environment
            .as_ref()
            .ok_or_else(|| state("the graph was reset while it was instantiated"))?;
        exec.retain(Arc::clone(&environment.retained) as cg_core::Retained);
        let ready = Ready {
            exec,
            current: Arc::clone(&environment.current),
            check: environment.check.as_ref().map(|check| check.clone_ref(py)),
            random_step: environment.random_step.as_ref().map(|s| s.clone_ref(py)),
            drive: environment.drive.as_ref().map(|sim| sim.clone_ref(py)),
        };
        let before = locked.ready.replace(Arc::new(ready));
        drop(locked);
        py.detach(|| drop(before));
        Ok(())
    }

    /// Drops the template; the exec stays.
    fn _drop_template(&self, py: Python<'_>) {
        let template = self.state().template.take();
        py.detach(|| drop(template));
    }

    /// Drops everything.
    fn _clear(&self, py: Python<'_>) {
        let before = std::mem::take(&mut *self.state());
        py.detach(|| drop(before));
    }

    /// Whether a template is live.
    #[getter]
    fn _has_template(&self) -> bool {
        self.state().template.is_some()
    }

    /// Whether there is an exec.
    #[getter]
    fn _has_exec(&self) -> bool {
        self.state().ready.is_some()
    }

    /// The live template.
    #[getter]
    fn _template(&self) -> PyResult<Template> {
        Ok(Template {
            core: self.template()?,
        })
    }

    /// What the environment and the exec own, but for `retained`: an exec that is in flight may need
    /// it after this object is gone.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let Ok(state) = self.state.try_lock() else {
            return Ok(());
        };
        if let Some(environment) = &state.environment {
            environment.current.traverse(&visit)?;
            visit.call(&environment.check)?;
            visit.call(&environment.random_step)?;
            visit.call(&environment.drive)?;
        }
        match &state.ready {
            Some(ready) => ready.traverse(&visit),
            None => Ok(()),
        }
    }

    fn __clear__(&self) {
        let before = std::mem::take(&mut *self.state());
        drop(before);
    }

    /// The number by which tools know the exec; none from a driver older than CUDA 13.1.
    #[getter]
    fn _exec_id(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let ready = self.state().ready.clone();
        match ready {
            Some(ready) => enter(py, || ready.exec.graph_id()),
            None => Ok(None),
        }
    }

    /// The raw exec.
    #[getter]
    fn _exec_handle(&self) -> Option<u64> {
        let state = self.state();
        state.ready.as_ref().map(|ready| ready.exec.handle().0)
    }
}

impl Graph {
    fn template(&self) -> PyResult<Arc<cg_core::Template>> {
        let template = self.state().template.clone();
        template.ok_or_else(|| {
            state("the graph has no live template: it was reset, or its template was not kept")
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
