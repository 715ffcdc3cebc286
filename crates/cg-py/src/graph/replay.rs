//! The hot path: current stream, random step, launch.

use std::sync::Arc;

use cg_core::Transfer;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::outputs::{Outputs, Sent, To, sent};
use super::replay_inputs::{ReplayInputs, ReplayTensors};
use crate::detach::detached;
use crate::device::CurrentStream;
use crate::error::state;
use crate::raw;

/// An exec with all that a replay needs.
pub(crate) struct ReadyExec {
    pub(crate) exec: cg_core::Exec,
    pub(crate) current: Arc<CurrentStream>,
    /// Raises if memory that the graph reads is gone; none unless it was asked for.
    pub(crate) check: Option<Py<PyAny>>,
    /// Advances the random state; none where the capture consumed no randomness, or where `fed`
    /// does it.
    pub(crate) random_step: Option<Py<PyAny>>,
    /// Copies and stores that come first; none in most graphs.
    pub(crate) fed: Option<Arc<ReplayInputs>>,
    /// Copies that come last; none in most graphs.
    pub(crate) outputs: Option<Py<Outputs>>,
}

impl ReadyExec {
    /// Show the garbage collector what this owns alone.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.check)?;
        visit.call(&self.random_step)
    }

    /// Raise if memory that the graph reads is gone.
    #[inline]
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        match &self.check {
            Some(check) => check.call0(py).map(drop),
            None => Ok(()),
        }
    }

    /// Enqueue one replay on the current stream, with these tensors copied to the static inputs, and
    /// the results copied there. `handle` is that stream's, where the caller has it.
    #[inline]
    pub(crate) fn replay(
        &self,
        py: Python<'_>,
        given: ReplayTensors<'_, '_>,
        to: To<'_>,
        handle: Option<u64>,
    ) -> PyResult<()> {
        let sent = sent(self.outputs.as_ref(), to)?;
        if self.fed.is_none() && !given.is_nothing() {
            return Err(state("the graph was captured without static inputs"));
        }
        let handle = match handle {
            Some(handle) => handle,
            None => self.current.handle(py)?,
        };
        let CurrentStream::Simulated(sim) = &*self.current else {
            return self.enqueue(py, given, sent, handle);
        };
        if let Some(fed) = &self.fed {
            // Where a GPU would write to memory of torch's cache, this would to anybody's.
            fed.require_memory(py)?;
        }
        let moves_tensors = sent.is_some() || !given.is_nothing();
        let stream = detached(py, || self.current.stream(self.exec.device(), handle))?;
        sim.get().before_replay(py, &stream, moves_tensors)?;
        self.enqueue(py, given, sent, handle)?;
        sim.get().after_replay(py, &stream, moves_tensors)
    }

    #[inline]
    fn enqueue(
        &self,
        py: Python<'_>,
        given: ReplayTensors<'_, '_>,
        sent: Sent<'_>,
        handle: u64,
    ) -> PyResult<()> {
        let launch = |transfer: Transfer<'_>| {
            self.exec.replay_with_on(
                transfer,
                |last| last.handle().0 == handle,
                || self.current.stream(self.exec.device(), handle),
            )
        };
        if let Some(fed) = &self.fed {
            return fed.replay(py, given, sent, self.random_step.as_ref(), launch);
        }
        if let Some(step) = &self.random_step {
            step.call0(py)?;
        }
        detached(py, || {
            let delivery = sent.map(|(outputs, to)| raw::deliver(outputs, to));
            launch(Transfer::new(None, delivery.transpose()?.as_ref()))
        })
    }
}
