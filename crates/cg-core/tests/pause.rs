//! Pauses on the simulator: each call failing once, threads, and what views of the memory see.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::atomic::{AtomicBool, Ordering};

use cg_core::{
    Call, Code, Error, InstantiateFlags, Keep, Memory, Pool, Sim, Stream, Template, Work,
};

use support::{all, error, random, sim, sim_from, words};

/// Bytes of the smallest segment.
const SEGMENT: u64 = 2 << 20;

#[test]
fn a_pause_that_fails_leaves_the_pool_as_it_was() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
    let blocks = streams.each_ref().map(|stream| filled(&pool, stream));
    let stats = pool.stats();
    let mut failed = Vec::new();
    for n in 0..40 {
        let (live, before) = (sim.live(), sim.calls().len());
        sim.fail_call(n, Code::INVALID_VALUE);
        let paused = pool.pause(Keep::Host);
        sim.clear_faults();
        match paused {
            Ok(()) => {
                pool.resume().unwrap();
                assert_eq!(pool.trim().unwrap(), 0);
            }
            Err(error) => {
                assert_eq!(error.code(), Some(Code::INVALID_VALUE));
                assert_eq!((pool.is_paused(), sim.live()), (false, live));
                assert_eq!(pool.stats(), stats);
                failed.push(sim.calls()[before + n]);
            }
        }
        for (seed, block) in (1..).zip(&blocks) {
            assert_eq!(words(block), random(seed));
        }
    }
    let copies = [Call::MemHostRegister, Call::MemcpyDtoH];
    let expected = [&[Call::ContextSynchronize][..], &copies, &copies].concat();
    assert_eq!(failed, expected);
}

#[test]
fn a_resume_that_fails_leaves_the_pool_paused_and_can_be_tried_again() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let streams = [Stream::new(&device).unwrap(), Stream::new(&device).unwrap()];
    let blocks = streams.each_ref().map(|stream| filled(&pool, stream));
    let mut failed = Vec::new();
    for n in 0..40 {
        pool.pause(Keep::Host).unwrap();
        let (paused, before) = (sim.live(), sim.calls().len());
        assert_eq!((paused.pages, paused.pinned), (0, 2));
        sim.fail_call(n, Code::INVALID_VALUE);
        let resumed = pool.resume();
        sim.clear_faults();
        if let Err(error) = resumed {
            assert_eq!(error.code(), Some(Code::INVALID_VALUE));
            assert_eq!((pool.is_paused(), sim.live()), (true, paused));
            failed.push(sim.calls()[before + n]);
            pool.resume().unwrap();
        }
        assert_eq!((sim.live().pages, sim.live().pinned), (1, 2));
        for (seed, block) in (1..).zip(&blocks) {
            assert_eq!(words(block), random(seed));
        }
    }
    let page = [Call::MemCreate, Call::MemMap, Call::MemSetAccess];
    let copies = [Call::MemcpyHtoD; 2];
    assert_eq!(failed, [&page[..], &copies].concat());
}

#[test]
fn a_resume_without_enough_memory_says_the_numbers_and_can_be_tried_again() {
    let (_sim, device) = sim_from(Sim::builder().memory(4 * SEGMENT));
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let _block = pool.allocate(&stream, 2 * SEGMENT).unwrap();
    let _other = pool.allocate(&stream, SEGMENT).unwrap();
    pool.pause(Keep::Discard).unwrap();
    let squatter = Memory::new(&device, 2 * SEGMENT).unwrap();
    let refused = error(pool.resume());
    assert!(matches!(refused, Error::OutOfMemory { .. }), "{refused}");
    assert_eq!((pool.is_paused(), pool.stats().mapped), (true, 0));
    drop(squatter);
    pool.resume().unwrap();
    assert_eq!(pool.stats().mapped, 3 * SEGMENT);
}

#[test]
fn what_was_not_kept_is_poison() {
    let (_sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = filled(&pool, &stream);
    pool.pause(Keep::Discard).unwrap();
    pool.resume().unwrap();
    assert_eq!(words(&block), all(u32::MAX));
}

#[test]
fn segments_come_back_in_pages_of_at_most_512_mib() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    for _ in 0..3 {
        pool.allocate_segment(200 << 20).unwrap();
    }
    assert_eq!(sim.live().pages, 3);
    pool.pause(Keep::Discard).unwrap();
    pool.resume().unwrap();
    assert_eq!((sim.live().pages, pool.stats().mapped), (2, 600 << 20));
}

#[test]
fn a_view_of_a_block_sees_poison_while_the_pool_is_paused() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = filled(&pool, &stream);
    let view = sim.view(block.address(), block.bytes());
    pool.pause(Keep::Host).unwrap();
    assert!(view.to_vec().iter().all(|byte| *byte == 0xFF));
    pool.resume().unwrap();
    assert_eq!(view.to_vec(), support::bytes(&random(1)));
}

#[test]
fn a_view_of_a_block_sees_it_after_a_pause() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = filled(&pool, &stream);
    let view = sim.view(block.address(), block.bytes());
    pool.pause(Keep::Discard).unwrap();
    pool.resume().unwrap();
    block.write(&support::bytes(&random(9))).unwrap();
    assert_eq!(view.to_vec(), support::bytes(&random(9)));
}

#[test]
fn replays_on_other_threads_come_before_a_pause_or_are_refused() {
    let (sim, device) = sim();
    let pool = Pool::new(&device);
    let stream = Stream::new(&device).unwrap();
    let block = filled(&pool, &stream);
    let template = Template::new(&device).unwrap();
    let set = Work::memset(&block, 7).unwrap();
    template.add(&set, &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let done = AtomicBool::new(false);
    // The simulator panics if a page is unmapped under a replay or a replay finds none.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                match exec.replay(&stream) {
                    Ok(()) | Err(Error::Paused { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        });
        for _ in 0..30 {
            pool.pause(Keep::Discard).unwrap();
            pool.resume().unwrap();
        }
        done.store(true, Ordering::Relaxed);
    });
    sim.drive();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&block), all(7));
}

#[test]
fn an_exec_that_reads_a_pool_of_others_is_refused_while_that_is_paused_and_keeps_nothing_of_it() {
    let (_sim, device) = sim();
    let (weights, own) = (Pool::new(&device), Pool::new(&device));
    let stream = Stream::new(&device).unwrap();
    let (read, written) = (filled(&weights, &stream), filled(&own, &stream));
    let template = Template::new(&device).unwrap();
    let copy = Work::memcpy(&written, &read).unwrap();
    template.add(&copy, &[]).unwrap();
    let unused = Pool::new(&device);
    let named = template.named_pools(&[&unused, &weights, &own]).unwrap();
    assert_eq!(named, [false, true, true]);
    let other = Template::new(&device).unwrap();
    other.retain(weights.required());
    let exec = other.instantiate(InstantiateFlags::default()).unwrap();
    weights.pause(Keep::Discard).unwrap();
    assert!(matches!(exec.replay(&stream), Err(Error::Paused { .. })));
    weights.resume().unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    drop((template, copy, read));
    assert!(weights.trim().unwrap() > 0);
}

/// Return a block with the next random words: the first one of a pool holds `random(1)`.
fn filled(pool: &Pool, stream: &Stream) -> Memory {
    let block = pool.allocate(stream, support::BYTES).unwrap();
    let seed = pool.stats().segments.len() as u64;
    block.write(&support::bytes(&random(seed))).unwrap();
    block
}
