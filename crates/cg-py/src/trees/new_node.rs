//! `NewNode`: a call that becomes a node, while Python records it.

use std::sync::{Mutex, MutexGuard, PoisonError};

use cg_core::tree::Open;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::node::TreeNode;
use super::{Inner, Nodes, Tree};
use crate::error::state;

/// An output of a node: the node, its number among the node's pieces of memory, and where that begins.
pub(super) type HeldOutput = (Py<TreeNode>, usize, u64);

/// The outputs of a path that is over that somebody holds, and whether they own their blocks.
pub(super) type EndedPath = (Vec<HeldOutput>, bool);

/// A call that becomes a node.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct NewNode {
    /// The places of the inputs that lie in outputs of the path.
    #[pyo3(get)]
    managed: Vec<u32>,
    /// The nodes of the path, the root first.
    #[pyo3(get)]
    path: Vec<Py<TreeNode>>,
    /// Outputs of the path that somebody holds.
    #[pyo3(get)]
    live: Vec<HeldOutput>,
    /// Outputs of the path that somebody may have held after its last node, and nobody does now.
    #[pyo3(get)]
    dead: Vec<HeldOutput>,
    /// The outputs of the path own their blocks.
    #[pyo3(get)]
    owns: bool,
    /// The path that this call has ended: its outputs that somebody holds, and whether they own their blocks.
    #[pyo3(get)]
    ended: Option<EndedPath>,
    /// Replays are to be able to copy results to new memory.
    #[pyo3(get)]
    is_fresh: bool,
    tree: Py<Tree>,
    open: Mutex<Option<Open>>,
}

#[pymethods]
impl NewNode {
    /// The places of the inputs that stay where they are.
    #[getter]
    fn statics(&self) -> Vec<u32> {
        let open = self.open();
        open.as_ref()
            .map_or_else(Vec::new, |open| places(open.statics()))
    }

    /// Note that the outputs of the path own their blocks from here on.
    fn own_path(&self, py: Python<'_>) {
        self.tree.get().with(py, |inner| inner.core.own_path());
    }

    /// The static inputs that were elsewhere in the graph used last in this place: place, address there, address now.
    #[getter]
    fn moved(&self, py: Python<'_>) -> Vec<(u32, u64, u64)> {
        let with = |inner: &mut Inner| self.open().as_ref().map(|open| inner.core.moved(open));
        self.tree.get().with(py, with).flatten().unwrap_or_default()
    }

    /// Take static inputs for such that may be anywhere: those at these places, and those that have moved too often;
    /// the places of all that have. The memory of those in `gone` at the recording before is gone.
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn copy(&self, py: Python<'_>, places: Vec<u32>, gone: Vec<u32>) -> Vec<u32> {
        let with = |inner: &mut Inner| {
            let mut open = self.open();
            let open = open.as_mut()?;
            open.copy(&places);
            inner.core.let_move(open, &gone);
            Some(inner.core.moving(open.function()).to_vec())
        };
        self.tree.get().with(py, with).flatten().unwrap_or_default()
    }

    /// Add the node, as the end of the path; `addresses` are those of its pieces of memory.
    fn close(&self, node: Bound<'_, TreeNode>, addresses: Vec<u64>) -> PyResult<()> {
        let open = self.open().take();
        let open = open.ok_or_else(|| state("the call is a node already"))?;
        self.tree.get().close(open, node, addresses);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)
    }
}

impl NewNode {
    fn open(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new(
        py: Python<'_>,
        tree: Py<Tree>,
        open: Open,
        ended: Option<EndedPath>,
        is_fresh: bool,
        (core, nodes): (&cg_core::tree::Tree, &Nodes),
    ) -> Self {
        let path = core.path();
        let may_be_live = path
            .last()
            .map_or(&[][..], |id| core.node(*id).live_after());
        let dead = may_be_live.iter().filter(|one| !open.live().contains(one));
        let held = |found: &mut dyn Iterator<Item = _>| nodes.held(py, core, found);
        Self {
            managed: places(open.managed()),
            path: path.iter().map(|id| nodes.get(py, *id)).collect(),
            live: held(&mut open.live().iter().copied()),
            dead: held(&mut dead.copied()),
            owns: core.path_owns(),
            ended,
            is_fresh,
            tree,
            open: Mutex::new(Some(open)),
        }
    }
}

fn places(found: &[(u32, u64)]) -> Vec<u32> {
    found.iter().map(|(place, _)| *place).collect()
}
