//! The dictionaries that are watched, and the guards that watch them.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::raw::{Attached, Change, DictWatchers, count};

/// The places of a guard that have to be looked into again.
pub(super) struct Marks {
    are_there: AtomicBool,
    of: Box<[AtomicBool]>,
    /// Number of changes that Python has told of.
    changes: AtomicU64,
}

/// The keys of a dictionary that somebody looks at.
pub(super) struct WatchedKeys {
    /// Of strings, in order.
    hashes: Box<[isize]>,
    /// True if it also matters how many items there are.
    are_counted: bool,
}

/// Keys that a guard looks at in the dictionaries of an object.
#[derive(Default)]
pub(super) struct Looks {
    pub(super) at_attributes: Option<Arc<WatchedKeys>>,
    pub(super) at_items: Option<Arc<WatchedKeys>>,
}

/// A place that looks into a dictionary.
struct Watch {
    marks: Arc<Marks>,
    place: usize,
    keys: Arc<WatchedKeys>,
}

/// By the addresses of the dictionaries. Only those are here that a guard holds. It is taken out and put back
/// around what runs no code of Python's.
static WATCHED: Attached<Option<HashMap<usize, Vec<Watch>>>> = Attached::new(None);

impl Marks {
    /// Everything has to be looked into.
    pub(super) fn new(places: usize) -> Self {
        Self {
            are_there: AtomicBool::new(true),
            of: (0..places).map(|_| AtomicBool::new(true)).collect(),
            changes: AtomicU64::new(0),
        }
    }

    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.are_there.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn has(&self, place: usize) -> bool {
        self.of[place].load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn put(&self, place: usize) {
        self.of[place].store(true, Ordering::Relaxed);
        self.are_there.store(true, Ordering::Relaxed);
    }

    /// Return how many changes Python has told of.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }

    pub(super) fn clear(&self) {
        for one in &self.of {
            one.store(false, Ordering::Relaxed);
        }
        self.are_there.store(false, Ordering::Relaxed);
    }
}

impl WatchedKeys {
    pub(super) fn new(mut hashes: Vec<isize>, are_counted: bool) -> Self {
        hashes.sort_unstable();
        Self {
            hashes: hashes.into(),
            are_counted,
        }
    }

    fn are_concerned(&self, change: Change) -> bool {
        let is_one = |hash: isize| self.hashes.binary_search(&hash).is_ok();
        match change {
            Change::Count(hash) => self.are_counted || is_one(hash),
            Change::Value(hash) => is_one(hash),
            Change::Any => true,
        }
    }
}

/// Mark the places that look at what is about to change.
pub(super) fn note_change(py: Python<'_>, dict: usize, change: Change) {
    let Some(watched) = WATCHED.replace(py, None) else {
        return;
    };
    for one in watched.get(&dict).into_iter().flatten() {
        if one.keys.are_concerned(change) {
            one.marks.put(one.place);
            count(&one.marks.changes);
        }
    }
    WATCHED.replace(py, Some(watched));
}

/// Begin to mark a place when the dictionary changes that it looks into; whether it does. The caller holds
/// the dictionary until it has called [`unwatch`].
pub(super) fn watch(
    watchers: &DictWatchers,
    dict: &Bound<'_, PyDict>,
    place: usize,
    marks: &Arc<Marks>,
    keys: &Arc<WatchedKeys>,
) -> bool {
    if !watchers.watch(dict) {
        return false;
    }
    let (marks, keys) = (marks.clone(), keys.clone());
    let mut watched = WATCHED.replace(dict.py(), None).unwrap_or_default();
    let of_dict = watched.entry(dict.as_ptr().addr()).or_default();
    of_dict.push(Watch { marks, place, keys });
    WATCHED.replace(dict.py(), Some(watched));
    true
}

/// Mark a place no more when a dictionary changes.
pub(super) fn unwatch(
    watchers: &DictWatchers,
    dict: &Bound<'_, PyDict>,
    place: usize,
    marks: &Arc<Marks>,
) {
    let mut watched = WATCHED.replace(dict.py(), None).unwrap_or_default();
    let address = dict.as_ptr().addr();
    let of_dict = watched.get_mut(&address);
    let is_last = of_dict.is_some_and(|of_dict| {
        of_dict.retain(|one| one.place != place || !Arc::ptr_eq(&one.marks, marks));
        of_dict.is_empty()
    });
    if is_last {
        watched.remove(&address);
    }
    WATCHED.replace(dict.py(), Some(watched));
    if is_last {
        watchers.unwatch(dict);
    }
}
