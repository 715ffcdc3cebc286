//! [`PoolStats`]: how many bytes a pool has, and where.

use super::Pool;
use super::blocks::Usage;
use crate::driver::handle::{Address, StreamHandle};

/// Bytes of a pool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// In blocks, and in segments that were given out whole.
    pub in_use: u64,
    /// The most that was in use at once.
    pub peak: u64,
    /// In segments, mapped or not.
    pub reserved: u64,
    /// Physical memory: that of all segments, and none while the pool is paused. More than reserved
    /// where neighbours have shared a page since a pause, and some of them are gone.
    pub mapped: u64,
    /// In segments that were released and have not gone back to the device yet.
    pub leaving: u64,
    /// Of the host, where a pause keeps contents or the last one did.
    pub kept: u64,
    /// Reserved addresses, which cost no memory.
    pub addresses: u64,
    /// The segments, by address.
    pub segments: Vec<SegmentStats>,
}

/// Bytes of one segment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentStats {
    /// Start address.
    pub address: Address,
    /// Number of bytes.
    pub bytes: u64,
    /// Number of bytes in use.
    pub in_use: u64,
    /// The largest block that it has room for.
    pub largest_free: u64,
    /// The stream that its blocks are for; none if it was given out whole.
    pub stream: Option<StreamHandle>,
}

impl Pool {
    /// Return the most bytes that its segments may have together; none if only the device limits them.
    #[must_use]
    pub fn limit(&self) -> Option<u64> {
        self.shared.limit
    }

    /// Return how many bytes it has.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let ranges = self.shared.addresses.ranges();
        let book = self.shared.book();
        let segments = book.segments.values().map(|segment| {
            let (largest_free, stream) = match &segment.usage {
                Usage::Blocks { stream, free } => (free.largest(), Some(*stream)),
                Usage::Whole => (0, None),
            };
            SegmentStats {
                address: segment.backing.address(),
                bytes: segment.backing.bytes(),
                in_use: segment.in_use(),
                largest_free,
                stream,
            }
        });
        let leaving = book.leaving.iter().map(|leaving| leaving.backing.bytes());
        PoolStats {
            in_use: book.in_use,
            peak: book.peak,
            reserved: book.reserved(),
            mapped: book.mapped(),
            leaving: leaving.sum(),
            kept: book.backings().map(|backing| backing.kept()).sum(),
            addresses: ranges.iter().map(|(_, bytes)| bytes).sum(),
            segments: segments.collect(),
        }
    }

    /// Bytes of its segments, as [`Self::stats`] has them.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.shared.book().reserved()
    }

    /// Return whether an address lies in one of its segments.
    #[must_use]
    pub fn covers(&self, address: Address) -> bool {
        let book = self.shared.book();
        let nearest = book.segments.range(..=address.0).next_back();
        nearest.is_some_and(|(start, segment)| address.0 - start < segment.backing.bytes())
    }

    /// Return the ranges of addresses that it has reserved: where each starts and its bytes.
    #[must_use]
    pub fn ranges(&self) -> Vec<(Address, u64)> {
        self.shared.addresses.ranges()
    }
}
