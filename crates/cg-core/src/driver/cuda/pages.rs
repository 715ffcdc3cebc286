//! Addresses, pages and pinned host memory of a [`Cuda`] device.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ptr;

use cudarc::driver::sys;

use super::{Cuda, call, check, out, size};
use crate::code::Call;
use crate::driver::PageCalls;
use crate::driver::handle::{Address, PageHandle};
use crate::error::Result;

/// Flags for future use, which must be zero.
const NO_FLAGS: u64 = 0;

/// An alignment of the driver's choice: the granularity.
const DEFAULT_ALIGNMENT: usize = 0;

impl PageCalls for Cuda {
    fn ordinal(&self) -> u32 {
        self.ordinal
    }

    fn page_granularity(&self) -> Result<u64> {
        let _entered = self.enter()?;
        let properties = self.page_properties();
        let minimum = sys::CUmemAllocationGranularity_flags_enum::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        // SAFETY: the call reads `properties`, which outlives it, and writes one size, through
        // `bytes`.
        let bytes = out(Call::MemGetAllocationGranularity, 0, |bytes| unsafe {
            call!(cuMemGetAllocationGranularity(
                bytes,
                &raw const properties,
                minimum
            ))
        })?;
        Ok(bytes as u64)
    }

    fn address_reserve(&self, bytes: u64, hint: Address) -> Result<Address> {
        let _entered = self.enter()?;
        // SAFETY: any hint may be given: where it is not free, the driver chooses; the call writes
        // one address, through `address`.
        let reserved = out(Call::MemAddressReserve, 0, |address| unsafe {
            call!(cuMemAddressReserve(
                address,
                size(bytes),
                DEFAULT_ALIGNMENT,
                hint.0,
                NO_FLAGS
            ))
        })?;
        Ok(Address(reserved))
    }

    unsafe fn address_free(&self, address: Address, bytes: u64) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `address` comes from cuMemAddressReserve for as many bytes, nothing is mapped
        // there, and this is its only free, by the contract.
        unsafe { call!(cuMemAddressFree(address.0, size(bytes))) };
    }

    fn page_create(&self, bytes: u64) -> Result<PageHandle> {
        let _entered = self.enter()?;
        let properties = self.page_properties();
        // SAFETY: the call reads `properties`, which outlives it, and writes one handle, through
        // `page`.
        let created = out(Call::MemCreate, 0, |page| unsafe {
            call!(cuMemCreate(
                page,
                size(bytes),
                &raw const properties,
                NO_FLAGS
            ))
        });
        created
            .map(PageHandle)
            .map_err(|error| self.with_sizes(error, bytes))
    }

    unsafe fn page_release(&self, page: PageHandle) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `page` comes from cuMemCreate and this is its only release, by the contract.
        unsafe { call!(cuMemRelease(page.0)) };
    }

    unsafe fn page_map(&self, address: Address, bytes: u64, page: PageHandle) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: `page` is live and has `bytes` bytes by the contract; a range that is not reserved
        // or not free is refused by a code. The offset must be zero.
        let mapped = unsafe { call!(cuMemMap(address.0, size(bytes), 0, page.0, NO_FLAGS)) };
        check(Call::MemMap, mapped)?;
        let access = sys::CUmemAccessDesc {
            location: self.location(),
            flags: sys::CUmemAccess_flags_enum::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range was mapped just now; the call reads one descriptor, `access`, which
        // outlives it.
        let opened = unsafe { call!(cuMemSetAccess(address.0, size(bytes), &raw const access, 1)) };
        check(Call::MemSetAccess, opened).inspect_err(|_| {
            // SAFETY: exactly this range was mapped just now, and no work can have come to use it.
            unsafe { call!(cuMemUnmap(address.0, size(bytes))) };
        })
    }

    unsafe fn page_unmap(&self, address: Address, bytes: u64) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: one cuMemMap mapped exactly this range, and no work in flight touches it, by the
        // contract.
        unsafe { call!(cuMemUnmap(address.0, size(bytes))) };
    }

    unsafe fn host_pin(&self, start: *mut u8, bytes: usize) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: the range is one live allocation by the contract; the call changes none of its
        // bytes.
        let pinned = unsafe { call!(cuMemHostRegister_v2(start.cast(), bytes, 0)) };
        check(Call::MemHostRegister, pinned)
    }

    unsafe fn host_unpin(&self, start: *mut u8) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: cuMemHostRegister_v2 pinned memory from there on, and no copy with it is in
        // flight, by the contract.
        unsafe { call!(cuMemHostUnregister(start.cast())) };
    }

    fn synchronize(&self) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: our context is current; the call writes nothing of ours.
        let result = unsafe { call!(cuCtxSynchronize()) };
        check(Call::ContextSynchronize, result)
    }
}

impl Cuda {
    /// Plain memory of this device: neither shared with other processes nor compressed.
    fn page_properties(&self) -> sys::CUmemAllocationProp {
        sys::CUmemAllocationProp {
            type_: sys::CUmemAllocationType_enum::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: sys::CUmemAllocationHandleType_enum::CU_MEM_HANDLE_TYPE_NONE,
            location: self.location(),
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: 0,
                usage: 0,
                reserved: [0; 4],
            },
        }
    }

    fn location(&self) -> sys::CUmemLocation {
        sys::CUmemLocation {
            type_: sys::CUmemLocationType_enum::CU_MEM_LOCATION_TYPE_DEVICE,
            id: self.ordinal.cast_signed(),
        }
    }
}
