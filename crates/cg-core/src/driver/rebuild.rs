//! [`RebuildCalls`]: what it takes to add a node again, in another graph or process.

use std::path::Path;
use std::sync::Arc;

use super::handle::{Address, FunctionHandle, NodeHandle};
use super::spec::{FunctionAttribute, LaunchAttribute, WorkSpec};
use crate::error::Result;

/// The work of nodes as it may be added again, and attributes of kernels and of their launches.
#[expect(
    unsafe_code,
    reason = "a trait over raw handles: the caller vouches for them"
)]
pub trait RebuildCalls {
    /// From now on, keep what kernels are loaded from, in the whole process. `cupti` is the file of CUDA's library
    /// that tells.
    fn record_images(&self, cupti: &Path) -> Result<()>;

    /// Return the image that the kernel of a node comes from, if it was loaded since [`Self::record_images`].
    ///
    /// # Safety
    /// `node` is a kernel node of a live graph.
    unsafe fn node_image(&self, node: NodeHandle) -> Result<Option<Arc<[u8]>>>;

    /// Return whether memory that kernels reach is at an address: of a device, or pinned memory of the host.
    fn is_reached(&self, address: Address) -> Result<bool>;

    /// Return the work of a node, as far as it is all that the node does, but for attributes: a kernel, a memset of
    /// one row, a copy in one row. None for other nodes, and where the driver does not tell all.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn node_work(&self, node: NodeHandle) -> Result<Option<WorkSpec>>;

    /// Return the launch attributes of a kernel node that are not zero; none of another node.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn node_attributes(&self, node: NodeHandle) -> Result<Vec<LaunchAttribute>>;

    /// Set a launch attribute of a kernel node.
    ///
    /// # Safety
    /// `node` is a kernel node of a live graph.
    unsafe fn node_set_attribute(
        &self,
        node: NodeHandle,
        attribute: &LaunchAttribute,
    ) -> Result<()>;

    /// Return the attributes of a kernel that may be set.
    ///
    /// # Safety
    /// `function` is of a loaded module.
    unsafe fn function_attributes(
        &self,
        function: FunctionHandle,
    ) -> Result<Vec<FunctionAttribute>>;

    /// Set an attribute of a kernel, for all launches to come.
    ///
    /// # Safety
    /// `function` is of a loaded module.
    unsafe fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
    ) -> Result<()>;
}
