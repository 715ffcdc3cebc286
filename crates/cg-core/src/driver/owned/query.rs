//! Questions to graphs and execs, beyond those that their owners need.

#![expect(unsafe_code, reason = "calls the driver")]

use super::{OwnedExec, OwnedGraph};
use crate::driver::handle::NodeHandle;
use crate::driver::spec::{EdgeSpec, NodeIds};
use crate::error::Result;

impl OwnedGraph {
    /// Return the copy of a node in a copy of its graph; the caller has checked the node.
    pub(crate) fn find_in(&self, copy: &Self, node: NodeHandle) -> Result<NodeHandle> {
        // SAFETY: both graphs are live as long as their owners, and `node` is one of this graph.
        unsafe { self.driver.node_find_in_clone(node, copy.handle) }
    }

    /// Return its nodes that come after no other.
    pub(crate) fn roots(&self) -> Result<Vec<NodeHandle>> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.graph_roots(self.handle) }
    }

    /// Return its edges.
    pub(crate) fn edges(&self) -> Result<Vec<EdgeSpec<NodeHandle>>> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.graph_edges(self.handle) }
    }

    /// Return how many nodes it has.
    pub(crate) fn count(&self) -> Result<usize> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.graph_node_count(self.handle) }
    }

    /// Return what one of its nodes comes directly after; the caller has checked the node.
    pub(crate) fn before(&self, node: NodeHandle) -> Result<Vec<NodeHandle>> {
        // SAFETY: the graph is live as long as `self`, and `node` is one of it.
        unsafe { self.driver.node_dependencies(node) }
    }

    /// By which number tools know it.
    pub(crate) fn id(&self) -> Result<Option<u32>> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.graph_id(self.handle) }
    }

    /// Return what one of its kernel nodes hands the kernel; the caller has checked the node.
    pub(crate) fn words(&self, node: NodeHandle) -> Result<Vec<u64>> {
        // SAFETY: `Template` checks that the node is one of this live graph.
        unsafe { self.driver.node_words(node) }
    }

    /// By which numbers tools know one of its nodes; the caller has checked the node.
    pub(crate) fn node_ids(&self, node: NodeHandle) -> Result<Option<NodeIds>> {
        // SAFETY: `Template` checks that the node is one of this live graph.
        unsafe { self.driver.node_ids(node) }
    }
}

impl OwnedExec {
    /// By which number tools know it.
    pub(crate) fn id(&self) -> Result<Option<u32>> {
        // SAFETY: the exec is live as long as `self`.
        unsafe { self.driver.exec_id(self.handle) }
    }
}
