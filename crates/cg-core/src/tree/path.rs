//! [`Path`]: the calls since a step began.

use std::collections::HashMap;

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
    /// How many forward passes wait for their backward passes, by pair.
    waiting: HashMap<Option<u32>, u32>,
}

impl Path {
    pub(super) fn current(&self) -> NodeId {
        *self.nodes.last().expect("a path has nodes")
    }

    /// Return whether outputs own their blocks of the pool.
    pub(super) fn owns(&self) -> bool {
        self.state == PathState::Recorded
    }

    pub(super) fn is_waiting(&self) -> bool {
        self.waiting.values().any(|count| *count > 0)
    }

    /// Note a forward pass, of a pair if this is known.
    pub(super) fn wait(&mut self, pair: Option<u32>) {
        let count = self.waiting.entry(pair).or_default();
        *count = if pair.is_some() { *count + 1 } else { 1 };
    }

    /// Note a backward pass: that of a pair, or of nobody knows which.
    pub(super) fn end_waiting(&mut self, pair: Option<u32>) {
        if pair.is_none() {
            self.waiting.clear();
        } else if let Some(count) = self.waiting.get_mut(&pair) {
            *count = count.saturating_sub(1);
        }
    }
}
