//! `OwnMemory`: the memory of a static tensor, and the ways for others to get into it.

/// A way for a tensor to get into a static one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Match {
    /// It is there: the same memory in the same layout, or no elements.
    Same,
    /// By a copy of the bytes from this address.
    Copy(u64),
    /// By torch's `copy_`: the strides differ, or the bytes are not the values.
    Torch,
}

/// The memory of a static tensor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OwnMemory {
    pub(crate) address: u64,
    pub(super) bytes: u64,
    /// True if the elements fill `bytes` bytes with no gap and no overlap.
    pub(super) is_dense: bool,
}

impl OwnMemory {
    /// Return how a tensor of the same layout that lies there gets into this one.
    #[inline]
    pub(crate) fn from(self, address: u64) -> Match {
        match address {
            // No memory of its own: torch, or the tensor's class, knows where the values are.
            0 => Match::Torch,
            _ if address == self.address => Match::Same,
            _ if self.is_dense && address.abs_diff(self.address) >= self.bytes => {
                Match::Copy(address)
            }
            _ => Match::Torch,
        }
    }
}
