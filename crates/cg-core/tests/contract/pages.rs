//! Addresses and physical memory apart from each other, pinned host memory, and the whole device.
#![expect(unsafe_code, reason = "calls the driver directly")]

use cg_core::driver::handle::PageHandle;
use cg_core::{
    Address, Capture, CaptureMode, Code, Device, InstantiateFlags, Memory, Result, Stream,
};

use crate::support::kernels::Kernels;
use crate::support::{BYTES, all, axpy, bytes, code, poisoned, random, random_word, words};

on_every_driver! {
    a_mapped_page_is_memory_for_kernels,
    a_taken_hint_gives_other_addresses,
    reserved_addresses_cost_no_memory,
    a_page_has_its_memory_until_it_is_unmapped_and_released,
    a_page_that_is_not_mapped_goes_with_its_release,
    nothing_can_be_mapped_over_a_mapping,
    a_page_is_a_multiple_of_the_granularity,
    an_absurd_page_is_refused_with_the_numbers,
    a_graph_replays_on_a_page_that_was_mapped_anew,
    the_range_of_a_mapped_address_contains_its_page,
    a_global_capture_allows_mapping,
    waiting_for_the_device_waits_for_every_stream,
    waiting_for_the_device_is_refused_while_a_stream_captures,
    pinned_memory_takes_part_in_copies,
    memory_cannot_be_pinned_twice,
}

/// A base that no pool of a test asks for.
const HINT: Address = Address(0x6f00_0000_0000);

/// Reserved addresses; freed when dropped.
struct Range {
    device: Device,
    start: Address,
    bytes: u64,
    unit: u64,
}

impl Range {
    /// Reserve so many times the granularity.
    fn new(device: &Device, units: u64, hint: Address) -> Self {
        let unit = device.driver().page_granularity().unwrap();
        let bytes = units * unit;
        Self {
            start: device.driver().address_reserve(bytes, hint).unwrap(),
            device: device.clone(),
            bytes,
            unit,
        }
    }

    /// Map a page over so many units.
    fn map(&self, unit: u64, units: u64, page: PageHandle) -> Result<()> {
        let at = self.start.offset(unit * self.unit);
        let driver = self.device.driver();
        // SAFETY: the callers pass a live page of so many units.
        unsafe { driver.page_map(at, units * self.unit, page) }
    }

    fn unmap(&self, unit: u64, units: u64) {
        let at = self.start.offset(unit * self.unit);
        let driver = self.device.driver();
        // SAFETY: the callers have mapped it so, and wait for what they enqueue.
        unsafe { driver.page_unmap(at, units * self.unit) };
    }

    fn page(&self, units: u64) -> PageHandle {
        let driver = self.device.driver();
        driver.page_create(units * self.unit).unwrap()
    }

    /// Return the start of a unit as a test's memory.
    fn memory(&self, unit: u64) -> Memory {
        let at = self.start.offset(unit * self.unit);
        // SAFETY: the callers use it only while a page is mapped there.
        unsafe { Memory::from_raw(&self.device, at, BYTES) }
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: reserved by `new`; a test that passes has unmapped everything.
        unsafe { self.device.driver().address_free(self.start, self.bytes) };
    }
}

fn release(device: &Device, page: PageHandle) {
    // SAFETY: the callers release each page once.
    unsafe { device.driver().page_release(page) };
}

fn free(device: &Device) -> u64 {
    device.memory_info().unwrap().free
}

fn a_mapped_page_is_memory_for_kernels(device: &Device) {
    let kernels = Kernels::load(device);
    let stream = Stream::new(device).unwrap();
    let range = Range::new(device, 4, Address(0));
    let page = range.page(2);
    range.map(1, 2, page).unwrap();
    let (x, y) = (range.memory(1), range.memory(2));
    x.write(&bytes(&random(1))).unwrap();
    y.write(&bytes(&random(2))).unwrap();
    stream.enqueue(&kernels.axpy(3, &x, &y)).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(3, &random(1), &random(2)));
    range.unmap(1, 2);
    release(device, page);
}

fn a_taken_hint_gives_other_addresses(device: &Device) {
    let first = Range::new(device, 8, HINT);
    let second = Range::new(device, 8, HINT);
    let (a, b) = (first.start.0, second.start.0);
    assert!(a + first.bytes <= b || b + second.bytes <= a);
    assert_eq!(b % second.unit, 0);
}

fn reserved_addresses_cost_no_memory(device: &Device) {
    let before = free(device);
    let unit = device.driver().page_granularity().unwrap();
    let _range = Range::new(device, (64 << 30) / unit, Address(0));
    assert!(before.saturating_sub(free(device)) < 64 << 20);
}

fn a_page_has_its_memory_until_it_is_unmapped_and_released(device: &Device) {
    let range = Range::new(device, 32, Address(0));
    let before = free(device);
    let page = range.page(32);
    assert!(before - free(device) >= range.bytes);
    range.map(0, 32, page).unwrap();
    release(device, page);
    let during = free(device);
    assert!(before - during >= range.bytes);
    let memory = range.memory(31);
    memory.write(&bytes(&random(3))).unwrap();
    assert_eq!(words(&memory), random(3));
    range.unmap(0, 32);
    assert!(free(device) >= during + range.bytes);
}

fn a_page_that_is_not_mapped_goes_with_its_release(device: &Device) {
    let bytes = 32 * device.driver().page_granularity().unwrap();
    let page = device.driver().page_create(bytes).unwrap();
    let during = free(device);
    release(device, page);
    assert!(free(device) >= during + bytes);
}

fn nothing_can_be_mapped_over_a_mapping(device: &Device) {
    let range = Range::new(device, 4, Address(0));
    let (page, other) = (range.page(2), range.page(2));
    range.map(1, 2, page).unwrap();
    let memory = range.memory(2);
    memory.write(&bytes(&random(4))).unwrap();
    for unit in [0, 1, 2] {
        assert_eq!(code(range.map(unit, 2, other)), Code::INVALID_VALUE);
    }
    assert_eq!(words(&memory), random(4));
    range.unmap(1, 2);
    release(device, page);
    release(device, other);
}

fn a_page_is_a_multiple_of_the_granularity(device: &Device) {
    let unit = device.driver().page_granularity().unwrap();
    for bytes in [0, 512, unit + 4096] {
        let refused = device.driver().page_create(bytes);
        assert_eq!(code(refused), Code::INVALID_VALUE);
    }
}

fn an_absurd_page_is_refused_with_the_numbers(device: &Device) {
    let total = device.memory_info().unwrap().total;
    let unit = device.driver().page_granularity().unwrap();
    let absurd = (2 * total).next_multiple_of(unit);
    let refused = crate::support::error(device.driver().page_create(absurd));
    let cg_core::Error::OutOfMemory {
        requested, limit, ..
    } = refused
    else {
        panic!("{refused}")
    };
    assert_eq!((requested, limit), (absurd, total));
}

fn a_graph_replays_on_a_page_that_was_mapped_anew(device: &Device) {
    let kernels = Kernels::load(device);
    let stream = Stream::new(device).unwrap();
    let range = Range::new(device, 1, Address(0));
    let value = random_word(5);
    let out = poisoned(device);
    let page = range.page(1);
    range.map(0, 1, page).unwrap();
    let memory = range.memory(0);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&kernels.fill(&memory, value)).unwrap();
    let copy = cg_core::Work::memcpy(&out, &memory).unwrap();
    stream.enqueue(&copy).unwrap();
    let exec = capture
        .finish()
        .unwrap()
        .instantiate(InstantiateFlags::default())
        .unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    range.unmap(0, 1);
    release(device, page);
    let other = range.page(1);
    range.map(0, 1, other).unwrap();
    memory.write(&bytes(&random(6))).unwrap();
    out.write(&bytes(&random(7))).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!((words(&memory), words(&out)), (all(value), all(value)));
    drop(exec);
    range.unmap(0, 1);
    release(device, other);
}

fn the_range_of_a_mapped_address_contains_its_page(device: &Device) {
    let range = Range::new(device, 4, Address(0));
    let page = range.page(2);
    range.map(1, 2, page).unwrap();
    let start = range.start.offset(range.unit);
    let (base, bytes) = device
        .memory_range(start.offset(range.unit + 4))
        .unwrap()
        .unwrap();
    assert!(base <= start && base.0 + bytes >= start.0 + 2 * range.unit);
    range.unmap(1, 2);
    release(device, page);
}

fn a_global_capture_allows_mapping(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let range = Range::new(device, 1, Address(0));
    let page = range.page(1);
    range.map(0, 1, page).unwrap();
    range.unmap(0, 1);
    release(device, page);
    drop(range);
    capture.finish().unwrap();
}

fn waiting_for_the_device_waits_for_every_stream(device: &Device) {
    let kernels = Kernels::load(device);
    let streams = [Stream::new(device).unwrap(), Stream::new(device).unwrap()];
    let outs = [poisoned(device), poisoned(device)];
    for (stream, out) in streams.iter().zip(&outs) {
        stream.enqueue(&kernels.slow_fill(out, 9)).unwrap();
    }
    device.synchronize().unwrap();
    for (stream, out) in streams.iter().zip(&outs) {
        assert!(stream.is_idle().unwrap());
        assert_eq!(words(out), all(9));
    }
}

fn waiting_for_the_device_is_refused_while_a_stream_captures(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for mode in [CaptureMode::Global, CaptureMode::Relaxed] {
        let capture = Capture::begin(&stream, mode).unwrap();
        let refused = device.driver().synchronize();
        assert_eq!(code(refused), Code::STREAM_CAPTURE_UNSUPPORTED);
        // What becomes of the capture is the driver's affair.
        drop(capture.finish());
        // The device itself asks first: nothing breaks.
        let capture = Capture::begin(&stream, mode).unwrap();
        assert!(device.synchronize().is_err());
        capture.finish().unwrap();
        device.synchronize().unwrap();
    }
}

fn pinned_memory_takes_part_in_copies(device: &Device) {
    let memory = poisoned(device);
    let mut host = bytes(&random(8));
    let start = host.as_mut_ptr();
    // SAFETY: `host` stays until it is unpinned below.
    unsafe { device.driver().host_pin(start, host.len()) }.unwrap();
    memory.write(&host).unwrap();
    // SAFETY: pinned above; the copy has waited.
    unsafe { device.driver().host_unpin(start) };
    assert_eq!(words(&memory), random(8));
}

fn memory_cannot_be_pinned_twice(device: &Device) {
    let mut host = vec![0_u8; 1 << 20];
    let start = host.as_mut_ptr();
    // SAFETY: `host` stays until it is unpinned below.
    unsafe { device.driver().host_pin(start, host.len()) }.unwrap();
    // SAFETY: as above; it is refused.
    let again = unsafe { device.driver().host_pin(start, host.len()) };
    assert_eq!(code(again), Code::HOST_MEMORY_ALREADY_REGISTERED);
    // SAFETY: pinned above.
    unsafe { device.driver().host_unpin(start) };
}
