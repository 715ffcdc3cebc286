//! What the driver tells of nodes and kernels so that they can be added again.
//!
//! Attributes go by plain numbers: a newer driver may know more of them than cudarc's enums.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::{c_int, c_void};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::work::Copy3d;
use super::{Cuda, call, check, images, out, params, probe, work};
use crate::code::{Call, Code};
use crate::driver::RebuildCalls;
use crate::driver::failed;
use crate::driver::handle::{Address, FunctionHandle, NodeHandle};
use crate::driver::spec::{Dim3, FunctionAttribute, LaunchAttribute, WorkSpec};
use crate::error::{Error, Result};

/// The launch attributes that a kernel keeps in a graph: access policy, cooperative, cluster dimension and its
/// scheduling, priority, memory synchronisation domains, preferred cluster dimension, updates by the device,
/// carveout, programmatic launches by `NVLink`, portable clusters, shared memory. Programmatic launches otherwise
/// are edges.
const OF_LAUNCHES: [u32; 13] = [1, 2, 4, 5, 8, 9, 10, 11, 13, 14, 16, 17, 18];

/// The attributes of a kernel that may be set: dynamic shared memory, carveout, required clusters, clusters that
/// are not portable and their scheduling.
const OF_FUNCTIONS: [u32; 7] = [FunctionAttribute::MAX_SHARED_BYTES, 9, 11, 12, 13, 14, 15];

const KERNEL: u32 = 0;
const MEMCPY: u32 = 1;
const MEMSET: u32 = 2;

impl RebuildCalls for Cuda {
    fn record_images(&self, cupti: &Path) -> Result<()> {
        images::record(cupti)
    }

    unsafe fn node_image(&self, node: NodeHandle) -> Result<Option<Arc<[u8]>>> {
        let _entered = self.enter()?;
        // SAFETY: `node` is a live kernel node by the contract.
        unsafe { images::of_node(node) }
    }

    fn is_reached(&self, address: Address) -> Result<bool> {
        let _entered = self.enter()?;
        let call = Call::PointerGetAttribute;
        let get = calls().get_of_pointer.ok_or_else(|| missing(call))?;
        let mut kind = 0_u32;
        // SAFETY: the call writes a C enum, which has the size of a u32; any number may be asked about.
        let result = unsafe { get((&raw mut kind).cast(), MEMORY_TYPE, address.0) };
        is_known(call, result)
    }

    unsafe fn node_work(&self, node: NodeHandle) -> Result<Option<WorkSpec>> {
        let _entered = self.enter()?;
        let node = node.0 as sys::CUgraphNode;
        // SAFETY: `node` is live by the contract.
        match unsafe { kind_of(node) }? {
            // SAFETY: `node` is a live kernel node.
            KERNEL => unsafe { kernel(node, self.context()) },
            // SAFETY: `node` is a live memcpy node.
            MEMCPY => unsafe { memcpy(node) },
            // SAFETY: `node` is a live memset node.
            MEMSET => unsafe { memset(node) },
            _ => Ok(None),
        }
    }

    unsafe fn node_attributes(&self, node: NodeHandle) -> Result<Vec<LaunchAttribute>> {
        let _entered = self.enter()?;
        let node = node.0 as sys::CUgraphNode;
        // SAFETY: `node` is live by the contract.
        if unsafe { kind_of(node) }? != KERNEL {
            return Ok(Vec::new());
        }
        let call = Call::GraphKernelNodeGetAttribute;
        let get = calls().get_of_node.ok_or_else(|| missing(call))?;
        let mut found = Vec::new();
        for id in OF_LAUNCHES {
            let mut value = Value([0; 64]);
            // SAFETY: `node` is a live kernel node; the call writes at most the 64 bytes of a value.
            let result = unsafe { get(node, id, &raw mut value) };
            // A driver that does not know the number has no such attribute.
            if is_known(call, result)? && value.0 != [0; 64] {
                found.push(LaunchAttribute { id, value: value.0 });
            }
        }
        Ok(found)
    }

    unsafe fn node_set_attribute(
        &self,
        node: NodeHandle,
        attribute: &LaunchAttribute,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let call = Call::GraphKernelNodeSetAttribute;
        let set = calls().set_of_node.ok_or_else(|| missing(call))?;
        let value = Value(attribute.value);
        // SAFETY: `node` is a live kernel node by the contract; the call reads the 64 bytes of a value.
        let result = unsafe { set(node.0 as sys::CUgraphNode, attribute.id, &raw const value) };
        check(call, result)
    }

    unsafe fn function_attributes(
        &self,
        function: FunctionHandle,
    ) -> Result<Vec<FunctionAttribute>> {
        let _entered = self.enter()?;
        let call = Call::FuncGetAttribute;
        let get = calls().get_of_function.ok_or_else(|| missing(call))?;
        let mut found = Vec::new();
        for id in OF_FUNCTIONS {
            let mut value = 0;
            // SAFETY: the function is loaded by the contract; the call writes one int.
            let result = unsafe { get(&raw mut value, id, function.0 as sys::CUfunction) };
            if is_known(call, result)? {
                found.push(FunctionAttribute { id, value });
            }
        }
        Ok(found)
    }

    unsafe fn function_set_attribute(
        &self,
        function: FunctionHandle,
        attribute: FunctionAttribute,
    ) -> Result<()> {
        let _entered = self.enter()?;
        let call = Call::FuncSetAttribute;
        let set = calls().set_of_function.ok_or_else(|| missing(call))?;
        let function = function.0 as sys::CUfunction;
        // SAFETY: the function is loaded by the contract.
        check(call, unsafe {
            set(function, attribute.id, attribute.value)
        })
    }
}

/// # Safety
/// `node` is a node of a live graph; the context is current.
unsafe fn kind_of(node: sys::CUgraphNode) -> Result<u32> {
    // SAFETY: `node` is live by the contract; the call writes a C enum, which has the size of a u32, through `kind`.
    out(Call::GraphNodeGetType, 0_u32, |kind| unsafe {
        call!(cuGraphNodeGetType(node, kind.cast()))
    })
}

/// # Safety
/// `node` is a kernel node of a live graph; the context is current.
unsafe fn kernel(node: sys::CUgraphNode, own: sys::CUcontext) -> Result<Option<WorkSpec>> {
    // SAFETY: `node` is a live kernel node.
    let params = unsafe { params::of_kernel(node) }?;
    if !params.ctx.is_null() && params.ctx != own {
        // It runs on another device.
        return Ok(None);
    }
    let function = if params.func.is_null() && !params.kern.is_null() {
        // SAFETY: the kernel of a live node is live; the call writes one handle.
        out(Call::GraphNodeGetParams, params.func, |function| unsafe {
            call!(cuKernelGetFunction(function, params.kern))
        })?
    } else {
        params.func
    };
    // SAFETY: the driver has just described a live node.
    let Some(args) = unsafe { params::arguments(&params) }? else {
        return Ok(None);
    };
    Ok(Some(WorkSpec::Kernel {
        function: FunctionHandle(function as u64),
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
        args: args.into(),
    }))
}

/// # Safety
/// `node` is a memcpy node of a live graph; the context is current.
unsafe fn memcpy(node: sys::CUgraphNode) -> Result<Option<WorkSpec>> {
    // SAFETY: `node` is a live memcpy node; `Copy3d` has the layout of what is written.
    let copy = out(Call::GraphNodeGetParams, Copy3d::default(), |copy| unsafe {
        call!(cuGraphMemcpyNodeGetParams(node, copy.cast()))
    })?;
    Ok(copy.is_row().then(|| WorkSpec::Memcpy {
        dst: copy.dst.address(),
        src: copy.src.address(),
        bytes: copy.width as u64,
    }))
}

/// # Safety
/// `node` is a memset node of a live graph; the context is current.
unsafe fn memset(node: sys::CUgraphNode) -> Result<Option<WorkSpec>> {
    let empty = work::memset(Address(0), 0, 1, 0)?;
    // SAFETY: `node` is a live memset node; the call writes its parameters.
    let set = out(Call::GraphNodeGetParams, empty, |set| unsafe {
        call!(cuGraphMemsetNodeGetParams(node, set))
    })?;
    Ok((set.height <= 1).then(|| WorkSpec::Memset {
        dst: Address(set.dst),
        value: set.value,
        element_bytes: (set.elementSize & 0xff) as u8,
        count: set.width as u64,
    }))
}

/// `CUlaunchAttributeValue`.
#[repr(C, align(8))]
struct Value([u8; 64]);

type GetNodeAttribute = unsafe extern "C" fn(sys::CUgraphNode, u32, *mut Value) -> u32;
type SetNodeAttribute = unsafe extern "C" fn(sys::CUgraphNode, u32, *const Value) -> u32;
type GetFunctionAttribute = unsafe extern "C" fn(*mut c_int, u32, sys::CUfunction) -> u32;
type GetPointerAttribute = unsafe extern "C" fn(*mut c_void, u32, u64) -> u32;
type SetFunctionAttribute = unsafe extern "C" fn(sys::CUfunction, u32, c_int) -> u32;

/// `CU_POINTER_ATTRIBUTE_MEMORY_TYPE`; what no driver knows has none.
const MEMORY_TYPE: u32 = 2;

struct Calls {
    get_of_pointer: Option<GetPointerAttribute>,
    get_of_node: Option<GetNodeAttribute>,
    set_of_node: Option<SetNodeAttribute>,
    get_of_function: Option<GetFunctionAttribute>,
    set_of_function: Option<SetFunctionAttribute>,
}

fn calls() -> &'static Calls {
    static CALLS: OnceLock<Calls> = OnceLock::new();
    CALLS.get_or_init(|| Calls {
        // SAFETY: CUDA declares it so since 4.0, with an enum of the size of a u32.
        get_of_pointer: unsafe { probe::symbol("cuPointerGetAttribute") },
        // SAFETY: CUDA declares it so since 11.0, with an enum of the size of a u32.
        get_of_node: unsafe { probe::symbol("cuGraphKernelNodeGetAttribute") },
        // SAFETY: as above.
        set_of_node: unsafe { probe::symbol("cuGraphKernelNodeSetAttribute") },
        // SAFETY: as above.
        get_of_function: unsafe { probe::symbol("cuFuncGetAttribute") },
        // SAFETY: as above.
        set_of_function: unsafe { probe::symbol("cuFuncSetAttribute") },
    })
}

/// Return whether a call has told an attribute; a driver may not know it.
fn is_known(call: Call, result: u32) -> Result<bool> {
    match check(call, result) {
        Ok(()) => Ok(true),
        Err(error) => match error.code() {
            Some(Code::INVALID_VALUE | Code::NOT_SUPPORTED) => Ok(false),
            _ => Err(error),
        },
    }
}

fn missing(call: Call) -> Error {
    failed(call, Code::NOT_SUPPORTED)
}
