//! The calls on simulated graphs and execs.
#![expect(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe for other drivers"
)]

use std::sync::Arc;

use super::exec::{self, Exec, Replay};
use super::template::{NodeWork, TELLS_BODIES, copy, create, destroy, get, id, insert, owner_of};
use super::work::Work;
use super::{Sim, State, capture, refuse, run, stream};
use crate::code::{Call, Code};
use crate::driver::handle::{
    ConditionHandle, ExecHandle, FunctionHandle, GraphHandle, NodeHandle, StreamHandle,
};
use crate::driver::spec::{
    Condition, Dim3, EdgeKind, EdgeSpec, NodeDetail, NodeIds, NodeSpec, WorkSpec,
};
use crate::driver::{GraphCalls, InstantiateFailure, InstantiateFlags, UpdateFailure};
use crate::error::Result;

impl GraphCalls for Sim {
    fn graph_create(&self) -> Result<GraphHandle> {
        let mut state = self.enter(Call::GraphCreate)?;
        Ok(create(&mut state))
    }

    unsafe fn graph_destroy(&self, handle: GraphHandle) {
        let mut state = self.enter_infallible(Call::GraphDestroy);
        capture::refuse_recording(&state, handle, "graph_destroy");
        destroy(&mut state, handle);
    }

    unsafe fn graph_clone(&self, handle: GraphHandle) -> Result<GraphHandle> {
        let mut state = self.enter(Call::GraphClone)?;
        Ok(copy(&mut state, handle, None))
    }

    unsafe fn node_find_in_clone(&self, node: NodeHandle, copy: GraphHandle) -> Result<NodeHandle> {
        let call = Call::GraphNodeFindInClone;
        let mut state = self.enter(call)?;
        owner_of(&state, node);
        let copy = get(&mut state, copy);
        let found = copy.copies.get(&node).copied();
        let found = found.filter(|found| copy.nodes.contains_key(found));
        found.ok_or_else(|| refuse(call, Code::INVALID_VALUE))
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
            NodeSpec::Child(child) => {
                if has_conditionals(&state, *child) {
                    return Err(refuse(call, Code::NOT_SUPPORTED));
                }
                NodeWork::Child(copy(&mut state, *child, Some(handle)))
            }
        };
        let node = NodeHandle(state.fresh());
        insert(get(&mut state, handle), node, work, after);
        Ok(node)
    }

    unsafe fn condition_create(&self, graph: GraphHandle, value: u32) -> Result<ConditionHandle> {
        let mut state = self.enter(Call::GraphConditionalHandleCreate)?;
        get(&mut state, graph);
        let handle = state.fresh();
        state.conditions.insert(handle, value);
        Ok(ConditionHandle(handle))
    }

    unsafe fn graph_add_conditional(
        &self,
        handle: GraphHandle,
        after: &[NodeHandle],
        rule: Condition,
        condition: ConditionHandle,
    ) -> Result<(NodeHandle, GraphHandle)> {
        let mut state = self.enter(Call::GraphAddNode)?;
        assert!(
            state.conditions.contains_key(&condition.0),
            "{condition:?} was never created"
        );
        let body = create(&mut state);
        get(&mut state, body).parent = Some(handle);
        let node = NodeHandle(state.fresh());
        let work = NodeWork::Conditional(rule, Some(condition), vec![body]);
        insert(get(&mut state, handle), node, work, after);
        Ok((node, body))
    }

    unsafe fn graph_add_edge(&self, handle: GraphHandle, edge: EdgeSpec<NodeHandle>) -> Result<()> {
        let call = Call::GraphAddDependencies;
        let mut state = self.enter(call)?;
        let graph = get(&mut state, handle);
        let refused = || refuse(call, Code::INVALID_VALUE);
        if edge != EdgeSpec::full(edge.from, edge.to) {
            return Err(refused());
        }
        let before = &mut graph.nodes.get_mut(&edge.to).ok_or_else(refused)?.before;
        if before.contains(&edge.from) {
            return Err(refused());
        }
        before.push(edge.from);
        Ok(())
    }

    unsafe fn graph_remove_edge(
        &self,
        handle: GraphHandle,
        edge: EdgeSpec<NodeHandle>,
    ) -> Result<()> {
        let call = Call::GraphRemoveDependencies;
        let mut state = self.enter(call)?;
        let graph = get(&mut state, handle);
        let refused = || refuse(call, Code::INVALID_VALUE);
        let before = &mut graph.nodes.get_mut(&edge.to).ok_or_else(refused)?.before;
        let position = before.iter().position(|b| *b == edge.from);
        before.remove(position.ok_or_else(refused)?);
        Ok(())
    }

    unsafe fn graph_remove_node(&self, node: NodeHandle) -> Result<()> {
        let mut state = self.enter(Call::GraphDestroyNode)?;
        let owner = owner_of(&state, node);
        capture::refuse_recording(&state, owner, "graph_remove_node");
        let graph = get(&mut state, owner);
        let removed = graph.nodes.remove(&node);
        for other in graph.nodes.values_mut() {
            other.before.retain(|before| *before != node);
        }
        if let Some(removed) = removed {
            for body in removed.work.bodies() {
                destroy(&mut state, *body);
            }
            state.trash.push(Box::new(removed));
        }
        Ok(())
    }

    unsafe fn graph_nodes(&self, handle: GraphHandle) -> Result<Vec<NodeHandle>> {
        let mut state = self.enter(Call::GraphGetNodes)?;
        Ok(get(&mut state, handle).nodes.keys().copied().collect())
    }

    unsafe fn graph_roots(&self, handle: GraphHandle) -> Result<Vec<NodeHandle>> {
        let mut state = self.enter(Call::GraphGetRootNodes)?;
        let nodes = get(&mut state, handle).nodes.iter();
        let roots = nodes.filter(|(_, node)| node.before.is_empty());
        Ok(roots.map(|(handle, _)| *handle).collect())
    }

    unsafe fn graph_node_count(&self, handle: GraphHandle) -> Result<usize> {
        let mut state = self.enter(Call::GraphGetNodes)?;
        Ok(get(&mut state, handle).nodes.len())
    }

    unsafe fn node_dependencies(&self, node: NodeHandle) -> Result<Vec<NodeHandle>> {
        let mut state = self.enter(Call::GraphNodeGetDependencies)?;
        let owner = owner_of(&state, node);
        Ok(get(&mut state, owner).before(node).to_vec())
    }

    unsafe fn graph_edges(&self, handle: GraphHandle) -> Result<Vec<EdgeSpec<NodeHandle>>> {
        let mut state = self.enter(Call::GraphGetEdges)?;
        let nodes = &get(&mut state, handle).nodes;
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
            NodeWork::Conditional(condition, _, bodies) => {
                let tells = self.inner.version >= TELLS_BODIES;
                NodeDetail::Conditional {
                    condition: tells.then_some(*condition),
                    bodies: if tells { bodies.clone() } else { Vec::new() },
                }
            }
        })
    }

    unsafe fn node_words(&self, node: NodeHandle) -> Result<Vec<u64>> {
        let state = self.enter(Call::GraphNodeGetParams)?;
        let owner = owner_of(&state, node);
        Ok(match &state.graphs[&owner.0].nodes[&node].work {
            NodeWork::Work(work) => work.words(),
            _ => Vec::new(),
        })
    }

    unsafe fn node_ids(&self, node: NodeHandle) -> Result<Option<NodeIds>> {
        let state = self.enter(Call::GraphNodeGetToolsId)?;
        let graph = owner_of(&state, node);
        Ok(self.tells_ids().then(|| NodeIds {
            graph,
            local: id(node.0),
            tools: u64::from(id(graph.0)) << 32 | u64::from(id(node.0)),
        }))
    }

    unsafe fn graph_id(&self, handle: GraphHandle) -> Result<Option<u32>> {
        let mut state = self.enter(Call::GraphGetId)?;
        get(&mut state, handle);
        Ok(self.tells_ids().then(|| id(handle.0)))
    }

    unsafe fn exec_id(&self, handle: ExecHandle) -> Result<Option<u32>> {
        let mut state = self.enter(Call::GraphExecGetId)?;
        exec(&mut state, handle);
        Ok(self.tells_ids().then(|| id(handle.0)))
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
        get(&mut state, handle);
        let exec = Exec::new(&state, handle).ok_or(failure(Code::INVALID_VALUE))?;
        let conditions = exec::conditions(&exec.steps);
        let is_in_use = |other: &Exec| {
            let others = exec::conditions(&other.steps);
            conditions.iter().any(|one| others.contains(one))
        };
        // A kernel names a condition by its number alone.
        if state.execs.values().any(is_in_use) {
            return Err(failure(Code::NOT_SUPPORTED));
        }
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
        let conditional =
            |step: &exec::Step| matches!(step.work, NodeWork::Conditional(_, None, _));
        assert!(
            !steps.iter().any(conditional),
            "exec_launch of {handle:?}: its conditional nodes are there to be looked at"
        );
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

fn exec(state: &mut State, handle: ExecHandle) -> &mut Exec {
    match state.execs.get_mut(&handle.0) {
        Some(exec) => exec,
        None => panic!("{handle:?} is not live"),
    }
}

/// Return whether a graph has a conditional node, also in the graphs of its nodes.
fn has_conditionals(state: &State, graph: GraphHandle) -> bool {
    let nodes = &state.graphs[&graph.0].nodes;
    nodes.values().any(|node| {
        matches!(node.work, NodeWork::Conditional(..))
            || node
                .work
                .bodies()
                .iter()
                .any(|body| has_conditionals(state, *body))
    })
}

/// Change what a node of an exec does. The node itself must be live: CUDA finds the exec's by it.
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
