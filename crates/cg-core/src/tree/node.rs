//! [`Node`]: a recorded call, and when it can be replayed.

use std::collections::HashMap;

use super::FunctionId;
use super::recording::Moves;

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
