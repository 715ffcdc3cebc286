//! Simulated execs: a graph flattened into steps, and its replays.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use super::State;
use super::stream::Event;
use super::template::{Graph, NodeWork};
use super::work::Work;
use crate::driver::handle::{ConditionHandle, ExecHandle, GraphHandle, NodeHandle};
use crate::driver::spec::Condition;

/// A node of an exec: children are flattened, their place taken by an empty node before and after.
#[derive(Clone)]
pub(super) struct Step {
    pub(super) work: NodeWork,
    pub(super) before: Vec<usize>,
    pub(super) enabled: bool,
    /// The steps that a conditional node runs.
    pub(super) body: Option<Arc<Vec<Self>>>,
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
    /// The conditional steps whose bodies run, each with the place of the body's steps.
    open: Vec<(usize, Range<usize>)>,
    /// The conditions that kernels of this replay have set.
    conditions: BTreeMap<u64, u32>,
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
            open: Vec::new(),
            conditions: BTreeMap::new(),
        }
    }

    /// Set a condition for the rest of the replay.
    pub(super) fn set_condition(&mut self, condition: ConditionHandle, value: u32) {
        self.conditions.insert(condition.0, value);
    }

    /// Note that a step has run; `defaults` are the values that conditions begin with.
    pub(super) fn ran(&mut self, index: usize, defaults: &BTreeMap<u64, u32>) {
        if self.runs_body(index, defaults) {
            let body = self.steps[index].body.clone().unwrap_or_default();
            let begin = self.steps.len();
            let steps = Arc::make_mut(&mut self.steps);
            steps.extend(body.iter().cloned().map(|mut step| {
                step.before.iter_mut().for_each(|one| *one += begin);
                step
            }));
            let end = steps.len();
            self.status.resize(end, Status::Waiting);
            self.records.resize(end, 0);
            self.open.push((index, begin..end));
        } else {
            self.status[index] = Status::Done;
        }
        self.close_bodies(defaults);
    }

    /// End the bodies whose steps have all run, or begin them anew.
    fn close_bodies(&mut self, defaults: &BTreeMap<u64, u32>) {
        let is_over = |(_, steps): &(usize, Range<usize>)| {
            self.status[steps.clone()]
                .iter()
                .all(|one| *one == Status::Done)
        };
        // The last one is the innermost.
        let Some(place) = self.open.iter().rposition(is_over) else {
            return;
        };
        let (index, steps) = self.open[place].clone();
        let NodeWork::Conditional(rule, ..) = self.steps[index].work else {
            unreachable!("only conditional steps open bodies")
        };
        if rule == Condition::While && self.runs_body(index, defaults) {
            self.status[steps].fill(Status::Waiting);
        } else {
            self.status[index] = Status::Done;
            self.open.remove(place);
            self.close_bodies(defaults);
        }
    }

    fn runs_body(&self, index: usize, defaults: &BTreeMap<u64, u32>) -> bool {
        let NodeWork::Conditional(_, Some(condition), _) = self.steps[index].work else {
            return false;
        };
        let set = self.conditions.get(&condition.0);
        set.or_else(|| defaults.get(&condition.0))
            .is_some_and(|value| *value != 0)
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

    /// Return the work that is to come, also that of bodies that may run.
    pub(super) fn pending(&self) -> impl Iterator<Item = &Work> {
        let steps = self.steps.iter().zip(&self.status);
        let left = steps.filter(|(_, status)| **status != Status::Done);
        left.flat_map(|(step, _)| works_of(step))
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
            body: body_of(state, &found.work)?,
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

/// Return the steps of what a conditional node runs; none if they cannot be: no host function and no event.
#[expect(
    clippy::option_option,
    reason = "there may be no body, or one that cannot be"
)]
fn body_of(state: &State, work: &NodeWork) -> Option<Option<Arc<Vec<Step>>>> {
    let NodeWork::Conditional(_, Some(_), bodies) = work else {
        return Some(None);
    };
    let mut body = Exec {
        steps: Arc::new(Vec::new()),
        index: HashMap::new(),
        shape: Vec::new(),
    };
    flatten(state, *bodies.first()?, None, &mut body)?;
    let is_refused = |step: &Step| {
        let host = matches!(step.work, NodeWork::Work(Work::Host(_)));
        host || matches!(step.work, NodeWork::Record(_) | NodeWork::Wait(_))
    };
    (!body.steps.iter().any(is_refused)).then_some(Some(body.steps))
}

/// Return the conditions of steps, and of those in their bodies.
pub(super) fn conditions(steps: &[Step]) -> HashSet<ConditionHandle> {
    let mut found = HashSet::new();
    for step in steps {
        if let NodeWork::Conditional(_, Some(condition), _) = &step.work {
            found.insert(*condition);
        }
        found.extend(step.body.iter().flat_map(|body| conditions(body)));
    }
    found
}

fn works_of(step: &Step) -> Vec<&Work> {
    match &step.work {
        NodeWork::Work(work) if step.enabled => vec![work],
        _ => step
            .body
            .iter()
            .flat_map(|body| body.iter())
            .flat_map(works_of)
            .collect(),
    }
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
