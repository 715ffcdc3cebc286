//! `ChangeTracker`: the dictionaries whose changes a guard is told of.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::change_source::{ChangeSource, find_change_source};
use super::watched_dicts::{Marks, WatchedKeys, unwatch, watch};

/// The dictionaries that a guard looks into, and who tells of their changes. Whoever has begun to be told of
/// one holds it until the end of that.
pub(super) struct ChangeTracker {
    source: Option<ChangeSource>,
    marks: Arc<Marks>,
    /// Versions of the dictionaries, if these are compared.
    versions: Vec<Version>,
    /// Numbers of those that are of no dictionary any more.
    free: Vec<usize>,
}

/// A dictionary and the version that it had.
struct Version {
    dict: Option<Py<PyDict>>,
    last: u64,
    place: usize,
}

/// That a guard is told of a dictionary, and where its version is.
#[derive(Clone, Copy)]
pub(super) struct Tracking(usize);

impl ChangeTracker {
    pub(super) fn new(py: Python<'_>, marks: &Arc<Marks>) -> Self {
        Self {
            source: find_change_source(py),
            marks: marks.clone(),
            versions: Vec::new(),
            free: Vec::new(),
        }
    }

    /// Return whether there is somebody who tells.
    pub(super) fn is_there(&self) -> bool {
        self.source.is_some()
    }

    /// From now on a place is marked when a dictionary that it looks into changes; none if that cannot be.
    pub(super) fn begin(
        &mut self,
        dict: &Bound<'_, PyDict>,
        place: usize,
        keys: &Arc<WatchedKeys>,
    ) -> Option<Tracking> {
        match self.source? {
            ChangeSource::Watchers(watchers) => {
                watch(watchers, dict, place, &self.marks, keys).then_some(Tracking(0))
            }
            ChangeSource::Versions(versions) => {
                let new = Version {
                    dict: Some(dict.clone().unbind()),
                    last: versions.of(dict),
                    place,
                };
                let Some(free) = self.free.pop() else {
                    self.versions.push(new);
                    return Some(Tracking(self.versions.len() - 1));
                };
                self.versions[free] = new;
                Some(Tracking(free))
            }
        }
    }

    /// It is marked no more.
    pub(super) fn end(&mut self, dict: &Bound<'_, PyDict>, place: usize, tracking: Tracking) {
        match self.source {
            Some(ChangeSource::Watchers(watchers)) => {
                unwatch(watchers, dict, place, &self.marks);
            }
            Some(ChangeSource::Versions(_)) => {
                // The caller has it, too, so that this drops nothing.
                self.versions[tracking.0].dict = None;
                self.free.push(tracking.0);
            }
            None => {}
        }
    }

    /// Mark the places whose dictionaries have other versions now.
    #[inline]
    pub(super) fn compare_versions(&mut self, py: Python<'_>) {
        let Some(ChangeSource::Versions(versions)) = self.source else {
            return;
        };
        for one in &mut self.versions {
            let Some(dict) = &one.dict else {
                continue;
            };
            let now = versions.of(dict.bind(py));
            if now != one.last {
                one.last = now;
                self.marks.put(one.place);
            }
        }
    }

    pub(super) fn traverse(&self, visit: &pyo3::PyVisit<'_>) -> Result<(), pyo3::PyTraverseError> {
        let mut versions = self.versions.iter();
        versions.try_for_each(|one| visit.call(&one.dict))
    }
}
