//! [`FreeList`]: best fit with coalescing over one segment; pure arithmetic, no driver.

use std::collections::BTreeMap;

/// The free ranges of one segment: offset to bytes, no two touching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FreeList {
    bytes: u64,
    free: BTreeMap<u64, u64>,
}

impl FreeList {
    /// Return a segment of `bytes` bytes, all free.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        Self {
            bytes,
            free: BTreeMap::from([(0, bytes)]),
        }
    }

    /// Bytes of the segment.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes that are free.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        self.free.values().sum()
    }

    /// Return the largest free range, by its bytes.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.free.values().copied().max().unwrap_or(0)
    }

    /// Return whether nothing is taken.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.free_bytes() == self.bytes
    }

    /// Return the smallest free range that fits, by its bytes; none if none does.
    #[must_use]
    pub fn best_fit(&self, bytes: u64) -> Option<u64> {
        let fitting = self.free.values().filter(|free| **free >= bytes);
        fitting.min().copied()
    }

    /// Take `bytes` from the smallest free range that fits; where they start.
    pub fn take(&mut self, bytes: u64) -> Option<u64> {
        let fitting = self.free.iter().filter(|(_, free)| **free >= bytes);
        let (offset, free) = fitting.min_by_key(|(_, free)| **free)?;
        let (offset, free) = (*offset, *free);
        self.free.remove(&offset);
        if free > bytes {
            self.free.insert(offset + bytes, free - bytes);
        }
        Some(offset)
    }

    /// Take exactly these bytes; false, and nothing is taken, unless all of them are free.
    pub fn take_at(&mut self, offset: u64, bytes: u64) -> bool {
        let Some(end) = offset.checked_add(bytes).filter(|_| bytes > 0) else {
            return false;
        };
        let before = self.free.range(..=offset).next_back();
        let Some((start, size)) = before.map(|(start, size)| (*start, *size)) else {
            return false;
        };
        if start + size < end {
            return false;
        }
        self.free.remove(&start);
        if start < offset {
            self.free.insert(start, offset - start);
        }
        if end < start + size {
            self.free.insert(end, start + size - end);
        }
        true
    }

    /// Give back what [`Self::take`] or [`Self::take_at`] took, and join it with its free neighbours.
    pub fn give(&mut self, offset: u64, bytes: u64) {
        let (mut offset, mut bytes) = (offset, bytes);
        if let Some(next) = self.free.remove(&(offset + bytes)) {
            bytes += next;
        }
        let previous = self.free.range(..offset).next_back();
        if let Some((start, size)) = previous.map(|(start, size)| (*start, *size))
            && start + size == offset
        {
            self.free.remove(&start);
            offset = start;
            bytes += size;
        }
        self.free.insert(offset, bytes);
    }
}
