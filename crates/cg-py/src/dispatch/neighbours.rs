//! `Neighbours`: what the graphs of one pool have lent, which another one may overwrite.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::prelude::*;

use super::outputs::{Held, Lent, Storage};
use super::pattern::Found;

/// The graphs of one pool, numbered in the order of their captures. What a graph returns may lie where
/// graphs captured before it have their temporary memory; never where later ones have theirs.
#[pyclass(frozen, weakref, module = "cgraph._core")]
#[derive(Default)]
pub(crate) struct Neighbours {
    count: AtomicU64,
    /// The number of the graph that was replayed last; zero if all are to be looked at.
    last: AtomicU64,
    loans: Mutex<Vec<Loan>>,
}

/// A result that a caller may have.
pub(super) struct Loan {
    pub(super) number: u64,
    /// Its place among the leaves of its graph's result.
    pub(super) place: usize,
    pub(super) lent: Weak<Lent>,
    pub(super) storage: Py<Storage>,
    pub(super) held: Weak<Held>,
    /// Whether the results of its graph are among the loans.
    pub(super) is_noted: Arc<AtomicBool>,
}

#[pymethods]
impl Neighbours {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// The number of a graph that was captured just now; the first one is 1.
    fn number(&self) -> u64 {
        self.count.fetch_add(1, Ordering::Relaxed) + 1
    }
}

impl Neighbours {
    /// Whether the graph of this number was replayed last, so that nothing can be told.
    #[inline]
    pub(super) fn is_last(&self, number: u64) -> bool {
        self.last.load(Ordering::Relaxed) == number
    }

    /// Tells of held results that a replay of the graph of this number may overwrite, but for its
    /// own.
    #[cold]
    pub(super) fn release(
        &self,
        py: Python<'_>,
        number: u64,
        found: &[Found<'_>],
        closely: bool,
    ) -> PyResult<()> {
        self.last.store(number, Ordering::Relaxed);
        let all = std::mem::take(&mut *self.loans());
        let (later, others): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|loan| loan.number > number);
        self.loans().extend(others);
        for loan in &later {
            if let Err(error) = loan.release(py, found, closely) {
                self.loans().extend(later);
                self.last.store(0, Ordering::Relaxed);
                return Err(error);
            }
        }
        for loan in &later {
            loan.is_noted.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Notes results that are about to be returned, and forgets those of graphs that are gone.
    #[cold]
    pub(super) fn note(&self, loans: impl Iterator<Item = Loan>) {
        let known = std::mem::take(&mut *self.loans());
        let all = known.into_iter().chain(loans);
        let (living, gone): (Vec<_>, Vec<_>) = all.partition(|one| one.lent.strong_count() > 0);
        self.loans().extend(living);
        // Dropping may run any code: the lock is open.
        drop(gone);
    }

    fn loans(&self) -> MutexGuard<'_, Vec<Loan>> {
        self.loans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Loan {
    fn release(&self, py: Python<'_>, found: &[Found<'_>], closely: bool) -> PyResult<()> {
        // Nobody looks after the results of a graph that is gone.
        let (Some(lent), Some(held)) = (self.lent.upgrade(), self.held.upgrade()) else {
            return Ok(());
        };
        let is_told = held.look(py, self.place, &lent, found, closely, false)?;
        if closely && !is_told && self.storage.get().is_held(py)? {
            held.tell(py, self.place, &lent, None, false)?;
        }
        Ok(())
    }
}
