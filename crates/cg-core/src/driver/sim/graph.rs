//! Simulated graphs: nodes, edges, copies, and the calls on graphs and execs.
#![expect(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe for other drivers"
)]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::exec::{self, Exec, Replay};
use super::work::Work;
use super::{Sim, State, capture, refuse, run, stream};
use crate::code::{Call, Code};
use crate::driver::handle::{
    EventHandle, ExecHandle, FunctionHandle, GraphHandle, NodeHandle, StreamHandle,
};
use crate::driver::spec::{Dim3, EdgeKind, EdgeSpec, NodeDetail, NodeSpec, WorkSpec};
use crate::driver::{GraphCalls, InstantiateFailure, InstantiateFlags, UpdateFailure};
use crate::error::Result;

#[derive(Clone)]
pub(super) enum NodeWork {
    Work(Work),
    Record(EventHandle),
    Wait(EventHandle),
    Empty,
    Child(GraphHandle),
}

impl From<Work> for NodeWork {
    fn from(work: Work) -> Self {
        Self::Work(work)
    }
}

pub(super) struct Node {
    pub(super) work: NodeWork,
    pub(super) before: Vec<NodeHandle>,
}

#[derive(Default)]
pub(super) struct Graph {
    /// In the order of adding.
    pub(super) nodes: BTreeMap<NodeHandle, Node>,
    /// The graph whose child this is.
    pub(super) parent: Option<GraphHandle>,
}

impl Graph {
    pub(super) fn before(&self, node: NodeHandle) -> &[NodeHandle] {
        &self.nodes[&node].before
    }
}

pub(super) fn insert(graph: &mut Graph, node: NodeHandle, work: NodeWork, after: &[NodeHandle]) {
    let before = after.to_vec();
    graph.nodes.insert(node, Node { work, before });
}

/// Throws a graph that no handle names away, with its children.
pub(super) fn discard(state: &mut State, graph: Graph) {
    for node in graph.nodes.values() {
        if let NodeWork::Child(child) = node.work {
            destroy(state, child);
        }
    }
    state.trash.push(Box::new(graph));
}

impl GraphCalls for Sim {
    fn graph_create(&self) -> Result<GraphHandle> {
        let mut state = self.enter(Call::GraphCreate)?;
        let handle = state.fresh();
        state.graphs.insert(handle, Graph::default());
        Ok(GraphHandle(handle))
    }

    unsafe fn graph_destroy(&self, handle: GraphHandle) {
        let mut state = self.enter_infallible(Call::GraphDestroy);
        destroy(&mut state, handle);
    }

    unsafe fn graph_clone(&self, handle: GraphHandle) -> Result<GraphHandle> {
        let mut state = self.enter(Call::GraphClone)?;
        Ok(copy(&mut state, handle, None))
    }

    unsafe fn graph_add_node(
        &self,
        handle: GraphHandle,
        after: &[NodeHandle],
        spec: &NodeSpec,
    ) -> Result<NodeHandle> {
        let call = match spec {
            NodeSpec::Work(WorkSpec::Kernel { .. }) => Call::GraphAddKernelNode,
            NodeSpec::Work(WorkSpec::Memcpy { .. }) => Call::GraphAddMemcpyNode,
            NodeSpec::Work(WorkSpec::Memset { .. }) => Call::GraphAddMemsetNode,
            NodeSpec::Work(WorkSpec::Host(_)) => Call::GraphAddHostNode,
            NodeSpec::EventRecord(_) => Call::GraphAddEventRecordNode,
            NodeSpec::EventWait(_) => Call::GraphAddEventWaitNode,
            NodeSpec::Empty => Call::GraphAddEmptyNode,
            NodeSpec::Child(_) => Call::GraphAddChildGraphNode,
        };
        let mut state = self.enter(call)?;
        let work = match spec {
            NodeSpec::Work(work) => Work::resolve(&state, work, call)?.into(),
            NodeSpec::EventRecord(event) => NodeWork::Record(*event),
            NodeSpec::EventWait(event) => NodeWork::Wait(*event),
            NodeSpec::Empty => NodeWork::Empty,
            NodeSpec::Child(child) => NodeWork::Child(copy(&mut state, *child, Some(handle))),
        };
        let node = NodeHandle(state.fresh());
        insert(graph(&mut state, handle), node, work, after);
        Ok(node)
    }

    unsafe fn graph_add_edge(
        &self,
        handle: GraphHandle,
        from: NodeHandle,
        to: NodeHandle,
    ) -> Result<()> {
        let call = Call::GraphAddDependencies;
        let mut state = self.enter(call)?;
        let graph = graph(&mut state, handle);
        let node = graph.nodes.get_mut(&to);
        let before = &mut node
            .ok_or_else(|| refuse(call, Code::INVALID_VALUE))?
            .before;
        if before.contains(&from) {
            return Err(refuse(call, Code::INVALID_VALUE));
        }
        before.push(from);
        Ok(())
    }

    unsafe fn graph_remove_edge(
        &self,
        handle: GraphHandle,
        edge: EdgeSpec<NodeHandle>,
    ) -> Result<()> {
        let call = Call::GraphRemoveDependencies;
        let mut state = self.enter(call)?;
        let graph = graph(&mut state, handle);
        let refused = || refuse(call, Code::INVALID_VALUE);
        let before = &mut graph.nodes.get_mut(&edge.to).ok_or_else(refused)?.before;
        let position = before.iter().position(|b| *b == edge.from);
        before.remove(position.ok_or_else(refused)?);
        Ok(())
    }

    unsafe fn graph_remove_node(&self, node: NodeHandle) -> Result<()> {
        let mut state = self.enter(Call::GraphDestroyNode)?;
        let owner = owner_of(&state, node);
        let graph = graph(&mut state, owner);
        let removed = graph.nodes.remove(&node);
        for other in graph.nodes.values_mut() {
            other.before.retain(|before| *before != node);
        }
        if let Some(removed) = removed {
            if let NodeWork::Child(child) = removed.work {
                destroy(&mut state, child);
            }
            state.trash.push(Box::new(removed));
        }
        Ok(())
    }

    unsafe fn graph_nodes(&self, handle: GraphHandle) -> Result<Vec<NodeHandle>> {
        let mut state = self.enter(Call::GraphGetNodes)?;
        Ok(graph(&mut state, handle).nodes.keys().copied().collect())
    }

    unsafe fn graph_edges(&self, handle: GraphHandle) -> Result<Vec<EdgeSpec<NodeHandle>>> {
        let mut state = self.enter(Call::GraphGetEdges)?;
        let nodes = &graph(&mut state, handle).nodes;
        let edges = nodes.iter().flat_map(|(to, node)| {
            node.before.iter().map(|from| EdgeSpec {
                from: *from,
                to: *to,
                from_port: 0,
                to_port: 0,
                kind: EdgeKind::Full,
            })
        });
        Ok(edges.collect())
    }

    unsafe fn node_detail(&self, node: NodeHandle) -> Result<NodeDetail> {
        let state = self.enter(Call::GraphNodeGetType)?;
        let owner = owner_of(&state, node);
        Ok(match &state.graphs[&owner.0].nodes[&node].work {
            NodeWork::Work(work) => work.detail(),
            NodeWork::Record(event) => NodeDetail::EventRecord(*event),
            NodeWork::Wait(event) => NodeDetail::EventWait(*event),
            NodeWork::Empty => NodeDetail::Empty,
            NodeWork::Child(child) => NodeDetail::Child(*child),
        })
    }

    unsafe fn graph_instantiate(
        &self,
        handle: GraphHandle,
        _flags: InstantiateFlags,
    ) -> Result<ExecHandle, InstantiateFailure> {
        let failure = |code| InstantiateFailure { code, node: None };
        let mut state = self
            .enter_unsafe(Call::GraphInstantiate)
            .map_err(|error| failure(error.code().unwrap_or(Code::UNKNOWN)))?;
        graph(&mut state, handle);
        let exec = Exec::new(&state, handle).ok_or(failure(Code::INVALID_VALUE))?;
        let handle = state.fresh();
        state.execs.insert(handle, exec);
        Ok(ExecHandle(handle))
    }

    unsafe fn exec_destroy(&self, handle: ExecHandle) {
        let mut state = self.enter_infallible(Call::GraphExecDestroy);
        if let Some(stream) = stream::replaying(&state, handle) {
            panic!("exec_destroy of {handle:?} while a replay is in flight on stream {stream:#x}")
        }
        let removed = state.execs.remove(&handle.0);
        let Some(removed) = removed else {
            panic!("exec_destroy of {handle:?}, not live")
        };
        state.trash.push(Box::new(removed));
    }

    unsafe fn exec_upload(&self, handle: ExecHandle, stream: StreamHandle) -> Result<()> {
        let mut state = self.enter(Call::GraphUpload)?;
        exec(&mut state, handle);
        capture::refuse_capturing(&mut state, stream, Call::GraphUpload)
    }

    unsafe fn exec_launch(&self, handle: ExecHandle, stream: StreamHandle) -> Result<()> {
        let mut state = self.enter(Call::GraphLaunch)?;
        let steps = Arc::clone(&exec(&mut state, handle).steps);
        capture::refuse_capturing(&mut state, stream, Call::GraphLaunch)?;
        run::check_failure(&state, Call::GraphLaunch)?;
        let replay = Replay::new(&mut state, handle, steps);
        let queue = &mut stream::get(&mut state, stream).queue;
        queue.push_back(stream::Item::Replay(replay));
        Ok(())
    }

    unsafe fn exec_update(
        &self,
        handle: ExecHandle,
        template: GraphHandle,
    ) -> Result<(), UpdateFailure> {
        let failure = |reason: &str, node| UpdateFailure {
            code: Code::GRAPH_EXEC_UPDATE_FAILURE,
            reason: reason.to_owned(),
            node,
        };
        let mut state = self
            .enter(Call::GraphExecUpdate)
            .map_err(|error| UpdateFailure {
                code: error.code().unwrap_or(Code::UNKNOWN),
                reason: error.to_string(),
                node: None,
            })?;
        let cycle = "the graph has a cycle";
        let new = Exec::new(&state, template).ok_or_else(|| failure(cycle, None))?;
        let old = exec(&mut state, handle);
        let shapes_differ = old.shape.len() != new.shape.len()
            || old.shape.iter().zip(&new.shape).any(|(a, b)| a.1 != b.1);
        if shapes_differ {
            return Err(failure("the graphs have different nodes or edges", None));
        }
        for (i, (from, to)) in old.steps.iter().zip(new.steps.iter()).enumerate() {
            if let Some(reason) = exec::refusal(&from.work, &to.work) {
                let node = new.index.iter().find(|(_, index)| **index == i);
                return Err(failure(reason, node.map(|(node, _)| *node)));
            }
        }
        let steps = Arc::make_mut(&mut old.steps);
        let before: Vec<NodeWork> = steps
            .iter_mut()
            .zip(new.steps.iter())
            .map(|(step, new)| std::mem::replace(&mut step.work, new.work.clone()))
            .collect();
        state.trash.push(Box::new(before));
        Ok(())
    }

    unsafe fn exec_set_work(
        &self,
        handle: ExecHandle,
        node: NodeHandle,
        work: &WorkSpec,
    ) -> Result<()> {
        let call = match work {
            WorkSpec::Kernel { .. } => Call::GraphExecKernelNodeSetParams,
            WorkSpec::Memcpy { .. } => Call::GraphExecMemcpyNodeSetParams,
            WorkSpec::Memset { .. } => Call::GraphExecMemsetNodeSetParams,
            WorkSpec::Host(_) => Call::GraphExecHostNodeSetParams,
        };
        let mut state = self.enter(call)?;
        set_work(&mut state, handle, node, work, call)
    }

    unsafe fn exec_set_parameter(
        &self,
        handle: ExecHandle,
        node: NodeHandle,
        function: FunctionHandle,
        [grid, block]: [Dim3; 2],
        parameter: &[u8],
    ) -> Result<()> {
        let call = Call::GraphExecKernelNodeSetParams;
        let mut state = self.enter(call)?;
        let work = WorkSpec::Kernel {
            function,
            grid,
            block,
            shared_bytes: 0,
            args: Arc::new([parameter.into()]),
        };
        set_work(&mut state, handle, node, &work, call)
    }

    unsafe fn exec_set_enabled(
        &self,
        handle: ExecHandle,
        node: NodeHandle,
        enabled: bool,
    ) -> Result<()> {
        let call = Call::GraphNodeSetEnabled;
        let mut state = self.enter(call)?;
        let step = exec(&mut state, handle).step(node);
        match step {
            Some(step) if exec::can_switch(&step.work) => step.enabled = enabled,
            _ => return Err(refuse(call, Code::INVALID_VALUE)),
        }
        Ok(())
    }

    unsafe fn exec_is_enabled(&self, handle: ExecHandle, node: NodeHandle) -> Result<bool> {
        let call = Call::GraphNodeGetEnabled;
        let mut state = self.enter(call)?;
        let step = exec(&mut state, handle).step(node);
        step.map(|step| step.enabled)
            .ok_or_else(|| refuse(call, Code::INVALID_VALUE))
    }
}

fn graph(state: &mut State, handle: GraphHandle) -> &mut Graph {
    match state.graphs.get_mut(&handle.0) {
        Some(graph) => graph,
        None => panic!("{handle:?} is not live"),
    }
}

fn exec(state: &mut State, handle: ExecHandle) -> &mut Exec {
    match state.execs.get_mut(&handle.0) {
        Some(exec) => exec,
        None => panic!("{handle:?} is not live"),
    }
}

/// Changes what a node of an exec does. The node itself must be live: CUDA finds the exec's by it.
fn set_work(
    state: &mut State,
    handle: ExecHandle,
    node: NodeHandle,
    work: &WorkSpec,
    call: Call,
) -> Result<()> {
    owner_of(state, node);
    let work = Work::resolve(state, work, call)?.into();
    let step = exec(state, handle).step(node);
    let step = step.ok_or_else(|| refuse(call, Code::INVALID_VALUE))?;
    if exec::refusal(&step.work, &work).is_some() {
        return Err(refuse(call, Code::INVALID_VALUE));
    }
    let before = std::mem::replace(&mut step.work, work);
    state.trash.push(Box::new(before));
    Ok(())
}

fn owner_of(state: &State, node: NodeHandle) -> GraphHandle {
    let found = state
        .graphs
        .iter()
        .find(|(_, graph)| graph.nodes.contains_key(&node));
    match found {
        Some((handle, _)) => GraphHandle(*handle),
        None => panic!("{node:?} is no node of a live graph"),
    }
}

fn destroy(state: &mut State, handle: GraphHandle) {
    let Some(removed) = state.graphs.remove(&handle.0) else {
        panic!("graph_destroy of {handle:?}, which is not live")
    };
    discard(state, removed);
}

/// A copy of a graph with new node handles, children copied too.
fn copy(state: &mut State, original: GraphHandle, parent: Option<GraphHandle>) -> GraphHandle {
    let handle = GraphHandle(state.fresh());
    let nodes: Vec<(NodeHandle, NodeWork, Vec<NodeHandle>)> = graph(state, original)
        .nodes
        .iter()
        .map(|(node, found)| (*node, found.work.clone(), found.before.clone()))
        .collect();
    let renamed: HashMap<NodeHandle, NodeHandle> = nodes
        .iter()
        .map(|(node, ..)| (*node, NodeHandle(state.fresh())))
        .collect();
    let mut copied = Graph {
        parent,
        ..Graph::default()
    };
    for (node, work, before) in nodes {
        let work = match work {
            NodeWork::Child(child) => NodeWork::Child(copy(state, child, Some(handle))),
            other => other,
        };
        let before: Vec<NodeHandle> = before.iter().map(|b| renamed[b]).collect();
        insert(&mut copied, renamed[&node], work, &before);
    }
    state.graphs.insert(handle.0, copied);
    handle
}
