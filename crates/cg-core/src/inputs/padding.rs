//! [`Padding`]: sources with fewer rows than their slots.

use std::ops::Range;
use std::sync::Arc;

use super::{Feed, Inputs};
use crate::error::{Error, Result};
use crate::transfer::Shared;

/// What a replay writes to the rows of a slot that its source does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fill {
    /// Bytes of zero.
    Zeros,
    /// The source's last row, again and again.
    LastRow,
}

/// Which slots have rows, and how many of these the sources have; made by [`Inputs::padding`].
pub struct Padding {
    shared: Arc<Shared>,
    has_rows: Box<[bool]>,
    pub(crate) rows: u32,
    pub(crate) of: u32,
    pub(crate) fill: Fill,
}

impl Padding {
    /// Whether each of these slots has rows.
    #[inline]
    pub(crate) fn have_rows(&self, slots: Range<usize>) -> &[bool] {
        &self.has_rows[slots]
    }

    /// Refuses other inputs than those that it was made for.
    #[inline]
    pub(super) fn require_of(&self, shared: &Arc<Shared>) -> Result<()> {
        if Arc::ptr_eq(&self.shared, shared) {
            return Ok(());
        }
        let given = format!("that of {} other slots", self.has_rows.len());
        Err(Error::invalid("padding", &given, "that of these inputs"))
    }

    /// How many of a slot's bytes come from its source.
    fn bytes(&self, slot: usize, bytes: u64) -> u64 {
        if self.has_rows[slot] {
            bytes / u64::from(self.of) * u64::from(self.rows)
        } else {
            bytes
        }
    }
}

impl Inputs {
    /// Padding for sources that have the first `rows` rows of as many as `of`, side by side in
    /// memory, in the slots for which `has_rows` is true; the other sources are whole.
    ///
    /// ```
    /// # use cg_core::{Device, Fill, Inputs, InstantiateFlags, Memory, Sim, Stream, Template};
    /// # use std::sync::Arc;
    /// # let device = Device::sim(&Sim::default());
    /// let slot = Memory::new(&device, 8)?;
    /// let template = Arc::new(Template::new(&device)?);
    /// let inputs = Inputs::add(&template, &[slot.clone()], &[])?;
    /// let exec = template.instantiate(InstantiateFlags::default())?;
    ///
    /// let (stream, three) = (Stream::new(&device)?, Memory::new(&device, 6)?);
    /// three.write(&[1, 2, 3, 4, 5, 6])?;
    /// let padding = inputs.padding(3, 4, Fill::LastRow, [true])?;
    /// let sources = [three.address()];
    /// // SAFETY: `three` has three rows, and lives until the stream has passed the replay.
    /// let feed = unsafe { inputs.feed_padded(&sources, &[], &padding) }?;
    /// exec.replay_with(&feed, &stream)?;
    /// stream.synchronize()?;
    /// assert_eq!(slot.read()?, [1, 2, 3, 4, 5, 6, 5, 6]);
    /// # Ok::<(), cg_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `has_rows` is not one for each slot, for no rows or more than `of`, and for
    /// a slot with rows whose bytes are not those of so many, or that has none.
    pub fn padding(
        &self,
        rows: u32,
        of: u32,
        fill: Fill,
        has_rows: impl Into<Box<[bool]>>,
    ) -> Result<Padding> {
        let has_rows = has_rows.into();
        if has_rows.len() != self.slots() {
            let expected = format!("{}, one for each slot", self.slots());
            return Err(Error::invalid("number of slots", &has_rows.len(), expected));
        }
        if rows == 0 || rows > of {
            let expected = format!("1 to {of}");
            return Err(Error::invalid("number of rows", &rows, expected));
        }
        let padded = self.shared.own().iter().zip(&has_rows).filter(|one| *one.1);
        for ((address, bytes), _) in padded {
            if *bytes == 0 || !bytes.is_multiple_of(u64::from(of)) {
                let given = format!("{bytes} bytes at {:#x}", address.0);
                let expected = format!("{of} rows of equal bytes");
                return Err(Error::invalid("slot", &given, expected));
            }
        }
        Ok(Padding {
            shared: Arc::clone(&self.shared),
            has_rows,
            rows,
            of,
            fill,
        })
    }
}

impl Feed<'_> {
    /// How many bytes a source has, of a slot that has so many.
    #[inline]
    pub(crate) fn bytes(&self, slot: usize, bytes: u64) -> u64 {
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
