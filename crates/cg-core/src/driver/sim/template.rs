//! Simulated graphs as data: nodes, copies, and what belongs to what.

use std::collections::{BTreeMap, HashMap};

use super::work::Work;
use super::{Sim, State};
use crate::code::Call;
use crate::driver::handle::{ConditionHandle, EventHandle, GraphHandle, NodeHandle};
use crate::driver::spec::Condition;
use crate::error::Result;

#[derive(Clone)]
pub(super) enum NodeWork {
    Work(Work),
    Record(EventHandle),
    Wait(EventHandle),
    Empty,
    Child(GraphHandle),
    /// The rule, its condition and what it chooses from. One without a condition is there to be looked at; see
    /// [`Sim::add_conditional`].
    Conditional(Condition, Option<ConditionHandle>, Vec<GraphHandle>),
}

impl NodeWork {
    /// Return the graphs that belong to the node.
    pub(super) fn bodies(&self) -> &[GraphHandle] {
        match self {
            Self::Child(child) => std::slice::from_ref(child),
            Self::Conditional(_, _, bodies) => bodies,
            _ => &[],
        }
    }
}

impl From<Work> for NodeWork {
    fn from(work: Work) -> Self {
        Self::Work(work)
    }
}

#[derive(Clone)]
pub(super) struct Node {
    pub(super) work: NodeWork,
    pub(super) before: Vec<NodeHandle>,
    /// The launch attributes that were set; they change nothing here.
    pub(super) attributes: BTreeMap<u32, [u8; 64]>,
}

#[derive(Default)]
pub(super) struct Graph {
    /// In the order of adding.
    pub(super) nodes: BTreeMap<NodeHandle, Node>,
    /// The graph whose child this is.
    pub(super) parent: Option<GraphHandle>,
    /// In a copy: its nodes by those that they are copies of.
    pub(super) copies: HashMap<NodeHandle, NodeHandle>,
}

impl Graph {
    pub(super) fn before(&self, node: NodeHandle) -> &[NodeHandle] {
        &self.nodes[&node].before
    }
}

pub(super) fn insert(graph: &mut Graph, node: NodeHandle, work: NodeWork, after: &[NodeHandle]) {
    let new = Node {
        work,
        before: after.to_vec(),
        attributes: BTreeMap::new(),
    };
    graph.nodes.insert(node, new);
}

/// Return a new empty graph.
pub(super) fn create(state: &mut State) -> GraphHandle {
    let handle = state.fresh();
    state.graphs.insert(handle, Graph::default());
    GraphHandle(handle)
}

impl Sim {
    /// Add a conditional node that chooses from copies of `bodies`, as code that is not ours may
    /// have captured one. It is there to be looked at: a replay of it panics.
    ///
    /// # Errors
    /// The faults that were asked for.
    pub fn add_conditional(
        &self,
        handle: GraphHandle,
        after: &[NodeHandle],
        condition: Condition,
        bodies: &[GraphHandle],
    ) -> Result<NodeHandle> {
        let mut state = self.enter(Call::GraphAddNode)?;
        let bodies = bodies
            .iter()
            .map(|body| copy(&mut state, *body, Some(handle)));
        let work = NodeWork::Conditional(condition, None, bodies.collect());
        let node = NodeHandle(state.fresh());
        insert(get(&mut state, handle), node, work, after);
        Ok(node)
    }

    pub(super) fn tells_ids(&self) -> bool {
        self.inner.version >= TELLS_IDS
    }
}

/// The first driver that tells ids.
pub(super) const TELLS_IDS: u32 = 13_010;
/// The first driver that tells what a conditional node chooses from.
pub(super) const TELLS_BODIES: u32 = 13_020;

/// Return the number of an object; handles are multiples of 16.
pub(super) fn id(handle: u64) -> u32 {
    u32::try_from(handle >> 4).expect("fewer handles are given out")
}

pub(super) fn get(state: &mut State, handle: GraphHandle) -> &mut Graph {
    match state.graphs.get_mut(&handle.0) {
        Some(graph) => graph,
        None => panic!("{handle:?} is not live"),
    }
}

pub(super) fn owner_of(state: &State, node: NodeHandle) -> GraphHandle {
    let found = state
        .graphs
        .iter()
        .find(|(_, graph)| graph.nodes.contains_key(&node));
    match found {
        Some((handle, _)) => GraphHandle(*handle),
        None => panic!("{node:?} is no node of a live graph"),
    }
}

pub(super) fn destroy(state: &mut State, handle: GraphHandle) {
    let Some(removed) = state.graphs.remove(&handle.0) else {
        panic!("graph_destroy of {handle:?}, which is not live")
    };
    for node in removed.nodes.values() {
        for body in node.work.bodies() {
            destroy(state, *body);
        }
    }
    state.trash.push(Box::new(removed));
}

/// Return a copy of a graph with new node handles, children copied too.
pub(super) fn copy(
    state: &mut State,
    original: GraphHandle,
    parent: Option<GraphHandle>,
) -> GraphHandle {
    let handle = GraphHandle(state.fresh());
    let nodes: Vec<(NodeHandle, Node)> = get(state, original)
        .nodes
        .iter()
        .map(|(node, found)| (*node, found.clone()))
        .collect();
    let renamed: HashMap<NodeHandle, NodeHandle> = nodes
        .iter()
        .map(|(node, _)| (*node, NodeHandle(state.fresh())))
        .collect();
    let mut copied = Graph {
        parent,
        ..Graph::default()
    };
    for (node, found) in nodes {
        let work = match found.work {
            NodeWork::Child(child) => NodeWork::Child(copy(state, child, Some(handle))),
            NodeWork::Conditional(rule, condition, bodies) => {
                let bodies = bodies
                    .into_iter()
                    .map(|body| copy(state, body, Some(handle)));
                NodeWork::Conditional(rule, condition, bodies.collect())
            }
            other => other,
        };
        let copy = Node {
            work,
            before: found.before.iter().map(|one| renamed[one]).collect(),
            attributes: found.attributes,
        };
        copied.nodes.insert(renamed[&node], copy);
    }
    copied.copies = renamed;
    state.graphs.insert(handle.0, copied);
    handle
}
