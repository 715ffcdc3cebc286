//! Nodes of a template: adding one, and finding out what one does.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::CStr;
use std::mem::offset_of;
use std::ptr;

use cudarc::driver::sys;

use super::work::{self, Copy3d};
use super::{call, check, conditional, out, params};
use crate::code::Call;
use crate::driver::handle::{Address, EventHandle, GraphHandle, NodeHandle};
use crate::driver::spec::{Dim3, NodeDetail, NodeSpec, WorkSpec};
use crate::error::Result;

/// Add a node; `context` is current.
///
/// # Safety
/// As for `GraphCalls::graph_add_node`.
pub(super) unsafe fn add(
    context: sys::CUcontext,
    graph: GraphHandle,
    after: &[NodeHandle],
    spec: &NodeSpec,
) -> Result<NodeHandle> {
    let graph = graph.0 as sys::CUgraph;
    let after: Vec<_> = after.iter().map(|node| node.0 as _).collect();
    let (first, count) = (after.as_ptr(), after.len());
    let null = ptr::null_mut();
    let node = match spec {
        NodeSpec::Work(WorkSpec::Kernel {
            function,
            grid,
            block,
            shared_bytes,
            args,
        }) => {
            let mut args = work::argument_pointers(args);
            let params = work::kernel(*function, *grid, *block, *shared_bytes, &mut args);
            // SAFETY: `graph`, `after` and the function are live and the arguments are the
            // kernel's, by the contract; the driver copies parameters and arguments.
            out(Call::GraphAddKernelNode, null, |node| unsafe {
                call!(cuGraphAddKernelNode_v2(
                    node,
                    graph,
                    first,
                    count,
                    &raw const params
                ))
            })
        }
        NodeSpec::Work(WorkSpec::Memcpy { dst, src, bytes }) => {
            let params = Copy3d::linear(*dst, *src, *bytes);
            // SAFETY: `graph` and `after` are live and both sides stay mapped, by the contract; the
            // driver copies the parameters.
            out(Call::GraphAddMemcpyNode, null, |node| unsafe {
                call!(cuGraphAddMemcpyNode(
                    node,
                    graph,
                    first,
                    count,
                    params.as_raw(),
                    context
                ))
            })
        }
        NodeSpec::Work(WorkSpec::Memset {
            dst,
            value,
            element_bytes,
            count: elements,
        }) => {
            let params = work::memset(*dst, *value, *element_bytes, *elements)?;
            // SAFETY: `graph` and `after` are live and `dst` stays mapped, by the contract; the
            // driver copies the parameters.
            out(Call::GraphAddMemsetNode, null, |node| unsafe {
                call!(cuGraphAddMemsetNode(
                    node,
                    graph,
                    first,
                    count,
                    &raw const params,
                    context
                ))
            })
        }
        NodeSpec::Work(WorkSpec::Host(function)) => {
            let params = work::host(function);
            // SAFETY: `graph` and `after` are live and the caller keeps the function alive as long
            // as the graph or an exec of it, by the contract; the driver copies the parameters.
            out(Call::GraphAddHostNode, null, |node| unsafe {
                call!(cuGraphAddHostNode(
                    node,
                    graph,
                    first,
                    count,
                    &raw const params
                ))
            })
        }
        NodeSpec::EventRecord(event) => {
            let event = event.0 as sys::CUevent;
            // SAFETY: `graph`, `after` and `event` are live by the contract.
            out(Call::GraphAddEventRecordNode, null, |node| unsafe {
                call!(cuGraphAddEventRecordNode(node, graph, first, count, event))
            })
        }
        NodeSpec::EventWait(event) => {
            let event = event.0 as sys::CUevent;
            // SAFETY: `graph`, `after` and `event` are live by the contract.
            out(Call::GraphAddEventWaitNode, null, |node| unsafe {
                call!(cuGraphAddEventWaitNode(node, graph, first, count, event))
            })
        }
        // SAFETY: `graph` and `after` are live by the contract.
        NodeSpec::Empty => out(Call::GraphAddEmptyNode, null, |node| unsafe {
            call!(cuGraphAddEmptyNode(node, graph, first, count))
        }),
        NodeSpec::Child(child) => {
            let child = child.0 as sys::CUgraph;
            // SAFETY: `graph`, `after` and `child` are live by the contract; the driver copies the
            // child.
            out(Call::GraphAddChildGraphNode, null, |node| unsafe {
                call!(cuGraphAddChildGraphNode(node, graph, first, count, child))
            })
        }
    }?;
    Ok(NodeHandle(node as u64))
}

/// Return what a node does; the context is current.
///
/// # Safety
/// `node` is a node of a live graph.
pub(super) unsafe fn detail(node: NodeHandle) -> Result<NodeDetail> {
    let node = node.0 as sys::CUgraphNode;
    // SAFETY: `node` is live by the contract; the call writes a C enum, which has the size of a
    // u32, through `kind`.
    let kind = out(Call::GraphNodeGetType, 0_u32, |kind| unsafe {
        call!(cuGraphNodeGetType(node, kind.cast()))
    })?;
    let call = Call::GraphNodeGetParams;
    match kind {
        // SAFETY: `node` is a live kernel node.
        0 => Ok(unsafe { kernel_detail(node) }),
        1 => {
            // SAFETY: `node` is a live memcpy node; `Copy3d` has the layout of what is written.
            let copy = out(call, Copy3d::default(), |copy| unsafe {
                call!(cuGraphMemcpyNodeGetParams(node, copy.cast()))
            })?;
            Ok(NodeDetail::Memcpy {
                dst: copy.dst.address(),
                src: copy.src.address(),
                bytes: (copy.width * copy.height * copy.depth) as u64,
            })
        }
        2 => {
            let empty = work::memset(Address(0), 0, 1, 0)?;
            // SAFETY: `node` is a live memset node; the call writes its parameters.
            let set = out(call, empty, |set| unsafe {
                call!(cuGraphMemsetNodeGetParams(node, set))
            })?;
            Ok(NodeDetail::Memset {
                dst: Address(set.dst),
                value: set.value,
                element_bytes: (set.elementSize & 0xff) as u8,
                count: (set.width * set.height) as u64,
            })
        }
        // SAFETY: `node` is a live host node.
        3 => Ok(unsafe { host_detail(node) }),
        4 => {
            // SAFETY: `node` is a live child-graph node; the call writes one handle.
            let child = out(call, ptr::null_mut(), |child| unsafe {
                call!(cuGraphChildGraphNodeGetGraph(node, child))
            })?;
            Ok(NodeDetail::Child(GraphHandle(child as u64)))
        }
        5 => Ok(NodeDetail::Empty),
        6 => {
            // SAFETY: `node` is a live event-wait node; the call writes one handle.
            let event = out(call, ptr::null_mut(), |event| unsafe {
                call!(cuGraphEventWaitNodeGetEvent(node, event))
            })?;
            Ok(NodeDetail::EventWait(EventHandle(event as u64)))
        }
        7 => {
            // SAFETY: `node` is a live event-record node; the call writes one handle.
            let event = out(call, ptr::null_mut(), |event| unsafe {
                call!(cuGraphEventRecordNodeGetEvent(node, event))
            })?;
            Ok(NodeDetail::EventRecord(EventHandle(event as u64)))
        }
        8 => Ok(NodeDetail::ExternalSignal),
        9 => Ok(NodeDetail::ExternalWait),
        10 => {
            // SAFETY: `node` is a live node that allocates; `AllocParams` has the layout of what is
            // written.
            let params = out(call, AllocParams::default(), |params| unsafe {
                call!(cuGraphMemAllocNodeGetParams(node, params.cast()))
            })?;
            Ok(NodeDetail::MemAlloc {
                address: Address(params.address),
                bytes: params.bytes as u64,
            })
        }
        11 => {
            // SAFETY: `node` is a live node that frees; the call writes one address.
            let address = out(call, 0, |address| unsafe {
                call!(cuGraphMemFreeNodeGetParams(node, address))
            })?;
            Ok(NodeDetail::MemFree {
                address: Address(address),
            })
        }
        12 => Ok(NodeDetail::BatchMemOp),
        13 => {
            // SAFETY: `node` is a live conditional node.
            let (condition, bodies) = unsafe { conditional::detail(node) }?;
            Ok(NodeDetail::Conditional { condition, bodies })
        }
        _ => Ok(NodeDetail::Other(kind)),
    }
}

/// Return what a kernel node does; where the driver does not say, only that it is one.
///
/// # Safety
/// `node` is a kernel node of a live graph.
unsafe fn kernel_detail(node: sys::CUgraphNode) -> NodeDetail {
    // SAFETY: this function's contract is that one's.
    let Ok(params) = (unsafe { params::of_kernel(node) }) else {
        return NodeDetail::Other(0);
    };
    NodeDetail::Kernel {
        // SAFETY: the driver has just named the function or kernel of a live node.
        name: unsafe { kernel_name(params.func, params.kern) },
        grid: Dim3 {
            x: params.gridDimX,
            y: params.gridDimY,
            z: params.gridDimZ,
        },
        block: Dim3 {
            x: params.blockDimX,
            y: params.blockDimY,
            z: params.blockDimZ,
        },
        shared_bytes: params.sharedMemBytes,
    }
}

/// Return what a host node calls; where the driver does not say, only that it is one.
///
/// # Safety
/// `node` is a host node of a live graph.
unsafe fn host_detail(node: sys::CUgraphNode) -> NodeDetail {
    let empty = sys::CUDA_HOST_NODE_PARAMS {
        fn_: None,
        userData: ptr::null_mut(),
    };
    // SAFETY: `node` is a live host node by the contract; the call writes its parameters.
    let params = out(Call::GraphNodeGetParams, empty, |params| unsafe {
        call!(cuGraphHostNodeGetParams(node, params))
    });
    match params {
        Ok(params) => NodeDetail::Host {
            function: params.fn_.map_or(0, |function| function as usize as u64),
            data: params.userData as u64,
        },
        Err(_) => NodeDetail::Other(3),
    }
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS` with numbers for its enums.
#[repr(C)]
#[derive(Default)]
struct AllocParams {
    pool: [u64; 11],
    access: u64,
    access_count: usize,
    bytes: usize,
    address: u64,
}

const _: () = {
    type Theirs = sys::CUDA_MEM_ALLOC_NODE_PARAMS;
    assert!(size_of::<AllocParams>() == size_of::<Theirs>());
    assert!(offset_of!(AllocParams, access) == offset_of!(Theirs, accessDescs));
    assert!(offset_of!(AllocParams, bytes) == offset_of!(Theirs, bytesize));
    assert!(offset_of!(AllocParams, address) == offset_of!(Theirs, dptr));
};

/// Return the name of whichever is not null.
///
/// # Safety
/// Each is null or live.
unsafe fn kernel_name(function: sys::CUfunction, kernel: sys::CUkernel) -> Option<String> {
    let mut name = ptr::null();
    let result = if !function.is_null() {
        // SAFETY: `function` is live by the contract; the call writes one pointer, to `name`.
        unsafe { call!(cuFuncGetName(&raw mut name, function)) }
    } else if !kernel.is_null() {
        // SAFETY: `kernel` is live by the contract; the call writes one pointer, to `name`.
        unsafe { call!(cuKernelGetName(&raw mut name, kernel)) }
    } else {
        return None;
    };
    check(Call::GraphNodeGetParams, result).ok()?;
    if name.is_null() {
        return None;
    }
    // SAFETY: the driver has written a C string that lives as long as the function's module.
    let name = unsafe { CStr::from_ptr(name) };
    Some(name.to_string_lossy().into_owned())
}
