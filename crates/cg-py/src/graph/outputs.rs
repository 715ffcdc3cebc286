//! `Outputs`: memory of a template that replays copy to where a call wants it.

use cg_core::Destination;
use pyo3::prelude::*;

use crate::detach::detached;
use crate::device::Template;
use crate::error::state;
use crate::raw;

/// Last nodes of a template that copy its memory to where each replay says.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Outputs {
    core: cg_core::Outputs,
}

/// Destinations of the results of a replay; none where it copies none.
pub(crate) type To<'a> = Option<&'a [Destination]>;

/// The same with the outputs of the graph.
pub(crate) type Sent<'a> = Option<(&'a cg_core::Outputs, &'a [Destination])>;

#[pymethods]
impl Outputs {
    /// Add nodes for these pieces of memory, each an address and its bytes, which the caller keeps alive
    /// as long as the template and its execs. They come after all that the template has now.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn new(py: Python<'_>, template: &Template, storages: Vec<(u64, u64)>) -> PyResult<Self> {
        let device = template.core.device();
        let memory = storages
            .iter()
            .map(|(at, bytes)| raw::memory(device, *at, *bytes));
        let memory: Vec<_> = memory.collect();
        let core = detached(py, || cg_core::Outputs::add(&template.core, &memory))?;
        Ok(Self { core })
    }

    /// Return how many pieces there are.
    fn __len__(&self) -> usize {
        self.core.len()
    }
}

impl Outputs {
    pub(crate) fn core(&self) -> &cg_core::Outputs {
        &self.core
    }
}

/// Return the outputs of a graph and where they go, if they go anywhere.
#[inline]
pub(crate) fn sent<'a>(outputs: Option<&'a Py<Outputs>>, to: To<'a>) -> PyResult<Sent<'a>> {
    match (outputs, to) {
        (_, None) => Ok(None),
        (Some(outputs), Some(to)) => Ok(Some((outputs.get().core(), to))),
        (None, Some(_)) => Err(state("the graph was captured without results to copy")),
    }
}

/// Return what Python gives for destinations: an address and its bytes for each.
pub(crate) fn destinations(given: &[(u64, u64)]) -> Vec<Destination> {
    let destination = |(address, bytes): &(u64, u64)| Destination {
        address: cg_core::Address(*address),
        bytes: *bytes,
    };
    given.iter().map(destination).collect()
}
