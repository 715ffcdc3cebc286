//! torch's table of C functions for DLPack, which read tensors and the current stream.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::null_mut;

use dlpack_ffi::{DLDeviceType, DLPackExchangeAPI, DLTensor};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use super::view::{Dtype, Lazy, Place, View};
use super::{is_instance, numbers};
use crate::error::argument;

/// DLPack versions whose table has its functions where `dlpack_ffi` declares them.
const MAJOR: u32 = 1;

/// torch's "what is this tensor" as a C function: no Python call and no allocation.
pub(crate) struct DlpackReader {
    function: unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> i32,
    class: Py<PyType>,
}

impl DlpackReader {
    /// Take the function from the table of `torch.Tensor`, which is `class`.
    pub(crate) fn new(capsule: &Bound<'_, PyCapsule>, class: &Bound<'_, PyType>) -> PyResult<Self> {
        let table = exchange_api(capsule)?;
        let name = "dltensor_from_py_object_no_sync of the exchange API";
        let function = table.dltensor_from_py_object_no_sync;
        let function = function.ok_or_else(|| argument(name, "NULL", "a function"))?;
        let class = class.clone().unbind();
        Ok(Self { function, class })
    }

    /// Run `with` on what the tensor is; none if torch cannot say it in this way. `with` runs no
    /// Python code, which might change the tensor.
    #[inline]
    pub(crate) fn with<T>(
        &self,
        tensor: &Bound<'_, PyAny>,
        with: impl FnOnce(&View<'_>) -> T,
    ) -> Option<T> {
        // torch does not check what it is given.
        if !is_instance(tensor, &self.class) {
            return None;
        }
        let mut out = MaybeUninit::<DLTensor>::uninit();
        // SAFETY: `function` is the table's, the object is a `torch.Tensor`, `out` is valid for one
        // write, and the interpreter is held, as `tensor` shows.
        let status = unsafe { (self.function)(tensor.as_ptr().cast(), out.as_mut_ptr()) };
        if status != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the function says that it has written all of it.
        let out = unsafe { out.assume_init() };
        let ndim = usize::try_from(out.ndim).ok()?;
        // SAFETY: `shape` has `ndim` numbers that live as long as the tensor, which the caller holds
        // and nothing changes before `with` has returned.
        let shape = unsafe { numbers(out.shape, ndim) };
        // SAFETY: as for `shape`; torch always writes strides, as DLPack 1.2 asks for.
        let strides = unsafe { numbers(out.strides, ndim) };
        let bits = u64::from(out.dtype.bits);
        Some(with(&View {
            address: out.data as u64 + out.byte_offset,
            element_bytes: (bits * u64::from(out.dtype.lanes)).div_ceil(8),
            shape,
            strides,
            dtype: Dtype::Dlpack(out.dtype.code, out.dtype.bits, out.dtype.lanes),
            place: Place::of(out.device.device_type, out.device.device_id),
            lazy: Lazy::Unknown,
        }))
    }
}

/// torch's "current stream" as a C function: no Python call.
pub(crate) struct CurrentWorkStream {
    function: unsafe extern "C" fn(DLDeviceType, i32, *mut *mut c_void) -> i32,
    ordinal: i32,
}

impl CurrentWorkStream {
    /// Take the function from `torch.Tensor.__dlpack_c_exchange_api__` (torch 2.10 and newer).
    pub(crate) fn new(capsule: &Bound<'_, PyCapsule>, ordinal: u32) -> PyResult<Self> {
        let function = exchange_api(capsule)?.current_work_stream;
        let name = "current_work_stream of the exchange API";
        let function = function.ok_or_else(|| argument(name, "NULL", "a function"))?;
        let ordinal = i32::try_from(ordinal)?;
        Ok(Self { function, ordinal })
    }

    /// Return the raw handle of the current stream.
    #[inline]
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<u64> {
        let mut stream = null_mut();
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

/// Return the table of functions behind `torch.Tensor.__dlpack_c_exchange_api__` (torch 2.10 and newer).
fn exchange_api(capsule: &Bound<'_, PyCapsule>) -> PyResult<DLPackExchangeAPI> {
    let table = capsule
        .pointer_checked(Some(c"dlpack_exchange_api"))?
        .cast::<DLPackExchangeAPI>()
        .as_ptr();
    // SAFETY: a capsule of this name points at a table that lives as long as the process, and its
    // header has the same layout in all versions.
    let version = unsafe { (*table).header.version };
    if version.major != MAJOR {
        let given = format!("DLPack {}.{}", version.major, version.minor);
        return Err(argument("the exchange API", &given, "DLPack 1.x"));
    }
    // SAFETY: version 1 of the table has these fields, and the table is never changed.
    Ok(unsafe { *table })
}
