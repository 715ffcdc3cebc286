//! Simulated execs: a graph flattened into steps, and its replays.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use super::State;
use super::stream::Event;
use super::template::{Graph, NodeWork};
use super::work::Work;
use crate::driver::handle::{ExecHandle, GraphHandle, NodeHandle};

/// A node of an exec: children are flattened, their place taken by an empty node before and after.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) work: NodeWork,
    pub(super) before: Vec<usize>,
    pub(super) enabled: bool,
}

#[derive(Clone)]
pub(super) struct Exec {
    pub(super) steps: Arc<Vec<Step>>,
    pub(super) index: HashMap<NodeHandle, usize>,
    /// Shape and kinds, to compare with an update's.
    pub(super) shape: Vec<(u8, Vec<usize>)>,
}

/// One replay in a stream.
pub(super) struct Replay {
    pub(super) exec: ExecHandle,
    /// Its place among all replays.
    pub(super) number: u64,
    /// For each step that is an event node, the record that it makes or waits for.
    pub(super) records: Vec<u64>,
    pub(super) steps: Arc<Vec<Step>>,
    pub(super) status: Vec<Status>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Waiting,
    Running,
    Done,
}

impl Replay {
    /// Return a launch: events count as recorded from now on.
    pub(super) fn new(state: &mut State, exec: ExecHandle, steps: Arc<Vec<Step>>) -> Self {
        let record = |step: &Step| match &step.work {
            NodeWork::Record(event) => state.events.get_mut(&event.0).map(|event| {
                event.captured = None;
                event.recorded += 1;
                event.recorded
            }),
            NodeWork::Wait(event) => state.events.get(&event.0).map(|event| event.recorded),
            _ => None,
        };
        let records = steps
            .iter()
            .map(record)
            .map(Option::unwrap_or_default)
            .collect();
        let status = vec![Status::Waiting; steps.len()];
        Self {
            exec,
            number: state.fresh(),
            records,
            steps,
            status,
        }
    }

    pub(super) fn ready(&self) -> impl Iterator<Item = usize> {
        (0..self.steps.len()).filter(|&i| {
            self.status[i] == Status::Waiting
                && self.steps[i]
                    .before
                    .iter()
                    .all(|&b| self.status[b] == Status::Done)
        })
    }

    /// Mark the record that the step makes, if it is an event record, as reached.
    pub(super) fn reach(&self, index: usize, events: &mut BTreeMap<u64, Event>) {
        if let NodeWork::Record(event) = &self.steps[index].work
            && let Some(event) = events.get_mut(&event.0)
        {
            event.reached = event.reached.max(self.records[index]);
        }
    }

    pub(super) fn pending(&self) -> impl Iterator<Item = &Work> {
        let steps = self.steps.iter().zip(&self.status);
        steps.filter_map(|(step, status)| match &step.work {
            NodeWork::Work(work) if *status != Status::Done && step.enabled => Some(work),
            _ => None,
        })
    }
}

impl Exec {
    /// Flatten a graph; none if it has a cycle.
    pub(super) fn new(state: &State, graph: GraphHandle) -> Option<Self> {
        let mut exec = Self {
            steps: Arc::new(Vec::new()),
            index: HashMap::new(),
            shape: Vec::new(),
        };
        flatten(state, graph, None, &mut exec)?;
        Some(exec)
    }

    /// Return a node by the handle that its graph gave it.
    pub(super) fn step(&mut self, node: NodeHandle) -> Option<&mut Step> {
        let index = *self.index.get(&node)?;
        Arc::make_mut(&mut self.steps).get_mut(index)
    }
}

/// Nodes in an order in which each comes after those before it; none if there is a cycle.
fn ordered(graph: &Graph) -> Option<Vec<NodeHandle>> {
    let mut done: HashSet<NodeHandle> = HashSet::new();
    let mut order: Vec<NodeHandle> = Vec::new();
    let mut left: Vec<NodeHandle> = graph.nodes.keys().copied().collect();
    while !left.is_empty() {
        let count = left.len();
        left.retain(|node| {
            let ready = graph.nodes[node].before.iter().all(|b| done.contains(b));
            if ready {
                done.insert(*node);
                order.push(*node);
            }
            !ready
        });
        if left.len() == count {
            return None;
        }
    }
    Some(order)
}

/// Add a graph's nodes to an exec; `start` is what its first nodes come after.
fn flatten(
    state: &State,
    handle: GraphHandle,
    start: Option<usize>,
    into: &mut Exec,
) -> Option<Vec<usize>> {
    let graph = &state.graphs[&handle.0];
    let mut ends: HashMap<NodeHandle, Vec<usize>> = HashMap::new();
    for node in ordered(graph)? {
        let found = &graph.nodes[&node];
        let mut before: Vec<usize> = found.before.iter().flat_map(|b| ends[b].clone()).collect();
        if before.is_empty() {
            before.extend(start);
        }
        let steps = Arc::make_mut(&mut into.steps);
        let own = steps.len();
        let kind = kind_of(&found.work);
        into.shape.push((kind, before.clone()));
        into.index.insert(node, own);
        steps.push(Step {
            work: found.work.clone(),
            before,
            enabled: true,
        });
        let last = match found.work {
            NodeWork::Child(child) => flatten(state, child, Some(own), into)?,
            _ => vec![own],
        };
        ends.insert(node, if last.is_empty() { vec![own] } else { last });
    }
    let inner: HashSet<NodeHandle> = graph
        .nodes
        .values()
        .flat_map(|node| node.before.iter().copied())
        .collect();
    let sinks = graph.nodes.keys().filter(|node| !inner.contains(node));
    Some(sinks.flat_map(|node| ends[node].clone()).collect())
}

fn kind_of(work: &NodeWork) -> u8 {
    match work {
        NodeWork::Work(Work::Kernel { .. }) => 0,
        NodeWork::Work(Work::Memcpy { .. }) => 1,
        NodeWork::Work(Work::Memset { .. }) => 2,
        NodeWork::Work(Work::Host(_)) => 3,
        NodeWork::Record(_) => 4,
        NodeWork::Wait(_) => 5,
        NodeWork::Empty => 6,
        NodeWork::Child(_) => 7,
        NodeWork::Conditional(..) => 8,
    }
}

/// Why an exec cannot take the change from one work to another; none if it can.
pub(super) fn refusal(from: &NodeWork, to: &NodeWork) -> Option<&'static str> {
    match (from, to) {
        (
            NodeWork::Work(Work::Memset {
                element_bytes: a, ..
            }),
            NodeWork::Work(Work::Memset {
                element_bytes: b, ..
            }),
        ) if a != b => Some("a parameter changed that an exec cannot take"),
        _ if kind_of(from) != kind_of(to) => Some("a node's kind changed"),
        _ => None,
    }
}

/// Return whether CUDA lets a node be switched off: kernels, memcpys and memsets.
pub(super) fn can_switch(work: &NodeWork) -> bool {
    matches!(
        work,
        NodeWork::Work(Work::Kernel { .. } | Work::Memcpy { .. } | Work::Memset { .. })
    )
}
