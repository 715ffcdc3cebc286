//! The parameter of the kernels in `inputs.cu` and `outputs.cu`, byte for byte, and how work is spread
//! over blocks.

use std::ops::Range;

use super::places::{COPY_WORDS, HALF, HEADER, Places, STORE_WORDS, WORD};
use super::{Direction, Fill, Padding};
use crate::driver::handle::Address;

/// Names of a kernel and size of its parameter.
pub(super) struct Kernel {
    inputs: &'static str,
    outputs: &'static str,
    bytes: usize,
}

macro_rules! kernel {
    ($bytes:literal) => {
        Kernel {
            inputs: concat!("cg_inputs_", $bytes),
            outputs: concat!("cg_outputs_", $bytes),
            bytes: $bytes,
        }
    };
}

/// They do the same, and a replay costs the less the smaller the parameter. The fifth has room for 64
/// copies and the stores of a generator; the last one has the largest that every chip takes.
pub(super) const KERNELS: [Kernel; 7] = [
    kernel!(128),
    kernel!(256),
    kernel!(512),
    kernel!(1024),
    kernel!(1600),
    kernel!(2560),
    kernel!(4096),
];
/// Return the module that declares those of a direction.
pub(super) const fn ptx(direction: Direction) -> &'static str {
    match direction {
        Direction::In => include_str!("inputs.ptx"),
        Direction::Out => include_str!("outputs.ptx"),
    }
}
/// Threads per block.
pub(super) const THREADS: u32 = 256;

/// Most words of one node.
const MOST_WORDS: usize = KERNELS[KERNELS.len() - 1].words();
// A byte counts the copies, and one the stores.
const _: () = assert!(MOST_WORDS / STORE_WORDS <= 255);
/// Number of bits of an extent that are the first block; the others are the bytes, but for the top one.
const BLOCK_BITS: u32 = 20;
const FIRST_BLOCK: u64 = (1 << BLOCK_BITS) - 1;
/// True if the copy has rows, in the same word.
const HAS_ROWS: u64 = 1 << 63;

/// Most bytes that one block copies, as long as there are blocks left.
const TILE: u64 = 8 << 10;
/// Blocks of one copy at most: more would not run at once.
const MOST_BLOCKS: u64 = 1024;

// Where the header has what: a byte each, and then four.
const COPIES: usize = 0;
const STORES: usize = 1;
/// The [`Fill`] of the rows that sources do not have; 0 if these have all.
const FILL: usize = 2;
const COPY_BLOCKS: usize = 4;
const ROWS: usize = 8;
const OF: usize = 12;

impl Kernel {
    pub(super) const fn name(&self, direction: Direction) -> &'static str {
        match direction {
            Direction::In => self.inputs,
            Direction::Out => self.outputs,
        }
    }

    /// Return how many words for copies and stores the parameter has.
    const fn words(&self) -> usize {
        (self.bytes - HEADER) / WORD
    }
}

/// Return which copies and which stores each node does, for that many of them.
pub(super) fn split(copies: usize, stores: usize) -> Vec<(Range<usize>, Range<usize>)> {
    let mut parts = Vec::new();
    let (mut copy, mut store) = (0, 0);
    while copy < copies || store < stores {
        let more_copies = (copies - copy).min(MOST_WORDS / COPY_WORDS);
        let left = MOST_WORDS - COPY_WORDS * more_copies;
        let more_stores = (stores - store).min(left / STORE_WORDS);
        parts.push((copy..copy + more_copies, store..store + more_stores));
        copy += more_copies;
        store += more_stores;
    }
    parts
}

/// One copy, as the kernel reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copy {
    /// The template's side: where an input is copied to, and an output from.
    pub(super) own: u64,
    /// The side that replays set.
    pub(super) other: u64,
    pub(super) bytes: u64,
    pub(super) has_rows: bool,
    pub(super) first_block: u32,
    pub(super) blocks: u32,
}

/// The parameter of one launch. The grid never changes: another one would make later replays slower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parameter {
    bytes: Box<[u8]>,
    /// The other sides that the bytes have, as one piece that each replay can compare.
    others: Box<[Address]>,
}

impl Parameter {
    /// One that does nothing: the other sides are the own ones, and nothing is stored. It is the
    /// smallest that has room.
    ///
    /// # Panics
    /// If none has, or for a copy of 8 TiB.
    pub(super) fn new(copies: &[(Address, u64)], stores: &[Address]) -> Self {
        let words = COPY_WORDS * copies.len() + STORE_WORDS * stores.len();
        let kernel = KERNELS.iter().find(|kernel| words <= kernel.words());
        let bytes = kernel.expect("a node has room for its entries").bytes;
        let mut new = Self {
            bytes: vec![0; bytes].into(),
            others: copies.iter().map(|(own, _)| *own).collect(),
        };
        new.bytes[COPIES] = count(copies.len());
        let (places, mut next_block) = (new.places(), 0);
        for (i, (own, bytes)) in copies.iter().enumerate() {
            assert!(bytes.leading_zeros() > BLOCK_BITS, "{bytes} bytes");
            new.set_u64(places.own(i), own.0);
            new.write_other(i, *own);
            let extent = bytes << BLOCK_BITS | u64::from(next_block);
            new.set_u64(places.extent(i), extent);
            next_block += blocks_of(*bytes);
        }
        new.set_u32(COPY_BLOCKS, next_block);
        for (i, address) in stores.iter().enumerate() {
            new.set_u64(places.store(i), address.0);
        }
        new
    }

    /// Read what a launch was given.
    ///
    /// # Panics
    /// If no kernel takes that many bytes.
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut new = Self {
            bytes: bytes.into(),
            others: Box::default(),
        };
        new.kernel();
        new.others = (0..new.copies()).map(|i| new.read_other(i)).collect();
        new
    }

    /// Return which of the [`KERNELS`] takes it.
    pub(super) fn kernel(&self) -> usize {
        let kernel = KERNELS.iter().position(|k| k.bytes == self.bytes.len());
        kernel.expect("the size is that of a kernel")
    }

    /// As the kernel takes it.
    #[inline]
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Blocks of the launch that can do `stores` stores.
    pub(super) fn grid(&self, stores: usize) -> u32 {
        (self.u32(COPY_BLOCKS) + u32::from(stores > 0)).max(1)
    }

    /// Return whether the stores happen.
    #[inline]
    pub(super) fn set_stores(&mut self, stores: usize) -> bool {
        let stores = count(stores);
        std::mem::replace(&mut self.bytes[STORES], stores) != stores
    }

    /// Let all sources have all rows; whether some had fewer.
    #[inline]
    pub(super) fn pad_nothing(&mut self) -> bool {
        std::mem::replace(&mut self.bytes[FILL], 0) != 0
    }

    /// Let the sources of these slots, which are those of the copies, have fewer rows; whether that
    /// is a change.
    pub(super) fn pad(&mut self, padding: &Padding, slots: Range<usize>) -> bool {
        let fill = fill_number(padding.fill);
        let mut changes = std::mem::replace(&mut self.bytes[FILL], fill) != fill;
        for (at, number) in [(ROWS, padding.rows), (OF, padding.of)] {
            changes |= self.u32(at) != number;
            self.set_u32(at, number);
        }
        for (i, has_rows) in padding.have_rows(slots).iter().enumerate() {
            let at = self.places().extent(i);
            let before = self.u64(at);
            let now = before & !HAS_ROWS | if *has_rows { HAS_ROWS } else { 0 };
            changes |= before != now;
            self.set_u64(at, now);
        }
        changes
    }

    /// Return what the rows are filled with that sources do not have, how many rows these have, and of how
    /// many; none if they have all.
    pub(super) fn padding(&self) -> Option<(Fill, u32, u32)> {
        let mut fills = [Fill::Zeros, Fill::LastRow].into_iter();
        let fill = fills.find(|fill| fill_number(*fill) == self.bytes[FILL])?;
        Some((fill, self.u32(ROWS), self.u32(OF)))
    }

    /// Return the other side of the `i`-th copy.
    #[inline]
    pub(super) fn other(&self, i: usize) -> Address {
        self.others[i]
    }

    /// Change the other side of each copy; whether one was elsewhere.
    ///
    /// # Panics
    /// If there are more or fewer.
    #[inline]
    pub(super) fn set_others(&mut self, others: &[Address]) -> bool {
        if *self.others == *others {
            return false;
        }
        assert_eq!(self.others.len(), others.len(), "one for each copy");
        for (i, other) in others.iter().enumerate() {
            self.set_other(i, *other);
        }
        true
    }

    /// Change the other side of the `i`-th copy; whether it was elsewhere.
    #[inline]
    pub(super) fn set_other(&mut self, i: usize, other: Address) -> bool {
        let changes = self.others[i] != other;
        if changes {
            self.others[i] = other;
            self.write_other(i, other);
        }
        changes
    }

    /// Let the `i`-th copy take so many bytes, no more than it has blocks for; whether it took others.
    #[inline]
    pub(super) fn set_bytes(&mut self, i: usize, bytes: u64) -> bool {
        let at = self.places().extent(i);
        let before = self.u64(at);
        let now = bytes << BLOCK_BITS | before & FIRST_BLOCK;
        self.set_u64(at, now);
        before != now
    }

    /// Become another one of the same copies and stores.
    pub(super) fn assign(&mut self, other: &Self) {
        self.bytes.copy_from_slice(&other.bytes);
        self.others.copy_from_slice(&other.others);
    }

    /// Change the value of the `i`-th store; whether it was another one.
    #[inline]
    pub(super) fn set_value(&mut self, i: usize, value: u64) -> bool {
        let at = self.places().store(i) + WORD;
        let changes = self.u64(at) != value;
        self.set_u64(at, value);
        changes
    }

    /// Return the copies, in order.
    pub(super) fn all_copies(&self) -> Vec<Copy> {
        let extent = |i| self.u64(self.places().extent(i));
        let first_block = |i| u32::try_from(extent(i) & FIRST_BLOCK).expect("less than 32 bits");
        let copy = |i| {
            let last = i + 1 == self.copies();
            let end = if last {
                self.u32(COPY_BLOCKS)
            } else {
                first_block(i + 1)
            };
            Copy {
                own: self.u64(self.places().own(i)),
                other: self.other(i).0,
                bytes: (extent(i) & !HAS_ROWS) >> BLOCK_BITS,
                has_rows: extent(i) & HAS_ROWS != 0,
                first_block: first_block(i),
                blocks: end - first_block(i),
            }
        };
        (0..self.copies()).map(copy).collect()
    }

    /// Addresses and values of the stores that happen, in order.
    pub(super) fn all_stores(&self) -> Vec<(Address, u64)> {
        let store = |i| {
            let at = self.places().store(i);
            (Address(self.u64(at)), self.u64(at + WORD))
        };
        (0..usize::from(self.bytes[STORES])).map(store).collect()
    }

    fn read_other(&self, i: usize) -> Address {
        let (lower, upper) = self.places().other(i);
        Address(u64::from(self.u32(upper)) << 32 | u64::from(self.u32(lower)))
    }

    #[inline]
    fn write_other(&mut self, i: usize, other: Address) {
        let (lower, upper) = self.places().other(i);
        let address = other.0.to_le_bytes();
        let (low, high) = address.split_at(HALF);
        self.bytes[lower..lower + HALF].copy_from_slice(low);
        self.bytes[upper..upper + HALF].copy_from_slice(high);
    }

    #[inline]
    fn copies(&self) -> usize {
        usize::from(self.bytes[COPIES])
    }

    #[inline]
    fn places(&self) -> Places {
        Places::new(self.bytes.len(), self.copies())
    }

    #[inline]
    fn u32(&self, at: usize) -> u32 {
        let (_, rest) = self.bytes.split_at(at);
        u32::from_le_bytes(*rest.first_chunk().expect("it lies inside"))
    }

    #[inline]
    fn u64(&self, at: usize) -> u64 {
        let (_, rest) = self.bytes.split_at(at);
        u64::from_le_bytes(*rest.first_chunk().expect("it lies inside"))
    }

    #[inline]
    fn set_u32(&mut self, at: usize, value: u32) {
        self.bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }

    #[inline]
    fn set_u64(&mut self, at: usize, value: u64) {
        self.bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
}

/// Return how many blocks copy so many bytes.
fn blocks_of(bytes: u64) -> u32 {
    let blocks = bytes.div_ceil(TILE).min(MOST_BLOCKS);
    u32::try_from(blocks).expect("no more than the most")
}

#[inline]
fn count(entries: usize) -> u8 {
    u8::try_from(entries).expect("no more entries than a node has room for")
}

/// As the kernel knows it.
fn fill_number(fill: Fill) -> u8 {
    match fill {
        Fill::Zeros => 1,
        Fill::LastRow => 2,
    }
}

#[cfg(test)]
mod tests;
