//! `HeldInputs`: the inputs of a call, and who holds outputs of the path.

use cg_core::tree::{Holders, Input, NodeId, OutputId};
use pyo3::prelude::*;
use smallvec::SmallVec;

use super::node::TreeNode;
use crate::tensors::TensorReader;

/// The inputs of a call; none where one was let go of.
pub(super) type Items<'py> = SmallVec<[Option<Bound<'py, PyAny>>; 16]>;

/// The inputs of a call, which the call owns.
pub(super) struct HeldInputs<'a, 'py> {
    py: Python<'py>,
    nodes: &'a [Py<TreeNode>],
    pub(super) items: Items<'py>,
    /// An input could not be taken back.
    pub(super) failed: Option<PyErr>,
}

impl<'a, 'py> HeldInputs<'a, 'py> {
    pub(super) fn new(py: Python<'py>, nodes: &'a [Py<TreeNode>], items: Items<'py>) -> Self {
        Self {
            py,
            nodes,
            items,
            failed: None,
        }
    }

    fn node(&self, id: NodeId) -> Option<&'a TreeNode> {
        self.nodes.get(id.0 as usize).map(Py::get)
    }
}

impl Holders for HeldInputs<'_, '_> {
    #[inline]
    fn is_alive(&self, output: OutputId) -> bool {
        let node = self.node(output.node);
        node.is_some_and(|node| node.is_alive(self.py, output.index as usize))
    }

    fn release(&mut self, node: NodeId) {
        for (place, _) in self.node(node).map_or(&[][..], TreeNode::stand_ins) {
            self.items[*place] = None;
        }
    }

    fn take_back(&mut self, node: NodeId) {
        for (place, make) in self.node(node).map_or(&[][..], TreeNode::stand_ins) {
            match make.bind(self.py).call0() {
                Ok(tensor) => self.items[*place] = Some(tensor),
                Err(error) => self.failed = Some(error),
            }
        }
    }
}

/// Where each input is.
#[inline]
pub(super) fn locations<'py>(
    reader: &TensorReader,
    items: impl Iterator<Item = &'py Bound<'py, PyAny>>,
) -> PyResult<SmallVec<[Input; 16]>> {
    items
        .map(|item| {
            if !reader.is_tensor(item) {
                return Ok(Input::default());
            }
            let (address, memory) = reader.location(item)?;
            Ok(Input { address, memory })
        })
        .collect()
}
