//! Raw values from torch: the only file of this crate with `unsafe` blocks.
#![expect(
    unsafe_code,
    reason = "torch hands over pointers; this file says what it relies on"
)]

use std::ffi::c_void;

use cg_core::{Device, Error, GraphHandle, Result, Stream, StreamHandle, Template, Tracker};
use dlpack_ffi::{DLDeviceType, DLPackExchangeAPI};
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::error::argument;

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// DLPack versions whose table has `current_work_stream` where `dlpack_ffi` declares it.
const MAJOR: u32 = 1;

/// A stream of torch's, by its raw handle.
///
/// # Errors
/// For CUDA's name of "the stream of this thread", which is another stream in each thread.
pub(crate) fn stream(device: &Device, handle: u64) -> Result<Stream> {
    if handle == PER_THREAD {
        return Err(Error::Invalid {
            argument: "stream".to_owned(),
            given: "CU_STREAM_PER_THREAD".to_owned(),
            expected: "a stream that is the same in all threads".to_owned(),
        });
    }
    // SAFETY: the handle comes from torch's current stream or from a `torch.cuda.Stream` that the
    // caller holds; torch takes its streams from a pool that it never destroys, and the
    // documentation of `cgraph.graph` asks the same of external streams.
    Ok(unsafe { Stream::from_raw(device, StreamHandle(handle)) })
}

/// The graph of a `torch._C._CUDAGraph`, by its raw handle.
pub(crate) fn template(device: &Device, handle: u64) -> Template {
    // SAFETY: the handle comes from `raw_cuda_graph()` of the object that captured it; `Graph`
    // drops the template before it lets that object go, and holds the pool that the captured
    // memory came from as long as the exec.
    unsafe { Template::from_raw(device, GraphHandle(handle)) }
}

/// The nodes of an open capture that no earlier look has returned.
///
/// The interpreter is held: the calls are short, and they come after each operator.
pub(crate) fn new_nodes(
    _py: Python<'_>,
    tracker: &mut Tracker,
    current: &Stream,
) -> Result<Vec<u64>> {
    // SAFETY: `cgraph.labels` looks only between the beginning and the end of its own capture, from
    // the threads that record into it; to end or break it from another thread at the same time is
    // a race between that thread and what is being recorded, with or without a look.
    let nodes = unsafe { tracker.new_nodes(current) }?;
    Ok(nodes.into_iter().map(|node| node.0).collect())
}

/// torch's "current stream" as a C function: no Python call.
pub(crate) struct CurrentWorkStream {
    function: unsafe extern "C" fn(DLDeviceType, i32, *mut *mut c_void) -> i32,
    ordinal: i32,
}

impl CurrentWorkStream {
    /// Takes the function from `torch.Tensor.__dlpack_c_exchange_api__` (torch 2.10 and newer).
    pub(crate) fn new(capsule: &Bound<'_, PyCapsule>, ordinal: u32) -> PyResult<Self> {
        let table = capsule
            .pointer_checked(Some(c"dlpack_exchange_api"))?
            .cast::<DLPackExchangeAPI>()
            .as_ptr();
        // SAFETY: a capsule of this name points at a table that lives as long as the process, and
        // its header has the same layout in all versions.
        let version = unsafe { (*table).header.version };
        if version.major != MAJOR {
            let given = format!("DLPack {}.{}", version.major, version.minor);
            return Err(argument("the exchange API", &given, "DLPack 1.x"));
        }
        // SAFETY: version 1 of the table has this field, and the table is never changed.
        let function = unsafe { (*table).current_work_stream };
        let function = function.ok_or_else(|| {
            argument(
                "current_work_stream of the exchange API",
                "NULL",
                "a function",
            )
        })?;
        let ordinal = i32::try_from(ordinal)?;
        Ok(Self { function, ordinal })
    }

    /// The raw handle of the current stream.
    #[inline]
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<u64> {
        let mut stream = std::ptr::null_mut();
        // SAFETY: `function` is the table's, `stream` is valid for one write, and the interpreter is
        // held, which the function needs to report an error.
        let status =
            unsafe { (self.function)(DLDeviceType::kDLCUDA, self.ordinal, &raw mut stream) };
        if status == 0 {
            return Ok(stream as u64);
        }
        Err(PyErr::take(py).unwrap_or_else(|| argument("the current stream", "unknown", "known")))
    }
}
