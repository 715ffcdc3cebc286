//! `Cycle`: callbacks and objects of one capture of a graph, until its reset or death.

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use cg_core::hook::{Phase, Policy, Registry};
use pyo3::prelude::*;
use pyo3::types::PySet;
use pyo3::{PyTraverseError, PyVisit};

use super::hooks::{self, Hook, HookHandle};
use super::replay::ReadyExec;
use crate::detach::detached;

/// Destroy callbacks and retained objects of one capture.
///
/// All are owned by the graph and visible to the garbage collector: one that refers to its own graph
/// does not keep it alive.
pub(crate) struct Cycle {
    callbacks: Registry<Hook, PyErr>,
    objects: Registry<Hook, PyErr>,
    /// Wait for the replays before the callbacks run and the objects go.
    synchronize: AtomicBool,
    captured: AtomicBool,
    /// The last replays of the execs that were replaced by a later instantiate.
    replaced: Mutex<Vec<cg_core::LastReplay>>,
    /// The driver's numbers of all graphs and execs of this cycle, where it gives any.
    ids: Mutex<BTreeSet<u32>>,
}

impl Default for Cycle {
    fn default() -> Self {
        Self {
            callbacks: Registry::new(Policy::Propagate),
            objects: Registry::new(Policy::Propagate),
            synchronize: AtomicBool::new(false),
            captured: AtomicBool::new(false),
            replaced: Mutex::default(),
            ids: Mutex::default(),
        }
    }
}

impl Cycle {
    /// Add a callable that is called without arguments when the cycle ends.
    pub(crate) fn register(
        &self,
        callback: &Bound<'_, PyAny>,
        synchronize: bool,
    ) -> PyResult<HookHandle> {
        let callback = hooks::callable(callback, "a callable without arguments")?;
        self.synchronize.fetch_or(synchronize, Ordering::Relaxed);
        let handle = self.callbacks.register(Phase::Destroy, callback);
        Ok(HookHandle::new(handle))
    }

    /// Keep an object until the cycle ends.
    pub(crate) fn retain(&self, object: Py<PyAny>, synchronize: bool) -> HookHandle {
        self.synchronize.fetch_or(synchronize, Ordering::Relaxed);
        HookHandle::new(self.objects.register(Phase::Destroy, Arc::new(object)))
    }

    /// Note that something was captured, with the driver's numbers of it.
    pub(crate) fn captured(&self, ids: impl IntoIterator<Item = u32>) {
        self.captured.store(true, Ordering::Relaxed);
        lock(&self.ids).extend(ids);
    }

    /// Note the last replay of an exec that goes before the cycle ends. Its replays in flight keep the
    /// retained objects alive.
    pub(crate) fn replaced(&self, exec: &cg_core::Exec) {
        for object in self.objects.hooks() {
            exec.retain(object as cg_core::Retained);
        }
        let mut replaced = lock(&self.replaced);
        replaced.extend(exec.last_replay());
        replaced.retain(|replay| !replay.has_finished());
    }

    /// Run the destroy hooks of all graphs and then the callbacks. Everything happens at most once,
    /// and a new cycle begins. The objects stay until [`Self::release`].
    ///
    /// # Errors
    /// Exceptions of a callable that are no `Exception`; the others have run then.
    pub(crate) fn end(&self, py: Python<'_>, ready: Option<&ReadyExec>) -> PyResult<()> {
        let captured = self.captured.swap(false, Ordering::Relaxed);
        let ids = std::mem::take(&mut *lock(&self.ids));
        let replaced = std::mem::take(&mut *lock(&self.replaced));
        let synchronize = self.synchronize.swap(false, Ordering::Relaxed);
        let callbacks = self.callbacks.take();
        if synchronize {
            // The exec may be locked by a launch that waits for a host function, which needs the
            // interpreter.
            let last = py.detach(|| ready.and_then(|ready| ready.exec.last_replay()));
            for replay in replaced.iter().chain(&last) {
                // A device that cannot be waited for must not keep the callbacks from running.
                if let Err(error) = detached(py, || replay.synchronize()) {
                    error.write_unraisable(py, None);
                }
            }
        }
        let mut ended = Ok(());
        if captured {
            let ids = PySet::new(py, ids)?;
            ended = hooks::run_of_all(py, Phase::Destroy, &ids);
        }
        for callback in callbacks {
            let called = callback.call0(py).map(drop);
            let reported = called.or_else(|error| hooks::report((error, callback)));
            ended = ended.and(reported.map_err(|(error, _)| error));
        }
        ended
    }

    /// Let the objects go, once the replays of the exec have passed.
    ///
    /// An object may refer to the graph. Only when the graph is about to let its exec go may the
    /// objects leave the sight of the garbage collector.
    pub(crate) fn release(&self, ready: Option<&ReadyExec>) {
        let objects = self.objects.take();
        if let Some(ready) = ready {
            for object in objects {
                ready.exec.retain(object as cg_core::Retained);
            }
        }
    }

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let owned = [self.callbacks.hooks(), self.objects.hooks()].concat();
        owned.iter().try_for_each(|object| visit.call(&**object))
    }

    /// Let the callbacks go; none is called.
    pub(crate) fn clear(&self) {
        drop(self.callbacks.take());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
