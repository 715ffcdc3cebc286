//! Finds libcuda, and finds out whether every call of ours would reach it.

#![expect(unsafe_code, reason = "opens a library and calls into it")]

use std::ffi::{c_int, c_uint};
use std::sync::OnceLock;

use libloading::Library;

use crate::code::Code;
use crate::error::{Error, Result};

/// The lowest version that is used: the `cuda-12040` of cudarc's features.
const NEEDED: u32 = 12040;

/// Every symbol that we call, which has the name of its wrapper in cudarc.
const SYMBOLS: &[&str] = &[
    "cuCtxGetCurrent",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDevicePrimaryCtxRetain",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncGetName",
    "cuFuncGetParamInfo",
    "cuGraphAddChildGraphNode",
    "cuGraphAddDependencies_v2",
    "cuGraphAddEmptyNode",
    "cuGraphAddEventRecordNode",
    "cuGraphAddEventWaitNode",
    "cuGraphAddHostNode",
    "cuGraphAddKernelNode_v2",
    "cuGraphAddMemcpyNode",
    "cuGraphAddMemsetNode",
    "cuGraphAddNode_v2",
    "cuGraphChildGraphNodeGetGraph",
    "cuGraphClone",
    "cuGraphConditionalHandleCreate",
    "cuGraphCreate",
    "cuGraphDestroy",
    "cuGraphDestroyNode",
    "cuGraphEventRecordNodeGetEvent",
    "cuGraphEventWaitNodeGetEvent",
    "cuGraphExecDestroy",
    "cuGraphExecHostNodeSetParams",
    "cuGraphExecKernelNodeSetParams_v2",
    "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams",
    "cuGraphExecUpdate_v2",
    "cuGraphGetEdges_v2",
    "cuGraphGetNodes",
    "cuGraphGetRootNodes",
    "cuGraphHostNodeGetParams",
    "cuGraphInstantiateWithParams",
    "cuGraphKernelNodeGetParams_v2",
    "cuGraphLaunch",
    "cuGraphMemAllocNodeGetParams",
    "cuGraphMemFreeNodeGetParams",
    "cuGraphMemcpyNodeGetParams",
    "cuGraphMemsetNodeGetParams",
    "cuGraphNodeFindInClone",
    "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetEnabled",
    "cuGraphNodeGetType",
    "cuGraphNodeSetEnabled",
    "cuGraphRemoveDependencies_v2",
    "cuGraphUpload",
    "cuKernelGetFunction",
    "cuKernelGetName",
    "cuKernelGetParamInfo",
    "cuLaunchHostFunc",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemFree_v2",
    "cuMemGetAddressRange_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD16Async",
    "cuMemsetD32Async",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamGetCaptureInfo_v2",
    "cuStreamGetCaptureInfo_v3",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuThreadExchangeStreamCaptureMode",
];

/// Return the driver's version, once it is initialised; what went wrong stays wrong.
pub(super) fn version() -> Result<u32> {
    match PROBED.get_or_init(probe) {
        Ok(probed) => Ok(probed.version),
        Err(error) => Err(error.clone()),
    }
}

/// Return what the driver has under a name, if anything; nothing before [`version`] has succeeded.
///
/// # Safety
/// In every driver that has the symbol, it may be taken for a `T`.
pub(super) unsafe fn symbol<T: Copy>(name: &str) -> Option<T> {
    let probed = PROBED.get()?.as_ref().ok()?;
    // SAFETY: the symbol may be taken for a `T` by the contract, and the library stays open as long
    // as the process.
    unsafe { probed.library.get::<T>(name) }
        .ok()
        .map(|found| *found)
}

static PROBED: OnceLock<Result<Probed>> = OnceLock::new();

struct Probed {
    version: u32,
    /// Open as long as the process: the driver's threads run its code.
    library: Library,
}

fn probe() -> Result<Probed> {
    let (library, name) = open()?;
    let unusable = |reason| Error::NoDriver {
        reason,
        looked_for: vec![name.clone()],
    };
    let version = loaded_version(&library).map_err(unusable)?;
    if version < NEEDED {
        return Err(unusable(format!(
            "driver version {version} is older than {NEEDED}"
        )));
    }
    let missing = missing_symbols(&library);
    if !missing.is_empty() {
        return Err(unusable(format!("it lacks {}", missing.join(", "))));
    }
    initialise(&library).map_err(unusable)?;
    Ok(Probed { version, library })
}

/// Open the first library that there is of the names that cudarc has for it.
fn open() -> Result<(Library, String)> {
    let names: Vec<String> = ["cuda", "nvcuda"]
        .into_iter()
        .flat_map(cudarc::get_lib_name_candidates)
        .collect();
    for name in &names {
        // SAFETY: a library of this name is NVIDIA's driver, whose initialisers any thread may run.
        if let Ok(library) = unsafe { Library::new(name) } {
            return Ok((library, name.clone()));
        }
    }
    // The same name may come twice, and those of other systems tell nobody anything.
    let mut looked_for: Vec<String> = Vec::new();
    for name in names {
        if name.contains(std::env::consts::DLL_SUFFIX) && !looked_for.contains(&name) {
            looked_for.push(name);
        }
    }
    Err(Error::NoDriver {
        reason: "no libcuda could be opened".into(),
        looked_for,
    })
}

fn loaded_version(library: &Library) -> Result<u32, String> {
    type GetVersion = unsafe extern "C" fn(*mut c_int) -> u32;
    // SAFETY: cuDriverGetVersion has this signature in every CUDA version.
    let get_version = unsafe { library.get::<GetVersion>("cuDriverGetVersion") }
        .map_err(|_| "it lacks cuDriverGetVersion")?;
    let mut version = 0;
    // SAFETY: the call needs no initialised driver and writes one int, to `version`.
    let code = unsafe { get_version(&raw mut version) };
    if code != 0 {
        return Err(format!("cuDriverGetVersion failed: {}", Code(code)));
    }
    Ok(version.unsigned_abs())
}

fn missing_symbols(library: &Library) -> Vec<&'static str> {
    let lacks = |symbol: &&str| {
        // SAFETY: the address is only asked for, not called.
        unsafe { library.get::<*const ()>(*symbol) }.is_err()
    };
    SYMBOLS.iter().copied().filter(lacks).collect()
}

fn initialise(library: &Library) -> Result<(), String> {
    type Init = unsafe extern "C" fn(c_uint) -> u32;
    // SAFETY: cuInit has this signature in every CUDA version.
    let init = unsafe { library.get::<Init>("cuInit") }.map_err(|_| "it lacks cuInit")?;
    // SAFETY: zero is the only flag word there is; any thread may call it, any number of times.
    match unsafe { init(0) } {
        0 => Ok(()),
        code => Err(format!("cuInit failed: {}", Code(code))),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    /// A call that is not looked for would panic on a driver without it.
    #[test]
    fn every_call_is_looked_for() {
        let sources = [
            include_str!("conditional.rs"),
            include_str!("exec.rs"),
            include_str!("graph.rs"),
            include_str!("memory.rs"),
            include_str!("newer.rs"),
            include_str!("mod.rs"),
            include_str!("node.rs"),
            include_str!("pages.rs"),
            include_str!("params.rs"),
            include_str!("rebuild.rs"),
            include_str!("stream.rs"),
            include_str!("work.rs"),
        ];
        let called: BTreeSet<&str> = sources
            .iter()
            .flat_map(|source| source.split("call!(").skip(1))
            .map(str::trim_start)
            .filter_map(|rest| rest.split('(').next())
            .collect();
        assert_eq!(called, super::SYMBOLS.iter().copied().collect());
    }
}
