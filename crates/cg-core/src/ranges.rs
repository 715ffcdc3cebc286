//! [`Ranges`]: pieces of memory that something else may or may not lie in.

use std::ops::Range;

use crate::driver::handle::Address;

/// Ranges of addresses that do not overlap, in order.
#[derive(Debug, Clone, Default)]
pub struct Ranges {
    ranges: Vec<Range<u64>>,
}

impl Ranges {
    /// Ranges that share no byte with each other.
    ///
    /// # Errors
    /// The start of one that does.
    pub fn disjoint(all: impl IntoIterator<Item = Range<u64>>) -> Result<Self, Address> {
        let ranges = sorted(all);
        let mut pairs = ranges.windows(2);
        match pairs.find(|pair| pair[1].start < pair[0].end) {
            Some(pair) => Err(Address(pair[1].start)),
            None => Ok(Self { ranges }),
        }
    }

    /// Return what any ranges are together.
    #[must_use]
    pub fn merged(all: impl IntoIterator<Item = Range<u64>>) -> Self {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for next in sorted(all) {
            match ranges.last_mut() {
                Some(last) if next.start <= last.end => last.end = last.end.max(next.end),
                _ => ranges.push(next),
            }
        }
        Self { ranges }
    }

    /// Return whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Return whether one of them shares a byte with so many at an address.
    #[must_use]
    #[inline]
    pub fn overlap(&self, start: Address, bytes: u64) -> bool {
        let (start, end) = (start.0, start.0.saturating_add(bytes));
        let (Some(first), Some(last)) = (self.ranges.first(), self.ranges.last()) else {
            return false;
        };
        if end <= first.start || start >= last.end || bytes == 0 {
            return false;
        }
        let next = self.ranges.partition_point(|range| range.end <= start);
        self.ranges.get(next).is_some_and(|range| range.start < end)
    }
}

fn sorted(all: impl IntoIterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut ranges: Vec<_> = all.into_iter().filter(|one| !one.is_empty()).collect();
    ranges.sort_unstable_by_key(|one| (one.start, one.end));
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_overlaps_where_it_shares_a_byte() {
        let disjoint = Ranges::disjoint([60..80, 10..20]).unwrap();
        let merged = Ranges::merged([70..80, 10..20, 60..75, 12..13, 5..5]);
        for from in 0..100 {
            for bytes in 0..40 {
                let shares = |a, b| bytes > 0 && from < b && a < from + bytes;
                let expected = shares(10, 20) || shares(60, 80);
                for all in [&disjoint, &merged] {
                    assert_eq!(all.overlap(Address(from), bytes), expected);
                }
            }
        }
    }

    #[test]
    fn overlapping_ranges_are_not_disjoint_and_neighbours_are() {
        let start = |ranges: [Range<u64>; 2]| Ranges::disjoint(ranges).err().map(|at| at.0);
        assert_eq!(start([0..10, 10..20]), None);
        assert_eq!(start([5..5, 0..10]), None);
        assert_eq!(start([9..20, 0..10]), Some(9));
        assert_eq!(start([3..4, 3..4]), Some(3));
        assert_eq!(start([2..50, 10..20]), Some(10));
    }

    #[test]
    fn merged_neighbours_have_no_byte_between_them() {
        assert!(Ranges::merged([]).is_empty());
        let all = Ranges::merged([0..10, 10..20, 30..40]);
        assert!(all.overlap(Address(9), 2) && all.overlap(Address(15), 20));
        assert!(!all.overlap(Address(20), 10));
    }
}
