//! Simulated device memory: an address space with gaps, poisoned, bounds-checked, never reused.
#![expect(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe for other drivers"
)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::pages::Pages;
use super::work::Module;
use super::{Sim, ptx, refuse, run, stream};
use crate::code::{Call, Code};
use crate::driver::handle::{Address, FunctionHandle, ModuleHandle};
use crate::driver::{MemoryCalls, failed};
use crate::error::{Error, Result};

/// The byte that fresh memory is filled with.
const POISON: u8 = 0xFF;
/// Start of the address space: no host address lies there.
const BASE: u64 = 0x7_0000_0000_0000;
/// Unmapped bytes between two allocations.
const GAP: u64 = 1 << 16;
/// Alignment of an allocation, in the address space and in the host memory behind it.
const ALIGN: u64 = 512;

/// A range of simulated memory; it outlives the allocation. Every access here is atomic by byte, so
/// that Rust code may race for it; code outside Rust must not run beside an operation that touches it.
#[derive(Debug, Clone)]
pub struct SimMemory {
    pub(super) bytes: Arc<[AtomicU8]>,
    pub(super) range: Range<usize>,
}

impl SimMemory {
    /// Return how many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.range.len()
    }

    /// Return a copy of the bytes.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        self.cells()
            .iter()
            .map(|cell| cell.load(Ordering::Relaxed))
            .collect()
    }

    /// Overwrite the bytes from the start.
    ///
    /// # Panics
    /// If `data` is longer than the range.
    pub fn copy_from(&self, data: &[u8]) {
        for (cell, byte) in self.cells()[..data.len()].iter().zip(data) {
            cell.store(*byte, Ordering::Relaxed);
        }
    }

    /// Return the `index`-th 32-bit word.
    ///
    /// # Panics
    /// If it lies outside.
    #[must_use]
    pub fn word(&self, index: usize) -> u32 {
        let cells = &self.cells()[index * 4..][..4];
        u32::from_le_bytes(std::array::from_fn(|i| cells[i].load(Ordering::Relaxed)))
    }

    /// Set the `index`-th 32-bit word.
    ///
    /// # Panics
    /// If it lies outside.
    pub fn set_word(&self, index: usize, value: u32) {
        let cells = &self.cells()[index * 4..][..4];
        for (cell, byte) in cells.iter().zip(value.to_le_bytes()) {
            cell.store(byte, Ordering::Relaxed);
        }
    }

    /// Return the host memory behind the range, for code outside Rust.
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.cells()
            .first()
            .map_or(std::ptr::null_mut(), AtomicU8::as_ptr)
    }

    /// Fresh memory.
    pub(super) fn poisoned(bytes: u64) -> Self {
        let backing: Arc<[AtomicU8]> = (0..bytes + ALIGN).map(|_| AtomicU8::new(POISON)).collect();
        let misaligned = backing.as_ptr().addr() % to_usize(ALIGN);
        let start = (to_usize(ALIGN) - misaligned) % to_usize(ALIGN);
        Self {
            bytes: backing,
            range: start..start + to_usize(bytes),
        }
    }

    /// Make it as fresh memory is.
    pub(super) fn poison(&self) {
        let cells = self.cells().iter();
        cells.for_each(|cell| cell.store(POISON, Ordering::Relaxed));
    }

    /// Return a part of it.
    pub(super) fn part(&self, offset: u64, bytes: u64) -> Self {
        let first = self.range.start + to_usize(offset);
        Self {
            bytes: Arc::clone(&self.bytes),
            range: first..first + to_usize(bytes),
        }
    }

    fn cells(&self) -> &[AtomicU8] {
        &self.bytes[self.range.clone()]
    }
}

struct Allocation {
    bytes: u64,
    memory: SimMemory,
}

/// The address space.
pub(super) struct Map {
    pub(super) limit: u64,
    pub(super) in_use: u64,
    pub(super) pages: Pages,
    next: u64,
    live: BTreeMap<u64, Allocation>,
    /// Start and size of what was freed, to tell "freed" from "never was".
    freed: BTreeMap<u64, u64>,
}

impl Map {
    pub(super) fn new(limit: u64) -> Self {
        Self {
            limit,
            in_use: 0,
            pages: Pages::default(),
            next: BASE,
            live: BTreeMap::new(),
            freed: BTreeMap::new(),
        }
    }

    pub(super) fn live(&self) -> usize {
        self.live.len()
    }

    /// Return whether an address was or is one of the device.
    pub(super) fn knows(&self, address: Address) -> bool {
        let lies_in = |start: u64, bytes: u64| address.0 - start < bytes;
        let below = self.live.range(..=address.0).next_back();
        let freed = self.freed.range(..=address.0).next_back();
        self.pages.is_inside(address.0)
            || below.is_some_and(|(start, found)| lies_in(*start, found.bytes))
            || freed.is_some_and(|(start, bytes)| lies_in(*start, *bytes))
    }

    /// Return the memory of a range, for `user`.
    ///
    /// # Panics
    /// If the range is not wholly inside one live allocation: undefined on a GPU.
    pub(super) fn view(&self, address: Address, bytes: u64, user: &str) -> SimMemory {
        let start = address.0;
        if let Some(memory) = self.pages.view(start, bytes, user) {
            return memory;
        }
        if let Some((base, allocation)) = self.live.range(..=start).next_back() {
            let offset = start - base;
            if offset + bytes <= allocation.bytes {
                return allocation.memory.part(offset, bytes);
            }
            assert!(
                offset >= allocation.bytes,
                "{user} touches {bytes} bytes at {start:#x}, beyond the end of the allocation of \
                 {} bytes at {base:#x}",
                allocation.bytes
            );
        }
        match self.freed.range(..=start).next_back() {
            Some((base, size)) if start - base < *size => {
                panic!("{user} touches {start:#x} in the allocation at {base:#x}, which was freed")
            }
            _ => panic!("{user} touches {start:#x}, which is no device address"),
        }
    }

    fn allocate(&mut self, bytes: u64) -> Option<Address> {
        let size = bytes.checked_next_multiple_of(ALIGN)?;
        if size > self.limit - self.in_use {
            return None;
        }
        let address = self.next;
        self.next += size + GAP;
        self.in_use += size;
        let memory = SimMemory::poisoned(bytes);
        self.live.insert(address, Allocation { bytes, memory });
        Some(Address(address))
    }

    fn free(&mut self, address: Address) {
        let Some(allocation) = self.live.remove(&address.0) else {
            panic!("mem_free of {:#x}, which is no live allocation", address.0)
        };
        self.in_use -= allocation.bytes.next_multiple_of(ALIGN);
        self.freed.insert(address.0, allocation.bytes);
    }

    /// Start and size of the live allocation or mapping that an address lies in.
    pub(super) fn range(&self, address: Address) -> Option<(Address, u64)> {
        if let Some(mapped) = self.pages.mapping(address.0) {
            return Some(mapped);
        }
        let (base, allocation) = self.live.range(..=address.0).next_back()?;
        let inside = address.0 - base < allocation.bytes;
        inside.then_some((Address(*base), allocation.bytes))
    }

    /// Return the error of an allocation that does not fit.
    pub(super) fn out_of_memory(&self, requested: u64) -> Error {
        Error::OutOfMemory {
            requested,
            in_use: self.in_use,
            reserved: self.in_use,
            limit: self.limit,
        }
    }

    fn bytes_at(&self, address: Address) -> u64 {
        self.live.get(&address.0).map_or(0, |found| found.bytes)
    }
}

impl MemoryCalls for Sim {
    fn mem_alloc(&self, bytes: u64) -> Result<Address> {
        let mut state = match self.enter_unsafe(Call::MemAlloc) {
            Err(Error::Driver { code, .. }) if code == Code::OUT_OF_MEMORY => {
                return Err(self.state().memory.out_of_memory(bytes));
            }
            other => other?,
        };
        run::check_failure(&state, Call::MemAlloc)?;
        if bytes == 0 {
            return Err(refuse(Call::MemAlloc, Code::INVALID_VALUE));
        }
        match state.memory.allocate(bytes) {
            Some(address) => Ok(address),
            None => Err(state.memory.out_of_memory(bytes)),
        }
    }

    unsafe fn mem_free(&self, address: Address) {
        let mut state = self.enter_infallible(Call::MemFree);
        let bytes = state.memory.bytes_at(address);
        if let Some(user) = stream::in_flight_on(&state, address, bytes) {
            panic!("mem_free of {:#x} while {user} is in flight", address.0);
        }
        state.memory.free(address);
    }

    fn mem_info(&self) -> Result<(u64, u64)> {
        let state = self.enter(Call::MemGetInfo)?;
        let limit = state.memory.limit;
        Ok((limit - state.memory.in_use, limit))
    }

    fn memory_range(&self, address: Address) -> Result<Option<(Address, u64)>> {
        let state = self.enter(Call::MemGetAddressRange)?;
        Ok(state.memory.range(address))
    }

    unsafe fn memcpy_to_device(&self, dst: Address, src: &[u8]) -> Result<()> {
        drop(self.enter(Call::MemcpyHtoD)?);
        run::drive_stream(self, super::StreamHandle::LEGACY, Call::MemcpyHtoD)?;
        let view = self.view(dst, src.len() as u64);
        view.copy_from(src);
        Ok(())
    }

    unsafe fn memcpy_to_host(&self, dst: &mut [u8], src: Address) -> Result<()> {
        drop(self.enter(Call::MemcpyDtoH)?);
        run::drive_stream(self, super::StreamHandle::LEGACY, Call::MemcpyDtoH)?;
        dst.copy_from_slice(&self.view(src, dst.len() as u64).to_vec());
        Ok(())
    }

    fn module_load(&self, image: &[u8]) -> Result<ModuleHandle> {
        let mut state = self.enter(Call::ModuleLoadData)?;
        let text = std::str::from_utf8(image)
            .map_err(|_| failed(Call::ModuleLoadData, Code::INVALID_IMAGE))?;
        let entries = ptx::entries(text);
        if entries.is_empty() {
            return Err(refuse(Call::ModuleLoadData, Code::INVALID_PTX));
        }
        let handle = state.fresh();
        let image = state.records_images.then(|| image.into());
        state.modules.insert(handle, Module::new(entries, image));
        Ok(ModuleHandle(handle))
    }

    unsafe fn module_unload(&self, module: ModuleHandle) {
        let mut state = self.enter_infallible(Call::ModuleUnload);
        let Some(module) = state.modules.remove(&module.0) else {
            panic!("module_unload of {module:?}, which is not loaded")
        };
        module.unload();
    }

    unsafe fn module_function(&self, module: ModuleHandle, name: &str) -> Result<FunctionHandle> {
        let mut state = self.enter(Call::ModuleGetFunction)?;
        let handle = FunctionHandle(state.fresh());
        let not_found = || failed(Call::ModuleGetFunction, Code::NOT_FOUND);
        let kernel = state.kernels.get(name).cloned();
        let Some(module) = state.modules.get_mut(&module.0) else {
            panic!("module_function of {module:?}, which is not loaded")
        };
        if let Some(known) = module.functions.get(name) {
            return Ok(*known);
        }
        let parameters = module.parameters(name).ok_or_else(not_found)?;
        let Some(kernel) = kernel else {
            panic!("the module declares kernel {name}, but Sim::kernel was not called for it")
        };
        let function = module.function(handle, name, kernel, parameters);
        module.functions.insert(name.to_owned(), handle);
        state.functions.insert(handle.0, Arc::new(function));
        Ok(handle)
    }
}

fn to_usize(bytes: u64) -> usize {
    usize::try_from(bytes).expect("simulated memory fits the host's address space")
}
