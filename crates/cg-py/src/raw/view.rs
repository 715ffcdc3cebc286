//! `View`: a tensor as any reader has read it, and what comes of comparing it.

use dlpack_ffi::DLDeviceType;

/// A tensor's memory and layout, borrowed from torch.
pub(crate) struct View<'a> {
    pub(crate) address: u64,
    pub(crate) element_bytes: u64,
    pub(crate) shape: &'a [i64],
    /// In elements.
    pub(crate) strides: &'a [i64],
    pub(crate) dtype: Dtype,
    pub(crate) place: Place,
    pub(crate) lazy: Lazy,
}

/// A dtype, as far as two of them can be told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dtype {
    /// DLPack's code, bits and lanes.
    Dlpack(u8, u8, u16),
    /// Address of torch's object, which is never freed.
    Object(usize),
}

/// The device of a tensor's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Cpu,
    Cuda(i32),
    /// Out of reach of our copies.
    Elsewhere,
}

/// True if the bytes are not the values, but for example their conjugates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lazy {
    No,
    Yes,
    /// Only Python can tell.
    Unknown,
}

/// Result of comparing a tensor with another one, of which are known its words, or its form and its extents.
pub(crate) enum Comparison {
    /// It is the same, its bytes are its values, it lies there, and whether it requires a gradient
    /// if that is known. At 0 if its memory was taken away.
    At(u64, Option<bool>),
    /// It has another shape or form.
    Other,
    /// That cannot be said in this way.
    Unknown,
}

impl Place {
    /// Return where memory is, whatever its kind there.
    #[inline]
    pub(crate) fn of(kind: DLDeviceType, index: i32) -> Self {
        match kind {
            DLDeviceType::kDLCPU | DLDeviceType::kDLCUDAHost => Self::Cpu,
            DLDeviceType::kDLCUDA | DLDeviceType::kDLCUDAManaged => Self::Cuda(index),
            _ => Self::Elsewhere,
        }
    }
}
