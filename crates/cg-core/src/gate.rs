//! [`Gate`]: lets work on a pool's memory through, unless the pool is paused.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use crate::error::{Error, Result};
use crate::retain::Retained;

/// A pool in words.
pub(crate) struct PoolId {
    pub(crate) number: u64,
    pub(crate) device: String,
}

/// A lock that everything that uses a pool's memory passes on its way to the driver.
///
/// A read lock, held until the driver has the work: so that no work is on its way unseen when a
/// pause goes on to wait for what the driver has.
pub(crate) struct Gate {
    pool: PoolId,
    closed: RwLock<bool>,
}

impl Gate {
    pub(crate) fn new(pool: PoolId) -> Self {
        Self {
            pool,
            closed: RwLock::new(false),
        }
    }

    pub(crate) fn pool(&self) -> &PoolId {
        &self.pool
    }

    /// Keep the gate open as long as the result.
    #[inline]
    pub(crate) fn pass(&self) -> Result<RwLockReadGuard<'_, bool>> {
        let closed = self.closed.read().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err(self.paused());
        }
        Ok(closed)
    }

    pub(crate) fn is_closed(&self) -> bool {
        *self.closed.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Close or open it, once all that is passing has passed.
    pub(crate) fn set_closed(&self, closed: bool) {
        *self.closed.write().unwrap_or_else(PoisonError::into_inner) = closed;
    }

    #[cold]
    pub(crate) fn paused(&self) -> Error {
        Error::Paused {
            pool: self.pool.to_string(),
        }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gate of {}", self.pool)
    }
}

/// Something that keeps memory of a pool alive: work that retains it passes the pool's gate.
pub(crate) struct Gated {
    gate: Arc<Gate>,
    _owner: Retained,
}

impl Gated {
    pub(crate) fn retained(gate: &Arc<Gate>, owner: Retained) -> Retained {
        Arc::new(Self {
            gate: Arc::clone(gate),
            _owner: owner,
        })
    }
}

/// The gates of the pools that something retains memory of, each once.
#[derive(Debug, Clone, Default)]
pub(crate) struct Gates {
    /// In order of the pools' numbers: two threads that pass several cannot wait for each other.
    gates: Vec<Arc<Gate>>,
}

/// Gates that are kept open.
pub(crate) struct Passage<'a> {
    _first: Option<RwLockReadGuard<'a, bool>>,
    _others: Vec<RwLockReadGuard<'a, bool>>,
}

impl Gates {
    pub(crate) fn of<'a>(retained: impl IntoIterator<Item = &'a Retained>) -> Self {
        let mut gates = Self::default();
        gates.extend(retained);
        gates
    }

    /// Add the gates of more that is retained.
    pub(crate) fn extend<'a>(&mut self, retained: impl IntoIterator<Item = &'a Retained>) {
        for gate in retained.into_iter().filter_map(gate_of) {
            let key = |gate: &Arc<Gate>| gate.pool.number;
            if let Err(place) = self.gates.binary_search_by_key(&key(gate), key) {
                self.gates.insert(place, Arc::clone(gate));
            }
        }
    }

    /// Keep all of them open as long as the result. Allocates only for more than one.
    #[inline]
    pub(crate) fn pass(&self) -> Result<Passage<'_>> {
        let mut gates = self.gates.iter();
        let first = gates.next().map(|gate| gate.pass()).transpose()?;
        let others = gates.map(|gate| gate.pass()).collect::<Result<_>>()?;
        Ok(Passage {
            _first: first,
            _others: others,
        })
    }
}

/// Keep the gate of a memory's owner open, if it is of a pool.
pub(crate) fn pass(owner: Option<&Retained>) -> Result<Option<RwLockReadGuard<'_, bool>>> {
    owner.and_then(gate_of).map(|gate| gate.pass()).transpose()
}

fn gate_of(retained: &Retained) -> Option<&Arc<Gate>> {
    let retained: &(dyn Any + Send + Sync) = &**retained;
    let gated = retained.downcast_ref::<Gated>();
    gated.map(|gated| &gated.gate)
}

impl fmt::Display for PoolId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pool {} of {}", self.number, self.device)
    }
}
