//! New tensors by torch's own allocator, without a call by Python: `torch.empty_strided` takes twice as
//! long.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::null_mut;

use pyo3::ffi::PyObject;
use pyo3::prelude::*;

use super::address;
use super::stable_functions::Form;

/// `aoti_torch_empty_strided`: dimensions, sizes, strides, dtype, device and where the handle goes.
type EmptyStrided =
    unsafe extern "C" fn(i64, *const i64, *const i64, i32, i32, i32, *mut *mut c_void) -> i32;
/// `aoti_torch_create_tensor_from_blob`: memory, dimensions, sizes, strides, offset, dtype, device and where the
/// handle goes.
type FromBlob = unsafe extern "C" fn(
    *mut c_void,
    i64,
    *const i64,
    *const i64,
    i64,
    i32,
    i32,
    i32,
    *mut *mut c_void,
) -> i32;
type DataPtr = unsafe extern "C" fn(*mut c_void, *mut *mut c_void) -> i32;
type Delete = unsafe extern "C" fn(*mut c_void) -> i32;
/// `THPVariable_Wrap`. It takes an `at::TensorBase` by reference, or by value, which is a reference as
/// well, since such an object has a destructor, which its owner calls.
type Wrap = unsafe extern "C-unwind" fn(*mut c_void) -> *mut PyObject;

/// The functions.
pub(crate) struct NewTensor {
    allocate: EmptyStrided,
    from_blob: Option<FromBlob>,
    data_ptr: DataPtr,
    delete: Delete,
    wrap: Wrap,
}

/// A tensor as torch's functions have it until it is deleted: the address of an `at::Tensor`.
struct Handle<'a> {
    functions: &'a NewTensor,
    handle: *mut c_void,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: `allocate` has made the handle for this owner, who deletes it once.
        unsafe { (self.functions.delete)(self.handle) };
    }
}

impl NewTensor {
    /// By their names and where they are; none if one is missing.
    pub(crate) fn find(known: &HashMap<String, usize>) -> Option<Self> {
        let at = |name| address(known, name).map(|address| address as *const c_void);
        let (allocate, data_ptr) = (at("empty_strided")?, at("data_ptr")?);
        let (delete, wrap) = (at("delete")?, at("wrap")?);
        Some(Self {
            // SAFETY: `cgraph._torch` has looked these names up in torch's libraries, which are never
            // unloaded; torch's stable header declares this one so.
            allocate: unsafe { transmute::<*const c_void, EmptyStrided>(allocate) },
            // SAFETY: as above.
            from_blob: at("from_blob")
                .map(|address| unsafe { transmute::<*const c_void, FromBlob>(address) }),
            // SAFETY: as above.
            data_ptr: unsafe { transmute::<*const c_void, DataPtr>(data_ptr) },
            // SAFETY: as above.
            delete: unsafe { transmute::<*const c_void, Delete>(delete) },
            // SAFETY: a C++ name says what a function takes, and torch's header that this one returns a
            // Python object.
            wrap: unsafe { transmute::<*const c_void, Wrap>(wrap) },
        })
    }

    /// Return a new tensor of this form, whose sizes and strides are these, and where its memory is; none if
    /// torch fails, which tells nobody but stderr why.
    ///
    /// # Panics
    /// If there are not as many strides as sizes.
    #[inline]
    pub(crate) fn make<'py>(
        &self,
        py: Python<'py>,
        form: &Form,
        sizes: &[i64],
        strides: &[i64],
    ) -> Option<(Bound<'py, PyAny>, u64)> {
        assert_eq!(sizes.len(), strides.len(), "a stride for each dimension");
        let dim = i64::try_from(sizes.len()).ok()?;
        let (scalar_type, device_type, device_index) = form.codes();
        // SAFETY: there are as many sizes and strides as dimensions, the codes are what torch has said of
        // a tensor, and `handle` is valid for one write.
        let handle = self.made(|handle| unsafe {
            (self.allocate)(
                dim,
                sizes.as_ptr(),
                strides.as_ptr(),
                scalar_type,
                device_type,
                device_index,
                handle,
            )
        })?;
        let mut address = null_mut();
        // SAFETY: the handle is a tensor's, and `address` is valid for one write.
        if unsafe { (self.data_ptr)(handle.handle, &raw mut address) } != 0 {
            return None;
        }
        Some((self.wrapped(py, &handle)?, address as u64))
    }

    /// Return a tensor over memory that begins there, which it does not own; none if torch fails, or cannot.
    ///
    /// # Panics
    /// As [`Self::make`].
    #[inline]
    pub(crate) fn over<'py>(
        &self,
        py: Python<'py>,
        address: u64,
        form: &Form,
        (sizes, strides, offset): (&[i64], &[i64], i64),
    ) -> Option<Bound<'py, PyAny>> {
        assert_eq!(sizes.len(), strides.len(), "a stride for each dimension");
        let from_blob = self.from_blob?;
        let dim = i64::try_from(sizes.len()).ok()?;
        let (scalar_type, device_type, device_index) = form.codes();
        let memory = std::ptr::with_exposed_provenance_mut(usize::try_from(address).ok()?);
        // SAFETY: there are as many sizes and strides as dimensions, the codes are what torch has said of
        // a tensor over this memory, which it does not touch, and `handle` is valid for one write.
        let handle = self.made(|handle| unsafe {
            from_blob(
                memory,
                dim,
                sizes.as_ptr(),
                strides.as_ptr(),
                offset,
                scalar_type,
                device_type,
                device_index,
                handle,
            )
        })?;
        self.wrapped(py, &handle)
    }

    /// Return the tensor that a function of torch's makes, which writes its handle; none if it fails.
    fn made(&self, make: impl FnOnce(*mut *mut c_void) -> i32) -> Option<Handle<'_>> {
        let mut handle = null_mut();
        let status = make(&raw mut handle);
        (status == 0).then(|| Handle {
            functions: self,
            handle,
        })
    }

    fn wrapped<'py>(&self, py: Python<'py>, handle: &Handle<'_>) -> Option<Bound<'py, PyAny>> {
        // SAFETY: the handle is the address of an `at::Tensor`, which the function refers to or moves
        // out of, and either leaves one that can be deleted; the interpreter is held, as `py` shows.
        let object = unsafe { (self.wrap)(handle.handle) };
        // SAFETY: it is a new reference, or null with an error set.
        unsafe { Bound::from_owned_ptr_or_err(py, object) }.ok()
    }
}
