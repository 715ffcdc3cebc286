//! The memory that a kernel writes: what it copies must not lie there, since nothing orders the two.

use crate::driver::handle::Address;
use crate::error::{Error, Result};
use crate::memory::Memory;

/// Ranges that do not overlap, in order.
#[derive(Debug)]
pub(super) struct Destinations {
    /// Start and end.
    ranges: Vec<(u64, u64)>,
}

impl Destinations {
    /// # Errors
    /// [`Error::Invalid`] if two of them overlap.
    pub(super) fn new<'a>(all: impl Iterator<Item = &'a Memory>) -> Result<Self> {
        let range = |memory: &Memory| (memory.address().0, memory.address().0 + memory.bytes());
        let mut ranges: Vec<(u64, u64)> = all.map(range).filter(|(a, b)| a < b).collect();
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            if pair[1].0 < pair[0].1 {
                let given = format!("{:#x}, inside of another destination", pair[1].0);
                let expected = "memory that no other slot or store writes";
                return Err(Error::invalid("destination", &given, expected));
            }
        }
        Ok(Self { ranges })
    }

    /// Whether one of them shares a byte with the range.
    #[inline]
    pub(super) fn overlap(&self, start: Address, bytes: u64) -> bool {
        let (start, end) = (start.0, start.0.saturating_add(bytes));
        let (Some(first), Some(last)) = (self.ranges.first(), self.ranges.last()) else {
            return false;
        };
        if end <= first.0 || start >= last.1 || bytes == 0 {
            return false;
        }
        let next = self.ranges.partition_point(|range| range.1 <= start);
        self.ranges.get(next).is_some_and(|range| range.0 < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Sim};

    #[test]
    fn a_range_overlaps_where_it_shares_a_byte() {
        let device = Device::sim(&Sim::default());
        let memory = Memory::new(&device, 100).unwrap();
        let start = memory.address().0;
        let slices = [memory.slice(60..80), memory.slice(10..20)].map(Result::unwrap);
        let all = Destinations::new(slices.iter()).unwrap();
        for from in 0..100 {
            for bytes in 0..40 {
                let shares = |a, b| bytes > 0 && from < b && a < from + bytes;
                let expected = shares(10, 20) || shares(60, 80);
                assert_eq!(all.overlap(Address(start + from), bytes), expected);
            }
        }
    }

    #[test]
    fn overlapping_destinations_are_refused_and_neighbours_are_not() {
        let device = Device::sim(&Sim::default());
        let memory = Memory::new(&device, 100).unwrap();
        let two = |a, b| {
            let slices = [memory.slice(a), memory.slice(b)].map(Result::unwrap);
            Destinations::new(slices.iter()).is_ok()
        };
        assert!(two(0..10, 10..20) && two(5..5, 0..10));
        assert!(!two(0..10, 9..20) && !two(3..4, 3..4) && !two(2..50, 10..20));
    }
}
