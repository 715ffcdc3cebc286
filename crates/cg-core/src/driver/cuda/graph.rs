//! Templates and execs of a [`Cuda`] device.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ptr;

use cudarc::driver::sys;

use super::{Cuda, call, check, conditional, exec, newer, node, out, params};
use crate::code::{Call, Code};
use crate::driver::handle::{
    ConditionHandle, ExecHandle, FunctionHandle, GraphHandle, NodeHandle, StreamHandle,
};
use crate::driver::spec::{
    Condition, Dim3, EdgeKind, EdgeSpec, NodeDetail, NodeIds, NodeSpec, WorkSpec,
};
use crate::driver::{GraphCalls, InstantiateFailure, InstantiateFlags, UpdateFailure};
use crate::error::Result;

impl GraphCalls for Cuda {
    fn graph_create(&self) -> Result<GraphHandle> {
        let _entered = self.enter()?;
        // SAFETY: the call writes one handle, through `graph`; there are no flags.
        let graph = out(Call::GraphCreate, ptr::null_mut(), |graph| unsafe {
            call!(cuGraphCreate(graph, 0))
        })?;
        Ok(GraphHandle(graph as u64))
    }

    unsafe fn graph_destroy(&self, graph: GraphHandle) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `graph` is live and no other graph's child, by the contract.
        unsafe { call!(cuGraphDestroy(graph.0 as sys::CUgraph)) };
    }

    unsafe fn graph_clone(&self, graph: GraphHandle) -> Result<GraphHandle> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        // SAFETY: `graph` is live by the contract; the call writes one handle, through `copy`.
        let copy = out(Call::GraphClone, ptr::null_mut(), |copy| unsafe {
            call!(cuGraphClone(copy, graph))
        })?;
        Ok(GraphHandle(copy as u64))
    }

    unsafe fn node_find_in_clone(&self, node: NodeHandle, copy: GraphHandle) -> Result<NodeHandle> {
        let _entered = self.enter()?;
        let (node, copy) = (node.0 as sys::CUgraphNode, copy.0 as sys::CUgraph);
        // SAFETY: `node` and `copy` are live by the contract; the call writes one handle, through
        // `found`.
        let found = out(
            Call::GraphNodeFindInClone,
            ptr::null_mut(),
            |found| unsafe { call!(cuGraphNodeFindInClone(found, node, copy)) },
        )?;
        Ok(NodeHandle(found as u64))
    }

    unsafe fn graph_add_node(
        &self,
        graph: GraphHandle,
        after: &[NodeHandle],
        spec: &NodeSpec,
    ) -> Result<NodeHandle> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { node::add(self.context(), graph, after, spec) }
    }

    unsafe fn condition_create(&self, graph: GraphHandle, value: u32) -> Result<ConditionHandle> {
        /// `CU_GRAPH_COND_ASSIGN_DEFAULT`.
        const ASSIGN: u32 = 1;
        let _entered = self.enter()?;
        let (graph, context) = (graph.0 as sys::CUgraph, self.context());
        // SAFETY: `graph` is live by the contract and the context is current; the call writes one number, through
        // `condition`.
        let condition = out(Call::GraphConditionalHandleCreate, 0, |condition| unsafe {
            call!(cuGraphConditionalHandleCreate(
                condition, graph, context, value, ASSIGN
            ))
        })?;
        Ok(ConditionHandle(condition))
    }

    unsafe fn graph_add_conditional(
        &self,
        graph: GraphHandle,
        after: &[NodeHandle],
        rule: Condition,
        condition: ConditionHandle,
    ) -> Result<(NodeHandle, GraphHandle)> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { conditional::add(self.context(), graph, after, rule, condition) }
    }

    unsafe fn graph_add_edge(&self, graph: GraphHandle, edge: EdgeSpec<NodeHandle>) -> Result<()> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        let (from, to) = (
            edge.from.0 as sys::CUgraphNode,
            edge.to.0 as sys::CUgraphNode,
        );
        let data = edge_data(edge);
        // SAFETY: `graph` is live and holds both nodes, by the contract; the call reads one element
        // from each pointer.
        let result = unsafe {
            call!(cuGraphAddDependencies_v2(
                graph,
                &raw const from,
                &raw const to,
                &raw const data,
                1
            ))
        };
        check(Call::GraphAddDependencies, result)
    }

    unsafe fn graph_remove_edge(
        &self,
        graph: GraphHandle,
        edge: EdgeSpec<NodeHandle>,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        let (from, to) = (
            edge.from.0 as sys::CUgraphNode,
            edge.to.0 as sys::CUgraphNode,
        );
        let data = edge_data(edge);
        // SAFETY: `graph` is live and holds both nodes, by the contract; the call reads one element
        // from each pointer.
        let result = unsafe {
            call!(cuGraphRemoveDependencies_v2(
                graph,
                &raw const from,
                &raw const to,
                &raw const data,
                1,
            ))
        };
        check(Call::GraphRemoveDependencies, result)
    }

    unsafe fn graph_remove_node(&self, node: NodeHandle) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: `node` is a node of a live graph, by the contract.
        let result = unsafe { call!(cuGraphDestroyNode(node.0 as sys::CUgraphNode)) };
        check(Call::GraphDestroyNode, result)
    }

    unsafe fn graph_nodes(&self, graph: GraphHandle) -> Result<Vec<NodeHandle>> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        // SAFETY: `graph` is live by the contract; the call writes `count`, and at most as many nodes
        // as that says there is room for, none without an array.
        listed(Call::GraphGetNodes, |nodes, count| unsafe {
            call!(cuGraphGetNodes(graph, nodes, count))
        })
    }

    unsafe fn graph_roots(&self, graph: GraphHandle) -> Result<Vec<NodeHandle>> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        // SAFETY: as in `graph_nodes`.
        listed(Call::GraphGetRootNodes, |nodes, count| unsafe {
            call!(cuGraphGetRootNodes(graph, nodes, count))
        })
    }

    unsafe fn graph_node_count(&self, graph: GraphHandle) -> Result<usize> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        // SAFETY: `graph` is live by the contract; without an array the call writes only `count`.
        out(Call::GraphGetNodes, 0, |count| unsafe {
            call!(cuGraphGetNodes(graph, ptr::null_mut(), count))
        })
    }

    unsafe fn node_dependencies(&self, node: NodeHandle) -> Result<Vec<NodeHandle>> {
        let _entered = self.enter()?;
        let node = node.0 as sys::CUgraphNode;
        // SAFETY: `node` is live by the contract; without arrays the call writes only `count`.
        let count = out(Call::GraphNodeGetDependencies, 0, |count| unsafe {
            call!(cuGraphNodeGetDependencies_v2(
                node,
                ptr::null_mut(),
                ptr::null_mut(),
                count
            ))
        })?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut nodes: Vec<sys::CUgraphNode> = vec![ptr::null_mut(); count];
        let mut data = vec![FULL; count];
        // SAFETY: `node` is live by the contract; the call writes at most `count` elements of each
        // array, which each has room for.
        let count = out(Call::GraphNodeGetDependencies, count, |count| unsafe {
            call!(cuGraphNodeGetDependencies_v2(
                node,
                nodes.as_mut_ptr(),
                data.as_mut_ptr(),
                count
            ))
        })?;
        nodes.truncate(count);
        Ok(nodes.iter().map(|node| NodeHandle(*node as u64)).collect())
    }

    unsafe fn graph_edges(&self, graph: GraphHandle) -> Result<Vec<EdgeSpec<NodeHandle>>> {
        let _entered = self.enter()?;
        let graph = graph.0 as sys::CUgraph;
        // SAFETY: `graph` is live by the contract; without arrays the call writes only `count`.
        let count = out(Call::GraphGetEdges, 0, |count| unsafe {
            call!(cuGraphGetEdges_v2(
                graph,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
                count,
            ))
        })?;
        if count == 0 {
            return Ok(Vec::new());
        }
        let mut from: Vec<sys::CUgraphNode> = vec![ptr::null_mut(); count];
        let mut to = from.clone();
        let mut data = vec![FULL; count];
        // SAFETY: `graph` is live by the contract; the call writes at most `count` elements of each
        // array, which each has room for.
        let count = out(Call::GraphGetEdges, count, |count| unsafe {
            call!(cuGraphGetEdges_v2(
                graph,
                from.as_mut_ptr(),
                to.as_mut_ptr(),
                data.as_mut_ptr(),
                count,
            ))
        })?;
        let edge = |((from, to), data): ((sys::CUgraphNode, sys::CUgraphNode), _)| {
            edge_spec(NodeHandle(from as u64), NodeHandle(to as u64), data)
        };
        Ok(from
            .into_iter()
            .zip(to)
            .zip(data)
            .take(count)
            .map(edge)
            .collect())
    }

    unsafe fn node_detail(&self, node: NodeHandle) -> Result<NodeDetail> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { node::detail(node) }
    }

    unsafe fn node_words(&self, node: NodeHandle) -> Result<Vec<u64>> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { params::words(node) }
    }

    unsafe fn node_ids(&self, node: NodeHandle) -> Result<Option<NodeIds>> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { newer::node_ids(node) }
    }

    unsafe fn graph_id(&self, graph: GraphHandle) -> Result<Option<u32>> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { newer::graph_id(graph) }
    }

    unsafe fn exec_id(&self, exec: ExecHandle) -> Result<Option<u32>> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { newer::exec_id(exec) }
    }

    unsafe fn graph_instantiate(
        &self,
        graph: GraphHandle,
        flags: InstantiateFlags,
    ) -> Result<ExecHandle, InstantiateFailure> {
        let _entered = self.enter().map_err(|error| InstantiateFailure {
            code: error.code().unwrap_or(Code::UNKNOWN),
            node: None,
        })?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { exec::instantiate(graph, flags) }
    }

    unsafe fn exec_destroy(&self, exec: ExecHandle) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `exec` is live and no replay of it is in flight, by the contract.
        unsafe { call!(cuGraphExecDestroy(exec.0 as sys::CUgraphExec)) };
    }

    unsafe fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> Result<()> {
        let _entered = self.enter()?;
        let (exec, stream) = (exec.0 as sys::CUgraphExec, stream.0 as sys::CUstream);
        // SAFETY: `exec` and `stream` are live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuGraphUpload(exec, stream)) };
        check(Call::GraphUpload, result)
    }

    #[inline]
    unsafe fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<()> {
        let _entered = self.enter()?;
        let (exec, stream) = (exec.0 as sys::CUgraphExec, stream.0 as sys::CUstream);
        // SAFETY: `exec` and `stream` are live, and what the nodes name stays valid until the
        // stream has passed the replay, by the contract.
        let result = unsafe { call!(cuGraphLaunch(exec, stream)) };
        check(Call::GraphLaunch, result)
    }

    unsafe fn exec_update(
        &self,
        exec: ExecHandle,
        graph: GraphHandle,
    ) -> Result<(), UpdateFailure> {
        let _entered = self.enter().map_err(|error| UpdateFailure {
            code: error.code().unwrap_or(Code::UNKNOWN),
            reason: error.to_string(),
            node: None,
        })?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { exec::update(exec, graph) }
    }

    unsafe fn exec_set_work(
        &self,
        exec: ExecHandle,
        node: NodeHandle,
        work: &WorkSpec,
    ) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { exec::set_work(self.context(), exec, node, work) }
    }

    #[inline]
    unsafe fn exec_set_parameter(
        &self,
        exec: ExecHandle,
        node: NodeHandle,
        function: FunctionHandle,
        extents: [Dim3; 2],
        parameter: &[u8],
    ) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: this method's contract is that function's, and the context is current.
        unsafe { exec::set_parameter(exec, node, function, extents, parameter) }
    }

    unsafe fn exec_set_enabled(
        &self,
        exec: ExecHandle,
        node: NodeHandle,
        enabled: bool,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let (exec, node) = (exec.0 as sys::CUgraphExec, node.0 as sys::CUgraphNode);
        // SAFETY: `exec` and `node` are live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuGraphNodeSetEnabled(exec, node, enabled.into())) };
        check(Call::GraphNodeSetEnabled, result)
    }

    unsafe fn exec_is_enabled(&self, exec: ExecHandle, node: NodeHandle) -> Result<bool> {
        let _entered = self.enter()?;
        let (exec, node) = (exec.0 as sys::CUgraphExec, node.0 as sys::CUgraphNode);
        // SAFETY: `exec` and `node` are live by the contract; the call writes one unsigned int,
        // through `enabled`.
        let enabled = out(Call::GraphNodeGetEnabled, 0, |enabled| unsafe {
            call!(cuGraphNodeGetEnabled(exec, node, enabled))
        })?;
        Ok(enabled != 0)
    }
}

/// The data of an edge of the full kind.
const FULL: sys::CUgraphEdgeData = sys::CUgraphEdgeData {
    from_port: 0,
    to_port: 0,
    type_: 0,
    reserved: [0; 5],
};

fn edge_spec(from: NodeHandle, to: NodeHandle, data: sys::CUgraphEdgeData) -> EdgeSpec<NodeHandle> {
    EdgeSpec {
        from,
        to,
        from_port: data.from_port,
        to_port: data.to_port,
        kind: EdgeKind::from(data.type_),
    }
}

fn edge_data(edge: EdgeSpec<NodeHandle>) -> sys::CUgraphEdgeData {
    sys::CUgraphEdgeData {
        from_port: edge.from_port,
        to_port: edge.to_port,
        type_: edge.kind.number(),
        ..FULL
    }
}

/// Return the nodes that a call of the driver lists: first it says how many, then which.
fn listed(
    call: Call,
    list: impl Fn(*mut sys::CUgraphNode, *mut usize) -> u32,
) -> Result<Vec<NodeHandle>> {
    let count = out(call, 0, |count| list(ptr::null_mut(), count))?;
    if count == 0 {
        return Ok(Vec::new());
    }
    let mut nodes: Vec<sys::CUgraphNode> = vec![ptr::null_mut(); count];
    let count = out(call, count, |count| list(nodes.as_mut_ptr(), count))?;
    nodes.truncate(count);
    Ok(nodes.iter().map(|node| NodeHandle(*node as u64)).collect())
}
