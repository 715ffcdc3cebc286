//! What can be asked of graphs and execs, beyond what their owners need.

#![expect(unsafe_code, reason = "calls the driver")]

use super::{OwnedExec, OwnedGraph};
use crate::driver::handle::NodeHandle;
use crate::driver::spec::NodeIds;
use crate::error::Result;

impl OwnedGraph {
    /// By which number tools know it.
    pub(crate) fn id(&self) -> Result<Option<u32>> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.graph_id(self.handle) }
    }

    /// What one of its kernel nodes hands the kernel; the caller has checked the node.
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
