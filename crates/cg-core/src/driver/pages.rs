//! [`PageCalls`]: addresses and physical memory apart from each other, and pinned host memory.

use super::handle::{Address, PageHandle};
use crate::error::Result;

/// Ranges of addresses, physical memory that is mapped there, and what copying it away needs.
///
/// Calls that give something back cannot fail: there would be nothing that a caller could do.
#[expect(
    unsafe_code,
    reason = "a trait over raw handles: the caller vouches for them"
)]
pub trait PageCalls {
    /// Return the number of the device among those that share addresses with it.
    fn ordinal(&self) -> u32;

    /// Return what the starts and sizes of ranges and pages are multiples of.
    fn page_granularity(&self) -> Result<u64>;

    /// Reserve addresses with nothing behind them: at `hint` if the driver likes, and else anywhere.
    /// CUDA's keeps to it for ranges of many GiB, where they are free, and not for small ones. Zero
    /// leaves the choice to the driver.
    fn address_reserve(&self, bytes: u64, hint: Address) -> Result<Address>;

    /// Give reserved addresses back.
    ///
    /// # Safety
    /// `address` comes from [`Self::address_reserve`] for `bytes` bytes, was not given back, and
    /// nothing is mapped there.
    unsafe fn address_free(&self, address: Address, bytes: u64);

    /// Create physical memory that no address leads to yet.
    fn page_create(&self, bytes: u64) -> Result<PageHandle>;

    /// Give up a page. While it is mapped somewhere, its memory stays.
    ///
    /// # Safety
    /// `page` comes from [`Self::page_create`] and was not given up.
    unsafe fn page_release(&self, page: PageHandle);

    /// Map all of a page of `bytes` bytes at an address, for the device to read and write. After an
    /// error nothing is mapped.
    ///
    /// # Safety
    /// `page` is live and has `bytes` bytes.
    unsafe fn page_map(&self, address: Address, bytes: u64, page: PageHandle) -> Result<()>;

    /// Take a mapping away. Does not wait for work in flight.
    ///
    /// # Safety
    /// One [`Self::page_map`] mapped exactly these `bytes` bytes, and no work that touches them is in
    /// flight or comes before they are mapped again.
    unsafe fn page_unmap(&self, address: Address, bytes: u64);

    /// Pin host memory, so that copies with it run at full speed.
    ///
    /// # Safety
    /// `bytes` bytes from `start` are one allocation of the caller's, which stays until
    /// [`Self::host_unpin`].
    unsafe fn host_pin(&self, start: *mut u8, bytes: usize) -> Result<()>;

    /// Take a pin away.
    ///
    /// # Safety
    /// [`Self::host_pin`] pinned memory that starts there, and no copy with it is in flight.
    unsafe fn host_unpin(&self, start: *mut u8);

    /// Wait until all work on the device has finished. Refused while any of its streams captures,
    /// and such a capture may be broken by the attempt.
    fn synchronize(&self) -> Result<()>;
}
