//! What it takes to add nodes again.

#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use super::{OwnedGraph, OwnedModule};
use crate::driver::handle::{FunctionHandle, NodeHandle};
use crate::driver::spec::{FunctionAttribute, LaunchAttribute, WorkSpec};
use crate::error::Result;

impl OwnedGraph {
    /// Return the image that the kernel of one of its kernel nodes comes from; the caller has checked the node.
    pub(crate) fn image(&self, node: NodeHandle) -> Result<Option<Arc<[u8]>>> {
        // SAFETY: the graph is live as long as `self`, and `node` is one of it.
        unsafe { self.driver.node_image(node) }
    }

    /// Return the attributes of the kernel of one of its nodes.
    pub(crate) fn function_attributes(
        &self,
        function: FunctionHandle,
    ) -> Result<Vec<FunctionAttribute>> {
        // SAFETY: the graph is live as long as `self`, and so are the kernels that its nodes name.
        unsafe { self.driver.function_attributes(function) }
    }

    /// Return the work of one of its nodes, if it may be added again; the caller has checked the node.
    pub(crate) fn work(&self, node: NodeHandle) -> Result<Option<WorkSpec>> {
        // SAFETY: the graph is live as long as `self`, and `node` is one of it.
        unsafe { self.driver.node_work(node) }
    }

    /// Return the launch attributes of one of its nodes; the caller has checked the node.
    pub(crate) fn attributes(&self, node: NodeHandle) -> Result<Vec<LaunchAttribute>> {
        // SAFETY: the graph is live as long as `self`, and `node` is one of it.
        unsafe { self.driver.node_attributes(node) }
    }

    /// Set a launch attribute of one of its kernel nodes; the caller has checked the node.
    pub(crate) fn set_attribute(
        &self,
        node: NodeHandle,
        attribute: &LaunchAttribute,
    ) -> Result<()> {
        // SAFETY: the graph is live as long as `self`, and `node` is one of it.
        unsafe { self.driver.node_set_attribute(node, attribute) }
    }
}

impl OwnedModule {
    /// Return the attributes of one of its kernels.
    pub(crate) fn attributes(&self, function: FunctionHandle) -> Result<Vec<FunctionAttribute>> {
        // SAFETY: the module is loaded as long as `self`, and the caller has the kernel of it.
        unsafe { self.driver.function_attributes(function) }
    }

    /// Set an attribute of one of its kernels.
    pub(crate) fn set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
    ) -> Result<()> {
        // SAFETY: as for `attributes`.
        unsafe { self.driver.function_set_attribute(function, attribute) }
    }
}
