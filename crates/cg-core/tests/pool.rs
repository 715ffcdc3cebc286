//! Pools: blocks do not overlap, bytes are conserved, and what is given back is whole again.

mod support;

use cg_core::{
    Address, Capture, CaptureMode, Error, FreeList, InstantiateFlags, Keep, Live, Memory, Pool,
    PoolStats, Sim, Stream, Template, Work,
};
use proptest::prelude::*;
use proptest::sample::Index;

use support::{all, error, is_foreign, is_invalid, other_device, sim, sim_from, words};

/// Bytes of the smallest segment.
const SEGMENT: u64 = 2 << 20;

/// A call of a free list or a pool.
#[derive(Debug, Clone)]
enum Step {
    /// Takes so many bytes, for one of the streams.
    Take(u64, usize),
    /// Gives one of the blocks back.
    Give(Index),
}

fn steps(most: u64) -> impl Strategy<Value = Vec<Step>> {
    let take = (1..=most, 0..2_usize).prop_map(|(bytes, stream)| Step::Take(bytes, stream));
    let give = any::<Index>().prop_map(Step::Give);
    prop::collection::vec(prop_oneof![3 => take, 2 => give], 1..60)
}

/// Return whether no two of the ranges, as starts and bytes, share a byte.
fn are_apart(ranges: impl IntoIterator<Item = (u64, u64)>) -> bool {
    let mut ranges: Vec<(u64, u64)> = ranges.into_iter().collect();
    ranges.sort_unstable();
    ranges
        .windows(2)
        .all(|pair| pair[0].0 + pair[0].1 <= pair[1].0)
}

proptest! {
    #[test]
    fn a_free_list_conserves_its_bytes(bytes in 1..5000_u64, steps in steps(1500)) {
        let mut list = FreeList::new(bytes);
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Take(wanted, _) => {
                    let fit = list.best_fit(wanted);
                    let offset = list.take(wanted);
                    prop_assert_eq!(fit.is_some(), offset.is_some());
                    prop_assert!(fit.is_none_or(|fit| fit >= wanted));
                    taken.extend(offset.map(|offset| (offset, wanted)));
                }
                Step::Give(index) if !taken.is_empty() => {
                    let (offset, size) = taken.swap_remove(index.index(taken.len()));
                    list.give(offset, size);
                }
                Step::Give(_) => {}
            }
            let in_use: u64 = taken.iter().map(|(_, size)| size).sum();
            prop_assert_eq!(list.free_bytes() + in_use, bytes);
            prop_assert_eq!(list.is_whole(), taken.is_empty());
            prop_assert!(are_apart(taken.iter().copied()));
            prop_assert!(taken.iter().all(|(offset, size)| offset + size <= bytes));
        }
        for (offset, size) in taken {
            list.give(offset, size);
        }
        prop_assert_eq!(list, FreeList::new(bytes));
    }

    #[test]
    fn a_free_list_takes_from_the_smallest_range_that_fits(
        sizes in prop::collection::vec(1..100_u64, 2..20),
        wanted in 1..100_u64,
    ) {
        // Free ranges of these sizes, with a taken byte behind each.
        let mut list = FreeList::new(sizes.iter().map(|size| size + 1).sum());
        let starts: Vec<u64> = sizes
            .iter()
            .map(|size| {
                let start = list.take(*size).unwrap();
                list.take(1).unwrap();
                start
            })
            .collect();
        for (start, size) in starts.iter().zip(&sizes) {
            list.give(*start, *size);
        }
        let best = sizes.iter().copied().filter(|size| *size >= wanted).min();
        prop_assert_eq!(list.best_fit(wanted), best);
        let at = list.take(wanted).and_then(|at| starts.iter().position(|start| *start == at));
        prop_assert_eq!(at.map(|at| sizes[at]), best);
    }
}

proptest! {
    #[test]
    fn a_free_list_takes_exact_bytes_only_where_all_are_free(
        bytes in 1..500_u64,
        wanted in prop::collection::vec((0..600_u64, 0..200_u64), 1..30),
    ) {
        let mut list = FreeList::new(bytes);
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for (offset, size) in wanted {
            let is_free = size > 0
                && offset + size <= bytes
                && are_apart(taken.iter().copied().chain([(offset, size)]));
            prop_assert_eq!(list.take_at(offset, size), is_free);
            taken.extend(is_free.then_some((offset, size)));
            let in_use: u64 = taken.iter().map(|(_, size)| size).sum();
            prop_assert_eq!(list.free_bytes() + in_use, bytes);
            prop_assert!(list.largest() <= list.free_bytes());
        }
        for (offset, size) in taken {
            list.give(offset, size);
        }
        prop_assert_eq!(list, FreeList::new(bytes));
    }
}

/// A block with the stream that it is for.
type Taken = (Memory, usize);

/// Return the bytes that a pool counts for a block.
fn counted(memory: &Memory) -> u64 {
    memory.bytes().next_multiple_of(512)
}

/// Check all that holds for a pool at any time.
fn check_pool(pool: &Pool, taken: &[Taken]) -> Result<(), TestCaseError> {
    let range = |memory: &Memory| (memory.address().0, memory.bytes());
    let segments = pool.segments();
    prop_assert!(are_apart(taken.iter().map(|(memory, _)| range(memory))));
    prop_assert!(are_apart(segments.iter().map(range)));
    for segment in &segments {
        let (start, bytes) = range(segment);
        let end = start + bytes;
        let inside = |memory: &Memory| (start..end).contains(&memory.address().0);
        let own: Vec<&Taken> = taken.iter().filter(|(memory, _)| inside(memory)).collect();
        prop_assert!(
            own.iter()
                .all(|(memory, _)| memory.address().0 + memory.bytes() <= end)
        );
        prop_assert!(own.iter().all(|(_, stream)| *stream == own[0].1));
    }
    prop_assert!(
        taken
            .iter()
            .all(|(memory, _)| memory.address().0 % 512 == 0)
    );
    let stats = pool.stats();
    let in_use: u64 = taken.iter().map(|(memory, _)| counted(memory)).sum();
    prop_assert_eq!(stats.in_use, in_use);
    prop_assert!(stats.peak >= in_use && stats.reserved >= in_use);
    prop_assert_eq!(stats.segments.len(), segments.len());
    prop_assert_eq!(stats.mapped, stats.reserved);
    prop_assert_eq!(
        stats.reserved,
        segments.iter().map(Memory::bytes).sum::<u64>()
    );
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn blocks_of_a_pool_do_not_overlap(steps in steps(600_000)) {
        let (sim, device) = sim();
        let pool = Pool::new(&device);
        let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
        let mut taken: Vec<Taken> = Vec::new();
        let mut peak = 0;
        for step in steps {
            match step {
                Step::Take(bytes, stream) => {
                    let memory = pool.allocate(&streams[stream], bytes).unwrap();
                    prop_assert_eq!(memory.bytes(), bytes);
                    taken.push((memory, stream));
                }
                Step::Give(index) if !taken.is_empty() => {
                    taken.swap_remove(index.index(taken.len()));
                }
                Step::Give(_) => {}
            }
            check_pool(&pool, &taken)?;
            peak = peak.max(pool.stats().in_use);
        }
        prop_assert_eq!(pool.stats().peak, peak);
        taken.clear();
        prop_assert_eq!(pool.stats().in_use, 0);
        drop(pool);
        prop_assert_eq!(sim.live(), Live { streams: 2, ..Live::default() });
    }
}

#[test]
fn a_block_that_was_dropped_is_given_out_again_to_its_stream_only() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let (first, second) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let block = pool.allocate(&first, 4000).unwrap();
    let address = block.address();
    drop(block);
    assert_ne!(pool.allocate(&second, 4000).unwrap().address(), address);
    assert_eq!(pool.allocate(&first, 4000).unwrap().address(), address);
    assert_eq!((pool.stats().segments.len(), sim.live().pages), (2, 2));
}

#[test]
fn a_block_is_kept_by_its_slices_and_by_work_in_flight() {
    let (_sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = pool.allocate(&stream, 4000).unwrap();
    let address = block.address();
    let slice = block.slice(0..40).unwrap();
    drop(block);
    assert_eq!(pool.stats().in_use, 4096);
    stream.enqueue(&Work::memset(&slice, 1).unwrap()).unwrap();
    drop(slice);
    assert_ne!(pool.allocate(&stream, 4000).unwrap().address(), address);
    stream.synchronize().unwrap();
    assert_eq!(pool.stats().in_use, 0);
    assert_eq!(pool.allocate(&stream, 4000).unwrap().address(), address);
}

#[test]
fn a_template_and_its_execs_keep_their_blocks() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = pool.allocate(&stream, 4000).unwrap();
    let out = support::poisoned(&device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&Work::memset(&block, 6).unwrap()).unwrap();
    stream
        .enqueue(&Work::memcpy(&out, &block).unwrap())
        .unwrap();
    drop(block);
    let template = capture.finish().unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    drop((template, pool.clone()));
    assert_eq!(pool.stats().in_use, 4096);
    drop(pool);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!((words(&out), sim.live().pages), (all(6), 1));
    drop(exec);
    assert_eq!((sim.live().pages, sim.live().ranges), (0, 0));
}

#[test]
fn a_capture_in_any_mode_can_use_memory_that_the_pool_has() {
    let (_sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    drop(pool.allocate(&stream, 4).unwrap());
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let block = pool.allocate(&stream, 4000).unwrap();
    stream.enqueue(&Work::memset(&block, 1).unwrap()).unwrap();
    capture.finish().unwrap();
}

#[test]
fn stats_count_blocks_and_segments() {
    let (_sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    assert_eq!(pool.stats(), PoolStats::default());
    let first = pool.allocate(&stream, 513).unwrap();
    let second = pool.allocate(&stream, SEGMENT + 1).unwrap();
    let bytes = |stats: &PoolStats| (stats.in_use, stats.peak, stats.reserved, stats.mapped);
    let peak = 1024 + SEGMENT + 512;
    let all = 3 * SEGMENT;
    assert_eq!(bytes(&pool.stats()), (peak, peak, all, all));
    let expected = [(SEGMENT, 1024), (2 * SEGMENT, SEGMENT + 512)];
    for (segment, (bytes, in_use)) in pool.stats().segments.iter().zip(expected) {
        assert_eq!((segment.bytes, segment.in_use), (bytes, in_use));
        assert_eq!(segment.largest_free, bytes - in_use);
        assert_eq!(segment.stream, Some(stream.handle()));
    }
    assert_eq!(pool.stats().segments.len(), 2);
    assert_eq!(pool.stats().addresses, 64 << 30);
    drop(second);
    assert_eq!(bytes(&pool.clone().stats()), (1024, peak, all, all));
    drop(first);
    assert_eq!(bytes(&pool.stats()), (0, peak, all, all));
}

#[test]
fn a_pool_that_cannot_grow_says_the_numbers() {
    let (_sim, device) = sim_from(Sim::builder().memory(2 * SEGMENT));
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = pool.allocate(&stream, SEGMENT + 4).unwrap();
    let refused = error(pool.allocate(&stream, SEGMENT));
    let expected = Error::OutOfMemory {
        requested: SEGMENT,
        in_use: 2 * SEGMENT,
        reserved: 2 * SEGMENT,
        limit: 2 * SEGMENT,
    };
    assert_eq!(refused, expected);
    let stats = pool.stats();
    assert_eq!((stats.in_use, stats.segments.len()), (SEGMENT + 512, 1));
    drop(block);
    pool.allocate(&stream, SEGMENT).unwrap();
    let absurd = error(pool.allocate(&stream, u64::MAX));
    assert!(matches!(absurd, Error::OutOfMemory { .. }), "{absurd}");
}

#[test]
fn a_block_has_at_least_one_byte_and_is_for_a_stream_of_the_device() {
    let (_sim, device) = sim();
    let pool = Pool::new(&device);
    assert!(is_invalid(pool.allocate(&Stream::new(&device).unwrap(), 0)));
    let foreign = Stream::new(&other_device()).unwrap();
    assert!(is_foreign(pool.allocate(&foreign, 4)));
    assert_eq!(pool.stats(), PoolStats::default());
}

#[test]
fn pools_share_nothing() {
    let (_sim, device) = sim();
    let (first, second) = (Pool::new(&device), Pool::new(&device));
    assert_ne!(first.id(), second.id());
    assert_eq!(first.id(), first.clone().id());
    let stream = Stream::new(&device).unwrap();
    let block = first.allocate(&stream, 4).unwrap();
    let template = Template::new(&device).unwrap();
    template
        .add(&Work::memset(&block, 1).unwrap(), &[])
        .unwrap();
    assert_eq!(second.stats(), PoolStats::default());
    assert_ne!(
        second.allocate(&stream, 4).unwrap().address(),
        block.address()
    );
}

/// Return where each block lies and its bytes.
fn places(blocks: &[Memory]) -> Vec<(u64, u64)> {
    let place = |memory: &Memory| (memory.address().0, memory.bytes());
    let mut places: Vec<(u64, u64)> = blocks.iter().map(place).collect();
    places.sort_unstable();
    places
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn a_restored_pool_has_the_blocks_of_its_checkpoint(
        before in steps(600_000),
        after in steps(600_000),
    ) {
        let (_sim, device) = sim();
        let pool = Pool::new(&device);
        let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
        let run = |steps: Vec<Step>, blocks: &mut Vec<Memory>| {
            for step in steps {
                match step {
                    Step::Take(bytes, stream) => {
                        blocks.push(pool.allocate(&streams[stream], bytes).unwrap());
                    }
                    Step::Give(index) if !blocks.is_empty() => {
                        blocks.swap_remove(index.index(blocks.len()));
                    }
                    Step::Give(_) => {}
                }
            }
        };
        let mut old = Vec::new();
        run(before, &mut old);
        let (checkpoint, noted) = (pool.checkpoint(), places(&old));
        let in_use = pool.stats().in_use;
        // Old blocks go and new ones come, some of them where old ones were.
        let kept = old.split_off(old.len() / 2);
        drop(old);
        let mut new = Vec::new();
        run(after, &mut new);
        if !new.is_empty() {
            let now = pool.stats();
            prop_assert!(is_invalid(pool.restore(&checkpoint)));
            prop_assert_eq!(pool.stats(), now);
        }
        drop(new);
        let mut blocks = pool.restore(&checkpoint).unwrap();
        blocks.extend(kept);
        prop_assert_eq!(&places(&blocks), &noted);
        prop_assert_eq!(pool.stats().in_use, in_use);
        prop_assert_eq!(&pool.checkpoint(), &checkpoint);
        prop_assert!(are_apart(places(&blocks)));
        // What came back is a block like any other, and can come back again.
        drop(blocks);
        prop_assert_eq!(pool.stats().in_use, 0);
        let blocks = pool.restore(&checkpoint).unwrap();
        prop_assert_eq!(&places(&blocks), &noted);
    }
}

#[test]
fn a_block_that_came_back_is_not_given_out() {
    let (_sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = pool.allocate(&stream, 4000).unwrap();
    let (checkpoint, address) = (pool.checkpoint(), block.address());
    drop(block);
    let back = pool.restore(&checkpoint).unwrap();
    assert_eq!(places(&back), [(address.0, 4000)]);
    assert_ne!(pool.allocate(&stream, 4000).unwrap().address(), address);
    drop(back);
    assert_eq!(pool.allocate(&stream, 4000).unwrap().address(), address);
}

#[test]
fn a_checkpoint_is_of_one_pool_and_ends_with_its_segments() {
    let (_sim, device) = sim();
    let (pool, other) = (Pool::new(&device), Pool::new(&device));
    let stream = Stream::new(&device).unwrap();
    let block = pool.allocate(&stream, 4000).unwrap();
    let checkpoint = pool.checkpoint();
    assert!(is_foreign(other.restore(&checkpoint)));
    assert_eq!(pool.restore(&checkpoint).unwrap().len(), 0);
    drop(block);
    pool.trim().unwrap();
    // Another segment in the place of the one that was there.
    drop(pool.allocate(&stream, 4000).unwrap());
    let refused = error(pool.restore(&checkpoint));
    assert!(refused.to_string().contains("trimmed"), "{refused}");
    assert_eq!(pool.stats().in_use, 0);
}

/// A call for a pool's whole segments.
#[derive(Debug, Clone)]
enum Change {
    /// Takes a segment of so many smallest ones.
    Take(u64),
    Release(Index),
    Pause(Keep),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let keep = prop_oneof![Just(Keep::Discard), Just(Keep::Host)];
    let change = prop_oneof![
        4 => (1..4_u64).prop_map(Change::Take),
        2 => any::<Index>().prop_map(Change::Release),
        1 => keep.prop_map(Change::Pause),
    ];
    prop::collection::vec(change, 1..24)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn whole_segments_lose_no_byte_through_pauses_and_releases(changes in changes()) {
        let (sim, device) = sim();
        let in_use = || {
            let info = device.memory_info().unwrap();
            info.total - info.free
        };
        let pool = Pool::new(&device);
        let mut segments: Vec<(Address, u64)> = Vec::new();
        let sum = |segments: &[(Address, u64)]| segments.iter().map(|one| one.1).sum::<u64>();
        for change in changes {
            match change {
                Change::Take(units) => {
                    let bytes = units * SEGMENT;
                    segments.push((pool.allocate_segment(bytes).unwrap(), bytes));
                }
                Change::Release(index) if !segments.is_empty() => {
                    let (address, _) = segments.swap_remove(index.index(segments.len()));
                    prop_assert!(pool.release_segment(address));
                }
                Change::Release(_) => prop_assert!(!pool.release_segment(Address(SEGMENT))),
                Change::Pause(keep) => {
                    pool.pause(keep).unwrap();
                    prop_assert_eq!(in_use(), 0);
                    pool.resume().unwrap();
                    prop_assert_eq!(in_use(), sum(&segments));
                }
            }
            let (stats, bytes) = (pool.stats(), sum(&segments));
            prop_assert_eq!([stats.in_use, stats.reserved, stats.leaving], [bytes, bytes, 0]);
            prop_assert_eq!(in_use(), stats.mapped);
            prop_assert!(are_apart(segments.iter().map(|(start, bytes)| (start.0, *bytes))));
        }
        for (address, _) in segments {
            prop_assert!(pool.release_segment(address));
        }
        prop_assert_eq!((in_use(), sim.live().pages), (0, 0));
    }
}
