//! Whatever is dropped in whatever order, work in flight keeps what it needs, and then it goes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::any::Any;
use std::sync::Arc;
use std::thread;

use cg_core::hook::{HookHandle, Registry};
use cg_core::{
    Args, Capture, CaptureMode, Device, Error, Event, Exec, FreeList, Function, InstantiateFlags,
    Live, Memory, Module, Node, Pool, Sim, SimMemory, Stream, Template, TemplateData, Work,
};

use support::kernels::Kernels;
use support::{POISON, all, axpy, memory, poisoned, random, raw, sim, words};

/// Something to be dropped.
type Thing = Box<dyn Any + Send>;

/// Return all orders of `count` things.
fn orders(count: usize) -> Vec<Vec<usize>> {
    if count == 0 {
        return vec![Vec::new()];
    }
    let shorter = orders(count - 1);
    let with_last = |order: &Vec<usize>| {
        let insert = |at| {
            let mut longer = order.clone();
            longer.insert(at, count - 1);
            longer
        };
        (0..count).map(insert).collect::<Vec<_>>()
    };
    shorter.iter().flat_map(with_last).collect()
}

/// Memory, template, exec, stream and event of a replay that is in flight, and what it writes.
struct Replayed {
    things: Vec<Thing>,
    out: Memory,
}

impl Replayed {
    fn on(stream: Stream) -> Self {
        let device = stream.device();
        let (x, out) = (memory(device, &random(1)), memory(device, &random(2)));
        let (between, event) = (poisoned(device), Event::new(device).unwrap());
        let template = Template::new(device).unwrap();
        let copy = Work::memcpy(&between, &x).unwrap();
        let copy = template.add(&copy, &[]).unwrap();
        let sum = Kernels::load(device).axpy(3, &between, &out);
        let sum = template.add(&sum, &[copy]).unwrap();
        template.add_event_record(&event, &[sum]).unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        exec.replay(&stream).unwrap();
        stream.record(&event).unwrap();
        let things: [Thing; 5] = [
            Box::new((x, between)),
            Box::new(template),
            Box::new(exec),
            Box::new(stream),
            Box::new(event),
        ];
        Self {
            things: things.into(),
            out,
        }
    }
}

/// Drop the things in the given order.
fn drop_in(order: &[usize], things: Vec<Thing>) {
    let mut things: Vec<Option<Thing>> = things.into_iter().map(Some).collect();
    for index in order {
        things[*index] = None;
    }
}

/// Let all work finish, and check that nothing is left but the output.
fn assert_gone(sim: &Sim, device: &Device, out: &Memory) {
    sim.drive();
    assert_eq!(device.collect(), 0);
    let expected = Live {
        memory: 1,
        ..Live::default()
    };
    assert_eq!(sim.live(), expected);
    assert_eq!(words(out), axpy(3, &random(1), &random(2)));
}

#[test]
fn every_order_of_drops_is_safe_in_flight() {
    for order in orders(5) {
        println!("{order:?}");
        let (sim, device) = sim();
        let stream = Stream::new(&device).unwrap();
        // The simulator finishes the work of a stream that is destroyed: this one stays.
        let Replayed { things, out } = Replayed::on(stream.clone());
        drop_in(&order, things);
        assert_eq!(words(&out), random(2));
        stream.synchronize().unwrap();
        drop(stream);
        assert_gone(&sim, &device, &out);
    }
}

#[test]
fn every_order_of_drops_is_safe_half_way() {
    for order in orders(5) {
        println!("{order:?}");
        let (sim, device) = sim();
        let stream = Stream::new(&device).unwrap();
        let Replayed { mut things, out } = Replayed::on(stream);
        for index in order {
            sim.step();
            things[index] = Box::new(());
        }
        assert_gone(&sim, &device, &out);
    }
}

#[test]
fn every_order_of_drops_is_safe_when_work_is_done() {
    for order in orders(5) {
        println!("{order:?}");
        let (sim, device) = sim();
        let Replayed { things, out } = Replayed::on(Stream::new(&device).unwrap());
        sim.drive();
        drop_in(&order, things);
        assert_gone(&sim, &device, &out);
    }
}

#[test]
fn things_may_be_dropped_on_another_thread_beside_a_capture() {
    for order in orders(5) {
        println!("{order:?}");
        let (sim, device) = sim();
        let Replayed { things, out } = Replayed::on(Stream::new(&device).unwrap());
        let stream = Stream::new(&device).unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        thread::scope(|s| s.spawn(|| drop_in(&order, things)).join().unwrap());
        capture.finish().unwrap();
        drop(stream);
        assert_gone(&sim, &device, &out);
    }
}

#[test]
fn public_types_can_be_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<(Args, Capture, Device, Error, Event, Exec)>();
    check::<(FreeList, Function, HookHandle, Memory, Module, Node)>();
    check::<(Pool, Registry<Node, Error>, Sim, SimMemory, Stream)>();
    check::<(Template, TemplateData, Work)>();
}

#[test]
fn an_exec_in_flight_is_kept_until_its_stream_has_passed() {
    let (sim, device) = sim();
    let (first, second) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let template = Template::new(&device).unwrap();
    template
        .add(&Work::memset(&poisoned(&device), 1).unwrap(), &[])
        .unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    drop(template);
    let kept = Arc::new(());
    exec.retain(kept.clone());
    exec.replay(&first).unwrap();
    exec.replay(&second).unwrap();
    drop(exec);
    assert_eq!(
        (device.collect(), sim.live().execs, sim.live().memory),
        (1, 1, 1)
    );
    first.synchronize().unwrap();
    assert_eq!((device.collect(), sim.live().execs), (1, 1));
    second.synchronize().unwrap();
    assert_eq!(
        (sim.live().execs, sim.live().memory, sim.live().events),
        (0, 0, 0)
    );
    assert_eq!(Arc::strong_count(&kept), 1);
}

#[test]
fn an_exec_that_was_never_replayed_goes_at_once() {
    let (sim, device) = sim();
    let template = Template::new(&device).unwrap();
    drop(template.instantiate(InstantiateFlags::default()).unwrap());
    assert_eq!(sim.live().execs, 0);
}

#[test]
fn an_exec_whose_stream_captures_is_kept_until_the_capture_ends() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let template = Template::new(&device).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    drop(exec);
    sim.drive();
    assert_eq!((device.collect(), sim.live().execs), (1, 1));
    capture.finish().unwrap();
    assert_eq!((device.collect(), sim.live().execs), (0, 0));
}

#[test]
fn an_exec_dropped_while_another_stream_captures_breaks_nothing() {
    let (sim, device) = sim();
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let a = poisoned(&device);
    let template = Template::new(&device).unwrap();
    template.add(&Work::memset(&a, 1).unwrap(), &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&other).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    drop((exec, template));
    assert_eq!((device.collect(), sim.live().execs), (1, 1));
    sim.drive();
    assert_eq!((device.collect(), sim.live().execs), (0, 0));
    assert!(capture.finish().unwrap().nodes().unwrap().is_empty());
    assert_eq!(words(&a), all(1));
}

#[test]
fn a_forked_stream_goes_when_the_capture_ends() {
    let (sim, device) = sim();
    let main = Stream::new(&device).unwrap();
    for breaks in [false, true] {
        let side = Stream::new(&device).unwrap();
        let capture = Capture::begin(&main, CaptureMode::Relaxed).unwrap();
        raw::fork(&main, &side);
        if breaks {
            main.synchronize().unwrap_err();
        }
        drop(side);
        assert_eq!((device.collect(), sim.live().streams), (1, 2));
        assert_eq!(capture.finish().is_err(), breaks);
        assert_eq!((device.collect(), sim.live().streams), (0, 1));
    }
}

#[test]
fn what_work_has_passed_goes_when_graphs_come_and_go() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let template = Template::new(&device).unwrap();
    let instantiate = || template.instantiate(InstantiateFlags::default()).unwrap();
    let never_replayed = instantiate();
    let leave_one = || {
        let exec = instantiate();
        exec.replay(&stream).unwrap();
        let before = sim.live().execs;
        drop(exec);
        sim.drive();
        assert_eq!(sim.live().execs, before);
    };
    leave_one();
    let other = Stream::new(&device).unwrap();
    let capture = Capture::begin(&other, CaptureMode::Global).unwrap();
    assert_eq!(sim.live().execs, 1);
    drop(capture);
    leave_one();
    let again = instantiate();
    assert_eq!(sim.live().execs, 2);
    leave_one();
    drop(never_replayed);
    assert_eq!(sim.live().execs, 1);
    drop(again);
}

#[test]
fn a_failed_capture_keeps_nothing() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    for dropped in [false, true] {
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        let called = Arc::new(());
        let captured = Arc::clone(&called);
        let host = Work::host(move || assert_eq!(*captured, ()));
        stream.enqueue(&host).unwrap();
        drop(host);
        assert_eq!(Arc::strong_count(&called), 2);
        if dropped {
            drop(capture);
        } else {
            assert!(stream.synchronize().is_err());
            capture.finish().unwrap_err();
        }
        assert_eq!((Arc::strong_count(&called), sim.live().graphs), (1, 0));
    }
}

#[test]
fn a_thousand_graphs_leave_nothing_behind() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = poisoned(&device);
    let baseline = sim.live();
    for round in 0..1000 {
        let scratch = Memory::new(&device, 4000).unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        stream
            .enqueue(&Work::memset(&scratch, round).unwrap())
            .unwrap();
        stream
            .enqueue(&Work::memcpy(&a, &scratch).unwrap())
            .unwrap();
        let template = capture.finish().unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        exec.replay(&stream).unwrap();
        drop((template, exec, scratch));
        if round % 10 == 9 {
            stream.synchronize().unwrap();
            assert_eq!(words(&a), all(round));
            assert_eq!(sim.live(), baseline);
        }
    }
    assert_eq!(device.collect(), 0);
}

#[test]
fn a_stream_that_nobody_waits_for_does_not_keep_everything() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let mut most = 0;
    for _ in 0..5000 {
        let scratch = Memory::new(&device, 4).unwrap();
        stream.enqueue(&Work::memset(&scratch, 1).unwrap()).unwrap();
        sim.drive();
        most = most.max(sim.live().memory);
    }
    assert!(most < 3000, "{most} at once");
    stream.synchronize().unwrap();
    assert_eq!(sim.live().memory, 0);
}

#[test]
fn a_device_that_goes_takes_everything_along() {
    let (sim, device) = sim();
    let a = poisoned(&device);
    let view = sim.view(a.address(), a.bytes());
    let stream = Stream::new(&device).unwrap();
    let pool = Pool::new(&device);
    let block = pool.allocate(&stream, a.bytes()).unwrap();
    let template = Template::new(&device).unwrap();
    let set = template
        .add(&Work::memset(&block, 4).unwrap(), &[])
        .unwrap();
    template
        .add(&Work::memcpy(&a, &block).unwrap(), &[set])
        .unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    drop((a, block, pool, exec, template));
    assert_eq!(view.word(0), POISON);
    let live = sim.live();
    assert_eq!((live.memory, live.pages, live.execs), (1, 1, 1));
    drop((stream, device));
    assert_eq!(sim.live(), Live::default());
    assert_eq!(view.word(0), 4);
}

#[test]
fn a_capture_has_one_guard() {
    let (_sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    assert!(Capture::take_over(&stream).is_err());
    capture.hand_over();
    let capture = Capture::take_over(&stream).unwrap();
    capture.finish().unwrap();
}

#[test]
fn a_guard_of_a_capture_that_is_over_ends_no_later_one() {
    let (_sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    for finish in [true, false] {
        let memory = poisoned(&device);
        let stale = Capture::begin(&stream, CaptureMode::Global).unwrap();
        raw::end_capture(&stream).unwrap();
        let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
        stream.enqueue(&Work::memset(&memory, 1).unwrap()).unwrap();
        drop(memory);
        if finish {
            assert!(stale.finish().is_err());
        } else {
            drop(stale);
        }
        let template = capture.finish().unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        exec.replay(&stream).unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn dropping_a_stream_runs_none_of_its_work() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let memory = poisoned(&device);
    stream.enqueue(&Work::memset(&memory, 9).unwrap()).unwrap();
    let before = sim.ran();
    drop(stream);
    device.collect();
    assert_eq!(sim.ran(), before);
    sim.drive();
    assert_eq!(words(&memory), all(9));
}

#[test]
fn a_retained_thing_that_panics_when_dropped_frees_nothing_else() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            assert!(thread::panicking(), "bomb");
        }
    }
    let (sim, device) = sim();
    let (first, second) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let (a, b) = (poisoned(&device), poisoned(&device));
    for (stream, memory) in [(&first, &a), (&second, &b)] {
        let template = Template::new(&device).unwrap();
        template
            .add(&Work::memset(memory, 5).unwrap(), &[])
            .unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        if stream.handle() == first.handle() {
            exec.retain(Arc::new(Bomb));
        }
        exec.replay(stream).unwrap();
    }
    while sim.peek(a.address(), 4) != 5_u32.to_le_bytes() {
        sim.delay(second.handle(), true);
        assert!(sim.step());
    }
    let collected = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| device.collect()));
    assert!(collected.is_err());
    assert_eq!(device.collect(), 1, "the other one still waits");
    second.synchronize().unwrap();
    assert_eq!(words(&b), all(5));
    assert_eq!(device.collect(), 0);
}
