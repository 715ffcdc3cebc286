//! `Deliveries`: when replays of a node copy their results to memory of the caller's own.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// After so many steps in a row whose results were held at their end, replays deliver.
const ENOUGH: u32 = 2;
/// One in so many replays delivers nothing, to see whether its results are held still.
const SAMPLED: u32 = 64;

/// What a node knows of who holds its results when their step ends.
#[derive(Default)]
pub(super) struct Deliveries {
    /// The results of the last replay that delivered nothing were held at the end of its step.
    was_held: AtomicBool,
    in_a_row: AtomicU32,
    delivers: AtomicBool,
    count: AtomicU32,
}

impl Deliveries {
    /// Begin with replays that deliver, or with such that do not.
    pub(super) fn new(delivers: bool) -> Self {
        let found = Self::default();
        found.delivers.store(delivers, Ordering::Relaxed);
        found
    }

    /// Note that results are held when their step ends.
    pub(super) fn note_held(&self) {
        if !self.was_held.swap(true, Ordering::Relaxed) {
            self.in_a_row.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Return whether results have been held often enough.
    #[inline]
    pub(super) fn are_wanted(&self) -> bool {
        self.in_a_row.load(Ordering::Relaxed) >= ENOUGH
    }

    /// Return whether the next replay is to deliver, where it can.
    #[inline]
    pub(super) fn next(&self, can: bool) -> bool {
        if can && self.delivers.load(Ordering::Relaxed) {
            let count = self.count.fetch_add(1, Ordering::Relaxed) + 1;
            if count.is_multiple_of(SAMPLED) {
                self.was_held.store(false, Ordering::Relaxed);
                return false;
            }
            return count % SAMPLED != 1 || self.goes_on();
        }
        if !self.was_held.swap(false, Ordering::Relaxed) {
            self.in_a_row.store(0, Ordering::Relaxed);
        }
        let begins = can && self.are_wanted();
        self.delivers.store(begins, Ordering::Relaxed);
        self.count.store(1, Ordering::Relaxed);
        begins
    }

    /// Return whether the results of a sample were held, and deliver no more if not.
    fn goes_on(&self) -> bool {
        let was_held = self.was_held.swap(false, Ordering::Relaxed);
        if !was_held {
            self.in_a_row.store(0, Ordering::Relaxed);
            self.delivers.store(false, Ordering::Relaxed);
        }
        was_held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replays_deliver_while_results_are_held_and_no_longer() {
        let deliveries = Deliveries::default();
        let call = |is_held: bool| {
            let delivers = deliveries.next(true);
            if is_held && !delivers {
                deliveries.note_held();
            }
            delivers
        };
        let held: Vec<bool> = (0..200).map(|_| call(true)).collect();
        assert_eq!(held.iter().position(|one| *one), Some(2));
        assert_eq!(held.iter().skip(2).filter(|one| !**one).count(), 3);
        let dropped: Vec<bool> = (0..200).map(|_| call(false)).collect();
        let last = dropped.iter().rposition(|one| *one).expect("some");
        assert!(last < 64, "{last}");
    }

    #[test]
    fn results_that_are_held_now_and_then_are_not_delivered() {
        let deliveries = Deliveries::default();
        for number in 0..100 {
            assert!(!deliveries.next(true));
            if number % 2 == 0 {
                deliveries.note_held();
            }
        }
    }
}
