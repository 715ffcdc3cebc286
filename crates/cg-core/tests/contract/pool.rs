//! Pools: addresses that stay, memory that goes and comes, and graphs that stay valid.

use cg_core::{
    Address, Capture, CaptureMode, Device, Error, Exec, InstantiateFlags, Keep, Memory, Pool,
    Stream, Work,
};

use crate::support::kernels::Kernels;
use crate::support::{
    BYTES, POISON, all, axpy, bytes, error, is_invalid, poisoned, random, random_word, words,
};

on_every_driver! {
    blocks_are_memory_for_kernels,
    a_pool_lies_where_it_is_told_to,
    pools_of_a_device_lie_at_the_same_addresses_again,
    a_pool_grows_by_further_ranges,
    a_pool_covers_the_bytes_of_its_segments,
    a_capture_in_any_mode_can_make_a_pool_grow,
    memory_comes_back_at_the_same_addresses_after_a_pause,
    a_pause_can_keep_the_contents,
    a_paused_pool_has_no_memory,
    memory_of_the_host_stays_for_the_next_pause,
    a_graph_captured_in_a_pool_replays_right_after_the_resume,
    a_replay_in_a_paused_pool_is_refused_and_harms_nothing,
    a_fed_replay_into_a_paused_pool_is_refused,
    a_pause_waits_for_the_work_of_the_pool,
    a_pause_is_refused_while_a_stream_captures,
    a_trim_gives_back_what_is_wholly_free,
    nothing_is_trimmed_that_a_graph_knows,
    a_whole_segment_is_memory_until_it_is_released,
    a_segment_that_a_graph_knows_goes_with_the_graph,
    a_segment_released_beside_a_capture_goes_after_it,
    segments_that_came_back_together_go_together,
    a_pool_keeps_to_its_limit,
}

/// A base that no pool asks for by itself.
const BASE: Address = Address(0x6e00_0000_0000);

/// Bytes that are seen in what the device has free.
const LARGE: u64 = 16 << 20;

fn block(pool: &Pool, stream: &Stream) -> Memory {
    pool.allocate(stream, BYTES).unwrap()
}

fn written(pool: &Pool, stream: &Stream, seed: u64) -> Memory {
    let memory = block(pool, stream);
    memory.write(&bytes(&random(seed))).unwrap();
    memory
}

fn is_paused<T>(result: cg_core::Result<T>) -> bool {
    matches!(error(result), Error::Paused { .. })
}

fn free(device: &Device) -> u64 {
    device.memory_info().unwrap().free
}

/// `y = a * x + y`, as a graph whose template is gone.
fn sum(stream: &Stream, a: u32, x: &Memory, y: &Memory) -> Exec {
    let kernels = Kernels::load(stream.device());
    let capture = Capture::begin(stream, CaptureMode::Global).unwrap();
    stream.enqueue(&kernels.axpy(a, x, y)).unwrap();
    let template = capture.finish().unwrap();
    template.instantiate(InstantiateFlags::default()).unwrap()
}

fn blocks_are_memory_for_kernels(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let (x, y) = (written(&pool, &stream, 1), written(&pool, &stream, 2));
    let work = Kernels::load(device).axpy(5, &x, &y);
    stream.enqueue(&work).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(5, &random(1), &random(2)));
}

fn a_pool_lies_where_it_is_told_to(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for _ in 0..2 {
        let pool = Pool::builder(device).base(BASE).build();
        assert_eq!(block(&pool, &stream).address(), BASE);
        assert_eq!(pool.ranges(), [(BASE, 64 << 30)]);
    }
    let first = Pool::builder(device).base(BASE).build();
    let second = Pool::builder(device).base(BASE).build();
    let (first, second) = (block(&first, &stream), block(&second, &stream));
    assert_eq!(first.address(), BASE);
    assert_ne!(second.address(), BASE);
}

fn pools_of_a_device_lie_at_the_same_addresses_again(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let places = || {
        let pools = [Pool::new(device), Pool::new(device)];
        let blocks: Vec<Memory> = pools.iter().map(|pool| block(pool, &stream)).collect();
        blocks.iter().map(Memory::address).collect::<Vec<_>>()
    };
    let first = places();
    assert_eq!(first[0].0 >> 40, 0x6B);
    assert_eq!(first[1].0 - first[0].0, 64 << 30);
    assert_eq!(places(), first);
}

fn a_pool_grows_by_further_ranges(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let unit = device.driver().page_granularity().unwrap();
    let builder = Pool::builder(device).base(BASE).range_bytes(2 * unit);
    let pool = builder.build();
    let blocks: Vec<Memory> = (0..3)
        .map(|_| pool.allocate(&stream, unit).unwrap())
        .collect();
    let large = pool.allocate(&stream, 5 * unit).unwrap();
    let bytes: Vec<u64> = pool.ranges().iter().map(|(_, bytes)| *bytes).collect();
    assert_eq!(bytes, [2 * unit, 2 * unit, 5 * unit]);
    assert_eq!(pool.stats().addresses, 9 * unit);
    // Where they lie is the driver's affair: it keeps to a base only for large ranges.
    let lies_in_a_range = |block: &Memory| {
        let (start, end) = (block.address().0, block.address().0 + block.bytes());
        let ranges = pool.ranges();
        let mut inside = ranges.iter().map(|(at, bytes)| (at.0, at.0 + bytes));
        inside.any(|(first, last)| first <= start && end <= last)
    };
    assert!(blocks.iter().chain([&large]).all(lies_in_a_range));
    for (seed, block) in (1..).zip(blocks.iter().chain([&large])) {
        block.write(&crate::support::bytes(&random(seed))).unwrap();
        assert_eq!(words(&block.slice(0..BYTES).unwrap()), random(seed));
    }
}

fn a_pool_covers_the_bytes_of_its_segments(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let (block, other) = (block(&pool, &stream), block(&Pool::new(device), &stream));
    let (start, end) = (block.address().0, block.address().0 + pool.reserved());
    let covers = |address| pool.covers(Address(address));
    assert!([start, start + 1, end - 1].into_iter().all(covers));
    assert!(
        ![0, start - 1, end, other.address().0]
            .into_iter()
            .any(covers)
    );
}

fn a_capture_in_any_mode_can_make_a_pool_grow(device: &Device) {
    let stream = Stream::new(device).unwrap();
    for mode in [
        CaptureMode::Global,
        CaptureMode::ThreadLocal,
        CaptureMode::Relaxed,
    ] {
        let pool = Pool::new(device);
        let capture = Capture::begin(&stream, mode).unwrap();
        let block = block(&pool, &stream);
        stream.enqueue(&Work::memset(&block, 3).unwrap()).unwrap();
        let template = capture.finish().unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        exec.replay(&stream).unwrap();
        stream.synchronize().unwrap();
        assert_eq!(words(&block), all(3));
    }
}

fn memory_comes_back_at_the_same_addresses_after_a_pause(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let memory = written(&pool, &stream, 3);
    let (segments, ranges) = (pool.stats().segments, pool.ranges());
    for keep in [Keep::Discard, Keep::Host] {
        pool.pause(keep).unwrap();
        assert!(pool.is_paused());
        pool.resume().unwrap();
        assert!(!pool.is_paused());
        assert_eq!(
            (&pool.stats().segments, &pool.ranges()),
            (&segments, &ranges)
        );
        memory.write(&bytes(&random(4))).unwrap();
        assert_eq!(words(&memory), random(4));
    }
}

fn a_pause_can_keep_the_contents(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let other = Stream::new(device).unwrap();
    let large = pool.allocate(&stream, 6 << 20).unwrap();
    let end = large.slice(large.bytes() - BYTES..large.bytes()).unwrap();
    end.write(&bytes(&random(1))).unwrap();
    let blocks: Vec<Memory> = (2..6).map(|seed| written(&pool, &other, seed)).collect();
    for _ in 0..2 {
        pool.pause(Keep::Host).unwrap();
        pool.resume().unwrap();
        assert_eq!(words(&end), random(1));
        for (seed, block) in (2..).zip(&blocks) {
            assert_eq!(words(block), random(seed));
        }
    }
}

fn a_paused_pool_has_no_memory(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let before = free(device);
    let block = pool.allocate(&stream, LARGE).unwrap();
    let during = free(device);
    assert!(before - during >= LARGE);
    for keep in [Keep::Discard, Keep::Host] {
        pool.pause(keep).unwrap();
        assert!(free(device) >= during + LARGE);
        let stats = pool.stats();
        assert_eq!((stats.mapped, stats.reserved), (0, LARGE));
        pool.resume().unwrap();
        assert!(before - free(device) >= LARGE);
        assert_eq!(pool.stats().mapped, LARGE);
    }
    pool.pause(Keep::Discard).unwrap();
    drop(block);
    assert_eq!(pool.stats().in_use, 0);
    drop(pool);
    assert!(free(device) >= during + LARGE);
}

fn memory_of_the_host_stays_for_the_next_pause(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let block = pool.allocate(&stream, LARGE).unwrap();
    let end = block.slice(LARGE - BYTES..LARGE).unwrap();
    let kept = || pool.stats().kept;
    let cycle = |keep| {
        pool.pause(keep).unwrap();
        let during = kept();
        pool.resume().unwrap();
        (during, kept())
    };
    assert_eq!(cycle(Keep::Discard), (0, 0));
    for seed in 1..4 {
        end.write(&bytes(&random(seed))).unwrap();
        assert_eq!(cycle(Keep::Host), (LARGE, LARGE));
        assert_eq!(words(&end), random(seed));
    }
    assert_eq!(cycle(Keep::Discard), (0, 0));
    assert_eq!(cycle(Keep::Host), (LARGE, LARGE));
    assert_eq!((pool.trim().unwrap(), kept()), (0, 0));
    assert_eq!(cycle(Keep::Host), (LARGE, LARGE));
}

fn a_graph_captured_in_a_pool_replays_right_after_the_resume(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let (x, y) = (written(&pool, &stream, 1), written(&pool, &stream, 2));
    let exec = sum(&stream, 3, &x, &y);
    pool.pause(Keep::Host).unwrap();
    pool.resume().unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(3, &random(1), &random(2)));
    pool.pause(Keep::Discard).unwrap();
    pool.resume().unwrap();
    x.write(&bytes(&random(4))).unwrap();
    y.write(&bytes(&random(5))).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(3, &random(4), &random(5)));
}

fn a_replay_in_a_paused_pool_is_refused_and_harms_nothing(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let (x, y) = (written(&pool, &stream, 1), written(&pool, &stream, 2));
    let exec = sum(&stream, 3, &x, &y);
    // This one knows the pool, and none of its blocks.
    let out = poisoned(device);
    let template = cg_core::Template::new(device).unwrap();
    template.add(&Work::memset(&out, 1).unwrap(), &[]).unwrap();
    let free = template.instantiate(InstantiateFlags::default()).unwrap();
    template.retain(pool.retained());
    let held = template.instantiate(InstantiateFlags::default()).unwrap();
    pool.pause(Keep::Host).unwrap();
    assert!(is_paused(exec.replay(&stream)));
    assert!(is_paused(held.replay(&stream)));
    assert_eq!(words(&out), all(POISON));
    free.replay(&stream).unwrap();
    assert!(is_paused(stream.enqueue(&Work::memset(&x, 1).unwrap())));
    assert!(is_paused(x.read()));
    assert!(is_paused(x.write(&[1])));
    assert!(is_paused(pool.allocate(&stream, 4)));
    assert!(is_paused(pool.allocate_segment(4)));
    assert!(is_paused(pool.trim()));
    assert!(is_paused(pool.pause(Keep::Host)));
    stream.synchronize().unwrap();
    assert_eq!(words(&out), all(1));
    pool.resume().unwrap();
    assert!(is_invalid(pool.resume()));
    assert_eq!((words(&x), words(&y)), (random(1), random(2)));
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(3, &random(1), &random(2)));
}

fn a_fed_replay_into_a_paused_pool_is_refused(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let slot = written(&pool, &stream, 1);
    let source = crate::support::memory(device, &random(2));
    let template = std::sync::Arc::new(cg_core::Template::new(device).unwrap());
    let inputs = cg_core::Inputs::add(&template, std::slice::from_ref(&slot), &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let sources = [source.address()];
    let feed = crate::support::raw::feed(&inputs, &sources, &[]).unwrap();
    pool.pause(Keep::Host).unwrap();
    assert!(is_paused(exec.replay_with(&feed, &stream)));
    pool.resume().unwrap();
    assert_eq!(words(&slot), random(1));
    exec.replay_with(&feed, &stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&slot), random(2));
}

fn a_pause_waits_for_the_work_of_the_pool(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let kernels = Kernels::load(device);
    let block = block(&pool, &stream);
    let value = random_word(7);
    stream.enqueue(&kernels.slow_fill(&block, value)).unwrap();
    pool.pause(Keep::Host).unwrap();
    pool.resume().unwrap();
    assert_eq!(words(&block), all(value));
}

fn a_pause_is_refused_while_a_stream_captures(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let block = written(&pool, &stream, 8);
    for mode in [CaptureMode::Global, CaptureMode::Relaxed] {
        let capture = Capture::begin(&stream, mode).unwrap();
        let refused = error(pool.pause(Keep::Discard));
        assert!(matches!(refused, Error::Capture { .. }), "{refused}");
        assert!(!pool.is_paused());
        stream.enqueue(&Work::memset(&block, 1).unwrap()).unwrap();
        capture.finish().unwrap();
    }
    assert_eq!(words(&block), random(8));
}

fn a_trim_gives_back_what_is_wholly_free(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    assert_eq!(pool.trim().unwrap(), 0);
    let small = written(&pool, &stream, 1);
    let large = pool.allocate(&stream, LARGE).unwrap();
    let (at, during) = (large.address(), free(device));
    assert_eq!(pool.trim().unwrap(), 0);
    drop(large);
    assert_eq!(pool.trim().unwrap(), LARGE);
    assert!(free(device) >= during + LARGE);
    assert_eq!(pool.stats().segments.len(), 1);
    assert_eq!(words(&small), random(1));
    let again = pool.allocate(&stream, LARGE).unwrap();
    assert_eq!(again.address(), at);
    drop(again);
    // Somebody looks at the segment as a whole.
    let segments = pool.segments();
    assert_eq!(pool.trim().unwrap(), 0);
    drop(segments);
    assert_eq!(pool.trim().unwrap(), LARGE);
}

fn nothing_is_trimmed_that_a_graph_knows(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let (x, y) = (written(&pool, &stream, 1), written(&pool, &stream, 2));
    let exec = sum(&stream, 3, &x, &y);
    exec.retain(pool.retained());
    exec.replay(&stream).unwrap();
    let spare = pool.allocate(&stream, LARGE).unwrap();
    drop((x, y, spare));
    assert_eq!(pool.trim().unwrap(), 0);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    exec.replay(&stream).unwrap();
    drop(exec);
    let all = pool.stats().reserved;
    assert_eq!(pool.trim().unwrap(), all);
    assert_eq!(pool.stats().reserved, 0);
}

#[expect(unsafe_code, reason = "names an address that the test holds")]
fn a_whole_segment_is_memory_until_it_is_released(device: &Device) {
    let pool = Pool::new(device);
    let unit = device.driver().page_granularity().unwrap();
    let address = pool.allocate_segment(20 << 20).unwrap();
    assert_eq!(address.0 % unit, 0);
    let during = free(device);
    // SAFETY: the segment is released only below.
    let memory = unsafe { Memory::from_raw(device, address, BYTES) };
    memory.write(&bytes(&random(1))).unwrap();
    assert_eq!(words(&memory), random(1));
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.segments[0].stream), (20 << 20, None));
    assert_eq!(pool.trim().unwrap(), 0);
    assert!(!pool.release_segment(address.offset(unit)));
    assert!(pool.release_segment(address));
    assert!(!pool.release_segment(address));
    assert!(free(device) >= during + (20 << 20));
    assert_eq!((pool.stats().in_use, pool.stats().reserved), (0, 0));
    assert_eq!(pool.allocate_segment(1).unwrap(), address);
    assert_eq!(pool.stats().reserved, unit);
    assert!(pool.release_segment(address));
}

/// Return the bytes of a pool: in use, mapped and leaving.
fn sizes(pool: &Pool) -> [u64; 3] {
    let stats = pool.stats();
    [stats.in_use, stats.mapped, stats.leaving]
}

fn a_segment_that_a_graph_knows_goes_with_the_graph(device: &Device) {
    let pool = Pool::new(device);
    let address = pool.allocate_segment(LARGE).unwrap();
    let (held, also) = (pool.retained(), pool.retained());
    let during = free(device);
    assert!(pool.release_segment(address));
    drop(held);
    assert_eq!(sizes(&pool), [0, LARGE, LARGE]);
    drop(also);
    assert_eq!(sizes(&pool), [0, 0, 0]);
    assert!(free(device) >= during + LARGE);
}

fn a_segment_released_beside_a_capture_goes_after_it(device: &Device) {
    let (pool, stream) = (Pool::new(device), Stream::new(device).unwrap());
    let [first, second] = [1, 2].map(|_| pool.allocate_segment(LARGE).unwrap());
    let word = block(&Pool::new(device), &stream);
    // As somebody else begins one: the core has no guard of it.
    let mark = device.mark_capture();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&Work::memset(&word, 7).unwrap()).unwrap();
    assert!(pool.release_segment(first));
    assert_eq!(sizes(&pool), [LARGE, 2 * LARGE, LARGE]);
    capture.finish().unwrap();
    let refused = error(pool.pause(Keep::Discard));
    assert!(matches!(refused, Error::Capture { code: None, .. }));
    assert!(!pool.is_paused());
    drop(mark);
    assert_eq!(pool.trim().unwrap(), LARGE);
    assert!(pool.release_segment(second));
    assert_eq!(sizes(&pool), [0, 0, 0]);
}

#[expect(unsafe_code, reason = "names an address that the test holds")]
fn segments_that_came_back_together_go_together(device: &Device) {
    let pool = Pool::builder(device).limit(4 * LARGE).build();
    let segments = [1, 2, 3].map(|_| pool.allocate_segment(LARGE).unwrap());
    // SAFETY: the segments are released only below.
    let last = unsafe { Memory::from_raw(device, segments[2], BYTES) };
    last.write(&bytes(&random(1))).unwrap();
    pool.pause(Keep::Host).unwrap();
    assert_eq!(
        (pool.stats().kept, sizes(&pool)),
        (3 * LARGE, [3 * LARGE, 0, 0])
    );
    pool.resume().unwrap();
    assert!(pool.release_segment(segments[0]));
    assert!(pool.release_segment(segments[1]));
    assert_eq!(words(&last), random(1));
    assert_eq!(sizes(&pool), [LARGE, 3 * LARGE, 0]);
    // What is still mapped counts, and its addresses are nobody else's.
    let other = pool.allocate_segment(LARGE).unwrap();
    assert!(!segments.contains(&other));
    let refused = error(pool.allocate_segment(1));
    assert!(matches!(refused, Error::OutOfMemory { reserved, .. } if reserved == 4 * LARGE));
    assert!(pool.release_segment(segments[2]));
    assert_eq!(sizes(&pool), [LARGE, LARGE, 0]);
    assert_eq!(pool.allocate_segment(LARGE).unwrap(), segments[0]);
}

fn a_pool_keeps_to_its_limit(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let unit = device.driver().page_granularity().unwrap();
    let pool = Pool::builder(device).limit(3 * unit).build();
    let first = pool.allocate(&stream, unit + 4).unwrap();
    let expected = Error::OutOfMemory {
        requested: 2 * unit,
        in_use: unit + 512,
        reserved: 2 * unit,
        limit: 3 * unit,
    };
    assert_eq!(error(pool.allocate(&stream, 2 * unit)), expected);
    assert_eq!(error(pool.allocate_segment(2 * unit)), expected);
    pool.allocate(&stream, unit - 512).unwrap();
    let second = pool.allocate_segment(unit).unwrap();
    // What it needs is a segment.
    let refused = error(pool.allocate_segment(1));
    assert!(matches!(refused, Error::OutOfMemory { requested, .. } if requested == unit));
    assert!(pool.release_segment(second));
    drop(first);
    assert_eq!(pool.trim().unwrap(), 2 * unit);
    pool.allocate(&stream, 3 * unit).unwrap();
}
