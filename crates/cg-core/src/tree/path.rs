//! [`Path`]: the calls since a step began.

use super::node::NodeId;

/// How the nodes of a path came to be there.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum PathState {
    /// The last one was recorded: outputs of the path own their blocks of the pool.
    Recorded,
    /// All were replayed.
    #[default]
    Replayed,
}

#[derive(Debug, Default)]
pub(super) struct Path {
    /// At least one, the root first.
    pub(super) nodes: Vec<NodeId>,
    pub(super) state: PathState,
}

impl Path {
    pub(super) fn current(&self) -> NodeId {
        *self.nodes.last().expect("a path has nodes")
    }

    /// Return whether outputs own their blocks of the pool.
    pub(super) fn owns(&self) -> bool {
        self.state == PathState::Recorded
    }
}
