//! [`Checkpoint`]: which blocks of a pool were in use, to go back to.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Pool;
use super::blocks::{Block, Book, Placed};
use crate::error::{Error, Result};
use crate::memory::Memory;

/// The blocks of a pool that were in use at one time, for [`Pool::restore`]. It keeps nothing alive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Checkpoint {
    pool: u64,
    blocks: BTreeMap<u64, Placed>,
}

impl Pool {
    /// Note which blocks are in use.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint {
            pool: self.id(),
            blocks: self.shared.book().blocks.clone(),
        }
    }

    /// Make the blocks in use those of a checkpoint again: what was allocated since then must have
    /// been given back, and what was given back since then is taken again at the same place. Returns
    /// the latter in the order in which they were allocated at first; each is given back when it is
    /// dropped. Their contents are what later work has left.
    ///
    /// Segments stay: one that was made since then is free, and one that was given out whole is no
    /// block.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a checkpoint of another pool; [`Error::Invalid`] if a block that was
    /// allocated since then is in use, or the segment of one that is to come back was trimmed. Nothing
    /// is changed then.
    pub fn restore(&self, checkpoint: &Checkpoint) -> Result<Vec<Memory>> {
        if checkpoint.pool != self.id() {
            return Err(Error::Foreign {
                object: "checkpoint".to_owned(),
                found: format!("pool {}", checkpoint.pool),
                expected: format!("pool {}", self.id()),
            });
        }
        let mut book = self.shared.book();
        let gone = check(&book, checkpoint)?;
        let back = gone.into_iter().map(|(number, placed)| {
            let taken = book.retake(number, placed);
            debug_assert!(taken, "no other block is in use there");
            let backing = &book.segments[&placed.segment].backing;
            let owner = Block {
                pool: Arc::clone(&self.shared),
                number,
            };
            backing.memory(placed.offset, placed.bytes, Arc::new(owner))
        });
        Ok(back.collect())
    }
}

/// Return the blocks that are to come back.
fn check(book: &Book, checkpoint: &Checkpoint) -> Result<Vec<(u64, Placed)>> {
    let is_later = |(number, _): &(&u64, &Placed)| !checkpoint.blocks.contains_key(number);
    let later: Vec<u64> = book
        .blocks
        .iter()
        .filter(is_later)
        .map(|(_, placed)| placed.size)
        .collect();
    if !later.is_empty() {
        let bytes: u64 = later.iter().sum();
        let given = format!(
            "one with {} blocks of {bytes} bytes in use that were allocated later",
            later.len()
        );
        return Err(Error::invalid(
            "pool to restore",
            &given,
            "one where all of them were dropped",
        ));
    }
    let gone = checkpoint
        .blocks
        .iter()
        .filter(|(number, _)| !book.blocks.contains_key(number));
    let gone: Vec<(u64, Placed)> = gone.map(|(number, placed)| (*number, *placed)).collect();
    for (_, placed) in &gone {
        let segment = book.segments.get(&placed.segment);
        if segment.is_none_or(|segment| segment.number != placed.number) {
            let given = format!("one whose segment at {:#x} was trimmed", placed.segment);
            return Err(Error::invalid(
                "pool to restore",
                &given,
                "one that was not trimmed since the checkpoint",
            ));
        }
    }
    Ok(gone)
}
