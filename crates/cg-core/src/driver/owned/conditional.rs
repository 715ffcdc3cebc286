//! Conditional nodes of a graph that has an owner.

#![expect(unsafe_code, reason = "calls the driver")]

use super::OwnedGraph;
use crate::driver::handle::{ConditionHandle, GraphHandle, NodeHandle};
use crate::driver::spec::Condition;
use crate::error::Result;

impl OwnedGraph {
    /// Create a condition for conditional nodes of the graph, and of those inside it.
    pub(crate) fn new_condition(&self, value: u32) -> Result<ConditionHandle> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.condition_create(self.handle, value) }
    }

    /// Add a node that runs a graph of its own; the caller has checked `after`, and gives a condition of this graph,
    /// or of the one around it, that no other node has.
    pub(crate) fn add_conditional(
        &self,
        after: &[NodeHandle],
        rule: Condition,
        condition: ConditionHandle,
    ) -> Result<(NodeHandle, GraphHandle)> {
        // SAFETY: the graph is live as long as `self`; callers promise the rest.
        unsafe {
            self.driver
                .graph_add_conditional(self.handle, after, rule, condition)
        }
    }
}
