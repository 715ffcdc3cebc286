//! Segments for torch: the functions that its allocator calls for the pools of cgraph.
//!
//! torch hands an allocator no context, so a pool is known by which function is called. There is a
//! fixed number of pairs of them, and a pool takes one for as long as torch has segments from it.
//! torch calls them under a lock of its own and from any thread: nothing here takes the interpreter
//! or drops anything of it.

use std::cell::RefCell;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use cg_core::{Address, Error, Pool};
use pyo3::prelude::*;
use seq_macro::seq;

use crate::error::{state, to_py};

/// Most pools that torch can know at once.
const SLOTS: usize = 1024;

type Allocate = extern "C" fn(isize, c_int, *mut c_void) -> *mut c_void;
type Free = extern "C" fn(*mut c_void, usize, c_int, *mut c_void);

static POOLS: [Mutex<Option<Served>>; SLOTS] = [const { Mutex::new(None) }; SLOTS];
/// True if nobody but torch knows the pool of a slot any more.
static CLOSED: [AtomicBool; SLOTS] = [const { AtomicBool::new(false) }; SLOTS];

/// True if some of them may have memory that is to go back.
static WAITING: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// Why the last allocation of this thread was refused; torch knows only that it was.
    static REFUSED: RefCell<Option<(isize, Error)>> = const { RefCell::new(None) };
}

seq!(SLOT in 0..1024 {
    static ALLOCATE: [Allocate; SLOTS] = [#(allocate::<SLOT>,)*];
    static FREE: [Free; SLOTS] = [#(free::<SLOT>,)*];
});

/// A pool that torch takes segments from.
struct Served {
    pool: Pool,
    /// Number of segments that torch has.
    segments: usize,
}

/// The functions of one pool. They go on as long as torch has segments from it.
pub(crate) struct Lease {
    slot: usize,
}

impl Lease {
    /// Take the first free pair of functions.
    pub(crate) fn new(py: Python<'_>, pool: &Pool) -> PyResult<Self> {
        let taken = py.detach(|| (0..SLOTS).find(|slot| take(*slot, pool)));
        taken.map(|slot| Self { slot }).ok_or_else(|| {
            state(format!(
                "torch knows {SLOTS} pools of cgraph already, the most there can be at once: let \
                 captures share pools, or reset graphs"
            ))
        })
    }

    /// Return which pair it is, and the addresses of its functions.
    pub(crate) fn functions(&self) -> (usize, usize, usize) {
        let (allocate, free) = (ALLOCATE[self.slot], FREE[self.slot]);
        (self.slot, allocate as usize, free as usize)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Without the slot's lock: whoever has it may wait for work that needs the interpreter, which
        // the thread that drops this may hold.
        CLOSED[self.slot].store(true, Ordering::Release);
        WAITING.store(true, Ordering::Release);
    }
}

impl Served {
    /// Try to give back what torch has released.
    fn settle(&self) -> bool {
        let settled = self.pool.settle() == 0;
        if !settled {
            WAITING.store(true, Ordering::Release);
        }
        settled
    }

    /// Return whether torch has nothing of a closed pool, and all of its memory has gone back.
    fn is_gone(&self, slot: usize) -> bool {
        CLOSED[slot].load(Ordering::Acquire) && self.segments == 0 && self.settle()
    }
}

/// Let a pool take a slot; false if another one has it.
fn take(slot: usize, pool: &Pool) -> bool {
    let mut served = lock(slot);
    drop(served.take_if(|served| served.is_gone(slot)));
    if served.is_some() {
        return false;
    }
    CLOSED[slot].store(false, Ordering::Release);
    *served = Some(Served {
        pool: pool.clone(),
        segments: 0,
    });
    true
}

/// Give back what torch has released and what could not go back at once, as beside a capture.
#[pyfunction]
pub(crate) fn settle_pools(py: Python<'_>) {
    if !WAITING.swap(false, Ordering::AcqRel) {
        return;
    }
    py.detach(|| {
        for slot in 0..SLOTS {
            let mut served = lock(slot);
            if let Some(open) = &*served {
                open.settle();
            }
            drop(served.take_if(|served| served.is_gone(slot)));
        }
    });
}

/// Return the exception for the last segment that this thread was refused, if it asked for so many bytes.
#[pyfunction]
pub(crate) fn take_refusal(py: Python<'_>, bytes: isize) -> Option<PyErr> {
    let refused = REFUSED.take();
    let (_, error) = refused.filter(|(asked, _)| *asked == bytes)?;
    Some(to_py(py, &error))
}

extern "C" fn allocate<const SLOT: usize>(
    bytes: isize,
    device: c_int,
    _stream: *mut c_void,
) -> *mut c_void {
    let mut slot = lock(SLOT);
    let Some(served) = &mut *slot else {
        return ptr::null_mut();
    };
    let segment = require_device(&served.pool, device)
        .and_then(|()| served.pool.allocate_segment(bytes.unsigned_abs() as u64));
    match segment {
        Ok(address) => {
            served.segments += 1;
            REFUSED.take();
            ptr::with_exposed_provenance_mut(usize::try_from(address.0).unwrap_or_default())
        }
        Err(error) => {
            // Of a device that is full torch knows more.
            let is_full = matches!(error, Error::OutOfMemory { limit, .. }
                if Some(limit) != served.pool.limit());
            REFUSED.replace((!is_full).then_some((bytes, error)));
            ptr::null_mut()
        }
    }
}

extern "C" fn free<const SLOT: usize>(
    start: *mut c_void,
    _bytes: usize,
    _device: c_int,
    _stream: *mut c_void,
) {
    let mut slot = lock(SLOT);
    let Some(served) = &mut *slot else { return };
    let address = start.addr() as u64;
    if served.pool.release_segment(Address(address)) {
        served.segments -= 1;
        served.settle();
    }
    drop(slot.take_if(|served| served.is_gone(SLOT)));
}

/// Fail unless the pool is of the device with this number, as of a pool that is used on another one.
fn require_device(pool: &Pool, ordinal: c_int) -> cg_core::Result<()> {
    let device = pool.device();
    if i64::from(device.driver().ordinal()) == i64::from(ordinal) {
        return Ok(());
    }
    Err(Error::Foreign {
        object: format!("{pool:?}"),
        found: device.name(),
        expected: format!("cuda:{ordinal}, for which torch asks it for memory"),
    })
}

fn lock(slot: usize) -> MutexGuard<'static, Option<Served>> {
    POOLS[slot].lock().unwrap_or_else(PoisonError::into_inner)
}
