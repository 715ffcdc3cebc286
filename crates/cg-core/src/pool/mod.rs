//! [`Pool`]: segments that a set of captures allocates from.
//!
//! Stream-ordered: a block that is dropped can be given out again at once, to the same stream, since
//! what uses it next comes after what used it last. Blocks of different streams come from different
//! segments. A template that was captured with a pool retains it, so segments live as long as the
//! graphs that know their addresses; which block of a segment is in use is the captures' affair,
//! and a later capture may be given memory that an earlier one used only inside.

mod free_list;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use free_list::FreeList;

use crate::device::Device;
use crate::driver::handle::StreamHandle;
use crate::driver::owned::relaxed;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::retain::Retained;
use crate::stream::Stream;

/// A block starts at a multiple of this and has a multiple of this many bytes.
const BLOCK_BYTES: u64 = 512;
/// A segment has a multiple of this many bytes.
const SEGMENT_BYTES: u64 = 2 << 20;

/// Segments that a set of captures allocates from. Clones are the same pool.
#[derive(Clone)]
pub struct Pool {
    id: u64,
    device: Device,
    shared: Arc<Shared>,
}

/// What blocks keep alive: not the device, which itself keeps blocks of work in flight.
#[derive(Default)]
struct Shared {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// By address.
    segments: BTreeMap<u64, Segment>,
    in_use: u64,
    peak: u64,
}

struct Segment {
    memory: Memory,
    stream: StreamHandle,
    free: FreeList,
}

/// Bytes of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolStats {
    /// In blocks.
    pub in_use: u64,
    /// The most that was in blocks at once.
    pub peak: u64,
    /// In segments.
    pub reserved: u64,
    /// How many segments there are.
    pub segments: usize,
}

impl Pool {
    /// An empty pool.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            device: device.clone(),
            shared: Arc::default(),
        }
    }

    /// A number that no other pool of the process has.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// A block for work on a stream. Dropping the block, and all work and templates that name it,
    /// gives it back.
    ///
    /// # Errors
    /// [`Error::Invalid`] for zero bytes, [`Error::Foreign`] for a stream of another device,
    /// [`Error::OutOfMemory`].
    pub fn allocate(&self, stream: &Stream, bytes: u64) -> Result<Memory> {
        if bytes == 0 {
            return Err(Error::invalid("bytes", &0, "at least 1"));
        }
        if !self.device.is_same(stream.device()) {
            return Err(Error::Foreign {
                object: stream.to_string(),
                found: stream.device().name(),
                expected: self.device.name(),
            });
        }
        let size = round_up(bytes, BLOCK_BYTES);
        let mut state = self.shared.state();
        let taken = match state.take(stream.handle(), size) {
            None => {
                self.grow(&mut state, stream.handle(), size)?;
                state.take(stream.handle(), size)
            }
            found => found,
        };
        let Some((segment, offset)) = taken else {
            unreachable!("a new segment has room for what it was made for")
        };
        state.in_use += size;
        state.peak = state.peak.max(state.in_use);
        let range = offset..offset + bytes;
        let memory = state.segments[&segment].memory.slice(range)?;
        let block = Block {
            pool: Arc::clone(&self.shared),
            segment,
            offset,
            size,
        };
        Ok(memory.owned_by(Arc::new(block)))
    }

    /// What keeps the segments alive, for [`crate::Template::retain`]: a template knows addresses,
    /// and blocks may come and go.
    #[must_use]
    pub fn retained(&self) -> Retained {
        Arc::clone(&self.shared) as Retained
    }

    /// How many bytes it has.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.shared.state();
        PoolStats {
            in_use: state.in_use,
            peak: state.peak,
            reserved: state.segments.values().map(|s| s.free.bytes()).sum(),
            segments: state.segments.len(),
        }
    }

    /// The segments: where each starts and its bytes.
    #[must_use]
    pub fn segments(&self) -> Vec<Memory> {
        let state = self.shared.state();
        state.segments.values().map(|s| s.memory.clone()).collect()
    }

    fn grow(&self, state: &mut State, stream: StreamHandle, size: u64) -> Result<()> {
        // A capture may be what needs the memory: growing must not break it.
        let memory = relaxed(&**self.device.driver(), || {
            Memory::new(&self.device, round_up(size, SEGMENT_BYTES))
        })?;
        let segment = Segment {
            free: FreeList::new(memory.bytes()),
            stream,
            memory,
        };
        state.segments.insert(segment.memory.address().0, segment);
        Ok(())
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes the best fitting free range of all segments of a stream.
    fn take(&mut self, stream: StreamHandle, size: u64) -> Option<(u64, u64)> {
        let own = self
            .segments
            .iter_mut()
            .filter(|(_, segment)| segment.stream == stream);
        let fitting =
            own.filter_map(|(base, segment)| Some((segment.free.best_fit(size)?, base, segment)));
        let (_, base, segment) = fitting.min_by_key(|(fit, base, _)| (*fit, **base))?;
        Some((*base, segment.free.take(size)?))
    }
}

/// The owner of a block's memory: gives it back when dropped.
struct Block {
    pool: Arc<Shared>,
    segment: u64,
    offset: u64,
    size: u64,
}

impl Drop for Block {
    fn drop(&mut self) {
        let mut state = self.pool.state();
        state.in_use -= self.size;
        if let Some(segment) = state.segments.get_mut(&self.segment) {
            segment.free.give(self.offset, self.size);
        }
    }
}

/// The next multiple; a number so large that there is none stays, for the driver to refuse.
fn round_up(bytes: u64, unit: u64) -> u64 {
    bytes.checked_next_multiple_of(unit).unwrap_or(bytes)
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} of {})", self.id(), self.device().name())
    }
}
