//! [`Pool`]: segments that a set of captures allocates from.
//!
//! A pool reserves addresses once, and maps memory there segment by segment. So its addresses can be
//! the same in every process, and its memory can go and come again while they stay
//! ([`Pool::pause`]).
//!
//! Stream-ordered: a block that is dropped can be given out again at once, to the same stream, since
//! what uses it next comes after what used it last. Blocks of different streams come from different
//! segments. A template that was captured with a pool retains it, so segments live as long as the
//! graphs that know their addresses; which block of a segment is in use is the captures' affair,
//! and a later capture may be given memory that an earlier one used only inside.

mod addresses;
mod blocks;
mod builder;
mod checkpoint;
mod pause;
mod segment;
mod stats;

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use builder::PoolBuilder;
pub use checkpoint::Checkpoint;
pub use pause::Keep;
pub use stats::{PoolStats, SegmentStats};

use crate::device::Device;
use crate::driver::handle::Address;
use crate::driver::is_exiting;
use crate::error::{Error, Result};
use crate::free_list::FreeList;
use crate::gate::{Gate, Gated};
use crate::memory::Memory;
use crate::retain::Retained;
use crate::stream::Stream;
use addresses::Addresses;
use blocks::{Block, Book, Leaving, Usage};
use segment::Backing;

/// A block starts at a multiple of this and has a multiple of this many bytes.
const BLOCK_BYTES: u64 = 512;

/// Segments that a set of captures allocates from. Clones are the same pool.
///
/// Memory goes back to the device without waiting for it, when the pool and all that knows its
/// blocks are gone. Work that this crate does not know of must have passed by then.
#[derive(Clone)]
pub struct Pool {
    device: Device,
    shared: Arc<Shared>,
}

/// The part of a pool that blocks keep alive: not the device, which itself keeps blocks of work in flight.
struct Shared {
    gate: Arc<Gate>,
    addresses: Arc<Addresses>,
    limit: Option<u64>,
    book: Mutex<Book>,
    /// Held while memory goes or comes.
    turn: Mutex<()>,
    /// Number of [`Hold`]s.
    holds: AtomicUsize,
}

impl Pool {
    /// Return an empty pool.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self::builder(device).build()
    }

    /// Return a builder with the defaults.
    #[must_use]
    pub fn builder(device: &Device) -> PoolBuilder {
        PoolBuilder::new(device)
    }

    /// Return a number that no other pool of the process has.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.shared.gate.pool().number
    }

    /// Return its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Return a block for work on a stream. Dropping the block, and all work and templates that name it,
    /// gives it back.
    ///
    /// # Errors
    /// [`Error::Invalid`] for zero bytes, [`Error::Foreign`] for a stream of another device,
    /// [`Error::OutOfMemory`], [`Error::Paused`].
    pub fn allocate(&self, stream: &Stream, bytes: u64) -> Result<Memory> {
        check_bytes(bytes)?;
        if !self.device.is_same(stream.device()) {
            return Err(Error::Foreign {
                object: stream.to_string(),
                found: stream.device().name(),
                expected: self.device.name(),
            });
        }
        let _open = self.shared.gate.pass()?;
        let size = round_up(bytes, BLOCK_BYTES);
        let mut book = self.shared.book();
        let taken = match book.take(stream.handle(), bytes, size) {
            None => {
                let backing = self.shared.grow(&book, size)?;
                let free = FreeList::new(backing.bytes());
                let stream = stream.handle();
                book.add(backing, Usage::Blocks { stream, free });
                book.take(stream, bytes, size)
            }
            found => found,
        };
        let Some(number) = taken else {
            unreachable!("a new segment has room for what it was made for")
        };
        let placed = book.blocks[&number];
        let owner = Arc::new(Block {
            pool: Arc::clone(&self.shared),
            number,
        });
        let backing = &book.segments[&placed.segment].backing;
        Ok(backing.memory(placed.offset, bytes, owner))
    }

    /// Return a segment of its own, for an allocator that makes blocks of it itself; its size is rounded up
    /// to what the device maps at once. It stays until [`Self::release_segment`], or as long as the
    /// pool.
    ///
    /// # Errors
    /// [`Error::Invalid`] for zero bytes, [`Error::OutOfMemory`], [`Error::Paused`].
    pub fn allocate_segment(&self, bytes: u64) -> Result<Address> {
        check_bytes(bytes)?;
        let _open = self.shared.gate.pass()?;
        let mut book = self.shared.book();
        let backing = self.shared.grow(&book, bytes)?;
        let address = backing.address();
        book.add(backing, Usage::Whole);
        Ok(address)
    }

    /// Take back what [`Self::allocate_segment`] gave; false if no such segment starts there. Waits
    /// for the device, as `cuMemFree` does.
    ///
    /// It cannot fail. While something holds [`Self::retained`], the memory stays until that is gone.
    /// While a capture is open, nobody can wait: then it goes at a later release or
    /// [`Self::settle`]. A capture that this crate does not know of may be broken by the attempt to wait
    /// ([`Device::mark_capture`]).
    #[expect(clippy::must_use_candidate, reason = "called for what it releases")]
    pub fn release_segment(&self, address: Address) -> bool {
        let released = self.shared.book().release(address);
        if released {
            self.settle();
        }
        released
    }

    /// Return what keeps the segments alive, for [`crate::Template::retain`]: a template knows addresses,
    /// and blocks may come and go. Its execs cannot be replayed while the pool is paused.
    #[must_use]
    pub fn retained(&self) -> Retained {
        self.shared.holds.fetch_add(1, Ordering::AcqRel);
        let shared = Arc::clone(&self.shared);
        Gated::retained(&self.shared.gate, Arc::new(Hold { shared }))
    }

    /// Return what lets execs be replayed only while the pool is not paused, for [`crate::Template::retain`], and
    /// keeps nothing alive: for graphs that read memory of others.
    #[must_use]
    pub fn required(&self) -> Retained {
        Gated::retained(&self.shared.gate, Arc::new(()))
    }

    /// Return the segments: where each starts and its bytes.
    #[must_use]
    pub fn segments(&self) -> Vec<Memory> {
        let book = self.shared.book();
        let backings = book.segments.values().map(|segment| &segment.backing);
        backings
            .map(|backing| backing.memory(0, backing.bytes(), Arc::clone(backing) as Retained))
            .collect()
    }
}

impl Shared {
    /// Return whether templates or execs know addresses of any segment.
    fn is_held(&self) -> bool {
        self.holds.load(Ordering::Acquire) > 0
    }

    /// Drop the released segments that nothing can touch any more.
    fn let_go(&self) {
        if self.is_held() {
            return;
        }
        let mut book = self.book();
        let (gone, stay) = std::mem::take(&mut book.leaving)
            .into_iter()
            .partition(|leaving| leaving.passed);
        book.leaving = stay;
        drop(book);
        // Unmapped here, with the lock open.
        drop::<Vec<Leaving>>(gone);
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Memory for another segment, if the limit allows it.
    fn grow(&self, book: &Book, requested: u64) -> Result<Arc<Backing>> {
        let bytes = round_up(requested, self.addresses.granularity()?);
        if let Some(limit) = self.limit {
            let reserved = book.taken();
            if bytes > limit.saturating_sub(reserved) {
                return Err(Error::OutOfMemory {
                    requested: bytes,
                    in_use: book.in_use,
                    reserved,
                    limit,
                });
            }
        }
        // A capture may be what needs the memory: the owners take care not to break it.
        Backing::new(&self.addresses, &self.gate, bytes).map(Arc::new)
    }
}

/// Keeps a pool's segments alive.
struct Hold {
    shared: Arc<Shared>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if is_exiting() {
            return;
        }
        self.shared.holds.fetch_sub(1, Ordering::AcqRel);
        self.shared.let_go();
    }
}

fn check_bytes(bytes: u64) -> Result<()> {
    if bytes == 0 {
        return Err(Error::invalid("bytes", &0, "at least 1"));
    }
    Ok(())
}

/// Return the next multiple; a number so large that there is none stays, for the driver to refuse.
fn round_up(bytes: u64, unit: u64) -> u64 {
    bytes.checked_next_multiple_of(unit).unwrap_or(bytes)
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Pool({} of {})", self.id(), self.device().name())
    }
}
