//! torch's stable C functions, which read tensors. They take a third of the time of DLPack's, as they
//! count no reference. Source: torch's notes on its "`LibTorch` Stable ABI".

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{MaybeUninit, transmute};

use super::{address, numbers};

/// torch could not say it, as for nested tensors and for those without memory of their own.
pub(super) struct Failed;

pub(super) type Answer<T> = std::result::Result<T, Failed>;

/// Asks for one property of a tensor; what is not 0 says that there was an error.
type Get<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> i32;

/// A method of `c10::TensorImpl`, or a function that takes an `at::Tensor`.
pub(super) type Is = unsafe extern "C" fn(*const c_void) -> bool;

/// The functions. What they take, a handle, is the address of an `at::Tensor`.
pub(super) struct Functions {
    data_ptr: Get<*mut c_void>,
    dim: Get<i64>,
    sizes: Get<*const i64>,
    strides: Get<*const i64>,
    dtype: Get<i32>,
    /// Not in every torch: without it only tensors may be asked about that are known to be strided.
    pub(super) layout: Option<Get<i32>>,
    device_type: Get<i32>,
    device_index: Get<i32>,
    /// Private, as the next two are: not in every torch.
    pub(super) requires_grad: Option<Is>,
    /// Tell of bytes that are the conjugates of the values, and of those that are the negatives.
    pub(super) lazy: Option<[Is; 2]>,
}

/// The properties of a tensor, but for its extents and its address.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Form {
    dim: usize,
    scalar_type: i32,
    device_type: i32,
    device_index: i32,
}

impl Form {
    /// torch's numbers for dtype and device: type and index.
    #[inline]
    pub(super) fn codes(&self) -> (i32, i32, i32) {
        (self.scalar_type, self.device_type, self.device_index)
    }
}

impl Functions {
    /// By their names and where they are; none if some are missing.
    pub(super) fn find(known: &HashMap<String, usize>) -> Option<Self> {
        let is = |name| {
            let address = address(known, name)?;
            // SAFETY: a method of `c10::TensorImpl` that takes nothing, or a function of an
            // `at::Tensor`, which returns a `bool`, by the caller of `cgraph._core.TensorReader`.
            Some(unsafe { transmute::<*const c_void, Is>(address as *const c_void) })
        };
        let lazy = is("is_conj").zip(is("is_neg"));
        Some(Self {
            data_ptr: function(known, "aoti_torch_get_data_ptr")?,
            dim: function(known, "aoti_torch_get_dim")?,
            sizes: function(known, "aoti_torch_get_sizes")?,
            strides: function(known, "aoti_torch_get_strides")?,
            dtype: function(known, "aoti_torch_get_dtype")?,
            layout: function(known, "aoti_torch_get_layout"),
            device_type: function(known, "aoti_torch_get_device_type")?,
            device_index: function(known, "aoti_torch_get_device_index")?,
            requires_grad: is("requires_grad"),
            lazy: lazy.map(|(conj, neg)| [conj, neg]),
        })
    }

    /// Return the form of a tensor; none if it is not strided, or neither on the CPU nor on a GPU.
    ///
    /// # Safety
    /// The handle is a tensor's.
    #[inline]
    pub(super) unsafe fn form(&self, handle: *mut c_void) -> Answer<Option<Form>> {
        if let Some(layout) = self.layout {
            // SAFETY: the handle is a tensor's, by the contract; so for all that is asked here.
            if unsafe { ask(layout, handle) }? != STRIDED {
                return Ok(None);
            }
        }
        // SAFETY: as above.
        let device_type = unsafe { ask(self.device_type, handle) }?;
        let device_index = match device_type {
            CPU => 0,
            // SAFETY: as above.
            CUDA => unsafe { ask(self.device_index, handle) }?,
            _ => return Ok(None),
        };
        Ok(Some(Form {
            // SAFETY: as above.
            dim: usize::try_from(unsafe { ask(self.dim, handle) }?).map_err(|_| Failed)?,
            // SAFETY: as above.
            scalar_type: unsafe { ask(self.dtype, handle) }?,
            device_type,
            device_index,
        }))
    }

    /// Return whether a tensor has this form and these extents, which are the shape and then the strides.
    ///
    /// # Safety
    /// The handle is a tensor's, and nothing changes the tensor meanwhile.
    #[inline]
    pub(super) unsafe fn is_like(
        &self,
        handle: *mut c_void,
        form: &Form,
        extents: &[i64],
    ) -> Answer<bool> {
        // SAFETY: the handle is a tensor's, by the contract; so for all that is asked here.
        if unsafe { self.form(handle) }?.as_ref() != Some(form) {
            return Ok(false);
        }
        let (shape, strides) = extents.split_at(form.dim);
        // SAFETY: as above.
        let sizes = unsafe { ask(self.sizes, handle) }?;
        // SAFETY: there are as many as the form says, which are not changed meanwhile.
        let sizes = unsafe { numbers(sizes, form.dim) };
        // SAFETY: as above.
        let steps = unsafe { ask(self.strides, handle) }?;
        // SAFETY: as for the sizes.
        let steps = unsafe { numbers(steps, form.dim) };
        // The stride of a dimension of size one means nothing.
        let mut dimensions = (shape.iter().zip(sizes)).zip(strides.iter().zip(steps));
        Ok(dimensions.all(|((size, given), (a, b))| size == given && (*size == 1 || a == b)))
    }

    /// Return where a tensor's memory is.
    ///
    /// # Safety
    /// The handle is a tensor's.
    #[inline]
    pub(super) unsafe fn address(&self, handle: *mut c_void) -> Answer<u64> {
        // SAFETY: the caller keeps the same contract.
        let address = unsafe { ask(self.data_ptr, handle) };
        address.map(|address| address as u64)
    }
}

/// `c10::Layout::Strided`, `c10::DeviceType::CPU` and `CUDA`: part of torch's stable interface.
const STRIDED: i32 = 0;
const CPU: i32 = 0;
const CUDA: i32 = 1;

/// One of torch's stable functions, for a property of this type.
fn function<T>(functions: &HashMap<String, usize>, name: &str) -> Option<Get<T>> {
    let address = address(functions, name)?;
    // SAFETY: `cgraph._torch` has looked the name up in torch's library, which is never unloaded;
    // all functions of these names take a tensor and where to write, and the fields say of which
    // type.
    Some(unsafe { transmute::<*const c_void, Get<T>>(address as *const c_void) })
}

/// # Safety
/// The handle is one of a tensor, and the function is for properties of this type.
#[inline]
unsafe fn ask<T>(function: Get<T>, handle: *mut c_void) -> Answer<T> {
    let mut out = MaybeUninit::uninit();
    // SAFETY: `out` is valid for one write; the rest is the contract of this function.
    if unsafe { function(handle, out.as_mut_ptr()) } != 0 {
        return Err(Failed);
    }
    // SAFETY: the function says that it has written.
    Ok(unsafe { out.assume_init() })
}
