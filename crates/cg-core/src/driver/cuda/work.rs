//! A [`WorkSpec`](crate::driver::spec::WorkSpec) in the driver's terms: parameter structs, argument
//! pointers and the call of a host function.

#![expect(unsafe_code, reason = "is called by the CUDA driver")]

use std::ffi::c_void;
use std::mem::offset_of;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use super::size;
use crate::driver::handle::{Address, FunctionHandle};
use crate::driver::spec::{Dim3, HostFunction};
use crate::error::{Error, Result};

/// `CUDA_MEMCPY3D` with numbers for its memory types.
#[repr(C)]
#[derive(Default)]
pub(super) struct Copy3d {
    pub(super) src: Side,
    pub(super) dst: Side,
    pub(super) width: usize,
    pub(super) height: usize,
    pub(super) depth: usize,
}

/// One side of a [`Copy3d`].
#[repr(C)]
#[derive(Default)]
pub(super) struct Side {
    x: usize,
    y: usize,
    z: usize,
    lod: usize,
    memory_type: u32,
    host: u64,
    device: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    rows: usize,
}

const _: () = {
    type Theirs = sys::CUDA_MEMCPY3D;
    const DST: usize = offset_of!(Copy3d, dst);
    assert!(size_of::<Copy3d>() == size_of::<Theirs>());
    assert!(offset_of!(Side, memory_type) == offset_of!(Theirs, srcMemoryType));
    assert!(offset_of!(Side, host) == offset_of!(Theirs, srcHost));
    assert!(offset_of!(Side, pitch) == offset_of!(Theirs, srcPitch));
    assert!(DST == offset_of!(Theirs, dstXInBytes));
    assert!(DST + offset_of!(Side, device) == offset_of!(Theirs, dstDevice));
    assert!(DST + offset_of!(Side, rows) == offset_of!(Theirs, dstHeight));
    assert!(offset_of!(Copy3d, width) == offset_of!(Theirs, WidthInBytes));
};

impl Copy3d {
    /// Return a plain copy between addresses of any kind.
    pub(super) fn linear(dst: Address, src: Address, bytes: u64) -> Self {
        Self {
            src: Side::unified(src),
            dst: Side::unified(dst),
            width: size(bytes),
            height: 1,
            depth: 1,
        }
    }

    /// Return whether it is a copy of one row between addresses of the device.
    pub(super) fn is_row(&self) -> bool {
        let is_of_device = |side: &Side| !matches!(side.memory_type, Side::HOST | Side::ARRAY);
        self.height == 1 && self.depth == 1 && is_of_device(&self.dst) && is_of_device(&self.src)
    }

    /// Return where the driver reads the struct.
    pub(super) fn as_raw(&self) -> *const sys::CUDA_MEMCPY3D {
        ptr::from_ref(self).cast()
    }
}

impl Side {
    /// `CU_MEMORYTYPE_HOST`.
    const HOST: u32 = 1;
    /// `CU_MEMORYTYPE_ARRAY`.
    const ARRAY: u32 = 3;
    /// `CU_MEMORYTYPE_UNIFIED`.
    const UNIFIED: u32 = 4;

    /// Pitch and rows stay zero, which is to leave them out: a pitch has an upper limit.
    fn unified(address: Address) -> Self {
        Self {
            memory_type: Self::UNIFIED,
            device: address.0,
            ..Self::default()
        }
    }

    /// Return where the side begins; zero for an array, which has no addresses.
    pub(super) fn address(&self) -> Address {
        let base = match self.memory_type {
            Self::HOST => self.host,
            Self::ARRAY => return Address(0),
            _ => self.device,
        };
        let offset = (self.z * self.rows + self.y) * self.pitch + self.x;
        Address(base + offset as u64)
    }
}

/// Return the parameters of a memset of one row.
pub(super) fn memset(
    dst: Address,
    value: u32,
    element_bytes: u8,
    count: u64,
) -> Result<sys::CUDA_MEMSET_NODE_PARAMS> {
    let mask = match element_bytes {
        1 => 0xff,
        2 => 0xffff,
        4 => u32::MAX,
        _ => return Err(bad_element(element_bytes)),
    };
    Ok(sys::CUDA_MEMSET_NODE_PARAMS {
        dst: dst.0,
        pitch: 0,
        value: value & mask,
        elementSize: element_bytes.into(),
        width: size(count),
        height: 1,
    })
}

/// Return the error of a memset with elements of another size.
pub(super) fn bad_element(element_bytes: u8) -> Error {
    Error::invalid("memset element size", &element_bytes, "1, 2 or 4 bytes")
}

/// Return the parameters of a kernel launch, valid as long as `args`.
pub(super) fn kernel(
    function: FunctionHandle,
    grid: Dim3,
    block: Dim3,
    shared_bytes: u32,
    args: &mut [*mut c_void],
) -> sys::CUDA_KERNEL_NODE_PARAMS {
    sys::CUDA_KERNEL_NODE_PARAMS {
        func: function.0 as sys::CUfunction,
        gridDimX: grid.x,
        gridDimY: grid.y,
        gridDimZ: grid.z,
        blockDimX: block.x,
        blockDimY: block.y,
        blockDimZ: block.z,
        sharedMemBytes: shared_bytes,
        kernelParams: args.as_mut_ptr(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

/// Return a pointer to each argument's bytes, valid as long as `args`; the driver only reads them.
pub(super) fn argument_pointers(args: &[Box<[u8]>]) -> Vec<*mut c_void> {
    args.iter()
        .map(|arg| arg.as_ptr().cast_mut().cast())
        .collect()
}

/// Return the parameters of a call of a host function, which the caller keeps alive.
pub(super) fn host(function: &Arc<HostFunction>) -> sys::CUDA_HOST_NODE_PARAMS {
    sys::CUDA_HOST_NODE_PARAMS {
        fn_: Some(call_host),
        userData: Arc::as_ptr(function).cast_mut().cast(),
    }
}

/// Call the [`HostFunction`] that `function` points to, on a thread of the driver's.
///
/// # Safety
/// `function` points to a live [`HostFunction`].
#[expect(clippy::print_stderr, reason = "the last words of an abort")]
pub(super) unsafe extern "C" fn call_host(function: *mut c_void) {
    // SAFETY: `function` points to a live HostFunction by the contract; it is Sync and only read.
    let function = unsafe { &*function.cast::<HostFunction>() };
    if catch_unwind(AssertUnwindSafe(|| (function.0)())).is_err() {
        eprintln!("cgraph: a host function panicked in the CUDA driver's thread; aborting");
        std::process::abort();
    }
}
