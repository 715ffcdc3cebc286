//! Execs of templates.

use std::sync::Arc;

use super::Exec;
use crate::driver::InstantiateFlags;
use crate::driver::handle::NodeHandle;
use crate::driver::owned::{OwnedExec, OwnedGraph, relaxed};
use crate::error::{Error, Result};
use crate::retain::Retained;
use crate::template::Template;
use crate::transfer::Shared;

/// The parts of an exec.
struct Made {
    owned: OwnedExec,
    retained: Vec<Retained>,
    transfers: Vec<Arc<Shared>>,
}

impl Template {
    /// Make an exec. The template stays and may be changed and instantiated again; execs made
    /// before do not see the change.
    ///
    /// # Errors
    /// [`Error::Instantiate`] with the node at fault, where the driver names one; for a template that
    /// [allocates](Self::allocates), also while it has an exec.
    #[doc(alias = "cuGraphInstantiateWithParams")]
    pub fn instantiate(&self, flags: InstantiateFlags) -> Result<Exec> {
        self.device().collect();
        // CUDA counts it among the calls that break a capture of another thread.
        let made = relaxed(&**self.device().driver(), || self.make(flags))?;
        Ok(self.exec(made, None))
    }

    /// The same, and measure what the exec takes of the device: see [`Exec::device_bytes`].
    ///
    /// # Errors
    /// Those of [`Self::instantiate`].
    #[doc(alias = "cuMemGetInfo")]
    pub fn instantiate_measured(&self, flags: InstantiateFlags) -> Result<Exec> {
        self.device().collect();
        let (made, bytes) = self.device().measure(|| self.make(flags))?;
        Ok(self.exec(made?, Some(bytes)))
    }

    fn make(&self, flags: InstantiateFlags) -> Result<Made> {
        self.with(|graph, retained, transfers| {
            let owned = graph.instantiate(flags).map_err(|failure| {
                let node = failure.node.map(|node| describe(graph, node));
                Error::Instantiate {
                    code: failure.code,
                    node,
                }
            })?;
            Ok(Made {
                owned,
                retained,
                transfers: transfers.to_vec(),
            })
        })
    }

    fn exec(&self, made: Made, bytes: Option<u64>) -> Exec {
        let (retained, transfers) = (made.retained, made.transfers);
        Exec::new(
            self.device(),
            self.id(),
            made.owned,
            bytes,
            retained,
            transfers,
        )
    }
}

/// Return a node of a graph in words.
fn describe(graph: &OwnedGraph, node: NodeHandle) -> String {
    match graph.detail(node) {
        Ok(detail) => format!("{:#x}: {detail:?}", node.0),
        Err(_) => format!("{:#x}", node.0),
    }
}
