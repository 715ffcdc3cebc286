//! [`Backing`]: the addresses of a segment, and its memory as long as the pool is not paused.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::addresses::{Addresses, Place};
use super::gate::Gate;
use crate::driver::handle::Address;
use crate::driver::owned::pages::{OwnedPage, PinnedCopy};
use crate::error::Result;
use crate::memory::Memory;
use crate::retain::Retained;

/// One segment: addresses that stay, and memory that may go and come again.
pub(super) struct Backing {
    gate: Arc<Gate>,
    /// Before the place: what is mapped goes before its addresses.
    physical: Mutex<Physical>,
    place: Place,
    addresses: Arc<Addresses>,
}

enum Physical {
    Mapped(OwnedPage),
    /// Given back, with what was kept of the contents.
    Away(Option<PinnedCopy>),
}

impl Backing {
    /// Takes addresses and maps memory there.
    pub(super) fn new(addresses: &Arc<Addresses>, gate: &Arc<Gate>, bytes: u64) -> Result<Self> {
        let place = addresses.take(bytes)?;
        let page = OwnedPage::map(place.range(), place.address(), bytes)?;
        Ok(Self {
            gate: Arc::clone(gate),
            physical: Mutex::new(Physical::Mapped(page)),
            place,
            addresses: Arc::clone(addresses),
        })
    }

    pub(super) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    pub(super) fn address(&self) -> Address {
        self.place.address()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.place.bytes()
    }

    pub(super) fn is_mapped(&self) -> bool {
        matches!(*self.physical(), Physical::Mapped(_))
    }

    /// A part of it, kept alive by `owner`.
    pub(super) fn memory(&self, offset: u64, bytes: u64, owner: Retained) -> Memory {
        let address = self.address().offset(offset);
        Memory::owned_by(self.addresses.driver(), address, bytes, owner)
    }

    /// A copy of the contents; none if the memory is away.
    pub(super) fn copy(&self) -> Result<Option<PinnedCopy>> {
        match &*self.physical() {
            Physical::Mapped(page) => PinnedCopy::of(page).map(Some),
            Physical::Away(_) => Ok(None),
        }
    }

    /// Gives the memory back, and keeps a copy of what it held.
    pub(super) fn leave(&self, copy: Option<PinnedCopy>) {
        let before = std::mem::replace(&mut *self.physical(), Physical::Away(copy));
        // Here the driver is called, with the lock open.
        drop(before);
    }

    /// New memory at the addresses, with what was kept of the contents; none if nothing is away.
    pub(super) fn replacement(&self) -> Result<Option<OwnedPage>> {
        let physical = self.physical();
        let Physical::Away(copy) = &*physical else {
            return Ok(None);
        };
        let page = OwnedPage::map(self.place.range(), self.address(), self.bytes())?;
        if let Some(copy) = copy {
            copy.restore(&page)?;
        }
        Ok(Some(page))
    }

    /// Takes the memory that [`Self::replacement`] made.
    pub(super) fn come_back(&self, page: OwnedPage) {
        let before = std::mem::replace(&mut *self.physical(), Physical::Mapped(page));
        drop(before);
    }

    fn physical(&self) -> MutexGuard<'_, Physical> {
        self.physical.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
