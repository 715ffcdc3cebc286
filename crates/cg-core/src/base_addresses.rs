//! [`BaseAddresses`]: addresses for pools that are the same in every process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::handle::Address;
use crate::driver::is_exiting;
use crate::free_list::FreeList;

/// The first address for pools of the first device. Programs, libraries and heaps of a process lie
/// elsewhere. Two sizes or strides side by side in a kernel's arguments hardly look like addresses from here on: the
/// upper half of these is no round number, and the lower one is large.
const FIRST_BASE: u64 = 0x6B5F_9E40_0000;
/// Addresses for the pools of one device.
const WINDOW: u64 = 1 << 40;

/// The addresses that the pools of one device ask for: in the same order, the same ones.
pub(crate) struct BaseAddresses {
    start: u64,
    free: Mutex<FreeList>,
}

/// Addresses that no other pool asks for.
pub(crate) struct Base {
    bases: Arc<BaseAddresses>,
    offset: u64,
    bytes: u64,
}

impl BaseAddresses {
    /// Create the addresses of a device, by its number.
    pub(crate) fn new(ordinal: u32) -> Self {
        Self {
            start: FIRST_BASE + u64::from(ordinal) * WINDOW,
            free: Mutex::new(FreeList::new(WINDOW)),
        }
    }

    /// Take addresses; none if too few are left.
    pub(crate) fn take(self: &Arc<Self>, bytes: u64) -> Option<Base> {
        let offset = self.free().take(bytes)?;
        Some(Base {
            bases: Arc::clone(self),
            offset,
            bytes,
        })
    }

    fn free(&self) -> MutexGuard<'_, FreeList> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Base {
    /// Return the first of the addresses.
    pub(crate) fn address(&self) -> Address {
        Address(self.bases.start + self.offset)
    }
}

impl Drop for Base {
    fn drop(&mut self) {
        if is_exiting() {
            return;
        }
        self.bases.free().give(self.offset, self.bytes);
    }
}
