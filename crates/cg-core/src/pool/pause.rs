//! Giving memory back: [`Pool::trim`], [`Pool::pause`] and [`Pool::resume`].

use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};

use super::Pool;
use super::segment::{Backing, replacements};
use crate::driver::is_exiting;
use crate::driver::owned::pages;
use crate::error::{Error, Result};

/// The treatment of the contents of a pool in a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Keep {
    /// They are lost: after [`Pool::resume`] the memory holds anything.
    Discard,
    /// They are copied to pinned memory of the host, and back. To pin it takes longer than to copy: the pool
    /// keeps it for its next pauses, until [`Pool::trim`], a pause that discards, or its end.
    Host,
}

impl Pool {
    /// Give back the segments that are wholly free; how many bytes that were. Waits for the device.
    ///
    /// Memory of the host that held contents in a pause goes, too.
    ///
    /// No segment is given back while something was given [`Pool::retained`]: templates and execs know
    /// addresses of any segment. A segment that a [`Pool::segments`] is held of also stays.
    ///
    /// # Errors
    /// As [`crate::Device::synchronize`]; [`Error::Paused`]. Nothing was given back then.
    #[doc(alias = "cuMemUnmap")]
    pub fn trim(&self) -> Result<u64> {
        let _turn = self.turn();
        let _open = self.shared.gate.pass()?;
        // What is parked for work that has passed goes first, and may have been in the way.
        self.device().synchronize()?;
        let (released, free) = {
            let book = self.shared.book();
            (book.released(), book.free())
        };
        // Work that this crate does not know may have used what was free by then.
        pages::synchronize(&**self.device.driver())?;
        let mut spare = Vec::new();
        let before = {
            let mut book = self.shared.book();
            let before = book.mapped();
            book.passed(released);
            if !self.shared.is_held() {
                book.segments.retain(|address, segment| {
                    let unused = free.get(address) == Some(&(segment.number, segment.taken));
                    let is_spare = unused && segment.is_free();
                    spare.extend(is_spare.then(|| Arc::clone(&segment.backing)));
                    !is_spare
                });
            }
            before
        };
        // Unmapped here, with the lock open.
        drop(spare);
        self.backings()
            .iter()
            .for_each(|backing| backing.drop_spare());
        self.shared.let_go();
        Ok(before.saturating_sub(self.shared.book().mapped()))
    }

    /// Give all memory back and keep the addresses: graphs and blocks stay valid, and
    /// [`Self::resume`] maps memory there again. Until then, replays of execs that know the pool, work
    /// on its blocks, reading, writing and allocating are refused with [`Error::Paused`]. Blocks can
    /// be dropped.
    ///
    /// Waits for all work on the device, whosever it is: work that is enqueued by others in the
    /// meantime, or later, must not touch the pool.
    ///
    /// # Errors
    /// As [`crate::Device::synchronize`], what a copy to the host reports, [`Error::Invalid`] if the
    /// host has no room for it; the pool goes on then as if nothing had happened. [`Error::Paused`] if
    /// it is paused.
    #[doc(alias = "cuMemUnmap")]
    pub fn pause(&self, keep: Keep) -> Result<()> {
        let _turn = self.turn();
        let gate = &self.shared.gate;
        if gate.is_closed() {
            return Err(gate.paused());
        }
        self.device.check_captures()?;
        // From here on nothing new comes, and what was coming is on the device.
        gate.set_closed(true);
        let left = self.leave(keep);
        if left.is_err() {
            gate.set_closed(false);
        }
        left
    }

    /// Map memory at the addresses of a paused pool, and copy kept contents back.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless it is paused. [`Error::OutOfMemory`] and what else the driver
    /// reports; the pool is still paused then, has no memory, and can be resumed later.
    #[doc(alias = "cuMemMap")]
    pub fn resume(&self) -> Result<()> {
        let _turn = self.turn();
        let gate = &self.shared.gate;
        if !gate.is_closed() {
            let given = format!("{}, which runs", gate.pool());
            return Err(Error::invalid(
                "pool to resume",
                &given,
                "one that is paused",
            ));
        }
        for (backing, mapped) in replacements(&self.backings())? {
            backing.come_back(mapped);
        }
        gate.set_closed(false);
        Ok(())
    }

    /// Return whether it is paused: it has addresses and no memory.
    #[must_use]
    pub fn is_paused(&self) -> bool {
        self.shared.gate.is_closed()
    }

    /// Try again to give back segments that [`Self::release_segment`] could not give back at once;
    /// how many bytes still wait. Drops nothing else, so that it can be called with any lock held.
    #[expect(clippy::must_use_candidate, reason = "called for what it gives back")]
    pub fn settle(&self) -> u64 {
        self.try_settle();
        let book = self.shared.book();
        let leaving = book.leaving.iter().map(|leaving| leaving.backing.bytes());
        leaving.sum()
    }

    fn try_settle(&self) {
        // Whoever has the turn may have dropped something that calls this: then it happens later.
        let _turn = match self.shared.turn.try_lock() {
            Err(TryLockError::WouldBlock) => return,
            Err(TryLockError::Poisoned(turn)) => turn.into_inner(),
            Ok(turn) => turn,
        };
        let (released, all_passed) = {
            let book = self.shared.book();
            let all_passed = book.leaving.iter().all(|one| one.passed);
            (book.released(), all_passed)
        };
        // While the process exits, nothing is given back and nobody can be waited for.
        if is_exiting() {
            return;
        }
        let waited = all_passed
            || self.is_paused()
            || (!self.device.has_captures() && pages::synchronize(&**self.device.driver()).is_ok());
        if waited {
            self.shared.book().passed(released);
        }
        self.shared.let_go();
    }

    fn leave(&self, keep: Keep) -> Result<()> {
        self.device().synchronize()?;
        let mut left = Vec::new();
        for backing in self.backings() {
            let copy = match keep {
                Keep::Discard => None,
                Keep::Host => backing.copy()?,
            };
            left.push((backing, copy));
        }
        // From here on nothing fails.
        for (backing, copy) in left {
            backing.leave(copy);
        }
        Ok(())
    }

    /// In the order of their addresses.
    fn backings(&self) -> Vec<Arc<Backing>> {
        let mut backings: Vec<_> = self.shared.book().backings().cloned().collect();
        backings.sort_by_key(|backing| backing.address());
        backings
    }

    /// Keep others from pausing, resuming and trimming.
    fn turn(&self) -> MutexGuard<'_, ()> {
        let turn = self.shared.turn.lock();
        turn.unwrap_or_else(PoisonError::into_inner)
    }
}
