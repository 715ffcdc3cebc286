//! Owners of reserved addresses, of physical memory that is mapped there, and of pinned host memory.
//!
//! Whoever makes one or waits for the device does so with the thread's capture mode relaxed.

#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use super::{destroy, relaxed};
use crate::driver::Driver;
use crate::driver::handle::{Address, PageHandle};
use crate::error::{Error, Result};

/// Reserved addresses.
#[derive(Debug)]
pub(crate) struct OwnedRange {
    driver: Arc<dyn Driver>,
    address: Address,
    bytes: u64,
}

impl OwnedRange {
    /// Reserve addresses, at `hint` if they are free there.
    pub(crate) fn new(driver: Arc<dyn Driver>, bytes: u64, hint: Address) -> Result<Self> {
        let address = relaxed(&*driver, || driver.address_reserve(bytes, hint))?;
        Ok(Self {
            driver,
            address,
            bytes,
        })
    }

    /// Return where it starts.
    pub(crate) fn address(&self) -> Address {
        self.address
    }

    /// Return how many bytes it has.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for OwnedRange {
    fn drop(&mut self) {
        destroy(&*self.driver, || {
            // SAFETY: reserved by `new` for as many bytes and freed only here; each `OwnedPage` that
            // is mapped there holds this owner.
            unsafe { self.driver.address_free(self.address, self.bytes) }
        });
    }
}

/// Physical memory, mapped in a range.
#[derive(Debug)]
pub(crate) struct OwnedPage {
    range: Arc<OwnedRange>,
    address: Address,
    bytes: u64,
    handle: PageHandle,
}

impl OwnedPage {
    /// Create memory and map it at an address of the range.
    pub(crate) fn map(range: &Arc<OwnedRange>, address: Address, bytes: u64) -> Result<Self> {
        let driver = &*range.driver;
        relaxed(driver, || {
            let handle = driver.page_create(bytes)?;
            // SAFETY: the page was created just now with as many bytes.
            if let Err(error) = unsafe { driver.page_map(address, bytes, handle) } {
                // SAFETY: the page was created just now, and nobody else knows it.
                unsafe { driver.page_release(handle) };
                return Err(error);
            }
            Ok(Self {
                range: Arc::clone(range),
                address,
                bytes,
                handle,
            })
        })
    }

    /// Return how many bytes it has.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Return whether all of a part lies inside.
    fn has(&self, address: Address, bytes: u64) -> bool {
        let end = self.address.0 + self.bytes;
        self.address <= address && address.0 <= end && bytes <= end - address.0
    }
}

impl Drop for OwnedPage {
    fn drop(&mut self) {
        let driver = &*self.range.driver;
        destroy(driver, || {
            // SAFETY: `map` mapped exactly this, and it is unmapped only here; whoever enqueued work
            // on it has retained its owner until the work was passed, or has waited for the device.
            unsafe { driver.page_unmap(self.address, self.bytes) };
            // SAFETY: created by `map` and released only here.
            unsafe { driver.page_release(self.handle) };
        });
    }
}

/// Pinned memory starts at a multiple of this, so that no two share a page of the host.
const HOST_PAGE: usize = 64 << 10;

/// A copy of a page's bytes in pinned host memory.
pub(crate) struct PinnedCopy {
    driver: Arc<dyn Driver>,
    buffer: Vec<u8>,
    /// Start and bytes of the pinned part of the buffer.
    start: usize,
    bytes: usize,
}

impl PinnedCopy {
    /// Copy what a part of a page holds.
    ///
    /// # Panics
    /// If the part does not lie inside the page.
    pub(crate) fn of(page: &OwnedPage, address: Address, bytes: u64) -> Result<Self> {
        assert!(page.has(address, bytes), "a copy of what a page has not");
        let driver = Arc::clone(&page.range.driver);
        let none = || {
            let expected = "no more than the host has free, or Keep::Discard";
            Error::invalid("bytes to keep on the host", &bytes, expected)
        };
        let bytes = usize::try_from(bytes).map_err(|_| none())?;
        let mut buffer: Vec<u8> = Vec::new();
        let whole = bytes + HOST_PAGE;
        buffer.try_reserve_exact(whole).map_err(|_| none())?;
        buffer.resize(whole, 0);
        let start = buffer.as_ptr().addr().wrapping_neg() % HOST_PAGE;
        relaxed(&*driver, || {
            let pinned = buffer[start..].as_mut_ptr();
            // SAFETY: the buffer has so many bytes from there, and neither moves nor grows until
            // `drop` has unpinned it.
            unsafe { driver.host_pin(pinned, bytes) }
        })?;
        let mut copy = Self {
            driver,
            buffer,
            start,
            bytes,
        };
        let into = &mut copy.buffer[start..start + bytes];
        relaxed(&*copy.driver, || {
            // SAFETY: the page is mapped as long as it is borrowed, and has so many bytes from there,
            // as was asserted.
            unsafe { copy.driver.memcpy_to_host(into, address) }
        })?;
        Ok(copy)
    }

    /// Copy the bytes to an address of a page.
    ///
    /// # Panics
    /// If not all of them lie inside the page there.
    pub(crate) fn restore(&self, page: &OwnedPage, address: Address) -> Result<()> {
        let inside = page.has(address, self.bytes as u64);
        assert!(inside, "a copy to where a page has no room for it");
        let from = &self.buffer[self.start..self.start + self.bytes];
        relaxed(&*self.driver, || {
            // SAFETY: the page is mapped as long as it is borrowed, and has so many bytes from there,
            // as was asserted.
            unsafe { self.driver.memcpy_to_device(address, from) }
        })
    }
}

impl Drop for PinnedCopy {
    fn drop(&mut self) {
        let pinned = self.buffer[self.start..].as_mut_ptr();
        destroy(&*self.driver, || {
            // SAFETY: `of` pinned it, only this takes the pin away, and copies have waited.
            unsafe { self.driver.host_unpin(pinned) }
        });
    }
}

/// Wait for all work on the device.
pub(crate) fn synchronize(driver: &dyn Driver) -> Result<()> {
    relaxed(driver, || driver.synchronize())
}
