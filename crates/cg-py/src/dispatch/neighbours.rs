//! `Neighbours`: what the graphs of one pool have lent, which another one may overwrite.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};

use super::held::{Arguments, Held, Lent, Site, Storage};
use crate::raw;

/// The graphs of one pool, numbered in the order of their captures. What a graph returns may lie where
/// graphs captured before it have their temporary memory; never where later ones have theirs.
#[pyclass(frozen, weakref, module = "cgraph._core")]
#[derive(Default)]
pub(crate) struct Neighbours {
    count: AtomicU64,
    /// The number of the graph that was replayed last; zero if all are to be looked at.
    last: AtomicU64,
    loans: Mutex<Vec<Loan>>,
    orphans: Mutex<Vec<Orphan>>,
    /// Who is told of orphans. The garbage collector empties what only garbage refers to, before the
    /// graphs of a function go that is part of it.
    told: Mutex<Vec<Py<PyAny>>>,
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

/// A result that a caller had when its graph went.
struct Orphan {
    number: u64,
    place: usize,
    /// A weak reference.
    tensor: Py<PyWeakrefReference>,
    site: Option<Site>,
    held: Arc<Held>,
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

    /// Notes a replay of a graph that overwrites no results of others: what it lends is new to them.
    #[inline]
    pub(super) fn note_harmless(&self) {
        self.last.store(0, Ordering::Relaxed);
    }

    /// Whether a result that one of the graphs has lent lies in this storage.
    #[cold]
    pub(super) fn have_lent(&self, storage: u64) -> bool {
        let loans = lock(&self.loans);
        loans.iter().any(|loan| loan.storage.get().is(storage))
    }

    /// Tells of held results that a replay of the graph of this number may overwrite, but for its
    /// own.
    #[cold]
    pub(super) fn release(
        &self,
        py: Python<'_>,
        number: u64,
        given: Arguments<'_, '_>,
        closely: bool,
    ) -> PyResult<()> {
        self.last.store(number, Ordering::Relaxed);
        let loans = take(&mut lock(&self.loans), |loan| loan.number > number);
        let orphans = take(&mut lock(&self.orphans), |orphan| orphan.number > number);
        let told = loans
            .iter()
            .try_for_each(|loan| loan.release(py, given, closely));
        let told = told.and_then(|()| orphans.iter().try_for_each(|one| one.release(py, given)));
        if told.is_err() {
            lock(&self.loans).extend(loans);
            lock(&self.orphans).extend(orphans);
            self.last.store(0, Ordering::Relaxed);
            return told;
        }
        for loan in &loans {
            loan.is_noted.store(false, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Sees that somebody can still be told when the graphs are gone.
    pub(super) fn know(&self, somebody: &Bound<'_, PyAny>) {
        let py = somebody.py();
        let gone = {
            let mut told = lock(&self.told);
            if told.iter().all(|one| !one.is(somebody)) {
                told.push(somebody.clone().unbind());
            }
            // Those that only this knows have neither graphs nor orphans.
            take(&mut told, |one| raw::references(one.bind(py)) == 1)
        };
        drop(gone);
    }

    /// Looks after what a graph has lent that is about to go, if somebody else has it.
    pub(super) fn orphan(
        &self,
        tensor: &Bound<'_, PyAny>,
        number: u64,
        place: usize,
        site: Option<Site>,
        held: &Arc<Held>,
    ) {
        let py = tensor.py();
        if raw::references(tensor) == 1 {
            return;
        }
        let Ok(tensor) = PyWeakrefReference::new(tensor) else {
            return;
        };
        let orphan = Orphan {
            number,
            place,
            tensor: tensor.unbind(),
            site,
            held: Arc::clone(held),
        };
        let gone = take(&mut lock(&self.orphans), |one| {
            one.tensor.bind(py).upgrade().is_none()
        });
        lock(&self.orphans).push(orphan);
        drop(gone);
    }

    /// Notes results that are about to be returned, and forgets those of graphs that are gone.
    #[cold]
    pub(super) fn note(&self, loans: impl Iterator<Item = Loan>) {
        let gone = {
            let mut known = lock(&self.loans);
            known.extend(loans);
            take(&mut known, |one| one.lent.strong_count() == 0)
        };
        // Dropping may run any code: the lock is open.
        drop(gone);
    }
}

impl Orphan {
    fn release(&self, py: Python<'_>, given: Arguments<'_, '_>) -> PyResult<()> {
        let Some(tensor) = self.tensor.bind(py).upgrade() else {
            return Ok(());
        };
        // torch's tensors have to be told that Python has them again.
        if let Some(fix) = tensor.getattr_opt(intern!(py, "_fix_weakref"))? {
            fix.call0()?;
        }
        let count = raw::references(&tensor) - 1 - given.own(&tensor);
        if count <= 0 {
            return Ok(());
        }
        self.held
            .tell_late(py, self.place, &tensor, self.site.as_ref(), count, given)
    }
}

impl Loan {
    fn release(&self, py: Python<'_>, given: Arguments<'_, '_>, closely: bool) -> PyResult<()> {
        // Nobody looks after the results of a graph that is gone.
        let (Some(lent), Some(held)) = (self.lent.upgrade(), self.held.upgrade()) else {
            return Ok(());
        };
        let is_told = held.look(py, self.place, &lent, given, closely, false)?;
        if closely && !is_told && self.storage.get().is_held(py)? {
            held.tell(py, self.place, &lent, None, given, false)?;
        }
        Ok(())
    }
}

fn take<T>(all: &mut Vec<T>, is_wanted: impl FnMut(&mut T) -> bool) -> Vec<T> {
    all.extract_if(.., is_wanted).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
