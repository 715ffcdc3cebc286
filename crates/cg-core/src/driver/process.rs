//! The process: whether it exits, and whether it is a fork of one that had used a driver.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

static EXITING: AtomicBool = AtomicBool::new(false);
static FORKED: AtomicBool = AtomicBool::new(false);
static NEXT_DRIVER: AtomicU64 = AtomicU64::new(1);

/// Tell cgraph that the process exits: from now on nothing that is dropped calls the driver.
pub fn begin_exit() {
    EXITING.store(true, Ordering::Relaxed);
}

/// Return whether [`begin_exit`] was called.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::Relaxed)
}

/// Tell cgraph that the process is a fork of another one, as its first call there. A driver that the other
/// one used is of no use here, and its locks may be held for ever: nothing that is dropped calls it, and
/// callers ask [`is_forked`] before they use what was made before.
pub fn begin_forked() {
    if NEXT_DRIVER.load(Ordering::Relaxed) > 1 {
        FORKED.store(true, Ordering::Relaxed);
        begin_exit();
    }
}

/// Return whether the process is a fork of one that had used a driver.
#[inline]
#[must_use]
pub fn is_forked() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Return a fresh number for [`Driver::id`](super::Driver::id).
pub(crate) fn next_driver_id() -> u64 {
    NEXT_DRIVER.fetch_add(1, Ordering::Relaxed)
}
