//! The parameter of the kernels in `kernel.cu`, byte for byte, and how work is spread over blocks.

use std::ops::Range;

use super::padding::{Fill, Padding};
use super::places::{COPY_WORDS, HALF, HEADER, Places, STORE_WORDS, WORD};
use crate::driver::handle::Address;

/// Name of a kernel and size of its parameter.
pub(super) struct Kernel {
    pub(super) name: &'static str,
    bytes: usize,
}

/// They do the same, and a replay costs the less the smaller the parameter. The fifth has room for 64
/// copies and the stores of a generator; the last one has the largest that every chip takes.
pub(super) const KERNELS: [Kernel; 7] = [
    Kernel::new("cg_inputs_128", 128),
    Kernel::new("cg_inputs_256", 256),
    Kernel::new("cg_inputs_512", 512),
    Kernel::new("cg_inputs_1024", 1024),
    Kernel::new("cg_inputs_1600", 1600),
    Kernel::new("cg_inputs_2560", 2560),
    Kernel::new("cg_inputs_4096", 4096),
];
/// The module that declares them.
pub(super) const PTX: &str = include_str!("kernel.ptx");
/// Threads per block.
pub(super) const THREADS: u32 = 256;

/// How many words one node can have.
const MOST_WORDS: usize = KERNELS[KERNELS.len() - 1].words();
// A byte counts the copies, and one the stores.
const _: () = assert!(MOST_WORDS / STORE_WORDS <= 255);
/// How many bits of an extent are the first block; the others are the bytes, but for the top one.
const BLOCK_BITS: u32 = 20;
/// Whether the copy has rows, in the same word.
const HAS_ROWS: u64 = 1 << 63;

/// What one block copies at most, as long as there are blocks left.
const TILE: u64 = 8 << 10;
/// Blocks of one copy at most: more would not run at once.
const MOST_BLOCKS: u64 = 1024;

// Where the header has what: a byte each, and then four.
const COPIES: usize = 0;
const STORES: usize = 1;
/// What [`Fill`] the rows need that sources do not have; 0 if these have all.
const FILL: usize = 2;
const COPY_BLOCKS: usize = 4;
const ROWS: usize = 8;
const OF: usize = 12;

impl Kernel {
    const fn new(name: &'static str, bytes: usize) -> Self {
        Self { name, bytes }
    }

    /// How many words for copies and stores the parameter has.
    const fn words(&self) -> usize {
        (self.bytes - HEADER) / WORD
    }
}

/// Which copies and which stores each node does, for that many of them.
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
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) bytes: u64,
    pub(super) has_rows: bool,
    pub(super) first_block: u32,
    pub(super) blocks: u32,
}

/// The parameter of one launch. Only sources, values, padding and whether it stores ever change: a
/// launch with another grid would make later replays slower.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parameter {
    bytes: Box<[u8]>,
    /// What the bytes have of them, as one piece that each replay can compare.
    sources: Box<[Address]>,
}

impl Parameter {
    /// One that does nothing: sources are destinations, and nothing is stored. It is the smallest
    /// that has room.
    ///
    /// # Panics
    /// If none has, or for a copy of 8 TiB.
    pub(super) fn new(copies: &[(Address, u64)], stores: &[Address]) -> Self {
        let words = COPY_WORDS * copies.len() + STORE_WORDS * stores.len();
        let kernel = KERNELS.iter().find(|kernel| words <= kernel.words());
        let bytes = kernel.expect("a node has room for its entries").bytes;
        let mut new = Self {
            bytes: vec![0; bytes].into(),
            sources: copies.iter().map(|(dst, _)| *dst).collect(),
        };
        new.bytes[COPIES] = count(copies.len());
        let (places, mut next_block) = (new.places(), 0);
        for (i, (dst, bytes)) in copies.iter().enumerate() {
            assert!(bytes.leading_zeros() > BLOCK_BITS, "{bytes} bytes");
            new.set_u64(places.destination(i), dst.0);
            new.write_source(i, *dst);
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

    /// Reads what a launch was given.
    ///
    /// # Panics
    /// If no kernel takes that many bytes.
    pub(super) fn from_bytes(bytes: &[u8]) -> Self {
        let mut new = Self {
            bytes: bytes.into(),
            sources: Box::default(),
        };
        new.kernel();
        new.sources = (0..new.copies()).map(|i| new.read_source(i)).collect();
        new
    }

    /// Which of the [`KERNELS`] takes it.
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

    /// Whether the stores happen.
    #[inline]
    pub(super) fn set_stores(&mut self, stores: usize) -> bool {
        let stores = count(stores);
        std::mem::replace(&mut self.bytes[STORES], stores) != stores
    }

    /// Lets all sources have all rows; whether some had fewer.
    #[inline]
    pub(super) fn pad_nothing(&mut self) -> bool {
        std::mem::replace(&mut self.bytes[FILL], 0) != 0
    }

    /// Lets the sources of these slots, which are those of the copies, have fewer rows; whether that
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

    /// What the rows are filled with that sources do not have, how many rows these have, and of how
    /// many; none if they have all.
    pub(super) fn padding(&self) -> Option<(Fill, u32, u32)> {
        let mut fills = [Fill::Zeros, Fill::LastRow].into_iter();
        let fill = fills.find(|fill| fill_number(*fill) == self.bytes[FILL])?;
        Some((fill, self.u32(ROWS), self.u32(OF)))
    }

    /// Where the `i`-th copy reads.
    #[inline]
    pub(super) fn source(&self, i: usize) -> Address {
        self.sources[i]
    }

    /// Changes where each copy reads; whether one has read elsewhere.
    ///
    /// # Panics
    /// If there are more or fewer.
    #[inline]
    pub(super) fn set_sources(&mut self, sources: &[Address]) -> bool {
        if *self.sources == *sources {
            return false;
        }
        assert_eq!(self.sources.len(), sources.len(), "a source for each copy");
        for (i, source) in sources.iter().enumerate() {
            if self.sources[i] != *source {
                self.sources[i] = *source;
                self.write_source(i, *source);
            }
        }
        true
    }

    /// Becomes another one of the same copies and stores.
    pub(super) fn assign(&mut self, other: &Self) {
        self.bytes.copy_from_slice(&other.bytes);
        self.sources.copy_from_slice(&other.sources);
    }

    /// Changes the value of the `i`-th store; whether it was another one.
    #[inline]
    pub(super) fn set_value(&mut self, i: usize, value: u64) -> bool {
        let at = self.places().store(i) + WORD;
        let changes = self.u64(at) != value;
        self.set_u64(at, value);
        changes
    }

    /// The copies, in order.
    pub(super) fn all_copies(&self) -> Vec<Copy> {
        let extent = |i| self.u64(self.places().extent(i));
        let first_block = |i| {
            let mask = (1 << BLOCK_BITS) - 1;
            u32::try_from(extent(i) & mask).expect("less than 32 bits")
        };
        let copy = |i| {
            let last = i + 1 == self.copies();
            let end = if last {
                self.u32(COPY_BLOCKS)
            } else {
                first_block(i + 1)
            };
            Copy {
                dst: self.u64(self.places().destination(i)),
                src: self.source(i).0,
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

    fn read_source(&self, i: usize) -> Address {
        let (lower, upper) = self.places().source(i);
        Address(u64::from(self.u32(upper)) << 32 | u64::from(self.u32(lower)))
    }

    #[inline]
    fn write_source(&mut self, i: usize, source: Address) {
        let (lower, upper) = self.places().source(i);
        let address = source.0.to_le_bytes();
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

/// How many blocks copy so many bytes.
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
mod tests {
    use super::*;

    #[test]
    fn the_module_declares_the_kernels_with_parameters_of_their_sizes() {
        assert_eq!(PTX.matches(".entry").count(), KERNELS.len());
        for (entry, kernel) in PTX.split(".entry").skip(1).zip(&KERNELS) {
            let (name, parameters) = entry.split_once('(').unwrap();
            assert_eq!(name.trim(), kernel.name);
            let declared = format!("{}_param_0[{}]", kernel.name, kernel.bytes);
            let parameters = parameters.split(')').next().unwrap();
            assert!(parameters.contains(&declared) && !parameters.contains(','));
        }
    }

    #[test]
    fn a_node_has_the_smallest_parameter_that_fits() {
        for (copies, stores, bytes) in [
            (0, 0, 128),
            (4, 1, 128),
            (4, 2, 256),
            (0, 7, 128),
            (0, 8, 256),
            (10, 0, 256),
            (11, 0, 512),
            (20, 1, 512),
            (20, 2, 1024),
            (42, 0, 1024),
            (42, 1, 1600),
            (64, 3, 1600),
            (66, 0, 1600),
            (66, 1, 2560),
            (106, 0, 2560),
            (107, 0, 4096),
            (170, 0, 4096),
            (0, 255, 4096),
        ] {
            let parameter =
                Parameter::new(&vec![(Address(8), 1); copies], &vec![Address(8); stores]);
            assert_eq!(parameter.as_bytes().len(), bytes, "{copies} and {stores}");
            assert_eq!(KERNELS[parameter.kernel()].bytes, bytes);
        }
    }

    #[test]
    fn every_copy_and_store_is_done_by_one_node_and_fits_it() {
        let counts = [
            0, 1, 2, 15, 16, 66, 67, 168, 169, 170, 171, 254, 255, 256, 340, 1000,
        ];
        for (copies, stores) in counts.iter().flat_map(|c| counts.map(|s| (*c, s))) {
            let parts = split(copies, stores);
            let (mut copy, mut store) = (0, 0);
            for (copies, stores) in &parts {
                assert_eq!((copies.start, stores.start), (copy, store));
                let words = COPY_WORDS * copies.len() + STORE_WORDS * stores.len();
                assert!(words <= MOST_WORDS);
                assert!(copies.len() + stores.len() > 0);
                (copy, store) = (copies.end, stores.end);
            }
            assert_eq!((copy, store), (copies, stores));
        }
    }

    #[test]
    fn a_full_parameter_has_room_for_all_its_entries() {
        for (copies, stores) in [
            (4, 1),
            (0, 7),
            (20, 1),
            (64, 3),
            (0, 255),
            (169, 1),
            (100, 55),
        ] {
            let entries: Vec<(Address, u64)> = (0..copies).map(|i| (Address(i), i)).collect();
            let addresses: Vec<Address> = (0..stores).map(Address).collect();
            let mut parameter = Parameter::new(&entries, &addresses);
            parameter.set_stores(addresses.len());
            let (first, last) = (&addresses[0], addresses.len() - 1);
            assert!(parameter.set_value(last, 7) && !parameter.set_value(last, 7));
            assert_eq!(parameter.all_stores()[0].0, *first);
            assert_eq!(parameter.all_stores()[last], (addresses[last], 7));
            assert_eq!(parameter.all_copies().len(), entries.len());
        }
    }

    #[test]
    fn sources_anywhere_are_read_as_they_were_written() {
        for copies in [1, 4, 5, 10, 11, 64, 170] {
            let entries: Vec<_> = (0..copies).map(|i| (Address(i << 8), i)).collect();
            let mut parameter = Parameter::new(&entries, &[]);
            let source = |i: u64| Address((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let sources: Vec<_> = (0..copies).map(source).collect();
            assert!(parameter.set_sources(&sources) && !parameter.set_sources(&sources));
            let read = Parameter::from_bytes(parameter.as_bytes());
            assert_eq!(read, parameter);
            for (i, copy) in (0..copies).zip(read.all_copies()) {
                let expected = (i << 8, source(i).0, i);
                assert_eq!((copy.dst, copy.src, copy.bytes), expected);
            }
            let neutral = Parameter::new(&entries, &[]);
            parameter.assign(&neutral);
            assert_eq!(parameter, neutral);
        }
    }

    #[test]
    fn a_new_parameter_changes_nothing() {
        let parameter = Parameter::new(&[(Address(16), 100), (Address(512), 0)], &[Address(8)]);
        assert!(parameter.all_copies().iter().all(|c| c.src == c.dst));
        assert_eq!(parameter.all_stores(), []);
    }

    #[test]
    fn blocks_follow_one_another_and_cover_the_bytes() {
        let sizes = [0, 1, TILE, TILE + 1, 0, MOST_BLOCKS * TILE * 3, 5, 0];
        let entries: Vec<(Address, u64)> = sizes.iter().map(|bytes| (Address(1), *bytes)).collect();
        let parameter = Parameter::new(&entries, &[]);
        let mut next = 0;
        for copy in parameter.all_copies() {
            assert_eq!(copy.first_block, next);
            assert_eq!(copy.blocks == 0, copy.bytes == 0);
            next += copy.blocks;
        }
        assert_eq!(u64::from(next), 1 + 1 + 2 + MOST_BLOCKS + 1);
        assert_eq!((parameter.grid(0), parameter.grid(2)), (next, next + 1));
        assert_eq!(Parameter::new(&[(Address(1), 0)], &[]).grid(0), 1);
    }
}
