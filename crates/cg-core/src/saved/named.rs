//! Memory by its names, searched by address.

use std::collections::HashSet;

use super::graph::Place;
use super::{Names, small};
use crate::error::{Error, Result};
use crate::memory::Memory;

/// Memory with names, none of which overlaps.
pub(super) struct Named<'a> {
    memory: &'a Names<'a>,
    /// The numbers of the memory, by address.
    by_address: Vec<u32>,
}

impl<'a> Named<'a> {
    /// # Errors
    /// [`Error::Invalid`] for a name that is there twice, and for memory that overlaps.
    pub(super) fn new(memory: &'a Names<'a>) -> Result<Self> {
        let mut names = HashSet::new();
        if let Some((name, _)) = memory.iter().find(|(name, _)| !names.insert(*name)) {
            let expected = "one for each piece of memory";
            return Err(Error::invalid("a name of memory", name, expected));
        }
        let mut by_address: Vec<u32> = (0..small(memory.len())?).collect();
        by_address.sort_by_key(|number| memory[*number as usize].1.address());
        for pair in by_address.windows(2) {
            let [(before, first), (name, second)] = [0, 1].map(|at| memory[pair[at] as usize]);
            if second.range().start < first.range().end {
                let given = format!("where {before:?} is as well");
                let argument = format!("memory {name:?}");
                return Err(Error::invalid(argument, &given, "memory of its own"));
            }
        }
        Ok(Self { memory, by_address })
    }

    /// Return the names and sizes in their order.
    pub(super) fn sizes(&self) -> Vec<(&str, u64)> {
        let sizes = self.memory.iter();
        sizes
            .map(|(name, memory)| (*name, memory.bytes()))
            .collect()
    }

    /// Return how many pieces of memory there are.
    pub(super) fn count(&self) -> u32 {
        // `new` has seen that there are not too many.
        u32::try_from(self.memory.len()).unwrap_or(u32::MAX)
    }

    /// Return memory and its name by its number.
    pub(super) fn get(&self, number: u32) -> (&'a str, &'a Memory) {
        self.memory[number as usize]
    }

    /// Return the place inside of memory where an address is.
    pub(super) fn inside(&self, address: u64) -> Option<Place> {
        self.around(address)
            .find(|place| place.offset < self.bytes(*place))
    }

    /// Return the places where an address may be: inside of memory, or just behind it.
    pub(super) fn around(&self, address: u64) -> impl Iterator<Item = Place> + '_ {
        let starts_before = |number: &u32| self.get(*number).1.range().start <= address;
        let end = self.by_address.partition_point(starts_before);
        // What ends at the address lies before what begins there.
        let near = &self.by_address[end.saturating_sub(2)..end];
        let place = move |number: &u32| Place {
            memory: *number,
            offset: address - self.get(*number).1.range().start,
        };
        let places = near.iter().map(place);
        places.filter(|place| place.offset <= self.bytes(*place))
    }

    /// Return whether bytes from a place on lie in its memory.
    pub(super) fn has(&self, place: Place, bytes: u64) -> bool {
        let end = place.offset.checked_add(bytes);
        place.offset < self.bytes(place) && end.is_some_and(|end| end <= self.bytes(place))
    }

    fn bytes(&self, place: Place) -> u64 {
        self.get(place.memory).1.bytes()
    }
}
