//! Behaviour of the simulator alone: its order, its observers and its faults.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::{Arc, Mutex};

use cg_core::driver::Driver as _;
use cg_core::{
    Call, Capture, CaptureMode, Code, Condition, Device, Error, Event, InstantiateFlags, Live,
    Memory, Module, Sim, Stream, Template, Work,
};

use support::kernels::{Kernels, PTX};
use support::{
    BYTES, POISON, WORDS, all, bytes, code, error, memory, poisoned, sim, sim_from, words,
};

/// The names of closures in the order in which they ran.
type Order = Arc<Mutex<Vec<String>>>;

fn launch(sim: &Sim, stream: &Stream, name: &str, order: &Order) {
    let (order, own) = (Arc::clone(order), name.to_owned());
    let closure = move |_: &cg_core::KernelCall<'_>| {
        order.lock().unwrap().push(own.clone());
        Ok(())
    };
    sim.launch_closure(stream.handle(), name, Arc::new(closure))
        .unwrap();
}

/// Return the order in which three streams' work runs, and then that of a replay of unordered nodes.
fn order_of(seed: u64) -> Vec<String> {
    let (sim, device) = sim_from(Sim::builder().seed(seed));
    let order = Order::default();
    let streams: Vec<Stream> = (0..3).map(|_| Stream::new(&device).unwrap()).collect();
    for step in 0..5 {
        for (name, stream) in ["a", "b", "c"].iter().zip(&streams) {
            launch(&sim, stream, &format!("{name}{step}"), &order);
        }
    }
    sim.drive();
    let (template, stream) = (Template::new(&device).unwrap(), &streams[0]);
    for node in 0..6 {
        let order = Arc::clone(&order);
        let call = Work::host(move || order.lock().unwrap().push(format!("n{node}")));
        template.add(&call, &[]).unwrap();
    }
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(stream).unwrap();
    stream.synchronize().unwrap();
    let order = order.lock().unwrap();
    order.clone()
}

#[test]
fn nothing_runs_until_it_is_driven() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = poisoned(&device);
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    stream.enqueue(&Work::memset(&a, 2).unwrap()).unwrap();
    assert_eq!((sim.ran(), words(&a)), (0, all(POISON)));
    assert!(sim.step());
    assert_eq!((sim.ran(), words(&a)), (1, all(1)));
    assert!(sim.step());
    assert_eq!((sim.ran(), words(&a)), (2, all(2)));
    assert!(!sim.step());
}

#[test]
fn asking_does_not_drive() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (a, event) = (poisoned(&device), Event::new(&device).unwrap());
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    stream.record(&event).unwrap();
    for _ in 0..3 {
        assert!(!stream.is_idle().unwrap());
        assert!(!event.is_reached().unwrap());
    }
    sim.drive();
    assert!(stream.is_idle().unwrap());
    assert!(event.is_reached().unwrap());
}

#[test]
fn waiting_for_an_event_runs_what_is_before_it() {
    let (_sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (a, event) = (poisoned(&device), Event::new(&device).unwrap());
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    stream.record(&event).unwrap();
    stream.enqueue(&Work::memset(&a, 2).unwrap()).unwrap();
    event.synchronize().unwrap();
    assert_eq!(words(&a), all(1));
    assert!(!stream.is_idle().unwrap());
}

#[test]
fn the_same_seed_gives_the_same_order() {
    for seed in 0..8 {
        assert_eq!(order_of(seed), order_of(seed));
    }
}

#[test]
fn other_seeds_give_other_orders_but_keep_each_stream_in_order() {
    let orders: Vec<Vec<String>> = (0..8).map(order_of).collect();
    for first in ["a", "n"] {
        let part = |order: &[String]| {
            let position = if first == "a" { 0..15 } else { 15..21 };
            order[position].to_vec()
        };
        assert!(orders.iter().any(|order| part(order) != part(&orders[0])));
    }
    for order in &orders {
        for stream in ["a", "b", "c"] {
            let own: Vec<&String> = order.iter().filter(|o| o.starts_with(stream)).collect();
            assert!(own.is_sorted() && own.len() == 5, "{order:?}");
        }
    }
}

#[test]
fn a_delayed_stream_runs_when_nothing_else_can() {
    let (sim, device) = sim();
    let order = Order::default();
    let (first, second) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    sim.delay(first.handle(), true);
    for step in 0..4 {
        launch(&sim, &first, &format!("delayed {step}"), &order);
        launch(&sim, &second, &format!("other {step}"), &order);
    }
    for _ in 0..4 {
        assert!(sim.step());
    }
    assert!(
        order
            .lock()
            .unwrap()
            .iter()
            .all(|name| name.starts_with("other"))
    );
    sim.delay(first.handle(), false);
    launch(&sim, &second, "other 4", &order);
    first.synchronize().unwrap();
    assert!(order.lock().unwrap().contains(&"delayed 3".to_owned()));
}

#[test]
fn a_captured_closure_becomes_a_kernel_node() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let order = Order::default();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    launch(&sim, &stream, "closure", &order);
    let template = capture.finish().unwrap();
    assert_eq!(
        template.data().unwrap().nodes[0].name.as_deref(),
        Some("closure")
    );
    assert!(order.lock().unwrap().is_empty());
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    for _ in 0..2 {
        exec.replay(&stream).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(*order.lock().unwrap(), ["closure", "closure"]);
}

#[test]
fn a_kernel_sees_its_launch() {
    let (sim, device) = sim();
    let seen = Arc::new(Mutex::new(None));
    let store = Arc::clone(&seen);
    sim.kernel("fill", move |call| {
        let launch = (call.grid.x, call.block.x, call.shared_bytes, call.u32(1));
        *store.lock().unwrap() = Some((launch, call.arg(0).len()));
        call.memory(0, 8).set_word(1, 7);
        Ok(())
    });
    let stream = Stream::new(&device).unwrap();
    let a = poisoned(&device);
    let work = Kernels::load(&device).fill(&a, 42).with_shared_bytes(64);
    stream.enqueue(&work).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(*seen.lock().unwrap(), Some(((8, 128, 64, 42), 8)));
    assert_eq!(words(&a)[..3], [POISON, 7, POISON]);
}

#[test]
fn fresh_memory_is_poisoned_and_never_given_out_again() {
    let (_sim, device) = sim();
    let first = Memory::new(&device, BYTES).unwrap();
    assert_eq!(first.read().unwrap(), [0xFF; 4 * WORDS]);
    let address = first.address();
    drop(first);
    assert_ne!(Memory::new(&device, BYTES).unwrap().address(), address);
}

#[test]
fn memory_can_be_seen_while_work_is_in_flight_and_after_it_was_freed() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = memory(&device, &support::random(1));
    let view = sim.view(a.address(), BYTES);
    stream.enqueue(&Work::memset(&a, 9).unwrap()).unwrap();
    assert_eq!(sim.peek(a.address(), BYTES), bytes(&support::random(1)));
    sim.drive();
    assert_eq!(sim.peek(a.address(), BYTES), bytes(&all(9)));
    view.set_word(0, 11);
    assert_eq!(words(&a)[..2], [11, 9]);
    stream.synchronize().unwrap();
    drop(a);
    assert_eq!((view.word(0), view.word(1), view.bytes()), (11, 9, 4000));
    assert_eq!(sim.live().memory, 0);
}

#[test]
fn a_device_has_as_much_memory_as_it_was_built_with() {
    let (_sim, device) = sim_from(Sim::builder().memory(64 << 10));
    let half = Memory::new(&device, 32 << 10).unwrap();
    let refused = error(Memory::new(&device, 33 << 10));
    let expected = Error::OutOfMemory {
        requested: 33 << 10,
        in_use: 32 << 10,
        reserved: 32 << 10,
        limit: 64 << 10,
    };
    assert_eq!(refused, expected);
    drop(half);
    Memory::new(&device, 64 << 10).unwrap();
    assert!(matches!(
        error(Memory::new(&device, u64::MAX)),
        Error::OutOfMemory { .. }
    ));
}

#[test]
fn a_device_says_which_driver_it_has() {
    let sim = Sim::builder().driver_version(12_080).build();
    assert_eq!(sim.version(), 12_080);
    assert_eq!(Device::sim(&sim).name(), format!("sim:{}", sim.id()));
    assert_ne!(Sim::default().id(), Sim::default().id());
}

#[test]
fn live_counts_each_kind() {
    let (sim, device) = sim();
    assert_eq!(sim.live(), Live::default());
    let stream = Stream::new(&device).unwrap();
    let _event = Event::new(&device).unwrap();
    let module = Module::load(&device, PTX.as_bytes()).unwrap();
    let (_a, b) = (poisoned(&device), poisoned(&device));
    let child = Template::new(&device).unwrap();
    child.add(&Work::memset(&b, 1).unwrap(), &[]).unwrap();
    let template = Template::new(&device).unwrap();
    template.add_child(&child, &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let expected = Live {
        memory: 2,
        modules: 1,
        streams: 1,
        events: 1,
        graphs: 2,
        execs: 1,
        ..Live::default()
    };
    assert_eq!(sim.live(), expected);
    let function = module.function("fill").unwrap();
    drop((stream, module, template, child, exec));
    assert_eq!((sim.live().modules, sim.live().graphs), (1, 0));
    drop(function);
    assert_eq!(sim.live().modules, 0);
}

#[test]
fn calls_are_logged_in_order() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = poisoned(&device);
    let set = Work::memset(&a, 1).unwrap();
    let before = sim.calls().len();
    stream.enqueue(&set).unwrap();
    sim.fail_next(Call::StreamSynchronize, Code::UNKNOWN);
    stream.synchronize().unwrap_err();
    stream.synchronize().unwrap();
    let expected = [
        Call::StreamGetCaptureInfo,
        Call::MemsetAsync,
        Call::StreamSynchronize,
        Call::StreamSynchronize,
    ];
    assert_eq!(sim.calls()[before..], expected);
}

#[test]
fn a_replay_is_one_call() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let template = Template::new(&device).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let before = sim.calls().len();
    exec.replay(&stream).unwrap();
    assert_eq!(sim.calls()[before..], [Call::GraphLaunch]);
}

#[test]
fn a_fault_happens_once_and_to_the_call_that_was_named() {
    let (sim, device) = sim();
    let fault = Code(777);
    sim.fail_next(Call::EventCreate, fault);
    let stream = Stream::new(&device).unwrap();
    let call = Call::EventCreate;
    assert_eq!(
        error(Event::new(&device)),
        Error::Driver { call, code: fault }
    );
    Event::new(&device).unwrap();
    sim.fail_call(2, fault);
    assert!(stream.is_idle().unwrap());
    assert!(stream.is_idle().unwrap());
    assert_eq!(code(stream.is_idle()), fault);
    assert!(stream.is_idle().unwrap());
}

#[test]
fn faults_can_be_taken_back() {
    let (sim, device) = sim();
    sim.fail_next(Call::StreamCreate, Code::UNKNOWN);
    sim.fail_call(0, Code::UNKNOWN);
    sim.clear_faults();
    Stream::new(&device).unwrap();
}

#[test]
fn a_fault_that_is_lack_of_memory_has_the_numbers() {
    let (sim, device) = sim();
    let _a = poisoned(&device);
    sim.fail_next(Call::MemAlloc, Code::OUT_OF_MEMORY);
    let expected = Error::OutOfMemory {
        requested: 100,
        in_use: 4096,
        reserved: 4096,
        limit: 16 << 30,
    };
    assert_eq!(error(Memory::new(&device, 100)), expected);
}

#[test]
fn after_a_failed_kernel_everything_fails_until_it_is_taken() {
    let (sim, device) = sim();
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let (a, event) = (poisoned(&device), Event::new(&device).unwrap());
    let set = Work::memset(&a, 1).unwrap();
    let template = Template::new(&device).unwrap();
    template.add(&set, &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let closure = |_: &cg_core::KernelCall<'_>| Err("misaligned".to_owned());
    sim.launch_closure(stream.handle(), "bad", Arc::new(closure))
        .unwrap();
    stream.enqueue(&set).unwrap();
    exec.replay(&stream).unwrap();
    stream.record(&event).unwrap();

    let failed = Code::LAUNCH_FAILED;
    assert_eq!(code(stream.synchronize()), failed);
    assert_eq!(code(other.synchronize()), failed);
    assert_eq!(code(other.is_idle()), failed);
    assert_eq!(code(other.enqueue(&set)), failed);
    assert_eq!(code(exec.replay(&other)), failed);
    assert_eq!(code(event.synchronize()), failed);
    assert_eq!(code(event.is_reached()), failed);
    assert_eq!(code(Memory::new(&device, 4)), failed);
    assert_eq!(code(a.read()), failed);
    assert_eq!(code(a.write(&[1])), failed);

    assert_eq!(
        sim.take_failure().as_deref(),
        Some("kernel bad: misaligned")
    );
    assert_eq!(sim.take_failure(), None);
    assert_eq!(words(&a), all(POISON));
    assert!(event.is_reached().unwrap());
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(1));
}

#[test]
fn a_failed_node_ends_its_replay() {
    let (sim, device) = sim();
    sim.kernel("fill", |_| Err("out of luck".to_owned()));
    let stream = Stream::new(&device).unwrap();
    let (a, event) = (poisoned(&device), Event::new(&device).unwrap());
    let template = Template::new(&device).unwrap();
    let bad = Kernels::load(&device).fill(&a, 1);
    let bad = template.add(&bad, &[]).unwrap();
    template.add(&Work::memset(&a, 2).unwrap(), &[bad]).unwrap();
    template.add_event_record(&event, &[bad]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    assert_eq!(code(stream.synchronize()), Code::LAUNCH_FAILED);
    assert_eq!(
        sim.take_failure().as_deref(),
        Some("kernel fill: out of luck")
    );
    assert_eq!(words(&a), all(POISON));
    assert!(event.is_reached().unwrap());
    drop(exec);
    assert_eq!((device.collect(), sim.live().execs), (0, 0));
}

#[test]
fn two_threads_may_wait_at_once() {
    let (sim, device) = sim();
    let streams: Vec<Stream> = (0..2).map(|_| Stream::new(&device).unwrap()).collect();
    let order = Order::default();
    for step in 0..50 {
        for stream in &streams {
            launch(&sim, stream, &format!("{step}"), &order);
        }
    }
    std::thread::scope(|s| {
        for stream in &streams {
            s.spawn(|| stream.synchronize().unwrap());
        }
    });
    assert_eq!(order.lock().unwrap().len(), 100);
}

#[test]
fn a_conditional_node_tells_its_bodies_to_new_drivers_only() {
    for (version, tells) in [(13_010, false), (13_020, true)] {
        let sim = Sim::builder().driver_version(version).build();
        let device = Device::sim(&sim);
        let body = Template::new(&device).unwrap();
        body.add_empty(&[]).unwrap();
        let template = Template::new(&device).unwrap();
        let first = template.add_empty(&[]).unwrap();
        let bodies = [body.handle(), body.handle()];
        sim.add_conditional(template.handle(), &[first.handle()], Condition::If, &bodies)
            .unwrap();
        drop(body);
        let copy = template.try_clone().unwrap();
        drop(template);
        let data = copy.data().unwrap();
        assert_eq!(data.nodes[1].kind, "conditional");
        assert_eq!(data.nodes[1].condition, tells.then_some(Condition::If));
        assert_eq!(data.nodes[1].bodies.len(), if tells { 2 } else { 0 });
        assert_eq!(data.count(), if tells { 4 } else { 2 });
        assert_eq!(data.dot(false).contains("cluster_n1_1"), tells);
        drop(copy);
        assert_eq!(sim.live(), Live::default());
    }
}
