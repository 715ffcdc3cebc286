//! `Template`: what Python sees of a graph that can change.

use std::collections::HashMap;
use std::sync::Arc;

use cg_core::{Address, Condition, Draws, Flags, LoopPlan, Node, Piece, Stage};
use pyo3::prelude::*;

use super::Device;
use super::pool::Pool;
use super::sim::Sim;
use crate::detach::detached;
use crate::raw;

/// An address that a node names, and the allocation that it lies in.
#[pyclass(frozen, get_all, module = "cgraph._core")]
pub(crate) struct NodeAddress {
    /// The raw node.
    node: u64,
    /// The name of its kernel; `memcpy` or `memset` for such a node.
    name: Option<String>,
    address: u64,
    /// Start of the allocation.
    base: u64,
    /// Bytes of the allocation.
    bytes: u64,
}

/// A graph that can change and cannot run.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Template {
    pub(crate) core: Arc<cg_core::Template>,
}

impl Template {
    pub(crate) fn new(core: cg_core::Template) -> Self {
        Self {
            core: Arc::new(core),
        }
    }
}

#[pymethods]
impl Template {
    /// Return a graph of somebody else, who is kept as long as the result.
    #[staticmethod]
    fn from_raw(device: &Device, handle: u64, owner: Py<PyAny>) -> Self {
        Self::new(raw::template(&device.core, handle, owner))
    }

    /// Return a graph that makes a step again and again, and publishes what each has made.
    ///
    /// `step` are its stages: a graph, the flags without which it does not run, and the addresses of the offsets that
    /// it moves, and how far. Flags are the address of the first, how many there are, and the bytes of each. `steps`
    /// are the most that a replay makes, and those of an iteration. `until` are flags that end it. `pieces` are
    /// published, as addresses and bytes. `host` are the addresses of the words and of the ring, and what has both.
    #[staticmethod]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn looped(
        py: Python<'_>,
        step: Vec<StageGiven<'_>>,
        steps: (u32, u32),
        until: Option<(u64, u32, u32)>,
        pieces: Vec<(u64, u64)>,
        host: (u64, u64, Py<PyAny>),
    ) -> PyResult<Self> {
        let (words, ring, owner) = host;
        let plan = LoopPlan {
            most_steps: steps.0,
            unroll: steps.1,
            until: until.map(flags),
            pieces: pieces
                .into_iter()
                .map(|(address, bytes)| Piece {
                    address: Address(address),
                    bytes,
                })
                .collect(),
            host: Address(words),
            ring: Address(ring),
        };
        let step: Vec<Stage<'_>> = step
            .iter()
            .map(|(template, only_if, draws)| Stage {
                template: &template.core,
                only_if: only_if.map(flags),
                draws: draws
                    .iter()
                    .map(|(offset, increment)| Draws {
                        offset: Address(*offset),
                        increment: *increment,
                    })
                    .collect(),
            })
            .collect();
        let core = detached(py, || raw::looped_template(&step, &plan, owner))?;
        Ok(Self::new(core))
    }

    /// Return the raw graph.
    #[getter]
    fn handle(&self) -> u64 {
        self.core.handle().0
    }

    /// Return the number by which tools know the graph; none from a driver older than CUDA 13.1.
    #[getter]
    fn graph_id(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        detached(py, || self.core.graph_id())
    }

    /// Return how many nodes it has; those of child graphs are not counted.
    fn node_count(&self, py: Python<'_>) -> PyResult<usize> {
        detached(py, || self.core.node_count())
    }

    /// Return how many nodes it has, those of child graphs included.
    fn count(&self, py: Python<'_>) -> PyResult<usize> {
        Ok(detached(py, || self.core.data())?.count())
    }

    /// Return the addresses that its nodes name.
    fn addresses(&self, py: Python<'_>) -> PyResult<Vec<NodeAddress>> {
        let found = detached(py, || self.core.addresses())?;
        let named = found.into_iter().map(|one| NodeAddress {
            node: one.node.0,
            name: one.name,
            address: one.address.0,
            base: one.base.0,
            bytes: one.bytes,
        });
        Ok(named.collect())
    }

    /// Nodes and edges as JSON text.
    fn json(&self, py: Python<'_>) -> PyResult<String> {
        Ok(detached(py, || self.core.data())?.json())
    }

    /// Nodes and edges as a Graphviz graph.
    fn dot(&self, py: Python<'_>, verbose: bool) -> PyResult<String> {
        Ok(detached(py, || self.core.data())?.dot(verbose))
    }

    /// Add a node that runs a copy of another template, after no other node.
    fn add_child(&self, py: Python<'_>, child: &Self) -> PyResult<()> {
        detached(py, || self.core.add_child(&child.core, &[]).map(|_| ()))
    }

    /// Return a copy, with nodes of its own.
    fn copy(&self, py: Python<'_>) -> PyResult<Self> {
        Ok(Self::new(detached(py, || self.core.try_clone())?))
    }

    /// Return a copy, and its raw nodes by those that they are copies of.
    fn copy_mapped(&self, py: Python<'_>) -> PyResult<(Self, HashMap<u64, u64>)> {
        let (core, copies) = detached(py, || self.core.try_clone_mapped())?;
        let raw = |(node, copied): (Node, Node)| (node.handle().0, copied.handle().0);
        Ok((Self::new(core), copies.into_iter().map(raw).collect()))
    }

    /// Remove all nodes.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        detached(py, || self.core.clear())
    }

    /// Keep an object alive as long as the template, its execs and their replays in flight.
    fn retain(&self, object: Py<PyAny>) {
        self.core.retain(Arc::new(object));
    }

    /// Refuse replays while one of these pools is paused, if a node names memory of that.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn require_named(&self, py: Python<'_>, pools: Vec<Py<Pool>>) -> PyResult<()> {
        let cores: Vec<&cg_core::Pool> = pools.iter().map(|pool| &pool.get().core).collect();
        let named = detached(py, || self.core.named_pools(&cores))?;
        for (pool, _) in pools.iter().zip(named).filter(|(_, is_named)| *is_named) {
            self.require_pool(pool.get());
        }
        Ok(())
    }

    /// Refuse replays while a pool is paused. Its segments may go.
    fn require_pool(&self, pool: &Pool) {
        self.core.retain(pool.core.required());
    }

    /// Keep a pool's segments alive as long as the template and its execs.
    fn retain_pool(&self, pool: &Pool) {
        self.core.retain(pool.core.retained());
    }

    /// Add a conditional node of the kind `if` of a simulator, that chooses from copies of the bodies.
    fn add_conditional(
        &self,
        py: Python<'_>,
        simulator: &Sim,
        bodies: Vec<PyRef<'_, Self>>,
    ) -> PyResult<()> {
        let bodies: Vec<_> = bodies.into_iter().map(|b| b.core.handle()).collect();
        let graph = self.core.handle();
        detached(py, || {
            let added = simulator
                .core
                .add_conditional(graph, &[], Condition::If, &bodies);
            added.map(|_| ())
        })
    }
}

/// A stage of a step, as [`Template::looped`] gets it.
type StageGiven<'py> = (
    PyRef<'py, Template>,
    Option<(u64, u32, u32)>,
    Vec<(u64, u64)>,
);

fn flags((address, elements, element_bytes): (u64, u32, u32)) -> Flags {
    Flags {
        address: Address(address),
        elements,
        element_bytes,
    }
}
