//! Places of segments: in ranges of addresses that are the same in every process, if they are free.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::base_addresses::{Base, BaseAddresses};
use crate::driver::handle::Address;
use crate::driver::owned::pages::OwnedRange;
use crate::driver::{Driver, is_exiting};
use crate::error::{Error, Result};
use crate::free_list::FreeList;

/// The ranges of one pool.
pub(super) struct Addresses {
    driver: Arc<dyn Driver>,
    bases: Arc<BaseAddresses>,
    /// Address of the first range, if somebody has chosen.
    base: Option<Address>,
    range_bytes: u64,
    reserved: Mutex<Reserved>,
}

#[derive(Default)]
struct Reserved {
    granularity: Option<u64>,
    ranges: Vec<Range>,
}

/// Reserved first, so that it is freed before another pool may ask for its base.
struct Range {
    owned: Arc<OwnedRange>,
    free: FreeList,
    _base: Option<Base>,
}

/// Addresses of one segment; given back when dropped.
pub(super) struct Place {
    range: Arc<OwnedRange>,
    addresses: Arc<Addresses>,
    index: usize,
    offset: u64,
    bytes: u64,
}

impl Addresses {
    pub(super) fn new(
        driver: &Arc<dyn Driver>,
        bases: &Arc<BaseAddresses>,
        base: Option<Address>,
        range_bytes: u64,
    ) -> Self {
        Self {
            driver: Arc::clone(driver),
            bases: Arc::clone(bases),
            base,
            range_bytes,
            reserved: Mutex::default(),
        }
    }

    pub(super) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Return what the bytes of a segment are a multiple of.
    pub(super) fn granularity(&self) -> Result<u64> {
        let mut reserved = self.reserved();
        if let Some(known) = reserved.granularity {
            return Ok(known);
        }
        let found = self.driver.page_granularity()?.max(1);
        reserved.granularity = Some(found);
        Ok(found)
    }

    /// Start and bytes of each range.
    pub(super) fn ranges(&self) -> Vec<(Address, u64)> {
        let reserved = self.reserved();
        let ranges = reserved.ranges.iter();
        ranges
            .map(|range| (range.owned.address(), range.owned.bytes()))
            .collect()
    }

    /// Take addresses from the first range that has room, or from a new one. `bytes` is a multiple
    /// of the granularity.
    pub(super) fn take(self: &Arc<Self>, bytes: u64) -> Result<Place> {
        let granularity = self.granularity()?;
        let mut reserved = self.reserved();
        let found = reserved
            .ranges
            .iter_mut()
            .enumerate()
            .find_map(|(index, range)| Some((index, range.free.take(bytes)?)));
        let (index, offset) = if let Some(found) = found {
            found
        } else {
            let mut range = self.reserve(&reserved, bytes, granularity)?;
            let offset = range.free.take(bytes).unwrap_or_default();
            reserved.ranges.push(range);
            (reserved.ranges.len() - 1, offset)
        };
        Ok(Place {
            range: Arc::clone(&reserved.ranges[index].owned),
            addresses: Arc::clone(self),
            index,
            offset,
            bytes,
        })
    }

    fn reserve(&self, reserved: &Reserved, bytes: u64, granularity: u64) -> Result<Range> {
        if bytes > self.range_bytes {
            // Too much for the device is too much memory, not too many addresses.
            let (free, total) = self.driver.mem_info()?;
            if bytes > total {
                return Err(Error::OutOfMemory {
                    requested: bytes,
                    in_use: total - free,
                    reserved: total - free,
                    limit: total,
                });
            }
        }
        let size = super::round_up(bytes.max(self.range_bytes), granularity);
        let (hint, base) = match (self.base, reserved.ranges.last()) {
            (Some(base), None) => (base, None),
            (Some(_), Some(last)) => (last.owned.address().offset(last.owned.bytes()), None),
            (None, _) => {
                let base = self.bases.take(size);
                let hint = base.as_ref().map_or(Address(0), Base::address);
                (hint, base)
            }
        };
        let owned = OwnedRange::new(Arc::clone(&self.driver), size, hint)?;
        Ok(Range {
            owned: Arc::new(owned),
            free: FreeList::new(size),
            _base: base,
        })
    }

    fn reserved(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place {
    pub(super) fn address(&self) -> Address {
        self.range.address().offset(self.offset)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn range(&self) -> &Arc<OwnedRange> {
        &self.range
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if is_exiting() {
            return;
        }
        let mut reserved = self.addresses.reserved();
        if let Some(range) = reserved.ranges.get_mut(self.index) {
            range.free.give(self.offset, self.bytes);
        }
    }
}
