//! Each scenario with each of its driver calls failing once: an error that names the call, and
//! nothing left behind.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "a failing test says what led to it")]

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cg_core::{
    Call, Capture, CaptureMode, Code, Destination, Device, Error, Event, Exec, Inputs,
    InstantiateFlags, Keep, Live, Memory, Module, Outputs, Pool, Result, Sim, Stream, Template,
    Tracker, Transfer, Work,
};

use support::kernels::{Kernels, PTX};
use support::{BYTES, Words, all, axpy, bytes, memory, random, raw, sim, try_words};

/// The objects before a scenario and after it.
struct Fixture {
    sim: Sim,
    device: Device,
    stream: Stream,
    kernels: Kernels,
    x: Memory,
    y: Memory,
}

impl Fixture {
    fn new() -> Self {
        let (sim, device) = sim();
        Self {
            stream: Stream::new(&device).unwrap(),
            kernels: Kernels::load(&device),
            x: memory(&device, &random(1)),
            y: memory(&device, &random(2)),
            sim,
            device,
        }
    }

    /// Put back what a scenario has changed in memory.
    fn reset(&self) -> Result<()> {
        self.x.write(&bytes(&random(1)))?;
        self.y.write(&bytes(&random(2)))
    }

    /// Run an exec and wait for it.
    fn replay(&self, exec: &Exec) -> Result<()> {
        exec.replay(&self.stream)?;
        self.stream.synchronize()
    }

    /// Let all work finish and forget it; what then exists.
    fn drain(&self) -> Live {
        self.sim.drive();
        self.stream.synchronize().unwrap();
        assert_eq!(self.device.collect(), 0);
        self.sim.live()
    }
}

fn check(memory: &Memory, expected: &Words) -> Result<()> {
    assert_eq!(try_words(memory)?, *expected);
    Ok(())
}

/// Calls that only keep house: if one fails, the work may well succeed.
const HOUSEKEEPING: [Call; 8] = [
    Call::ThreadExchangeCaptureMode,
    // When a segment is released.
    Call::ContextSynchronize,
    // When a capture is dropped.
    Call::StreamEndCapture,
    Call::StreamGetCaptureInfo,
    Call::StreamQuery,
    Call::EventCreate,
    Call::EventRecord,
    Call::EventQuery,
];

/// Calls that cannot fail.
const INFALLIBLE: [Call; 10] = [
    Call::MemFree,
    Call::MemAddressFree,
    Call::MemRelease,
    Call::MemUnmap,
    Call::MemHostUnregister,
    Call::ModuleUnload,
    Call::StreamDestroy,
    Call::EventDestroy,
    Call::GraphDestroy,
    Call::GraphExecDestroy,
];

/// Return the fallible calls that were made since `start`.
fn fallible_calls(sim: &Sim, start: usize) -> Vec<Call> {
    let calls = sim.calls().split_off(start);
    let fallible = |call: &Call| !INFALLIBLE.contains(call);
    calls.into_iter().filter(fallible).collect()
}

/// Check that the error is about the call that was made to fail.
fn assert_blames(error: &Error, call: Call) {
    match error {
        Error::OutOfMemory { .. } => {
            assert!([Call::MemAlloc, Call::MemCreate].contains(&call));
        }
        Error::Instantiate { .. } => assert_eq!(call, Call::GraphInstantiate),
        Error::Update { .. } => assert!(call.symbol().starts_with("cuGraph")),
        // An unnoticed failure of housekeeping may break a capture.
        Error::Capture { .. } if HOUSEKEEPING.contains(&call) => {}
        Error::Driver { .. } | Error::Capture { .. } => {
            assert!(error.to_string().contains(call.symbol()));
        }
        other => panic!("{other}"),
    }
    let is_own = error
        .code()
        .is_none_or(|found| found == Code::OUT_OF_MEMORY);
    assert!(is_own || HOUSEKEEPING.contains(&call), "{error}");
}

/// Run the scenario cleanly, and then again and again with one call after the other failing.
fn with_each_call_failing(scenario: fn(&Fixture) -> Result<()>) {
    let fixture = Fixture::new();
    let sim = &fixture.sim;
    scenario(&fixture).unwrap();
    let baseline = fixture.drain();
    fixture.reset().unwrap();
    let start = sim.calls().len();
    scenario(&fixture).unwrap();
    let count = fallible_calls(sim, start).len();
    assert_eq!(fixture.drain(), baseline);
    assert!(count > 5, "{count} calls make no scenario");

    for n in 0..count {
        fixture.reset().unwrap();
        let start = sim.calls().len();
        sim.fail_call(n, Code::OUT_OF_MEMORY);
        let result = scenario(&fixture);
        sim.clear_faults();
        let call = fallible_calls(sim, start)[n];
        println!("call {n}, {call}, failed: {result:?}");
        match result {
            Err(error) => assert_blames(&error, call),
            Ok(()) => assert!(HOUSEKEEPING.contains(&call)),
        }
        assert!(!fixture.stream.is_capturing().unwrap());
        assert_eq!(raw::thread_mode(&fixture.device), CaptureMode::Global);
        assert_eq!(fixture.drain(), baseline);
        fixture.reset().unwrap();
        scenario(&fixture).unwrap();
        assert_eq!(fixture.drain(), baseline);
    }
}

#[test]
fn capture_and_replay() {
    with_each_call_failing(|f| {
        let capture = Capture::begin(&f.stream, CaptureMode::Global)?;
        f.stream.enqueue(&f.kernels.axpy(3, &f.x, &f.y))?;
        f.stream.enqueue(&Work::memcpy(&f.x, &f.y)?)?;
        let template = capture.finish()?;
        let exec = template.instantiate(InstantiateFlags::default())?;
        drop(template);
        exec.upload(&f.stream)?;
        f.replay(&exec)?;
        check(&f.x, &axpy(3, &random(1), &random(2)))
    });
}

#[test]
fn a_capture_that_begins_with_a_node() {
    with_each_call_failing(|f| {
        let capture = Capture::begin_with_node(&f.stream, CaptureMode::Relaxed)?;
        f.stream.enqueue(&Work::memset(&f.x, 7)?)?;
        let template = capture.finish()?;
        assert_eq!(template.node_count()?, 2);
        f.replay(&template.instantiate(InstantiateFlags::default())?)?;
        check(&f.x, &all(7))
    });
}

#[test]
fn a_capture_that_is_dropped() {
    with_each_call_failing(|f| {
        let capture = Capture::begin(&f.stream, CaptureMode::ThreadLocal)?;
        f.stream.enqueue(&Work::memset(&f.x, 7)?)?;
        drop(capture);
        f.stream.enqueue(&Work::memcpy(&f.y, &f.x)?)?;
        f.stream.synchronize()?;
        check(&f.y, &random(1))
    });
}

#[test]
fn nodes_of_every_kind() {
    with_each_call_failing(|f| {
        let (event, calls) = (Event::new(&f.device)?, Arc::new(AtomicU32::new(0)));
        let counted = Arc::clone(&calls);
        let child = Template::new(&f.device)?;
        child.add(&Work::memcpy(&f.y, &f.x)?, &[])?;
        let template = Template::new(&f.device)?;
        let set = template.add(&Work::memset(&f.x, 5)?, &[])?;
        let copy = template.add_child(&child, &[set])?;
        let record = template.add_event_record(&event, &[copy])?;
        let wait = template.add_event_wait(&event, &[])?;
        let meet = template.add_empty(&[record, wait])?;
        let sum = template.add(&f.kernels.axpy(2, &f.x, &f.y), &[meet])?;
        let host = Work::host(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let host = template.add(&host, &[set])?;
        template.add_edge(host, sum)?;
        let data = template.data()?;
        assert!(!template.addresses()?.is_empty());
        assert_eq!((data.count(), data.edges.len()), (8, 7));
        f.replay(&template.instantiate(InstantiateFlags::default())?)?;
        event.synchronize()?;
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        check(&f.y, &all(15))
    });
}

#[test]
fn repeated_bodies() {
    with_each_call_failing(|f| {
        let left = Memory::new(&f.device, 4)?;
        left.write(&bytes(&[3]))?;
        let step = Template::new(&f.device)?;
        step.add(&f.kernels.axpy(3, &f.x, &f.y), &[])?;
        let template = Template::repeated(&f.device, 1, |body| {
            let first = body.add_child(&step, &[])?;
            let condition = body.new_condition(1)?;
            let inner = body.add_if(condition, &[first], |inner| {
                inner.add(&f.kernels.axpy(3, &f.x, &f.y), &[]).map(drop)
            })?;
            let count = f.kernels.count_down(&left, body.condition());
            body.add(&count, &[inner]).map(drop)
        })?;
        let exec = template.instantiate(InstantiateFlags::default())?;
        f.replay(&exec)?;
        check(&f.y, &axpy(18, &random(1), &random(2)))
    });
}

#[test]
fn updates() {
    with_each_call_failing(|f| {
        let sum_and_copy = |a| {
            let template = Template::new(&f.device)?;
            let sum = template.add(&f.kernels.axpy(a, &f.x, &f.y), &[])?;
            let copy = template.add(&Work::memcpy(&f.x, &f.y)?, &[sum])?;
            let set = template.add(&Work::memset(&f.y, 1)?, &[copy])?;
            Ok((template, sum, copy, set))
        };
        let (template, sum, copy, set) = sum_and_copy(2)?;
        let mut exec = template.instantiate(InstantiateFlags::default())?;
        exec.update(&sum_and_copy(3)?.0)?;
        f.replay(&exec)?;
        check(&f.x, &axpy(3, &random(1), &random(2)))?;
        exec.set(&template, sum, &f.kernels.fill(&f.x, 8))?;
        exec.set(&template, copy, &Work::memcpy(&f.y, &f.x)?)?;
        exec.set(&template, set, &Work::memset(&f.x, 9)?)?;
        f.replay(&exec)?;
        check(&f.y, &all(8))?;
        exec.set_enabled(&template, sum, false)?;
        assert!(!exec.is_enabled(&template, sum)?);
        f.replay(&exec)?;
        check(&f.y, &all(9))
    });
}

#[test]
fn inputs_and_plain_replays() {
    with_each_call_failing(|f| {
        let template = Arc::new(Template::new(&f.device)?);
        let slots: Vec<Memory> = (0..200)
            .map(|i| f.y.slice(i * 8..i * 8 + 8))
            .collect::<Result<_>>()?;
        let set = template.add(&Work::memset(&f.x.slice(2048..BYTES)?, 3)?, &[])?;
        let store = f.y.slice(2048..2056)?;
        let inputs = Inputs::add(&template, &slots, &[store])?;
        assert_eq!(
            template
                .edges()?
                .iter()
                .filter(|edge| edge.to == set)
                .count(),
            2
        );
        let exec = template.instantiate(InstantiateFlags::default())?;
        let sources: Vec<_> = (0..200).map(|i| f.x.address().offset(i * 8)).collect();
        exec.replay_with(&raw::feed(&inputs, &sources, &[5])?, &f.stream)?;
        exec.replay(&f.stream)?;
        f.stream.synchronize()?;
        let mut expected = random(2);
        expected[..400].copy_from_slice(&random(1)[..400]);
        expected[512..514].copy_from_slice(&[5, 0]);
        check(&f.y, &expected)
    });
}

#[test]
fn outputs_and_plain_replays() {
    with_each_call_failing(|f| {
        let template = Arc::new(Template::new(&f.device)?);
        let (result, slot) = (f.y.slice(0..1024)?, f.y.slice(2048..2056)?);
        let set = template.add(&Work::memset(&result, 3)?, &[])?;
        let large = Memory::new(&f.device, 5 << 20)?;
        template.add(&Work::memset(&large, 4)?, &[set])?;
        let inputs = Inputs::add(&template, &[slot], &[])?;
        let outputs = Outputs::add(&template, &[result, large])?;
        let exec = template.instantiate(InstantiateFlags::default())?;
        let to = [1024, 2048].map(|offset| Destination {
            address: f.x.address().offset(offset),
            bytes: 1024,
        });
        let sources = [f.x.address()];
        let feed = raw::feed(&inputs, &sources, &[])?;
        let delivery = raw::deliver(&outputs, &to)?;
        exec.replay_with(Transfer::new(Some(&feed), Some(&delivery)), &f.stream)?;
        f.stream.synchronize()?;
        let mut expected = random(1);
        expected[256..512].fill(3);
        expected[512..768].fill(4);
        check(&f.x, &expected)?;
        f.x.write(&bytes(&random(1)))?;
        exec.replay(&f.stream)?;
        f.stream.synchronize()?;
        check(&f.x, &random(1))?;
        let mut after = random(2);
        after[..256].fill(3);
        after[512..514].copy_from_slice(&random(1)[..2]);
        check(&f.y, &after)
    });
}

#[test]
fn fork_and_join() {
    with_each_call_failing(|f| {
        let (side, scratch) = (Stream::new(&f.device)?, Memory::new(&f.device, BYTES)?);
        let (fork, join) = (Event::new(&f.device)?, Event::new(&f.device)?);
        let capture = Capture::begin(&f.stream, CaptureMode::Global)?;
        f.stream.record(&fork)?;
        side.wait(&fork)?;
        side.enqueue(&Work::memcpy(&scratch, &f.x)?)?;
        side.record(&join)?;
        f.stream.enqueue(&f.kernels.axpy(4, &f.x, &f.y))?;
        f.stream.wait(&join)?;
        f.stream.enqueue(&f.kernels.axpy(5, &scratch, &f.y))?;
        let template = capture.finish()?;
        drop((side, scratch, fork, join));
        f.replay(&template.instantiate(InstantiateFlags::default())?)?;
        check(&f.y, &axpy(4 + 5, &random(1), &random(2)))
    });
}

#[test]
fn blocks_of_a_pool_in_a_capture() {
    with_each_call_failing(|f| {
        let pool = Pool::new(&f.device);
        let inside = pool.allocate(&f.stream, BYTES)?;
        let capture = Capture::begin(&f.stream, CaptureMode::Relaxed)?;
        f.stream.enqueue(&Work::memcpy(&inside, &f.x)?)?;
        let second = pool.allocate(&f.stream, 2 << 20)?.slice(0..BYTES)?;
        f.stream.enqueue(&Work::memcpy(&second, &inside)?)?;
        f.stream.enqueue(&f.kernels.axpy(6, &second, &f.y))?;
        drop((inside, second));
        let template = capture.finish()?;
        let exec = template.instantiate(InstantiateFlags::default())?;
        drop((template, pool));
        f.replay(&exec)?;
        check(&f.y, &axpy(6, &random(1), &random(2)))
    });
}

#[test]
fn a_pool_that_is_trimmed_paused_and_resumed() {
    with_each_call_failing(|f| {
        let pool = Pool::builder(&f.device).range_bytes(2 << 20).build();
        let block = pool.allocate(&f.stream, BYTES)?;
        drop(pool.allocate(&f.stream, 2 << 20)?);
        let segment = pool.allocate_segment(2 << 20)?;
        assert_eq!(pool.trim()?, 2 << 20);
        pool.release_segment(segment);
        let capture = Capture::begin(&f.stream, CaptureMode::Global)?;
        f.stream.enqueue(&f.kernels.axpy(6, &block, &f.y))?;
        let exec = capture.finish()?.instantiate(InstantiateFlags::default())?;
        f.stream.enqueue(&Work::memcpy(&block, &f.x)?)?;
        pool.pause(Keep::Host)?;
        assert!(matches!(exec.replay(&f.stream), Err(Error::Paused { .. })));
        pool.resume()?;
        f.replay(&exec)?;
        check(&f.y, &axpy(6, &random(1), &random(2)))?;
        pool.pause(Keep::Discard)?;
        pool.resume()?;
        drop((block, pool));
        Ok(())
    });
}

#[test]
fn clones_children_and_removals() {
    with_each_call_failing(|f| {
        let template = Template::new(&f.device)?;
        let sum = template.add(&f.kernels.axpy(7, &f.x, &f.y), &[])?;
        let copy = template.try_clone()?;
        let outer = Template::new(&f.device)?;
        let first = outer.add_child(&copy, &[])?;
        let gone = outer.add(&Work::memset(&f.y, 1)?, &[first])?;
        let second = outer.add_child(&template, &[gone])?;
        outer.remove(gone)?;
        outer.add_edge(first, second)?;
        template.remove(sum)?;
        let edge = outer.edges()?[0];
        outer.remove_edge(edge)?;
        outer.add_edge(edge.from, edge.to)?;
        assert_eq!((outer.nodes()?.len(), template.nodes()?.len()), (2, 0));
        f.replay(&outer.instantiate(InstantiateFlags::default())?)?;
        check(&f.y, &axpy(7 + 7, &random(1), &random(2)))
    });
}

/// Replay on a stream, and drop everything while that is in flight.
fn drop_in_flight(f: &Fixture, replay: fn(&Exec, &Stream) -> Result<()>) -> Result<()> {
    let (other, event) = (Stream::new(&f.device)?, Event::new(&f.device)?);
    let module = Module::load(&f.device, PTX.as_bytes())?;
    assert_eq!(module.function("fill")?.name(), "fill");
    let (scratch, template) = (Memory::new(&f.device, BYTES)?, Template::new(&f.device)?);
    let copy = template.add(&Work::memcpy(&scratch, &f.x)?, &[])?;
    template.add(&Work::memcpy(&f.y, &scratch)?, &[copy])?;
    let exec = template.instantiate(InstantiateFlags::default())?;
    other.enqueue(&Work::memset(&f.x, 3)?)?;
    replay(&exec, &other)?;
    other.record(&event)?;
    drop((other, exec, template, scratch));
    f.stream.wait(&event)?;
    drop(event);
    f.stream.synchronize()?;
    check(&f.y, &all(3))
}

#[test]
fn everything_dropped_in_flight() {
    with_each_call_failing(|f| drop_in_flight(f, Exec::replay));
}

#[test]
fn a_foreign_stream_that_is_destroyed_in_flight() {
    with_each_call_failing(|f| {
        drop_in_flight(f, |exec, theirs| exec.replay(&raw::foreign_stream(theirs)))
    });
}

#[test]
fn a_capture_that_is_tracked_and_copied() {
    with_each_call_failing(|f| {
        let side = Stream::new(&f.device)?;
        let (fork, join) = (Event::new(&f.device)?, Event::new(&f.device)?);
        let capture = Capture::begin(&f.stream, CaptureMode::Global)?;
        let mut tracker = Tracker::new(&f.stream)?;
        f.stream.record(&fork)?;
        side.wait(&fork)?;
        f.stream.enqueue(&Work::memset(&f.x, 7)?)?;
        assert_eq!(raw::new_nodes(&mut tracker, &f.stream)?.len(), 1);
        f.stream.enqueue(&Work::memset(&f.x, 8)?)?;
        side.enqueue(&Work::memcpy(&f.y, &f.y)?)?;
        // The walk back from the first stream does not reach the second one.
        assert_eq!(raw::new_nodes(&mut tracker, &f.stream)?.len(), 2);
        side.record(&join)?;
        f.stream.wait(&join)?;
        let (copy, nodes) = capture.finish()?.try_clone_mapped()?;
        assert_eq!(nodes.len(), 3);
        f.replay(&copy.instantiate(InstantiateFlags::default())?)?;
        check(&f.x, &all(8))
    });
}

#[test]
fn an_exec_that_is_measured() {
    with_each_call_failing(|f| {
        let template = Template::new(&f.device)?;
        template.add(&Work::memset(&f.x, 3)?, &[])?;
        f.replay(&template.instantiate_measured(InstantiateFlags::default())?)?;
        check(&f.x, &all(3))
    });
}
