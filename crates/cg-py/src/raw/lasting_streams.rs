//! The streams that torch never destroys, by their raw handles.

use std::collections::BTreeSet;
use std::sync::{PoisonError, RwLock};

/// The legacy default stream, which each device has.
const LEGACY_DEFAULT: u64 = 0;

static LASTING: RwLock<BTreeSet<u64>> = RwLock::new(BTreeSet::new());

/// Note a stream of torch's pool.
pub(crate) fn note_lasting(handle: u64) {
    let lasting = LASTING.write();
    lasting
        .unwrap_or_else(PoisonError::into_inner)
        .insert(handle);
}

/// Return whether the stream was noted, or is the default one.
pub(crate) fn is_lasting(handle: u64) -> bool {
    let lasting = || LASTING.read().unwrap_or_else(PoisonError::into_inner);
    handle == LEGACY_DEFAULT || lasting().contains(&handle)
}
