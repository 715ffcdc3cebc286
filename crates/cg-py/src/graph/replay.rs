//! The hot path: current stream, random step, launch.

use std::sync::Arc;

use cg_core::Transfer;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::outputs::{Outputs, Sent, To, sent};
use super::replay_inputs::{ReplayInputs, ReplayTensors};
use crate::detach::detached;
use crate::device::{CurrentStream, Sim, Stream};
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
    /// The simulator whose replays are driven to their end; none on a GPU.
    pub(crate) drive: Option<Py<Sim>>,
}

impl ReadyExec {
    /// Show the garbage collector what this owns alone.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.check)?;
        visit.call(&self.random_step)?;
        visit.call(&self.drive)
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
        if let CurrentStream::Object(current) = &*self.current {
            return self.replay_on_object(py, current, sent);
        }
        let handle = match handle {
            Some(handle) => handle,
            None => self.current.handle(py)?.expect("it is no object"),
        };
        if let Some(fed) = &self.fed {
            let step = self.random_step.as_ref();
            return fed.replay(py, &self.exec, handle, given, sent, step);
        }
        if let Some(step) = &self.random_step {
            step.call0(py)?;
        }
        detached(py, || self.launch(sent, handle))
    }

    fn launch(&self, sent: Sent<'_>, handle: u64) -> cg_core::Result<()> {
        let delivery = sent
            .map(|(outputs, to)| raw::deliver(outputs, to))
            .transpose()?;
        self.exec.replay_with_on(
            Transfer::new(None, delivery.as_ref()),
            |last| last.handle().0 == handle,
            || raw::stream(self.exec.device(), handle),
        )
    }

    fn replay_on_object(
        &self,
        py: Python<'_>,
        current: &Py<PyAny>,
        sent: Sent<'_>,
    ) -> PyResult<()> {
        let stream: Py<Stream> = current.call0(py)?.extract(py)?;
        let stream = &stream.get().core;
        let captures = detached(py, || {
            let captures = stream.is_capturing()?;
            let delivery = sent
                .map(|(outputs, to)| raw::deliver(outputs, to))
                .transpose()?;
            let transfer = Transfer::new(None, delivery.as_ref());
            self.exec.replay_with(transfer, stream)?;
            Ok(captures)
        })?;
        let Some(sim) = self.drive.as_ref().filter(|_| !captures) else {
            return Ok(());
        };
        let finished = detached(py, || stream.synchronize());
        sim.get().raise_failure()?;
        finished
    }
}
