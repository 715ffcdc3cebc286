//! [`Node`]: a recorded call, and when it can be replayed.

use std::collections::HashMap;

use super::FunctionId;

/// The number of a node of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub u32);

/// A piece of memory that a node has made for outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OutputId {
    /// The node.
    pub node: NodeId,
    /// Its number among the pieces of the node.
    pub index: u32,
}

/// Where an input of a call is; 0 for what has no memory of the device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Input {
    /// The address of its first element.
    pub address: u64,
    /// The address at which its memory begins.
    pub memory: u64,
}

/// A recorded call.
#[derive(Debug)]
pub struct Node {
    pub(super) function: FunctionId,
    pub(super) parent: Option<NodeId>,
    /// How often its function stands on the path to it, with itself.
    pub(super) repeats: u32,
    /// The inputs that lay in outputs of the path, and their addresses.
    pub(super) managed: Vec<(u32, u64)>,
    /// The inputs that stay in place, and their addresses.
    pub(super) statics: Vec<(u32, u64)>,
    /// The outputs of the path that somebody held after its parent, but not any more before it.
    pub(super) dead_before: Vec<OutputId>,
    /// The outputs of the path that went with its inputs.
    pub(super) dead_after: Vec<OutputId>,
    /// The outputs of the path that may be held after it, its own among them.
    pub(super) live_after: Vec<OutputId>,
    /// Where each piece of its outputs begins.
    pub(super) outputs: Vec<u64>,
    pub(super) children: HashMap<FunctionId, Vec<NodeId>>,
    /// The recordings of each function behind it, as its inputs were elsewhere.
    pub(super) moves: HashMap<FunctionId, Moves>,
}

impl Node {
    /// The function.
    #[must_use]
    pub fn function(&self) -> FunctionId {
        self.function
    }

    /// The node before it; none for a root.
    #[must_use]
    pub fn parent(&self) -> Option<NodeId> {
        self.parent
    }

    /// The outputs of the path that may be held after it, its own among them.
    #[must_use]
    pub fn live_after(&self) -> &[OutputId] {
        &self.live_after
    }

    /// Return whether a call was recorded behind it.
    #[must_use]
    pub fn has_children(&self) -> bool {
        !self.children.is_empty()
    }

    /// Return whether the inputs that it does not copy are where they were.
    pub(super) fn is_at(&self, inputs: &[Input]) -> bool {
        let mut places = self.managed.iter().chain(&self.statics);
        places.all(|(place, address)| {
            let input = inputs.get(*place as usize);
            input.is_some_and(|input| input.address == *address)
        })
    }
}

/// So many replays pay for a recording.
pub(super) const ENOUGH_REPLAYS: u32 = 8;

/// Recordings of a function, one after another, each because its inputs were elsewhere.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Moves {
    /// How many there were without enough replays between.
    pub(super) recordings: u32,
    /// The replays since the last one.
    replays: u32,
}

impl Moves {
    /// Note a replay.
    #[inline]
    pub(super) fn replayed(&mut self) {
        self.replays = self.replays.saturating_add(1);
    }

    /// Note that a recording is to follow; return false if there were as many as there may be.
    pub(super) fn may_record(&mut self, limit: Option<u32>) -> bool {
        let before = if self.replays < ENOUGH_REPLAYS {
            self.recordings
        } else {
            0
        };
        let may = limit.is_none_or(|limit| before < limit);
        *self = Self {
            recordings: before + u32::from(may),
            replays: 0,
        };
        may
    }
}
