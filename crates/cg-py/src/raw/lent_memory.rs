//! Tensors that torch takes from us by DLPack, with what they keep alive.

use std::ffi::{CStr, c_void};

use cg_core::Retained;
use dlpack_ffi::{DLDataType, DLDevice, DLDeviceType, DLManagedTensor, DLTensor};
use pyo3::ffi::{
    Py_IsInitialized, PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New,
    PyErr_WriteUnraisable, PyGILState_Ensure, PyGILState_Release, PyObject,
};
use pyo3::prelude::*;

use crate::error::argument;

/// The name of a capsule that nobody has taken the memory from yet.
const NAME: &CStr = c"dltensor";

/// A tensor as DLPack describes it. What takes it calls the deleter when its last tensor is gone.
#[repr(C)]
struct Lent {
    /// The first field: the deleter gets its address, which is that of all.
    managed: DLManagedTensor,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    keeps: (Py<PyAny>, Option<Retained>),
}

/// The elements of a tensor: DLPack's code of their kind and their bits, and sizes and strides.
pub(crate) struct Elements {
    pub(crate) dtype: (u8, u8),
    pub(crate) shape: Box<[i64]>,
    pub(crate) strides: Box<[i64]>,
}

/// Return a capsule of a tensor on a GPU, or on the host without an `ordinal`. The memory stays valid as long
/// as `keeps`, which is held until its last tensor is gone.
///
/// # Errors
/// There are more or fewer strides than sizes, or Python has no memory for it.
pub(crate) fn lend(
    py: Python<'_>,
    address: u64,
    elements: Elements,
    ordinal: Option<i32>,
    keeps: (Py<PyAny>, Option<Retained>),
) -> PyResult<Bound<'_, PyAny>> {
    let Elements {
        dtype: (code, bits),
        shape,
        strides,
    } = elements;
    if shape.len() != strides.len() {
        let expected = format!("{}, as sizes", shape.len());
        return Err(argument(
            "number of strides",
            &strides.len().to_string(),
            &expected,
        ));
    }
    let device_type = match ordinal {
        Some(_) => DLDeviceType::kDLCUDA,
        None => DLDeviceType::kDLCPU,
    };
    let device = DLDevice {
        device_type,
        device_id: ordinal.unwrap_or(0),
    };
    let dtype = DLDataType {
        code,
        bits,
        lanes: 1,
    };
    let lent = Box::leak(Box::new(Lent {
        managed: DLManagedTensor {
            dl_tensor: DLTensor {
                data: address as *mut c_void,
                device,
                ndim: i32::try_from(shape.len())?,
                dtype,
                shape: std::ptr::null_mut(),
                strides: std::ptr::null_mut(),
                byte_offset: 0,
            },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(take_back),
        },
        shape,
        strides,
        keeps,
    }));
    lent.managed.dl_tensor.shape = lent.shape.as_mut_ptr();
    lent.managed.dl_tensor.strides = lent.strides.as_mut_ptr();
    let lent: *mut Lent = lent;
    // SAFETY: the pointer is not null, the name lives as long as the process, and the interpreter is held.
    let capsule = unsafe { PyCapsule_New(lent.cast(), NAME.as_ptr(), Some(forget)) };
    // SAFETY: it is a new reference, or null with an error set.
    let capsule = unsafe { Bound::from_owned_ptr_or_err(py, capsule) };
    if capsule.is_err() {
        // SAFETY: no capsule has it, so that nobody else takes it back.
        unsafe { take_back(lent.cast()) };
    }
    capsule
}

/// Let go what keeps the memory. Called once, when the last tensor over it is gone, on any thread.
unsafe extern "C" fn take_back(managed: *mut DLManagedTensor) {
    // SAFETY: this may be asked at any time.
    if unsafe { Py_IsInitialized() } == 0 {
        // A process at its end keeps it: objects of Python's cannot go any more.
        return;
    }
    // torch may run this inside of a call of ours, with the interpreter let go: what pyo3 believes of this
    // thread does not count.
    // SAFETY: Python is initialized, and the state is released below, on the same thread.
    let state = unsafe { PyGILState_Ensure() };
    {
        // SAFETY: the interpreter is held until the state is released, and the token ends before.
        let py = unsafe { Python::assume_attached() };
        // SAFETY: the pointer is that of `lend`, to the first field of a leaked box, and its taker calls
        // this once.
        let lent = unsafe { Box::from_raw(managed.cast::<Lent>()) };
        let (owner, retained) = lent.keeps;
        drop(retained);
        owner.drop_ref(py);
    }
    // SAFETY: this is the state of above, and nothing of Python's is used after it.
    unsafe { PyGILState_Release(state) };
}

/// End a capsule: without a taker, the memory goes back here.
unsafe extern "C" fn forget(capsule: *mut PyObject) {
    // SAFETY: Python calls this with the interpreter held and a capsule of `lend`.
    if unsafe { PyCapsule_IsValid(capsule, NAME.as_ptr()) } == 0 {
        return;
    }
    // SAFETY: as above.
    let lent = unsafe { PyCapsule_GetPointer(capsule, NAME.as_ptr()) };
    if lent.is_null() {
        // SAFETY: as above.
        unsafe { PyErr_WriteUnraisable(capsule) };
        return;
    }
    // SAFETY: its name says that nobody has taken it.
    unsafe { take_back(lent.cast()) };
}
