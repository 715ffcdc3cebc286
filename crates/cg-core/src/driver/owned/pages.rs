//! Owners of reserved addresses, of physical memory that is mapped there, and of pinned host memory.
//!
//! Whoever makes one or waits for the device does so with the thread's capture mode relaxed.

#![expect(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use memmap2::MmapMut;

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

/// Pinned memory of the host, which takes a copy of a page's bytes.
pub(crate) struct PinnedCopy {
    driver: Arc<dyn Driver>,
    memory: MmapMut,
}

impl PinnedCopy {
    /// Pin as many bytes. That takes ten times as long as to copy them.
    pub(crate) fn new(driver: &Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        let none = || {
            let expected = "no more than the host has free, or Keep::Discard";
            Error::invalid("bytes to keep on the host", &bytes, expected)
        };
        let size = usize::try_from(bytes).map_err(|_| none())?;
        let mut memory = MmapMut::map_anon(size).map_err(|_| none())?;
        // Only advice: without huge pages all is as right.
        #[cfg(target_os = "linux")]
        let _ = memory.advise(memmap2::Advice::HugePage);
        touch(&mut memory);
        let start = memory.as_mut_ptr();
        relaxed(&**driver, || {
            // SAFETY: the mapping has so many bytes from there, shares no page of the host with anything
            // else, and stays until `drop` has unpinned it.
            unsafe { driver.host_pin(start, size) }
        })?;
        Ok(Self {
            driver: Arc::clone(driver),
            memory,
        })
    }

    /// Copy what a page holds from an address on.
    ///
    /// # Panics
    /// If not all of the bytes lie inside the page.
    pub(crate) fn fill(&mut self, page: &OwnedPage, address: Address) -> Result<()> {
        assert!(
            page.has(address, self.memory.len() as u64),
            "a copy of what a page has not"
        );
        relaxed(&*self.driver, || {
            // SAFETY: the page is mapped as long as it is borrowed, and has so many bytes from there,
            // as was asserted.
            unsafe { self.driver.memcpy_to_host(&mut self.memory, address) }
        })
    }

    /// Copy the bytes to an address of a page.
    ///
    /// # Panics
    /// If not all of them lie inside the page there.
    pub(crate) fn restore(&self, page: &OwnedPage, address: Address) -> Result<()> {
        let inside = page.has(address, self.memory.len() as u64);
        assert!(inside, "a copy to where a page has no room for it");
        relaxed(&*self.driver, || {
            // SAFETY: the page is mapped as long as it is borrowed, and has so many bytes from there,
            // as was asserted.
            unsafe { self.driver.memcpy_to_device(address, &self.memory) }
        })
    }
}

impl Drop for PinnedCopy {
    fn drop(&mut self) {
        let pinned = self.memory.as_mut_ptr();
        destroy(&*self.driver, || {
            // SAFETY: `new` pinned it, only this takes the pin away, and copies have waited.
            unsafe { self.driver.host_unpin(pinned) }
        });
    }
}

/// The least bytes for which a thread is worth its start.
const PART: usize = 32 << 20;
/// The most threads: more are not faster.
const MOST_THREADS: usize = 8;
/// The smallest page of any host.
const HOST_PAGE: usize = 4096;

/// Touch each page of new memory, in several threads: to make pages takes most of the time of pinning them.
fn touch(memory: &mut [u8]) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = threads.min(MOST_THREADS).min(memory.len() / PART).max(1);
    if threads == 1 {
        return;
    }
    let part = memory.len().div_ceil(threads).next_multiple_of(HOST_PAGE);
    let touch = |part: &mut [u8]| {
        part.iter_mut()
            .step_by(HOST_PAGE)
            .for_each(|byte| *byte = 0);
    };
    std::thread::scope(|scope| {
        for part in memory.chunks_mut(part) {
            // Without a thread the driver touches the pages itself.
            let _ = std::thread::Builder::new().spawn_scoped(scope, move || touch(part));
        }
    });
}

/// Wait for all work on the device.
pub(crate) fn synchronize(driver: &dyn Driver) -> Result<()> {
    relaxed(driver, || driver.synchronize())
}
