//! `WrittenMemory`: memory of others that a graph writes, where no argument must lie.

use std::sync::atomic::{AtomicU64, Ordering};

use cg_core::{Address, Ranges};

use super::matched::MatchedTensors;
use crate::tensors::Match;

/// The ranges, and where the tensors of calls were last found to lie beside them.
pub(crate) struct WrittenMemory {
    ranges: Ranges,
    tensors: Box<[Tensor]>,
}

struct Tensor {
    bytes: u64,
    /// At first 0, where no tensor is.
    beside: AtomicU64,
}

impl WrittenMemory {
    /// None if nothing is written. `bytes` are those of the tensors that calls copy, in their order.
    pub(crate) fn new(ranges: Vec<(u64, u64)>, bytes: &[u64]) -> Option<Self> {
        let ranges = Ranges::merged(ranges.into_iter().map(|(start, end)| start..end));
        let tensor = |bytes: &u64| Tensor {
            bytes: *bytes,
            beside: AtomicU64::default(),
        };
        (!ranges.is_empty()).then(|| Self {
            ranges,
            tensors: bytes.iter().map(tensor).collect(),
        })
    }

    /// Return whether one of the tensors shares memory with what is written.
    #[inline]
    pub(crate) fn meets(&self, tensors: MatchedTensors<'_, '_>) -> bool {
        let MatchedTensors::Each(matched) = tensors else {
            // Others have been found to lie there beside it.
            return false;
        };
        let mut pairs = self.tensors.iter().zip(matched);
        pairs.any(|(tensor, one)| match one.fit {
            Match::Copy(at) => {
                tensor.beside.load(Ordering::Relaxed) != at && tensor.meets(self, at)
            }
            Match::Same | Match::Torch => false,
        })
    }
}

impl Tensor {
    fn meets(&self, written: &WrittenMemory, address: u64) -> bool {
        let meets = written.ranges.overlap(Address(address), self.bytes);
        if !meets {
            self.beside.store(address, Ordering::Relaxed);
        }
        meets
    }
}
