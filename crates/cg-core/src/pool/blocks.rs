//! Segments and blocks as a pool keeps book of them: no driver is called here.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Shared;
use super::segment::Backing;
use crate::driver::handle::{Address, StreamHandle};
use crate::driver::is_exiting;
use crate::free_list::FreeList;

/// The segments and the blocks of a pool, which its lock guards.
#[derive(Default)]
pub(super) struct Book {
    /// By address.
    pub(super) segments: BTreeMap<u64, Segment>,
    /// The blocks in use, by number.
    pub(super) blocks: BTreeMap<u64, Placed>,
    /// Whole segments that were released and could not go yet.
    pub(super) leaving: Vec<Leaving>,
    pub(super) in_use: u64,
    pub(super) peak: u64,
    next: u64,
}

/// A whole segment that was released.
pub(super) struct Leaving {
    pub(super) backing: Arc<Backing>,
    /// Larger than that of any segment released before.
    number: u64,
    /// The device has been waited for since then.
    pub(super) passed: bool,
}

/// One segment.
pub(super) struct Segment {
    pub(super) backing: Arc<Backing>,
    /// A number that no other segment or block of the pool has, also where one was before.
    pub(super) number: u64,
    pub(super) usage: Usage,
    /// Number of times a block was taken from it.
    pub(super) taken: u64,
}

/// The user of a segment.
pub(super) enum Usage {
    /// Blocks for one stream.
    Blocks {
        stream: StreamHandle,
        free: FreeList,
    },
    /// Somebody who was given all of it.
    Whole,
}

/// The place of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placed {
    pub(super) segment: u64,
    /// The segment's number.
    pub(super) number: u64,
    pub(super) offset: u64,
    /// The bytes that are taken.
    pub(super) size: u64,
    /// The bytes that were asked for.
    pub(super) bytes: u64,
}

impl Segment {
    /// Return how many bytes are in use.
    pub(super) fn in_use(&self) -> u64 {
        match &self.usage {
            Usage::Blocks { free, .. } => free.bytes() - free.free_bytes(),
            Usage::Whole => self.backing.bytes(),
        }
    }

    pub(super) fn is_free(&self) -> bool {
        // Who looks at a segment as a whole may be about to use it.
        self.in_use() == 0 && Arc::strong_count(&self.backing) == 1
    }
}

impl Book {
    /// Take a block from the best fitting free range of all segments of a stream.
    pub(super) fn take(&mut self, stream: StreamHandle, bytes: u64, size: u64) -> Option<u64> {
        let fitting = self.segments.iter_mut().filter_map(|(base, segment)| {
            let number = segment.number;
            match &mut segment.usage {
                Usage::Blocks { stream: own, free } if *own == stream => {
                    Some((free.best_fit(size)?, *base, number, free))
                }
                _ => None,
            }
        });
        let (_, segment, number, free) = fitting.min_by_key(|(fit, base, ..)| (*fit, *base))?;
        let offset = free.take(size)?;
        let block = self.fresh();
        let placed = Placed {
            segment,
            number,
            offset,
            size,
            bytes,
        };
        self.enter(block, placed);
        Some(block)
    }

    /// Take exactly the bytes of a block that was given back; false if they are not free.
    pub(super) fn retake(&mut self, block: u64, placed: Placed) -> bool {
        let segment = self.segments.get_mut(&placed.segment);
        let taken = match segment {
            Some(Segment {
                number,
                usage: Usage::Blocks { free, .. },
                ..
            }) if *number == placed.number => free.take_at(placed.offset, placed.size),
            _ => false,
        };
        if taken {
            self.enter(block, placed);
        }
        taken
    }

    /// Add a segment.
    pub(super) fn add(&mut self, backing: Arc<Backing>, usage: Usage) {
        let (number, address) = (self.fresh(), backing.address().0);
        if let Usage::Whole = usage {
            self.count(backing.bytes());
        }
        let segment = Segment {
            backing,
            number,
            usage,
            taken: 0,
        };
        self.segments.insert(address, segment);
    }

    /// Take a whole segment away from its owner; false if none starts there.
    pub(super) fn release(&mut self, address: Address) -> bool {
        let is_whole = |segment: &Segment| matches!(segment.usage, Usage::Whole);
        if !self.segments.get(&address.0).is_some_and(is_whole) {
            return false;
        }
        if let Some(segment) = self.segments.remove(&address.0) {
            self.in_use -= segment.backing.bytes();
            let number = self.fresh();
            self.leaving.push(Leaving {
                backing: segment.backing,
                number,
                passed: false,
            });
        }
        true
    }

    /// Return what was released until now; see [`Self::passed`].
    pub(super) fn released(&self) -> u64 {
        self.next
    }

    /// The device has been waited for since [`Self::released`] was asked.
    pub(super) fn passed(&mut self, released: u64) {
        let seen = self.leaving.iter_mut().filter(|one| one.number <= released);
        seen.for_each(|one| one.passed = true);
    }

    /// Return the segments in which nothing is in use, by address, and how often each was used.
    pub(super) fn free(&self) -> BTreeMap<u64, (u64, u64)> {
        let free = self
            .segments
            .iter()
            .filter(|(_, segment)| segment.is_free());
        free.map(|(address, segment)| (*address, (segment.number, segment.taken)))
            .collect()
    }

    /// Bytes of all segments, released ones included.
    pub(super) fn reserved(&self) -> u64 {
        self.backings().map(|backing| backing.bytes()).sum()
    }

    /// Bytes of physical memory. A page that several segments share counts once, and wholly.
    pub(super) fn mapped(&self) -> u64 {
        let pages = self.backings().filter_map(|backing| backing.mapped());
        let distinct: BTreeMap<_, _> = pages
            .map(|mapped| (Arc::as_ptr(&mapped), mapped.bytes()))
            .collect();
        distinct.values().sum()
    }

    /// Bytes that count against a limit: what is mapped, and what will be after a pause.
    pub(super) fn taken(&self) -> u64 {
        self.mapped().max(self.reserved())
    }

    pub(super) fn backings(&self) -> impl Iterator<Item = &Arc<Backing>> {
        let segments = self.segments.values().map(|segment| &segment.backing);
        segments.chain(self.leaving.iter().map(|leaving| &leaving.backing))
    }

    fn enter(&mut self, block: u64, placed: Placed) {
        if let Some(segment) = self.segments.get_mut(&placed.segment) {
            segment.taken += 1;
        }
        self.blocks.insert(block, placed);
        self.count(placed.size);
    }

    fn count(&mut self, bytes: u64) {
        self.in_use += bytes;
        self.peak = self.peak.max(self.in_use);
    }

    fn give(&mut self, block: u64) {
        let Some(placed) = self.blocks.remove(&block) else {
            return;
        };
        self.in_use -= placed.size;
        if let Some(segment) = self.segments.get_mut(&placed.segment)
            && let Usage::Blocks { free, .. } = &mut segment.usage
        {
            free.give(placed.offset, placed.size);
        }
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// The owner of a block's memory: gives it back when dropped.
pub(super) struct Block {
    pub(super) pool: Arc<Shared>,
    pub(super) number: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        if is_exiting() {
            return;
        }
        self.pool.book().give(self.number);
    }
}
