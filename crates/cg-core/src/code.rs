//! Names and meanings of driver calls and result codes, as static tables.

use std::fmt;

macro_rules! calls {
    ($($name:ident => $symbol:literal,)*) => {
        /// A driver call that cgraph makes.
        ///
        /// Errors carry it, and a test can make the simulator fail it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Call {
            $(#[doc = concat!("`", $symbol, "`")] $name,)*
        }

        impl Call {
            /// Every call, in the order of declaration.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// CUDA's name of the call.
            #[must_use]
            pub fn symbol(self) -> &'static str {
                match self { $(Self::$name => $symbol,)* }
            }
        }
    };
}

calls! {
    Init => "cuInit",
    DeviceGet => "cuDeviceGet",
    PrimaryContextRetain => "cuDevicePrimaryCtxRetain",
    ContextGetCurrent => "cuCtxGetCurrent",
    ContextSetCurrent => "cuCtxSetCurrent",
    ContextSynchronize => "cuCtxSynchronize",
    MemAlloc => "cuMemAlloc",
    MemFree => "cuMemFree",
    MemGetAllocationGranularity => "cuMemGetAllocationGranularity",
    MemAddressReserve => "cuMemAddressReserve",
    MemAddressFree => "cuMemAddressFree",
    MemCreate => "cuMemCreate",
    MemRelease => "cuMemRelease",
    MemMap => "cuMemMap",
    MemSetAccess => "cuMemSetAccess",
    MemUnmap => "cuMemUnmap",
    MemHostRegister => "cuMemHostRegister",
    MemHostUnregister => "cuMemHostUnregister",
    MemGetInfo => "cuMemGetInfo",
    MemGetAddressRange => "cuMemGetAddressRange",
    MemcpyHtoD => "cuMemcpyHtoD",
    MemcpyDtoH => "cuMemcpyDtoH",
    MemcpyAsync => "cuMemcpyAsync",
    MemsetAsync => "cuMemsetD32Async",
    LaunchKernel => "cuLaunchKernel",
    LaunchHostFunc => "cuLaunchHostFunc",
    ModuleLoadData => "cuModuleLoadData",
    ModuleGetFunction => "cuModuleGetFunction",
    ModuleUnload => "cuModuleUnload",
    PointerGetAttribute => "cuPointerGetAttribute",
    FuncGetModule => "cuFuncGetModule",
    KernelGetLibrary => "cuKernelGetLibrary",
    FuncGetAttribute => "cuFuncGetAttribute",
    FuncSetAttribute => "cuFuncSetAttribute",
    StreamCreate => "cuStreamCreate",
    StreamDestroy => "cuStreamDestroy",
    StreamSynchronize => "cuStreamSynchronize",
    StreamQuery => "cuStreamQuery",
    StreamWaitEvent => "cuStreamWaitEvent",
    StreamBeginCapture => "cuStreamBeginCapture",
    StreamEndCapture => "cuStreamEndCapture",
    StreamGetCaptureInfo => "cuStreamGetCaptureInfo",
    ThreadExchangeCaptureMode => "cuThreadExchangeStreamCaptureMode",
    EventCreate => "cuEventCreate",
    EventDestroy => "cuEventDestroy",
    EventRecord => "cuEventRecord",
    EventQuery => "cuEventQuery",
    EventSynchronize => "cuEventSynchronize",
    GraphCreate => "cuGraphCreate",
    GraphDestroy => "cuGraphDestroy",
    GraphClone => "cuGraphClone",
    GraphAddKernelNode => "cuGraphAddKernelNode",
    GraphAddMemcpyNode => "cuGraphAddMemcpyNode",
    GraphAddMemsetNode => "cuGraphAddMemsetNode",
    GraphAddHostNode => "cuGraphAddHostNode",
    GraphAddEventRecordNode => "cuGraphAddEventRecordNode",
    GraphAddEventWaitNode => "cuGraphAddEventWaitNode",
    GraphAddEmptyNode => "cuGraphAddEmptyNode",
    GraphAddChildGraphNode => "cuGraphAddChildGraphNode",
    GraphAddNode => "cuGraphAddNode",
    GraphConditionalHandleCreate => "cuGraphConditionalHandleCreate",
    GraphAddDependencies => "cuGraphAddDependencies",
    GraphRemoveDependencies => "cuGraphRemoveDependencies",
    GraphDestroyNode => "cuGraphDestroyNode",
    GraphGetNodes => "cuGraphGetNodes",
    GraphGetRootNodes => "cuGraphGetRootNodes",
    GraphGetEdges => "cuGraphGetEdges",
    GraphNodeGetDependencies => "cuGraphNodeGetDependencies",
    GraphNodeFindInClone => "cuGraphNodeFindInClone",
    GraphNodeGetType => "cuGraphNodeGetType",
    GraphNodeGetParams => "cuGraphKernelNodeGetParams",
    GraphKernelNodeGetAttribute => "cuGraphKernelNodeGetAttribute",
    GraphKernelNodeSetAttribute => "cuGraphKernelNodeSetAttribute",
    GraphNodeGetToolsId => "cuGraphNodeGetToolsId",
    GraphGetId => "cuGraphGetId",
    GraphExecGetId => "cuGraphExecGetId",
    GraphInstantiate => "cuGraphInstantiate",
    GraphUpload => "cuGraphUpload",
    GraphLaunch => "cuGraphLaunch",
    GraphExecDestroy => "cuGraphExecDestroy",
    GraphExecUpdate => "cuGraphExecUpdate",
    GraphExecKernelNodeSetParams => "cuGraphExecKernelNodeSetParams",
    GraphExecMemcpyNodeSetParams => "cuGraphExecMemcpyNodeSetParams",
    GraphExecMemsetNodeSetParams => "cuGraphExecMemsetNodeSetParams",
    GraphExecHostNodeSetParams => "cuGraphExecHostNodeSetParams",
    GraphNodeSetEnabled => "cuGraphNodeSetEnabled",
    GraphNodeGetEnabled => "cuGraphNodeGetEnabled",
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.symbol())
    }
}

macro_rules! codes {
    ($($name:ident = $number:literal, $symbol:literal, $meaning:literal;)*) => {
        impl Code {
            $(#[doc = concat!("`", $symbol, "`: ", $meaning)] pub const $name: Self = Self($number);)*

            /// CUDA's name of the code, where this version knows it.
            #[must_use]
            pub fn symbol(self) -> Option<&'static str> {
                match self.0 { $($number => Some($symbol),)* _ => None }
            }

            /// Return what the code means, where this version knows it.
            #[must_use]
            pub fn meaning(self) -> Option<&'static str> {
                match self.0 { $($number => Some($meaning),)* _ => None }
            }
        }
    };
}

/// A driver's result code: CUDA's `CUresult`, as a plain number, so that a code this version does
/// not know is still a valid value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Code(pub u32);

codes! {
    INVALID_VALUE = 1, "CUDA_ERROR_INVALID_VALUE", "an argument is not acceptable";
    OUT_OF_MEMORY = 2, "CUDA_ERROR_OUT_OF_MEMORY", "the device has not enough free memory";
    NOT_INITIALIZED = 3, "CUDA_ERROR_NOT_INITIALIZED", "the driver was not initialised";
    DEINITIALIZED = 4, "CUDA_ERROR_DEINITIALIZED", "the driver is shutting down";
    NO_DEVICE = 100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device was found";
    INVALID_DEVICE = 101, "CUDA_ERROR_INVALID_DEVICE", "there is no device with this number";
    INVALID_IMAGE = 200, "CUDA_ERROR_INVALID_IMAGE", "the kernel image is not valid";
    INVALID_CONTEXT = 201, "CUDA_ERROR_INVALID_CONTEXT", "no valid context is current on this thread";
    INVALID_PTX = 218, "CUDA_ERROR_INVALID_PTX", "the PTX text does not compile";
    ILLEGAL_STATE = 401, "CUDA_ERROR_ILLEGAL_STATE", "an object is not in a state for the call";
    INVALID_HANDLE = 400, "CUDA_ERROR_INVALID_HANDLE", "a handle is not valid";
    NOT_FOUND = 500, "CUDA_ERROR_NOT_FOUND", "the name was not found";
    NOT_READY = 600, "CUDA_ERROR_NOT_READY", "earlier work has not finished";
    ILLEGAL_ADDRESS = 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel touched memory that is not mapped";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
        "the host memory is pinned already";
    LAUNCH_FAILED = 719, "CUDA_ERROR_LAUNCH_FAILED", "earlier work on the device failed while it ran";
    NOT_PERMITTED = 800, "CUDA_ERROR_NOT_PERMITTED", "the operation is not permitted";
    NOT_SUPPORTED = 801, "CUDA_ERROR_NOT_SUPPORTED", "the operation is not supported here";
    STREAM_CAPTURE_UNSUPPORTED = 900, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        "the operation is not permitted while a stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        "an earlier operation has made the capture unusable";
    STREAM_CAPTURE_MERGE = 902, "CUDA_ERROR_STREAM_CAPTURE_MERGE",
        "the operation would have merged two captures";
    STREAM_CAPTURE_UNMATCHED = 903, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED",
        "the capture did not begin on this stream";
    STREAM_CAPTURE_UNJOINED = 904, "CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        "a stream that was forked into the capture was not joined back to its first stream";
    STREAM_CAPTURE_ISOLATION = 905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        "captured work would depend on work outside the capture";
    STREAM_CAPTURE_IMPLICIT = 906, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        "the operation would have made the legacy default stream depend on a capture";
    CAPTURED_EVENT = 907, "CUDA_ERROR_CAPTURED_EVENT",
        "the event was last recorded in a capture and has no state outside it";
    STREAM_CAPTURE_WRONG_THREAD = 908, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        "the capture was begun by another thread";
    GRAPH_EXEC_UPDATE_FAILURE = 910, "CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE",
        "the exec cannot take the change";
    UNKNOWN = 999, "CUDA_ERROR_UNKNOWN", "the driver does not say why";
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.symbol(), self.meaning()) {
            (Some(symbol), Some(meaning)) => write!(f, "{symbol} ({}): {meaning}", self.0),
            _ => write!(f, "code {}", self.0),
        }
    }
}
