//! `Graph`: the state machine behind `cgraph.CUDAGraph`, with `replay()` as one native call.

mod cycle;
mod fresh_results;
mod hooks;
mod inputs;
mod ladder;
mod lent_results;
mod outputs;
mod padded_graph;
mod recording;
mod replay;
mod replay_inputs;
mod results;
mod segments;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cg_core::hook::Phase;
use cg_core::{Code, InstantiateFlags};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

pub(crate) use fresh_results::FreshResults;
pub(crate) use hooks::{HookHandle, register_for_all};
pub(crate) use inputs::Inputs;
pub(crate) use ladder::{Ladder, Rung};
pub(crate) use lent_results::LentResults;
pub(crate) use outputs::Outputs;
pub(crate) use padded_graph::PaddedGraph;
pub(crate) use recording::Recording;
pub(crate) use replay_inputs::ReplayTensors;
pub(crate) use results::Returned;
pub(crate) use segments::Segments;

use crate::detach::{detached, require_unforked};
use crate::device::{CurrentStream, Template};
use crate::error::state;
use cycle::Cycle;
use hooks::Hooks;
use outputs::{To, destinations};
use replay::ReadyExec;
use replay_inputs::ReplayInputs;

/// A captured graph: a template, an exec, or both.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Graph {
    keeps_template: AtomicBool,
    state: Mutex<State>,
    hooks: Hooks,
    cycle: Cycle,
}

#[derive(Default)]
struct State {
    template: Option<Arc<cg_core::Template>>,
    ready: Option<Arc<ReadyExec>>,
    environment: Option<Environment>,
}

/// Properties of a capture for the execs that are made of it.
struct Environment {
    /// The number of the template.
    template: u64,
    current: Arc<CurrentStream>,
    check: Option<Py<PyAny>>,
    random_step: Option<Py<PyAny>>,
    fed: Option<Arc<ReplayInputs>>,
    outputs: Option<Py<Outputs>>,
    /// Kept alive until the last stream has passed the last replay.
    retained: Arc<Py<PyAny>>,
}

/// What a graph takes of the results of a capture.
#[derive(FromPyObject)]
struct Captured<'py> {
    template: Bound<'py, Template>,
    /// Finds the stream of a replay, see [`CurrentStream::new`].
    current: Bound<'py, PyAny>,
    ordinal: u32,
    /// Called before each replay, and after it `random_step`.
    check: Option<Py<PyAny>>,
    random_step: Option<Py<PyAny>>,
    /// They get seed and offset of each of the `generators`, which is advanced by the number that comes with
    /// it.
    inputs: Option<Py<Inputs>>,
    generators: Vec<(Py<PyAny>, u64)>,
    /// They copy results to where a replay says.
    outputs: Option<Py<Outputs>>,
    /// Kept until no replay is in flight.
    retained: Py<PyAny>,
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
            keeps_template: AtomicBool::new(keep_graph),
            state: Mutex::default(),
            hooks: Hooks::default(),
            cycle: Cycle::default(),
        }
    }

    /// Enqueue one run of the graph on the current stream and return.
    ///
    /// First memory that the graph reads is checked, where that was asked for; then the replay-start
    /// hooks run, and one that raises prevents the replay. The replay-end hooks run also if the
    /// launch fails.
    fn replay(slf: &Bound<'_, Self>) -> PyResult<()> {
        Self::run(slf, ReplayTensors::Nothing, None, None)
    }

    /// As [`Self::replay`], with each tensor copied into the static input of its place first.
    fn _replay_with(slf: &Bound<'_, Self>, tensors: &Bound<'_, PyTuple>) -> PyResult<()> {
        Self::run(slf, ReplayTensors::Unchecked(tensors), None, None)
    }

    /// As [`Self::_replay_with`], or without tensors as [`Self::replay`], and last each piece of memory of
    /// the outputs is copied to its destination, an address and bytes. The caller has allocated these on
    /// the current stream.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn _replay_into(
        slf: &Bound<'_, Self>,
        tensors: Option<&Bound<'_, PyTuple>>,
        to: Vec<(u64, u64)>,
    ) -> PyResult<()> {
        let given = tensors.map_or(ReplayTensors::Nothing, ReplayTensors::Unchecked);
        Self::run(slf, given, Some(&destinations(&to)), None)
    }

    /// As [`Self::_replay_into`], to new tensors, which are returned.
    fn _replay_made<'py>(
        slf: &Bound<'py, Self>,
        fresh: &Bound<'_, FreshResults>,
        tensors: &Bound<'_, PyTuple>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        Self::replay_made(slf, fresh.get(), ReplayTensors::of(tensors), None)
    }

    /// Add a hook of this graph.
    fn _register(&self, phase: &str, hook: &Bound<'_, PyAny>) -> PyResult<HookHandle> {
        self.hooks.register(phase, hook)
    }

    /// Run the hooks of all graphs and then this graph's.
    fn _run_hooks(slf: &Bound<'_, Self>, phase: &str) -> PyResult<()> {
        slf.get().hooks.run(hooks::parse_phase(phase)?, slf)
    }

    /// Return whether hooks of all graphs or of this one are to run.
    fn _has_hooks(&self, phase: &str) -> PyResult<bool> {
        Ok(self.hooks.has(hooks::parse_phase(phase)?))
    }

    /// Add a callable that is called without arguments at the reset or death of the graph.
    fn _register_destroy(
        &self,
        callback: &Bound<'_, PyAny>,
        synchronize: bool,
    ) -> PyResult<HookHandle> {
        self.cycle.register(callback, synchronize)
    }

    /// Keep an object until the reset or death of the graph, and until its replays have passed.
    fn _retain(&self, object: Py<PyAny>, synchronize: bool) -> HookHandle {
        self.cycle.retain(object, synchronize)
    }

    /// Run the destroy hooks and callbacks and let the retained objects go; once for each capture.
    fn _end_cycle(&self, py: Python<'_>) -> PyResult<()> {
        // The objects are the parent's, which runs its callbacks; its locks may be held here for ever.
        if cg_core::is_forked() {
            return Ok(());
        }
        self.cycle.end(py, self.ready().as_deref())
    }

    /// Return whether the template outlives the capture.
    #[getter]
    fn _keep_graph(&self) -> bool {
        self.keeps_template.load(Ordering::Relaxed)
    }

    #[setter(_keep_graph)]
    fn set_keep_graph(&self, keep: bool) {
        self.keeps_template.store(keep, Ordering::Relaxed);
    }

    /// Take over a capture: a `cgraph._driver.Captured`.
    fn _adopt(&self, py: Python<'_>, captured: Captured<'_>) -> PyResult<()> {
        let template = captured.template.get();
        let id = detached(py, || template.core.graph_id())?;
        let fed = captured
            .inputs
            .map(|inputs| ReplayInputs::new(inputs, captured.generators))
            .transpose()?;
        let current = CurrentStream::new(&captured.current, captured.ordinal)?;
        let adopted = State {
            template: Some(Arc::clone(&template.core)),
            ready: None,
            environment: Some(Environment {
                template: template.core.id(),
                current: Arc::new(current),
                check: captured.check,
                random_step: captured.random_step,
                fed: fed.map(Arc::new),
                outputs: captured.outputs,
                retained: Arc::new(captured.retained),
            }),
        };
        let before = std::mem::replace(&mut *self.state(), adopted);
        self.cycle.captured(id);
        // Dropping may run any code, also some that comes back here: the lock is open.
        drop(before);
        Ok(())
    }

    /// Instantiate the template; the exec before is dropped once the new one exists, or before where
    /// the graph allocates memory. With `measures` its device bytes are known afterwards.
    fn _instantiate(&self, py: Python<'_>, measures: bool) -> PyResult<()> {
        let template = self.template()?;
        let exec = detached(py, || self.make_exec(&template, measures))?;
        self.take_exec(py, exec, template.id())
    }

    /// Drop the template; the exec stays. With `empties` the graph is somebody else's and stays, and loses
    /// its nodes, unless inputs or outputs need them.
    fn _drop_template(&self, py: Python<'_>, empties: bool) {
        let template = self.state().template.take();
        py.detach(|| {
            if let Some(template) = template.and_then(Arc::into_inner)
                && empties
            {
                // Nodes that stay cost the host some memory, and nothing else.
                let _ = template.clear();
            }
        });
    }

    /// Drop everything.
    fn _clear(&self, py: Python<'_>) {
        py.detach(|| drop(self.release()));
    }

    /// Return whether a template is live.
    #[getter]
    fn _has_template(&self) -> bool {
        self.state().template.is_some()
    }

    /// Return whether there is an exec.
    #[getter]
    fn _has_exec(&self) -> bool {
        self.state().ready.is_some()
    }

    /// Return the live template.
    #[getter]
    fn _template(&self) -> PyResult<Template> {
        Ok(Template {
            core: self.template()?,
        })
    }

    /// Show what the environment and the exec own, but for `retained`: an exec that is in flight may need
    /// it after this object is gone.
    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.hooks.traverse(&visit)?;
        self.cycle.traverse(&visit)?;
        let Ok(state) = self.state.try_lock() else {
            return Ok(());
        };
        if let Some(environment) = &state.environment {
            environment.current.traverse(&visit)?;
            visit.call(&environment.check)?;
            visit.call(&environment.random_step)?;
            if let Some(fed) = &environment.fed {
                fed.traverse(&visit)?;
            }
        }
        match &state.ready {
            Some(ready) => ready.traverse(&visit),
            None => Ok(()),
        }
    }

    fn __clear__(&self) {
        self.hooks.clear();
        self.cycle.clear();
        drop(self.release());
    }

    /// Return the number by which tools know the exec; none from a driver older than CUDA 13.1.
    #[getter]
    fn _exec_id(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        let ready = self.state().ready.clone();
        match ready {
            Some(ready) => detached(py, || ready.exec.graph_id()),
            None => Ok(None),
        }
    }

    /// By how much free device memory fell when the exec was made, if that was measured.
    #[getter]
    fn _exec_bytes(&self) -> Option<u64> {
        self.ready()?.exec.device_bytes()
    }

    /// Return the raw exec.
    #[getter]
    fn _exec_handle(&self) -> Option<u64> {
        self.ready().map(|ready| ready.exec.handle().0)
    }
}

impl Graph {
    /// As [`Self::run`], with results copied to new tensors, which are returned.
    #[inline]
    pub(crate) fn replay_made<'py>(
        slf: &Bound<'py, Self>,
        fresh: &FreshResults,
        given: ReplayTensors<'_, '_>,
        stream: Option<u64>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let new = fresh.make(slf.py())?;
        Self::run(slf, given, Some(new.to()), stream)?;
        Ok(new.tensors())
    }

    /// Enqueue one run, with these tensors copied into the static inputs first, and results copied there
    /// last. `stream` is the raw handle of the stream that is current where the call began, if the caller has it.
    #[inline]
    pub(crate) fn run(
        slf: &Bound<'_, Self>,
        given: ReplayTensors<'_, '_>,
        to: To<'_>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        require_unforked()?;
        let (py, graph) = (slf.py(), slf.get());
        let ready = match graph.ready() {
            Some(ready) => ready,
            None => Self::instantiate_for_replay(slf)?,
        };
        ready.check(py)?;
        if !graph.has_replay_hooks() {
            return ready.replay(py, given, to, stream);
        }
        graph.hooks.run(Phase::ReplayStart, slf)?;
        // A hook may have instantiated the graph again, or reset it.
        let ready = graph.ready();
        let ready = ready.ok_or_else(|| state("a replay-start hook has reset the graph"))?;
        // It may have made another stream the current one, and given tensors other memory.
        let found = given.matched().filter(|found| found.len() > 0);
        let found = found.map(|found| found.to_tuple(py)).transpose()?;
        let given = found.as_ref().map_or(given, ReplayTensors::Unchecked);
        let replayed = ready.replay(py, given, to, None);
        let ended = graph.hooks.run(Phase::ReplayEnd, slf);
        match (replayed, ended) {
            (Err(error), Err(of_hook)) => {
                of_hook.write_unraisable(py, Some(slf));
                Err(error)
            }
            (replayed, ended) => replayed.and(ended),
        }
    }

    /// Return whether hooks run around a replay.
    #[inline]
    pub(crate) fn has_replay_hooks(&self) -> bool {
        self.hooks.has(Phase::ReplayStart) || self.hooks.has(Phase::ReplayEnd)
    }

    /// Let Python decide whether the graph, which is not instantiated, may be so now.
    #[cold]
    fn instantiate_for_replay(slf: &Bound<'_, Self>) -> PyResult<Arc<ReadyExec>> {
        slf.call_method0("_instantiate_for_replay")?;
        let ready = slf.get().ready();
        ready.ok_or_else(|| state("the graph was reset while it replayed"))
    }

    /// Take an exec of the template that has this number; the one before goes.
    fn take_exec(&self, py: Python<'_>, exec: cg_core::Exec, template: u64) -> PyResult<()> {
        let (exec, id) = detached(py, move || {
            let id = exec.graph_id()?;
            Ok((exec, id))
        })?;
        let mut locked = self.state();
        // It may have captured again since.
        let environment = locked.environment.as_ref();
        let environment = environment
            .filter(|found| found.template == template)
            .ok_or_else(|| state("the graph was reset while it was instantiated"))?;
        self.cycle.captured(id);
        exec.retain(Arc::clone(&environment.retained) as cg_core::Retained);
        let ready = ReadyExec {
            exec,
            current: Arc::clone(&environment.current),
            check: environment.check.as_ref().map(|check| check.clone_ref(py)),
            random_step: environment.random_step.as_ref().map(|s| s.clone_ref(py)),
            fed: environment.fed.clone(),
            outputs: environment.outputs.as_ref().map(|one| one.clone_ref(py)),
        };
        let before = locked.ready.replace(Arc::new(ready));
        drop(locked);
        if let Some(before) = &before {
            // As in `Cycle::end`: not while the interpreter is held.
            py.detach(|| self.cycle.replaced(&before.exec));
        }
        py.detach(|| drop(before));
        Ok(())
    }

    fn make_exec(
        &self,
        template: &cg_core::Template,
        measures: bool,
    ) -> cg_core::Result<cg_core::Exec> {
        let make = || {
            let flags = InstantiateFlags::default();
            if measures {
                template.instantiate_measured(flags)
            } else {
                template.instantiate(flags)
            }
        };
        let refused = match make() {
            Err(error) if error.code() == Some(Code::NOT_SUPPORTED) => error,
            other => return other,
        };
        // A graph that allocates memory has one exec at a time, and one in flight is there until its
        // replays have passed.
        let Some(before) = self.ready() else {
            return Err(refused);
        };
        if !template.allocates()? {
            return Err(refused);
        }
        if let Some(last) = before.exec.last_replay() {
            last.synchronize()?;
        }
        self.cycle.replaced(&before.exec);
        let held = self.state().ready.take();
        drop((before, held));
        make()
    }

    /// Empty the graph; what it held is to be dropped with no lock held.
    fn release(&self) -> State {
        if cg_core::is_forked() {
            return State::default();
        }
        let before = std::mem::take(&mut *self.state());
        self.cycle.release(before.ready.as_deref());
        before
    }

    fn ready(&self) -> Option<Arc<ReadyExec>> {
        self.state().ready.clone()
    }

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

impl Drop for Graph {
    fn drop(&mut self) {
        drop(self.release());
    }
}
