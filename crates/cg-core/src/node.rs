//! [`Node`]: what templates and bodies name their nodes by.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::driver::handle::NodeHandle;
use crate::driver::spec::EdgeSpec;

/// A node of one template: a `Copy` id, valid in that template until it is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Node {
    pub(crate) template: u64,
    pub(crate) handle: NodeHandle,
}

impl Node {
    /// Return the raw node. It dies with its template, or when it is removed.
    #[must_use]
    pub fn handle(self) -> NodeHandle {
        self.handle
    }
}

/// "`to` after `from`".
pub type Edge = EdgeSpec<Node>;

/// Return a number for what has nodes, never used twice.
pub(crate) fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
