//! [`Backing`]: the addresses of a segment, and its memory as long as the pool is not paused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::addresses::{Addresses, Place};
use crate::driver::handle::Address;
use crate::driver::owned::pages::{OwnedPage, PinnedCopy};
use crate::error::Result;
use crate::gate::{Gate, Gated};
use crate::memory::Memory;
use crate::retain::Retained;

/// The most bytes that neighbours share as one page. Mapping costs by the page rather than by the
/// byte, and a page goes only when the last of its segments has gone.
const MOST_SHARED: u64 = 512 << 20;

/// One segment: addresses that stay, and memory that may go and come again.
pub(super) struct Backing {
    gate: Arc<Gate>,
    /// Before the place: what is mapped goes before its addresses.
    physical: Mutex<Physical>,
    place: Arc<Place>,
    addresses: Arc<Addresses>,
}

enum Physical {
    /// With pinned memory of the host, if the last pause has used it and the next one may do so.
    Mapped(Arc<Mapped>, Option<PinnedCopy>),
    /// Given back, with what was kept of the contents.
    Away(Option<PinnedCopy>),
}

/// A mapped page: that of one segment, or of neighbours that came back together.
pub(super) struct Mapped {
    page: OwnedPage,
    /// After the page: until it is unmapped, nobody else may have its addresses.
    _places: Vec<Arc<Place>>,
}

impl Backing {
    /// Take addresses and map memory there.
    pub(super) fn new(addresses: &Arc<Addresses>, gate: &Arc<Gate>, bytes: u64) -> Result<Self> {
        let place = Arc::new(addresses.take(bytes)?);
        let mapped = Mapped::new(&[Arc::clone(&place)])?;
        Ok(Self {
            gate: Arc::clone(gate),
            physical: Mutex::new(Physical::Mapped(Arc::new(mapped), None)),
            place,
            addresses: Arc::clone(addresses),
        })
    }

    pub(super) fn address(&self) -> Address {
        self.place.address()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.place.bytes()
    }

    /// Return its page; none if the memory is away.
    pub(super) fn mapped(&self) -> Option<Arc<Mapped>> {
        match &*self.physical() {
            Physical::Mapped(mapped, _) => Some(Arc::clone(mapped)),
            Physical::Away(_) => None,
        }
    }

    /// Bytes of the host that keep its contents, or did so in the last pause.
    pub(super) fn kept(&self) -> u64 {
        match &*self.physical() {
            Physical::Mapped(_, Some(_)) | Physical::Away(Some(_)) => self.bytes(),
            Physical::Mapped(_, None) | Physical::Away(None) => 0,
        }
    }

    /// Give back memory of the host that holds nothing.
    pub(super) fn drop_spare(&self) {
        let spare = match &mut *self.physical() {
            Physical::Mapped(_, spare) => spare.take(),
            Physical::Away(_) => None,
        };
        // Here the driver is called, with the lock open.
        drop(spare);
    }

    /// Return a part of it, kept alive by `owner`.
    pub(super) fn memory(&self, offset: u64, bytes: u64, owner: Retained) -> Memory {
        let address = self.address().offset(offset);
        let owner = Gated::retained(&self.gate, owner);
        Memory::owned_by(self.addresses.driver(), address, bytes, owner)
    }

    /// Return a copy of the contents; none if the memory is away.
    pub(super) fn copy(&self) -> Result<Option<PinnedCopy>> {
        let (mapped, spare) = match &mut *self.physical() {
            Physical::Mapped(mapped, spare) => (Arc::clone(mapped), spare.take()),
            Physical::Away(_) => return Ok(None),
        };
        let mut copy = match spare {
            Some(copy) => copy,
            None => PinnedCopy::new(self.addresses.driver(), self.bytes())?,
        };
        copy.fill(&mapped.page, self.address())?;
        Ok(Some(copy))
    }

    /// Give the memory back, and keep a copy of what it held.
    pub(super) fn leave(&self, copy: Option<PinnedCopy>) {
        let before = std::mem::replace(&mut *self.physical(), Physical::Away(copy));
        // Here the driver is called, with the lock open.
        drop(before);
    }

    /// Take the memory that [`replacements`] made.
    pub(super) fn come_back(&self, mapped: Arc<Mapped>) {
        let mut physical = self.physical();
        if let Physical::Away(copy) = &mut *physical {
            let spare = copy.take();
            *physical = Physical::Mapped(mapped, spare);
        }
    }

    /// Copy kept contents to the memory that is to replace it.
    fn restore(&self, mapped: &Mapped) -> Result<()> {
        match &*self.physical() {
            Physical::Away(Some(copy)) => copy.restore(&mapped.page, self.address()),
            _ => Ok(()),
        }
    }

    fn physical(&self) -> MutexGuard<'_, Physical> {
        self.physical.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Mapped {
    /// Make new memory behind places that follow each other.
    fn new(places: &[Arc<Place>]) -> Result<Self> {
        let first = &places[0];
        let bytes = places.iter().map(|place| place.bytes()).sum();
        Ok(Self {
            page: OwnedPage::map(first.range(), first.address(), bytes)?,
            _places: places.to_vec(),
        })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.page.bytes()
    }
}

/// Make new memory for segments whose own is away, with what was kept of the contents; `backings` are in
/// the order of their addresses.
pub(super) fn replacements(backings: &[Arc<Backing>]) -> Result<Vec<(Arc<Backing>, Arc<Mapped>)>> {
    let away: Vec<_> = backings
        .iter()
        .filter(|one| one.mapped().is_none())
        .collect();
    let mut replaced = Vec::new();
    let mut rest = &away[..];
    while !rest.is_empty() {
        let (run, behind) = rest.split_at(run_length(rest));
        rest = behind;
        let places: Vec<_> = run.iter().map(|one| Arc::clone(&one.place)).collect();
        let mapped = Arc::new(Mapped::new(&places)?);
        for backing in run {
            backing.restore(&mapped)?;
            replaced.push((Arc::clone(backing), Arc::clone(&mapped)));
        }
    }
    Ok(replaced)
}

/// Return how many of the first segments can share a page: they follow each other in one range.
fn run_length(backings: &[&Arc<Backing>]) -> usize {
    let mut bytes = backings[0].bytes();
    let pairs = backings.windows(2).take_while(|pair| {
        let (one, next) = (&pair[0].place, &pair[1].place);
        bytes += next.bytes();
        let follows = one.address().offset(one.bytes()) == next.address();
        follows && Arc::ptr_eq(one.range(), next.range()) && bytes <= MOST_SHARED
    });
    1 + pairs.count()
}
