//! Execs: making one, and changing what its nodes do.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::mem::offset_of;
use std::ptr;

use cudarc::driver::sys;

use super::work::{self, Copy3d};
use super::{call, check};
use crate::code::{Call, Code};
use crate::driver::handle::{ExecHandle, FunctionHandle, GraphHandle, NodeHandle};
use crate::driver::spec::{Dim3, WorkSpec};
use crate::driver::{InstantiateFailure, InstantiateFlags, UpdateFailure};
use crate::error::Result;

/// Make an exec; the context is current.
///
/// # Safety
/// `graph` is live.
pub(super) unsafe fn instantiate(
    graph: GraphHandle,
    flags: InstantiateFlags,
) -> Result<ExecHandle, InstantiateFailure> {
    let mut params = InstantiateParams {
        flags: flags.0,
        ..InstantiateParams::default()
    };
    let mut exec: sys::CUgraphExec = ptr::null_mut();
    // SAFETY: `graph` is live by the contract; the call writes one handle, to `exec`, and the
    // outputs of `params`, which has the layout that it expects.
    let result = unsafe {
        call!(cuGraphInstantiateWithParams(
            &raw mut exec,
            graph.0 as sys::CUgraph,
            (&raw mut params).cast(),
        ))
    };
    match result {
        0 => Ok(ExecHandle(exec as u64)),
        code => Err(InstantiateFailure {
            code: Code(code),
            node: node_at(params.error_node),
        }),
    }
}

/// Take over the parameters of a graph; the context is current.
///
/// # Safety
/// As for `GraphCalls::exec_update`.
pub(super) unsafe fn update(exec: ExecHandle, graph: GraphHandle) -> Result<(), UpdateFailure> {
    let mut info = UpdateInfo::default();
    let (exec, graph) = (exec.0 as sys::CUgraphExec, graph.0 as sys::CUgraph);
    // SAFETY: `exec` and `graph` are live by the contract; the call writes `info`, which has the
    // layout that it expects.
    let result = unsafe { call!(cuGraphExecUpdate_v2(exec, graph, (&raw mut info).cast())) };
    match result {
        0 => Ok(()),
        code => Err(UpdateFailure {
            code: Code(code),
            reason: update_reason(info.result, Code(code)),
            node: node_at(info.error_node),
        }),
    }
}

/// Change what one node does; `context` is current.
///
/// # Safety
/// As for `GraphCalls::exec_set_work`.
pub(super) unsafe fn set_work(
    context: sys::CUcontext,
    exec: ExecHandle,
    node: NodeHandle,
    work: &WorkSpec,
) -> Result<()> {
    let (exec, node) = (exec.0 as sys::CUgraphExec, node.0 as sys::CUgraphNode);
    match work {
        WorkSpec::Kernel {
            function,
            grid,
            block,
            shared_bytes,
            args,
        } => {
            let mut args = work::argument_pointers(args);
            let params = work::kernel(*function, *grid, *block, *shared_bytes, &mut args);
            // SAFETY: `exec`, `node` and the function are live and the arguments are the kernel's,
            // by the contract; the driver copies parameters and arguments.
            let result = unsafe {
                call!(cuGraphExecKernelNodeSetParams_v2(
                    exec,
                    node,
                    &raw const params
                ))
            };
            check(Call::GraphExecKernelNodeSetParams, result)
        }
        WorkSpec::Memcpy { dst, src, bytes } => {
            let params = Copy3d::linear(*dst, *src, *bytes);
            // SAFETY: `exec` and `node` are live and both sides stay mapped as long as `exec`, by
            // the contract; the driver copies the parameters.
            let result = unsafe {
                call!(cuGraphExecMemcpyNodeSetParams(
                    exec,
                    node,
                    params.as_raw(),
                    context
                ))
            };
            check(Call::GraphExecMemcpyNodeSetParams, result)
        }
        WorkSpec::Memset {
            dst,
            value,
            element_bytes,
            count,
        } => {
            let params = work::memset(*dst, *value, *element_bytes, *count)?;
            // SAFETY: `exec` and `node` are live and `dst` stays mapped as long as `exec`, by the
            // contract; the driver copies the parameters.
            let result = unsafe {
                call!(cuGraphExecMemsetNodeSetParams(
                    exec,
                    node,
                    &raw const params,
                    context
                ))
            };
            check(Call::GraphExecMemsetNodeSetParams, result)
        }
        WorkSpec::Host(function) => {
            let params = work::host(function);
            // SAFETY: `exec` and `node` are live and the caller keeps the function alive as long as
            // `exec`, by the contract; the driver copies the parameters.
            let result =
                unsafe { call!(cuGraphExecHostNodeSetParams(exec, node, &raw const params)) };
            check(Call::GraphExecHostNodeSetParams, result)
        }
    }
}

/// Change the one argument of a kernel node; the context is current.
///
/// # Safety
/// As for `GraphCalls::exec_set_parameter`.
#[inline]
pub(super) unsafe fn set_parameter(
    exec: ExecHandle,
    node: NodeHandle,
    function: FunctionHandle,
    [grid, block]: [Dim3; 2],
    parameter: &[u8],
) -> Result<()> {
    let (exec, node) = (exec.0 as sys::CUgraphExec, node.0 as sys::CUgraphNode);
    let mut args = [parameter.as_ptr().cast_mut().cast()];
    let params = work::kernel(function, grid, block, 0, &mut args);
    // SAFETY: `exec`, `node` and the function are live and the kernel has one parameter of this
    // size, by the contract; the driver reads `params`, `args` and the bytes, and copies them.
    let result = unsafe {
        call!(cuGraphExecKernelNodeSetParams_v2(
            exec,
            node,
            &raw const params
        ))
    };
    check(Call::GraphExecKernelNodeSetParams, result)
}

/// `CUDA_GRAPH_INSTANTIATE_PARAMS` with numbers for its handles and its result.
#[repr(C)]
#[derive(Default)]
struct InstantiateParams {
    flags: u64,
    upload_stream: u64,
    error_node: u64,
    result: u32,
}

const _: () = {
    type Theirs = sys::CUDA_GRAPH_INSTANTIATE_PARAMS;
    assert!(size_of::<InstantiateParams>() == size_of::<Theirs>());
    assert!(offset_of!(InstantiateParams, error_node) == offset_of!(Theirs, hErrNode_out));
};

/// `CUgraphExecUpdateResultInfo` with numbers for its handles and its result.
#[repr(C)]
#[derive(Default)]
struct UpdateInfo {
    result: u32,
    error_node: u64,
    error_from_node: u64,
}

const _: () = {
    type Theirs = sys::CUgraphExecUpdateResultInfo;
    assert!(size_of::<UpdateInfo>() == size_of::<Theirs>());
    assert!(offset_of!(UpdateInfo, error_node) == offset_of!(Theirs, errorNode));
};

fn node_at(node: u64) -> Option<NodeHandle> {
    (node != 0).then_some(NodeHandle(node))
}

/// `CUgraphExecUpdateResult` in words.
fn update_reason(result: u32, code: Code) -> String {
    let words = match result {
        2 => "the graphs have different nodes or edges",
        3 => "a node's kind changed",
        4 => "a kernel's function changed",
        5 => "a parameter changed that an exec cannot take",
        6 => "a node's kind or configuration does not allow updates",
        7 => "a kernel's function changed in a way that is not supported",
        8 => "a node's attribute changed that an exec cannot take",
        _ => return code.to_string(),
    };
    words.into()
}
