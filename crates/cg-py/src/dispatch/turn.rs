//! `Turn`: one thread at a time replays the graphs of a function.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use pyo3::prelude::*;

/// From feeding a graph to taking its results no other thread may replay it. A replay may come to
/// another one of the same thread, as through a break.
#[pyclass(frozen, module = "cgraph._core")]
#[derive(Default)]
pub(crate) struct Turn {
    lock: Mutex<()>,
    /// The number of the thread that has it; zero if none has.
    owner: AtomicU64,
}

/// The turn of a thread, until it is dropped.
pub(crate) struct Taken<'a> {
    turn: &'a Turn,
    /// None inside another one of the same thread.
    guard: Option<MutexGuard<'a, ()>>,
}

#[pymethods]
impl Turn {
    #[new]
    fn new() -> Self {
        Self::default()
    }
}

impl Turn {
    /// Waits for the turn without the interpreter, which the thread that has it may need.
    #[inline]
    pub(crate) fn take(&self, py: Python<'_>) -> Taken<'_> {
        let me = thread_number();
        if self.owner.load(Ordering::Relaxed) == me {
            return Taken {
                turn: self,
                guard: None,
            };
        }
        loop {
            match self.lock.try_lock() {
                Ok(guard) => return self.taken(me, guard),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return self.taken(me, poisoned.into_inner());
                }
                Err(TryLockError::WouldBlock) => py.detach(|| drop(self.lock.lock())),
            }
        }
    }

    fn taken<'a>(&'a self, me: u64, guard: MutexGuard<'a, ()>) -> Taken<'a> {
        self.owner.store(me, Ordering::Relaxed);
        Taken {
            turn: self,
            guard: Some(guard),
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if self.guard.is_some() {
            self.turn.owner.store(0, Ordering::Relaxed);
        }
    }
}

/// A number that no other living thread has, and never zero.
fn thread_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static MINE: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    MINE.with(|mine| *mine)
}
