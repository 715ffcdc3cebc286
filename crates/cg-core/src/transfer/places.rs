//! [`Places`]: the offsets of copies and stores in a parameter.

/// Bytes of what comes before all copies.
pub(super) const HEADER: usize = 16;
pub(super) const WORD: usize = 8;
/// Half an address.
pub(super) const HALF: usize = 4;
/// Own side, other side, and extent: bytes, first block and whether it has rows in one.
pub(super) const COPY_WORDS: usize = 3;
/// Destination and value.
pub(super) const STORE_WORDS: usize = 2;

/// In parameters up to this size the lower halves of all other sides stand side by side, and then the
/// upper ones, which hardly ever change.
///
/// The cost of a launch after a change goes by the distance of the first byte that was changed from the
/// last one, up to some 100 bytes: four sources of inputs among the other words took 1.2 µs more than an unchanged
/// launch, their lower halves 0.6 (H100, where that took 2.3). In larger parameters that gains less than
/// the driver takes to compare the bytes behind them, 0.8 ns each.
const MOST_BYTES_TOGETHER: usize = 256;

/// Offsets of the copies and the stores in a parameter, in bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Places {
    copies: usize,
    /// True if the other sides stand together.
    are_together: bool,
}

impl Places {
    /// Return those of a parameter of so many bytes that has so many copies.
    #[inline]
    pub(super) fn new(bytes: usize, copies: usize) -> Self {
        Self {
            copies,
            are_together: bytes <= MOST_BYTES_TOGETHER,
        }
    }

    /// Return the lower and the upper half of the `i`-th other side.
    #[inline]
    pub(super) fn other(self, i: usize) -> (usize, usize) {
        if self.are_together {
            let lower = HEADER + i * HALF;
            (lower, lower + self.copies * HALF)
        } else {
            let lower = self.own(i) + WORD;
            (lower, lower + HALF)
        }
    }

    /// Return the own side of the `i`-th copy.
    #[inline]
    pub(super) fn own(self, i: usize) -> usize {
        let word = if self.are_together {
            self.copies + (COPY_WORDS - 1) * i
        } else {
            COPY_WORDS * i
        };
        HEADER + word * WORD
    }

    /// Return the extent of the `i`-th copy.
    #[inline]
    pub(super) fn extent(self, i: usize) -> usize {
        let words = if self.are_together { 1 } else { 2 };
        self.own(i) + words * WORD
    }

    /// Return the destination of the `i`-th store.
    #[inline]
    pub(super) fn store(self, i: usize) -> usize {
        HEADER + (self.copies * COPY_WORDS + i * STORE_WORDS) * WORD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lower_halves_of_up_to_four_other_sides_are_sixteen_bytes_side_by_side() {
        for copies in 1..=4 {
            let places = Places::new(128, copies);
            let lower: Vec<usize> = (0..copies).map(|i| places.other(i).0).collect();
            assert_eq!(lower, [16, 20, 24, 28][..copies]);
        }
    }

    #[test]
    fn no_two_things_have_the_same_place() {
        for (bytes, copies, stores) in [(128, 4, 1), (256, 10, 0), (256, 3, 10), (512, 20, 1)] {
            let places = Places::new(bytes, copies);
            let halves = (0..copies).flat_map(|i| [places.other(i).0, places.other(i).1]);
            let words = (0..copies).flat_map(|i| [places.own(i), places.extent(i)]);
            let of_stores = (0..stores).flat_map(|i| [places.store(i), places.store(i) + WORD]);
            let words = words.chain(of_stores).flat_map(|at| [at, at + HALF]);
            let mut all: Vec<usize> = halves.chain(words).collect();
            all.sort_unstable();
            let end = HEADER + (COPY_WORDS * copies + STORE_WORDS * stores) * WORD;
            assert!(all.iter().copied().eq((HEADER..end).step_by(HALF)));
        }
    }
}
