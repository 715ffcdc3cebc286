//! Memory, modules and kernels of a [`Cuda`] device.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::borrow::Cow;
use std::ffi::CString;
use std::ptr;

use cudarc::driver::sys;

use super::{Cuda, call, check, out, size};
use crate::code::{Call, Code};
use crate::driver::MemoryCalls;
use crate::driver::handle::{Address, FunctionHandle, ModuleHandle, StreamHandle};
use crate::driver::image::is_whole_binary;
use crate::error::{Error, Result};

impl MemoryCalls for Cuda {
    fn mem_alloc(&self, bytes: u64) -> Result<Address> {
        let _entered = self.enter()?;
        // SAFETY: the call writes one address, through `address`.
        let allocated = out(Call::MemAlloc, 0, |address| unsafe {
            call!(cuMemAlloc_v2(address, size(bytes)))
        });
        allocated
            .map(Address)
            .map_err(|error| self.with_sizes(error, bytes))
    }

    unsafe fn mem_free(&self, address: Address) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `address` comes from cuMemAlloc_v2 and this is its only free, by the contract.
        unsafe { call!(cuMemFree_v2(address.0)) };
    }

    fn mem_info(&self) -> Result<(u64, u64)> {
        let _entered = self.enter()?;
        let mut total = 0;
        // SAFETY: the call writes two sizes: through `free` and to `total`, which outlives it.
        let free = out(Call::MemGetInfo, 0, |free| unsafe {
            call!(cuMemGetInfo_v2(free, &raw mut total))
        })?;
        Ok((free as u64, total as u64))
    }

    fn memory_range(&self, address: Address) -> Result<Option<(Address, u64)>> {
        let _entered = self.enter()?;
        let mut bytes = 0;
        // SAFETY: any number may be asked for; the call writes an address, through `base`, and a
        // size, to `bytes`, which outlives it.
        let base = out(Call::MemGetAddressRange, 0, |base| unsafe {
            call!(cuMemGetAddressRange_v2(base, &raw mut bytes, address.0))
        });
        match base {
            Ok(base) => Ok(Some((Address(base), bytes as u64))),
            Err(error) => match error.code() {
                Some(Code::INVALID_VALUE | Code::NOT_FOUND) => Ok(None),
                _ => Err(error),
            },
        }
    }

    unsafe fn memcpy_to_device(&self, dst: Address, src: &[u8]) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the call reads `src.len()` bytes of `src`; `dst` is mapped for as many by the
        // contract.
        let result = unsafe { call!(cuMemcpyHtoD_v2(dst.0, src.as_ptr().cast(), src.len())) };
        check(Call::MemcpyHtoD, result)?;
        // Of pageable memory the driver has only taken its own copy by now, which is on its way.
        let legacy = StreamHandle::LEGACY.0 as sys::CUstream;
        // SAFETY: the legacy stream lives as long as the context.
        let result = unsafe { call!(cuStreamSynchronize(legacy)) };
        check(Call::StreamSynchronize, result)
    }

    unsafe fn memcpy_to_host(&self, dst: &mut [u8], src: Address) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the call writes `dst.len()` bytes of `dst` and returns when they are there; `src`
        // is mapped for as many by the contract.
        let result = unsafe { call!(cuMemcpyDtoH_v2(dst.as_mut_ptr().cast(), src.0, dst.len())) };
        check(Call::MemcpyDtoH, result)
    }

    fn module_load(&self, image: &[u8]) -> Result<ModuleHandle> {
        let _entered = self.enter()?;
        let image = terminated(image);
        // SAFETY: the call reads `image` up to its final zero, or, of a binary image, as far as the
        // image's header says, and keeps no pointer to it; it writes one handle, through `module`.
        let module = out(Call::ModuleLoadData, ptr::null_mut(), |module| unsafe {
            call!(cuModuleLoadData(module, image.as_ptr().cast()))
        })?;
        Ok(ModuleHandle(module as u64))
    }

    unsafe fn module_unload(&self, module: ModuleHandle) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `module` is loaded and nothing uses its kernels, by the contract.
        unsafe { call!(cuModuleUnload(module.0 as sys::CUmodule)) };
    }

    unsafe fn module_function(&self, module: ModuleHandle, name: &str) -> Result<FunctionHandle> {
        let c_name = CString::new(name)
            .map_err(|_| Error::invalid("kernel name", &format!("{name:?}"), "no zero byte"))?;
        let _entered = self.enter()?;
        let module = module.0 as sys::CUmodule;
        // SAFETY: `module` is loaded by the contract; `c_name` outlives the call, which writes one
        // handle, through `function`.
        let function = out(
            Call::ModuleGetFunction,
            ptr::null_mut(),
            |function| unsafe { call!(cuModuleGetFunction(function, module, c_name.as_ptr())) },
        )?;
        Ok(FunctionHandle(function as u64))
    }
}

impl Cuda {
    /// Give an out-of-memory code the device's numbers, where they can be had.
    pub(super) fn with_sizes(&self, error: Error, requested: u64) -> Error {
        if error.code() != Some(Code::OUT_OF_MEMORY) {
            return error;
        }
        match self.mem_info() {
            Ok((free, total)) => Error::OutOfMemory {
                requested,
                in_use: total - free,
                reserved: total - free,
                limit: total,
            },
            Err(_) => error,
        }
    }
}

/// Return the image with the final zero that PTX text must have. A whole binary image needs none.
fn terminated(image: &[u8]) -> Cow<'_, [u8]> {
    if image.last() == Some(&0) || is_whole_binary(image) {
        return Cow::Borrowed(image);
    }
    Cow::Owned([image, &[0]].concat())
}
