//! `FunctionLock`: one thread at a time replays or captures the graphs of a function.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::detach::require_unforked;

/// From feeding a graph to taking its results, and while another one is captured, no other thread may
/// replay it. The thread that holds the lock may take it again, as through a break. A thread that takes
/// or leaves it holds the interpreter, so no two threads do so at the same time.
#[pyclass(frozen, weakref, name = "FunctionLock", module = "cgraph._core")]
#[derive(Default)]
pub(crate) struct FunctionLock {
    /// The number of the thread that holds it; zero if none does.
    owner: AtomicU64,
    /// Number of times that thread has taken it again. Only that thread looks.
    again: AtomicUsize,
    /// Number of replays that are under way, one in a break or hook of the other. Only that thread looks.
    replaying: AtomicUsize,
    waiting: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

/// A lock that this thread holds until the value is dropped.
pub(crate) struct Locked<'a>(&'a FunctionLock);

/// A replay that is under way until the value is dropped.
pub(super) struct Replaying<'a>(&'a FunctionLock);

/// After so long who waits looks for signals: an interrupt of the user's ends the wait.
const PATIENCE: Duration = Duration::from_millis(50);

#[pymethods]
impl FunctionLock {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Take the lock, after a wait while another thread holds it.
    pub(crate) fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        require_unforked()?;
        while !self.enter() {
            self.wait(py)?;
        }
        Ok(())
    }

    /// Return whether a replay is under way, as seen from a break or a hook. Only the thread that holds the
    /// lock asks.
    #[getter]
    pub(crate) fn is_replaying(&self) -> bool {
        self.replaying.load(Ordering::Relaxed) > 0
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, PyTuple>) {
        self.leave();
    }
}

impl FunctionLock {
    /// Leave it after [`Self::__enter__`].
    pub(crate) fn release(&self) {
        self.leave();
    }

    /// Take the lock; none if another thread holds it.
    #[inline]
    pub(crate) fn try_take(&self) -> Option<Locked<'_>> {
        self.enter().then(|| Locked(self))
    }

    /// Say that a replay is under way. The thread holds the lock.
    #[inline]
    pub(super) fn replays(&self) -> Replaying<'_> {
        // Two steps are enough where only one thread writes, and cost less.
        let replaying = self.replaying.load(Ordering::Relaxed);
        self.replaying.store(replaying + 1, Ordering::Relaxed);
        Replaying(self)
    }

    /// Wait until nobody may have it, without the interpreter, which the thread that has it may need.
    ///
    /// # Errors
    /// The exception of a handler of a signal.
    #[cold]
    pub(crate) fn wait(&self, py: Python<'_>) -> PyResult<()> {
        // With the interpreter: who leaves after this sees it.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        py.detach(|| {
            let locked = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            let taken = |(): &mut ()| self.owner.load(Ordering::Acquire) != 0;
            drop(self.changed.wait_timeout_while(locked, PATIENCE, taken));
        });
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        py.check_signals()
    }

    #[inline]
    fn enter(&self) -> bool {
        let (me, owner) = (thread_number(), self.owner.load(Ordering::Relaxed));
        if owner == me {
            let again = self.again.load(Ordering::Relaxed);
            self.again.store(again + 1, Ordering::Relaxed);
        } else if owner == 0 {
            self.owner.store(me, Ordering::Relaxed);
        }
        owner == me || owner == 0
    }

    #[inline]
    fn leave(&self) {
        let again = self.again.load(Ordering::Relaxed);
        if again > 0 {
            self.again.store(again - 1, Ordering::Relaxed);
            return;
        }
        self.owner.store(0, Ordering::Release);
        // Who begins to wait from here on sees that nobody has it.
        if self.waiting.load(Ordering::Relaxed) > 0 {
            drop(self.lock.lock());
            self.changed.notify_one();
        }
    }
}

impl Drop for Locked<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.leave();
    }
}

impl Drop for Replaying<'_> {
    #[inline]
    fn drop(&mut self) {
        let replaying = self.0.replaying.load(Ordering::Relaxed);
        self.0.replaying.store(replaying - 1, Ordering::Relaxed);
    }
}

/// Return a number that no other living thread has, and never zero.
#[inline]
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static MINE: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    MINE.with(|mine| *mine)
}
