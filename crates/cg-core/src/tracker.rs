//! [`Tracker`]: which nodes an open capture has recorded since the last look.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;

use crate::driver::CaptureInfo;
use crate::driver::handle::{NodeHandle, StreamHandle};
use crate::driver::owned::{OwnedGraph, same_driver};
use crate::error::{Error, Result};
use crate::stream::Stream;

/// Follows an open capture, whoever began it.
///
/// A look costs what is new, not what there is: the driver says how many nodes the graph has, and
/// the new ones are found from the end of a stream backwards. Only where that does not reach all of
/// them, as on a forked stream that was not joined yet, is the whole graph listed.
pub struct Tracker {
    stream: Stream,
    id: u64,
    known: HashSet<NodeHandle>,
}

impl Tracker {
    /// Follow the capture that is open on the stream. What it has recorded so far is new at the
    /// first look.
    ///
    /// # Errors
    /// [`Error::Capture`] if the stream does not capture, or the capture was made unusable.
    #[doc(alias = "cuStreamGetCaptureInfo")]
    pub fn new(stream: &Stream) -> Result<Self> {
        let Some(CaptureInfo { id, .. }) = stream.owned().capture_info()? else {
            let reason = "the stream does not capture, or its capture was made unusable; begin one";
            return Err(Error::capture(stream, reason));
        };
        Ok(Self {
            stream: stream.clone(),
            id,
            known: HashSet::new(),
        })
    }

    /// Return the nodes of the capture that no earlier look has returned, in no promised order; none if
    /// `current` is not one of its streams or the capture was made unusable.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a stream of another device; what the driver reports.
    ///
    /// # Safety
    /// No other thread ends or breaks the capture during the call, which would take the graph away
    /// that is looked at.
    #[expect(
        unsafe_code,
        reason = "the caller vouches for a graph that the driver owns"
    )]
    pub unsafe fn new_nodes(&mut self, current: &Stream) -> Result<Vec<NodeHandle>> {
        let driver = self.stream.device().driver();
        same_driver(&**driver, &**current.device().driver(), "stream")?;
        if current.handle() == StreamHandle::LEGACY {
            // It captures never, and must not even be asked while a blocking stream does.
            return Ok(Vec::new());
        }
        let info = current.owned().capture_info()?;
        let Some(info) = info.filter(|info| info.id == self.id) else {
            return Ok(Vec::new());
        };
        let graph = OwnedGraph::borrowed(Arc::clone(driver), info.graph);
        // A capture's graph only grows: the driver permits no removal while it is recorded into.
        let missing = graph.count()?.saturating_sub(self.known.len());
        let mut found = Vec::with_capacity(missing);
        let mut ahead = info.after;
        while found.len() < missing
            && let Some(node) = ahead.pop()
        {
            if self.known.insert(node) {
                found.push(node);
                if found.len() < missing {
                    ahead.extend(graph.before(node)?);
                }
            }
        }
        if found.len() < missing {
            let all = graph.nodes()?.into_iter();
            found.extend(all.filter(|node| self.known.insert(*node)));
        }
        Ok(found)
    }
}

impl fmt::Debug for Tracker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tracker(capture {} on {})", self.id, self.stream)
    }
}
