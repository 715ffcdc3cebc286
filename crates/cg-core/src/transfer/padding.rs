//! [`Padding`]: sources with fewer rows than their slots.

use std::ops::Range;
use std::sync::Arc;

use super::{Shared, Sources};
use crate::error::{Error, Result};

/// Contents of the rows of a slot that its source does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Bytes of zero.
    Zeros,
    /// The source's last row, again and again.
    LastRow,
}

/// The slots that have rows, and the number of rows that the sources have; made by [`crate::Inputs::padding`].
pub struct Padding {
    shared: Arc<Shared>,
    has_rows: Box<[bool]>,
    pub(super) rows: u32,
    pub(super) of: u32,
    pub(super) fill: Fill,
}

impl Padding {
    /// Check and note which sources have fewer rows; see `Inputs::padding`.
    pub(crate) fn new(
        shared: &Arc<Shared>,
        rows: u32,
        of: u32,
        fill: Fill,
        has_rows: Box<[bool]>,
    ) -> Result<Self> {
        if has_rows.len() != shared.own().len() {
            let expected = format!("{}, one for each slot", shared.own().len());
            return Err(Error::invalid("number of slots", &has_rows.len(), expected));
        }
        if rows == 0 || rows > of {
            let expected = format!("1 to {of}");
            return Err(Error::invalid("number of rows", &rows, expected));
        }
        let padded = shared.own().iter().zip(&has_rows).filter(|one| *one.1);
        for ((address, bytes), _) in padded {
            if *bytes == 0 || !bytes.is_multiple_of(u64::from(of)) {
                let given = format!("{bytes} bytes at {:#x}", address.0);
                let expected = format!("{of} rows of equal bytes");
                return Err(Error::invalid("slot", &given, expected));
            }
        }
        Ok(Self {
            shared: Arc::clone(shared),
            has_rows,
            rows,
            of,
            fill,
        })
    }

    /// Return whether each of these slots has rows.
    #[inline]
    pub(super) fn have_rows(&self, slots: Range<usize>) -> &[bool] {
        &self.has_rows[slots]
    }

    /// Refuse other inputs than those that it was made for.
    #[inline]
    pub(crate) fn require_of(&self, shared: &Arc<Shared>) -> Result<()> {
        if Arc::ptr_eq(&self.shared, shared) {
            return Ok(());
        }
        let given = format!("that of {} other slots", self.has_rows.len());
        Err(Error::invalid("padding", &given, "that of these inputs"))
    }

    /// Return how many of a slot's bytes come from its source.
    fn bytes(&self, slot: usize, bytes: u64) -> u64 {
        if self.has_rows[slot] {
            bytes / u64::from(self.of) * u64::from(self.rows)
        } else {
            bytes
        }
    }
}

impl Sources<'_> {
    /// Return how many bytes a source has, of a slot that has so many.
    #[inline]
    pub(super) fn bytes(&self, slot: usize, bytes: u64) -> u64 {
        let padding = self.padding;
        padding.map_or(bytes, |padding| padding.bytes(slot, bytes))
    }
}

impl std::fmt::Debug for Padding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Padding({} of {} rows, ", self.rows, self.of)?;
        write!(f, "{:?}, slots {:?})", self.fill, self.has_rows)
    }
}
