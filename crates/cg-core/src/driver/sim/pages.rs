//! Simulated addresses and pages: reserved ranges, and memory that is mapped there.
//!
//! The host memory behind a mapping belongs to the addresses as long as somebody has a view of it: a
//! page that is mapped where another one was is seen by views of before, as a GPU's addresses are.
#![expect(
    unsafe_code,
    reason = "implements a trait whose methods are unsafe for other drivers"
)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicU8;
use std::sync::{Arc, Weak};

use super::memory::SimMemory;
use super::{Sim, State, capture, refuse, run, stream};
use crate::code::{Call, Code};
use crate::driver::PageCalls;
use crate::driver::handle::{Address, PageHandle};
use crate::error::{Error, Result};

/// Sizes and addresses are multiples of this.
const GRANULARITY: u64 = 2 << 20;
/// Start of the ranges whose hint is taken: behind all hints and before all allocations.
const ELSEWHERE: u64 = 0x1_0000_0000_0000;

/// Ranges, pages and mappings.
#[derive(Default)]
pub(super) struct Pages {
    /// Start and size of the reserved ranges.
    ranges: BTreeMap<u64, u64>,
    created: BTreeMap<u64, Page>,
    mappings: BTreeMap<u64, Mapping>,
    /// The memory that was mapped somewhere, by start, as long as somebody views it.
    seen: BTreeMap<u64, Seen>,
}

struct Page {
    bytes: u64,
    released: bool,
    mappings: usize,
}

struct Mapping {
    bytes: u64,
    page: u64,
    /// The memory behind it by address, without gaps: more than one where views are of before.
    parts: BTreeMap<u64, SimMemory>,
}

struct Seen {
    bytes: Weak<[AtomicU8]>,
    range: Range<usize>,
}

impl Pages {
    pub(super) fn ranges(&self) -> usize {
        self.ranges.len()
    }

    pub(super) fn count(&self) -> usize {
        self.created.len()
    }

    /// Start and size of the mapping that an address lies in.
    pub(super) fn mapping(&self, address: u64) -> Option<(Address, u64)> {
        let (base, mapping) = self.mappings.range(..=address).next_back()?;
        (address - base < mapping.bytes).then_some((Address(*base), mapping.bytes))
    }

    /// Return whether an address is reserved.
    pub(super) fn is_inside(&self, address: u64) -> bool {
        self.range(address).is_some()
    }

    /// Return the memory of a range, for `user`; none if no address there is reserved.
    ///
    /// # Panics
    /// If the range is reserved and not wholly inside one mapping.
    pub(super) fn view(&self, start: u64, bytes: u64, user: &str) -> Option<SimMemory> {
        let range = self.range(start)?;
        let Some((base, size)) = self.mapping(start) else {
            panic!(
                "{user} touches {start:#x} in the range reserved at {range:#x}, where nothing is \
                 mapped"
            )
        };
        let parts = self.mappings[&base.0].parts.range(..=start).next_back();
        let part = parts.map(|(first, memory)| (start - first, memory));
        match part {
            Some((offset, memory)) if offset + bytes <= memory.bytes() as u64 => {
                Some(memory.part(offset, bytes))
            }
            _ => panic!(
                "{user} touches {bytes} bytes at {start:#x}, beyond the end of the page of {size} \
                 bytes at {:#x}, or of what was one before",
                base.0
            ),
        }
    }

    /// Return the begin of the reserved range that an address lies in.
    fn range(&self, address: u64) -> Option<u64> {
        let (range, reserved) = self.ranges.range(..=address).next_back()?;
        (address - range < *reserved).then_some(*range)
    }

    fn is_free(&self, start: u64, bytes: u64) -> bool {
        let before = self.ranges.range(..start + bytes).next_back();
        before.is_none_or(|(other, size)| other + size <= start)
    }

    fn reserve(&mut self, bytes: u64, hint: u64) -> Option<u64> {
        let fits = |start: &u64| start.checked_add(bytes).is_some_and(|end| end <= ELSEWHERE);
        let hinted = Some(hint).filter(|start| *start > 0 && start.is_multiple_of(GRANULARITY));
        let hinted = hinted.filter(|start| fits(start) && self.is_free(*start, bytes));
        let start = if let Some(start) = hinted {
            start
        } else {
            let last = self.ranges.range(ELSEWHERE..).next_back();
            let start = last.map_or(ELSEWHERE, |(start, bytes)| start + bytes);
            start.checked_add(bytes).filter(|end| *end < 6 << 48)?;
            start
        };
        self.ranges.insert(start, bytes);
        Some(start)
    }

    fn unreserve(&mut self, start: u64, bytes: u64) {
        let reserved = self.ranges.get(&start);
        assert!(
            reserved == Some(&bytes),
            "address_free of {bytes} bytes at {start:#x}, where {reserved:?} bytes are reserved"
        );
        let end = start + bytes;
        if let Some(mapped) = self.mappings.range(start..end).next() {
            panic!(
                "address_free of the range at {start:#x} while a page is mapped at {:#x}",
                mapped.0
            );
        }
        self.ranges.remove(&start);
        self.seen.retain(|seen, _| !(start..end).contains(seen));
    }

    /// Return whether one range has all of it. A driver does not look: what it does beyond is undefined.
    fn is_reserved(&self, start: u64, bytes: u64) -> bool {
        let inside = self.ranges.range(..=start).next_back();
        inside.is_some_and(|(range, size)| start + bytes <= range + size)
    }

    /// Return whether nothing is mapped there.
    fn is_mappable(&self, start: u64, bytes: u64) -> bool {
        let before = self.mappings.range(..start + bytes).next_back();
        before.is_none_or(|(other, mapping)| other + mapping.bytes <= start)
    }

    /// Return the memory of a new mapping: that of before where somebody views it, as fresh memory is.
    fn memory_at(&mut self, start: u64, bytes: u64) -> BTreeMap<u64, SimMemory> {
        let end = start + bytes;
        self.seen.retain(|_, seen| seen.bytes.strong_count() > 0);
        let mut parts = BTreeMap::new();
        let mut next = start;
        for (first, seen) in &self.seen {
            let Some(memory) = seen.memory() else {
                continue;
            };
            let last = first + memory.bytes() as u64;
            let (from, to) = (next.max(*first), end.min(last));
            if from >= to {
                continue;
            }
            if next < from {
                parts.insert(next, SimMemory::poisoned(from - next));
            }
            let part = memory.part(from - first, to - from);
            part.poison();
            parts.insert(from, part);
            next = to;
        }
        if next < end {
            parts.insert(next, SimMemory::poisoned(end - next));
        }
        for (first, memory) in &parts {
            // Views of a part of what was seen keep all of it.
            let seen = Seen {
                bytes: Arc::downgrade(&memory.bytes),
                range: memory.range.clone(),
            };
            self.seen.entry(*first).or_insert(seen);
        }
        parts
    }
}

impl Seen {
    fn memory(&self) -> Option<SimMemory> {
        Some(SimMemory {
            bytes: self.bytes.upgrade()?,
            range: self.range.clone(),
        })
    }
}

/// Drop a page that is neither mapped nor wanted; its bytes are free again.
fn collect(state: &mut State, page: u64) {
    let gone = state.memory.pages.created.get(&page);
    if let Some(Page {
        bytes,
        released: true,
        mappings: 0,
    }) = gone
    {
        state.memory.in_use -= bytes;
        state.memory.pages.created.remove(&page);
    }
}

fn unmap(state: &mut State, address: Address, bytes: u64) {
    let pages = &mut state.memory.pages;
    let mapped = pages.mappings.get(&address.0).map(|mapping| mapping.bytes);
    assert!(
        mapped == Some(bytes),
        "page_unmap of {bytes} bytes at {:#x}, where {mapped:?} bytes are mapped",
        address.0
    );
    if let Some(mapping) = pages.mappings.remove(&address.0)
        && let Some(page) = pages.created.get_mut(&mapping.page)
    {
        // A view of before shows at once that nothing is there any more.
        mapping.parts.values().for_each(SimMemory::poison);
        page.mappings -= 1;
        collect(state, mapping.page);
    }
}

impl PageCalls for Sim {
    fn ordinal(&self) -> u32 {
        // Addresses of another simulated device have nothing to do with those of this one.
        0
    }

    fn page_granularity(&self) -> Result<u64> {
        self.enter(Call::MemGetAllocationGranularity)?;
        Ok(GRANULARITY)
    }

    fn address_reserve(&self, bytes: u64, hint: Address) -> Result<Address> {
        let call = Call::MemAddressReserve;
        let mut state = self.enter(call)?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(refuse(call, Code::INVALID_VALUE));
        }
        let start = state.memory.pages.reserve(bytes, hint.0);
        start
            .map(Address)
            .ok_or_else(|| refuse(call, Code::OUT_OF_MEMORY))
    }

    unsafe fn address_free(&self, address: Address, bytes: u64) {
        let mut state = self.enter_infallible(Call::MemAddressFree);
        state.memory.pages.unreserve(address.0, bytes);
    }

    fn page_create(&self, bytes: u64) -> Result<PageHandle> {
        let call = Call::MemCreate;
        let mut state = match self.enter(call) {
            Err(Error::Driver { code, .. }) if code == Code::OUT_OF_MEMORY => {
                return Err(self.state().memory.out_of_memory(bytes));
            }
            other => other?,
        };
        run::check_failure(&state, call)?;
        if bytes == 0 || !bytes.is_multiple_of(GRANULARITY) {
            return Err(refuse(call, Code::INVALID_VALUE));
        }
        if bytes > state.memory.limit - state.memory.in_use {
            return Err(state.memory.out_of_memory(bytes));
        }
        state.memory.in_use += bytes;
        let handle = state.fresh();
        let page = Page {
            bytes,
            released: false,
            mappings: 0,
        };
        state.memory.pages.created.insert(handle, page);
        Ok(PageHandle(handle))
    }

    unsafe fn page_release(&self, page: PageHandle) {
        let mut state = self.enter_infallible(Call::MemRelease);
        match state.memory.pages.created.get_mut(&page.0) {
            Some(found) if !found.released => found.released = true,
            _ => panic!("page_release of {page:?}, which is not live"),
        }
        collect(&mut state, page.0);
    }

    unsafe fn page_map(&self, address: Address, bytes: u64, page: PageHandle) -> Result<()> {
        let call = Call::MemMap;
        let mut state = self.enter(call)?;
        let pages = &mut state.memory.pages;
        match pages.created.get(&page.0) {
            Some(found) if !found.released => assert!(
                found.bytes == bytes,
                "page_map of {bytes} bytes of {page:?}, which has {}",
                found.bytes
            ),
            _ => panic!("page_map of {page:?}, which is not live"),
        }
        assert!(
            pages.is_reserved(address.0, bytes),
            "page_map of {bytes} bytes at {:#x}, which no range has",
            address.0
        );
        if !address.0.is_multiple_of(GRANULARITY) || !pages.is_mappable(address.0, bytes) {
            return Err(refuse(call, Code::INVALID_VALUE));
        }
        let mapping = Mapping {
            bytes,
            page: page.0,
            parts: pages.memory_at(address.0, bytes),
        };
        pages.mappings.insert(address.0, mapping);
        if let Some(page) = pages.created.get_mut(&page.0) {
            page.mappings += 1;
        }
        drop(state);
        // A second call of the driver, with a failure of its own.
        let opened = self.enter(Call::MemSetAccess).map(drop);
        opened.inspect_err(|_| unmap(&mut self.state(), address, bytes))
    }

    unsafe fn page_unmap(&self, address: Address, bytes: u64) {
        let mut state = self.enter_infallible(Call::MemUnmap);
        if let Some(user) = stream::in_flight_on(&state, address, bytes) {
            panic!("page_unmap of {:#x} while {user} is in flight", address.0);
        }
        unmap(&mut state, address, bytes);
    }

    unsafe fn host_pin(&self, start: *mut u8, bytes: usize) -> Result<()> {
        let mut state = self.enter(Call::MemHostRegister)?;
        let before = state.pinned.range(..start.addr() + bytes).next_back();
        if before.is_some_and(|(other, size)| other + size > start.addr()) {
            let code = Code::HOST_MEMORY_ALREADY_REGISTERED;
            return Err(refuse(Call::MemHostRegister, code));
        }
        state.pinned.insert(start.addr(), bytes);
        Ok(())
    }

    unsafe fn host_unpin(&self, start: *mut u8) {
        let mut state = self.enter_infallible(Call::MemHostUnregister);
        let pinned = state.pinned.remove(&start.addr());
        assert!(pinned.is_some(), "host_unpin of memory that is not pinned");
    }

    fn synchronize(&self) -> Result<()> {
        let call = Call::ContextSynchronize;
        let mut state = self.enter(call)?;
        capture::refuse_any(&mut state, call)?;
        drop(state);
        let idle = |state: &State| {
            let mut streams = state.streams.values();
            streams.all(|stream| stream.queue.is_empty() && !stream.busy)
        };
        run::drive_until(self, call, idle)
    }
}
