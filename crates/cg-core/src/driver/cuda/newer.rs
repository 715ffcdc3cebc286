//! Calls that only newer drivers have: each is looked up by name, and none where it is missing.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ptr;
use std::sync::OnceLock;

use cudarc::driver::sys;

use super::conditional::NodeParams;
use super::{check, probe};
use crate::code::Call;
use crate::driver::handle::{ExecHandle, GraphHandle, NodeHandle};
use crate::driver::spec::NodeIds;
use crate::error::Result;

/// By which numbers tools know a node (CUDA 13.1); the context is current.
///
/// # Safety
/// `node` is a node of a live graph.
pub(super) unsafe fn node_ids(node: NodeHandle) -> Result<Option<NodeIds>> {
    let calls = calls();
    let (Some(graph_of), Some(local_id), Some(tools_id)) =
        (calls.node_graph, calls.node_local_id, calls.node_tools_id)
    else {
        return Ok(None);
    };
    let call = Call::GraphNodeGetToolsId;
    let raw = node.0 as sys::CUgraphNode;
    let (mut graph, mut local, mut tools) = (ptr::null_mut(), 0, 0);
    // SAFETY: `node` is live by the contract; the call writes one handle, to `graph`.
    check(call, unsafe { graph_of(raw, &raw mut graph) })?;
    // SAFETY: `node` is live by the contract; the call writes one unsigned int, to `local`.
    check(call, unsafe { local_id(raw, &raw mut local) })?;
    // SAFETY: `node` is live by the contract; the call writes 64 bits, to `tools`.
    check(call, unsafe { tools_id(raw, &raw mut tools) })?;
    let graph = GraphHandle(graph as u64);
    Ok(Some(NodeIds {
        graph,
        local,
        tools,
    }))
}

/// By which number tools know a graph (CUDA 13.1); the context is current.
///
/// # Safety
/// `graph` is live.
pub(super) unsafe fn graph_id(graph: GraphHandle) -> Result<Option<u32>> {
    let Some(get) = calls().graph_id else {
        return Ok(None);
    };
    let mut id = 0;
    // SAFETY: `graph` is live by the contract; the call writes one unsigned int, to `id`.
    let code = unsafe { get(graph.0 as sys::CUgraph, &raw mut id) };
    check(Call::GraphGetId, code)?;
    Ok(Some(id))
}

/// By which number tools know an exec (CUDA 13.1); the context is current.
///
/// # Safety
/// `exec` is live.
pub(super) unsafe fn exec_id(exec: ExecHandle) -> Result<Option<u32>> {
    let Some(get) = calls().exec_id else {
        return Ok(None);
    };
    let mut id = 0;
    // SAFETY: `exec` is live by the contract; the call writes one unsigned int, to `id`.
    let code = unsafe { get(exec.0 as sys::CUgraphExec, &raw mut id) };
    check(Call::GraphExecGetId, code)?;
    Ok(Some(id))
}

type NodeGraph = unsafe extern "C" fn(sys::CUgraphNode, *mut sys::CUgraph) -> u32;
type NodeLocalId = unsafe extern "C" fn(sys::CUgraphNode, *mut u32) -> u32;
type NodeToolsId = unsafe extern "C" fn(sys::CUgraphNode, *mut u64) -> u32;
pub(super) type NodeGetParams = unsafe extern "C" fn(sys::CUgraphNode, *mut NodeParams) -> u32;
type GraphId = unsafe extern "C" fn(sys::CUgraph, *mut u32) -> u32;
type ExecId = unsafe extern "C" fn(sys::CUgraphExec, *mut u32) -> u32;

/// The calls that this driver has.
struct Calls {
    node_graph: Option<NodeGraph>,
    node_local_id: Option<NodeLocalId>,
    node_tools_id: Option<NodeToolsId>,
    node_params: Option<NodeGetParams>,
    graph_id: Option<GraphId>,
    exec_id: Option<ExecId>,
}

/// Return the call that tells the parameters of a node of any kind (CUDA 13.2).
pub(super) fn node_params() -> Option<NodeGetParams> {
    calls().node_params
}

fn calls() -> &'static Calls {
    static CALLS: OnceLock<Calls> = OnceLock::new();
    CALLS.get_or_init(|| Calls {
        // SAFETY: CUDA declares it so since 13.1.
        node_graph: unsafe { probe::symbol::<NodeGraph>("cuGraphNodeGetContainingGraph") },
        // SAFETY: CUDA declares it so since 13.1.
        node_local_id: unsafe { probe::symbol::<NodeLocalId>("cuGraphNodeGetLocalId") },
        // SAFETY: CUDA declares it so since 13.1.
        node_tools_id: unsafe { probe::symbol::<NodeToolsId>("cuGraphNodeGetToolsId") },
        // SAFETY: CUDA declares it so since 13.2, with a struct of this size.
        node_params: unsafe { probe::symbol::<NodeGetParams>("cuGraphNodeGetParams") },
        // SAFETY: CUDA declares it so since 13.1.
        graph_id: unsafe { probe::symbol::<GraphId>("cuGraphGetId") },
        // SAFETY: CUDA declares it so since 13.1.
        exec_id: unsafe { probe::symbol::<ExecId>("cuGraphExecGetId") },
    })
}
