//! Conditional nodes: adding one, and finding out what one chooses from.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::mem::offset_of;
use std::{ptr, slice};

use cudarc::driver::sys;

use super::{call, check, newer};
use crate::code::Call;
use crate::driver::handle::{ConditionHandle, GraphHandle, NodeHandle};
use crate::driver::spec::Condition;
use crate::error::Result;

/// Add a node with one graph of its own, and return both; `context` is current.
///
/// # Safety
/// As for `GraphCalls::graph_add_conditional`.
pub(super) unsafe fn add(
    context: sys::CUcontext,
    graph: GraphHandle,
    after: &[NodeHandle],
    rule: Condition,
    condition: ConditionHandle,
) -> Result<(NodeHandle, GraphHandle)> {
    let after: Vec<sys::CUgraphNode> = after.iter().map(|node| node.0 as _).collect();
    let mut params = NodeParams {
        kind: CONDITIONAL,
        handle: condition.0,
        condition: rule.number(),
        count: 1,
        context: context as u64,
        ..NodeParams::default()
    };
    let mut node: sys::CUgraphNode = ptr::null_mut();
    // SAFETY: `graph`, `after` and the condition are live by the contract, and the context is current. Without
    // edge data all edges are full ones. `params` has the layout that the call expects; it writes there, and one
    // handle to `node`.
    let result = unsafe {
        call!(cuGraphAddNode_v2(
            &raw mut node,
            graph.0 as sys::CUgraph,
            after.as_ptr(),
            ptr::null(),
            after.len(),
            (&raw mut params).cast()
        ))
    };
    check(Call::GraphAddNode, result)?;
    // SAFETY: the driver has written a pointer to an array of `count` handles that lives as long as the node.
    let body = unsafe { *params.bodies };
    Ok((NodeHandle(node as u64), GraphHandle(body)))
}

/// Return what a conditional node chooses from, and how (CUDA 13.2); the context is current.
///
/// # Safety
/// `node` is a conditional node of a live graph.
pub(super) unsafe fn detail(
    node: sys::CUgraphNode,
) -> Result<(Option<Condition>, Vec<GraphHandle>)> {
    let Some(get) = newer::node_params() else {
        return Ok((None, Vec::new()));
    };
    let mut params = NodeParams::default();
    // SAFETY: `node` is live by the contract; the call writes `params`, which has the size and the
    // layout that it expects.
    check(Call::GraphNodeGetParams, unsafe {
        get(node, &raw mut params)
    })?;
    if params.kind != CONDITIONAL || params.bodies.is_null() {
        return Ok((None, Vec::new()));
    }
    // SAFETY: of a conditional node the driver has written a pointer to an array of `count` handles
    // that lives as long as the node, and nobody changes it.
    let bodies = unsafe { slice::from_raw_parts(params.bodies, params.count as usize) };
    let condition = match params.condition {
        0 => Condition::If,
        1 => Condition::While,
        2 => Condition::Switch,
        other => Condition::Other(other),
    };
    let bodies = bodies.iter().map(|body| GraphHandle(*body)).collect();
    Ok((Some(condition), bodies))
}

/// `CU_GRAPH_NODE_TYPE_CONDITIONAL`.
const CONDITIONAL: u32 = 13;

/// `CUgraphNodeParams` of a conditional node, with numbers for its enums and handles. Its size is
/// the same in all versions.
#[repr(C)]
pub(super) struct NodeParams {
    kind: u32,
    reserved: [u32; 3],
    handle: u64,
    condition: u32,
    count: u32,
    bodies: *const u64,
    context: u64,
    others: [u64; 26],
}

impl Default for NodeParams {
    fn default() -> Self {
        Self {
            kind: 0,
            reserved: [0; 3],
            handle: 0,
            condition: 0,
            count: 0,
            bodies: ptr::null(),
            context: 0,
            others: [0; 26],
        }
    }
}

const _: () = {
    type Theirs = sys::CUgraphNodeParams;
    type Conditional = sys::CUDA_CONDITIONAL_NODE_PARAMS;
    const START: usize = offset_of!(Theirs, __bindgen_anon_1);
    assert!(size_of::<NodeParams>() == size_of::<Theirs>());
    assert!(offset_of!(NodeParams, handle) == START + offset_of!(Conditional, handle));
    assert!(offset_of!(NodeParams, condition) == START + offset_of!(Conditional, type_));
    assert!(offset_of!(NodeParams, count) == START + offset_of!(Conditional, size));
    assert!(offset_of!(NodeParams, bodies) == START + offset_of!(Conditional, phGraph_out));
};
