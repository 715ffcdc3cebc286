//! Driver calls of inputs, and the state after one of them has failed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;

use cg_core::{
    Address, Call, Code, Device, Exec, Inputs, InstantiateFlags, Memory, Result, Sim, Stream,
    Template, Work,
};

use support::raw::feed;
use support::{POISON, all, bytes, error, memory, poisoned, random, sim, words};

const SET: Call = Call::GraphExecKernelNodeSetParams;

struct Fixture {
    sim: Sim,
    device: Device,
    stream: Stream,
    slots: Vec<Memory>,
    results: Vec<Memory>,
    sources: Vec<Memory>,
    template: Arc<Template>,
    inputs: Inputs,
    exec: Exec,
}

impl Fixture {
    /// Return that many slots, each copied to a result.
    fn new(slots: usize) -> Self {
        let (sim, device) = sim();
        let some = || (0..slots).map(|_| poisoned(&device)).collect::<Vec<_>>();
        let (slots, results) = (some(), some());
        let template = Arc::new(Template::new(&device).unwrap());
        for (slot, result) in slots.iter().zip(&results) {
            let copy = Work::memcpy(result, slot).unwrap();
            template.add(&copy, &[]).unwrap();
        }
        let inputs = Inputs::add(&template, &slots, &[]).unwrap();
        Self {
            stream: Stream::new(&device).unwrap(),
            sources: (0..4).map(|seed| memory(&device, &random(seed))).collect(),
            exec: template.instantiate(InstantiateFlags::default()).unwrap(),
            sim,
            device,
            slots,
            results,
            template,
            inputs,
        }
    }

    /// Return the sources of each slot: those of these numbers by turns.
    fn sources(&self, numbers: &[usize]) -> Vec<Address> {
        let numbers = numbers.iter().cycle().take(self.slots.len());
        numbers.map(|n| self.sources[*n].address()).collect()
    }

    fn replay(&self, sources: &[Address]) -> Result<()> {
        let feed = feed(&self.inputs, sources, &[])?;
        self.exec.replay_with(&feed, &self.stream)
    }

    /// Return the calls that `work` makes.
    fn calls(&self, work: impl FnOnce()) -> Vec<Call> {
        let before = self.sim.calls().len();
        work();
        self.sim.calls().split_off(before)
    }

    fn check(&self, numbers: &[usize]) {
        self.stream.synchronize().unwrap();
        for (result, n) in self.results.iter().zip(numbers.iter().cycle()) {
            assert_eq!(words(result), random(*n as u64));
        }
    }
}

#[test]
fn new_sources_cost_one_set_and_old_ones_none() {
    let f = Fixture::new(64);
    let [first, second] = [f.sources(&[0, 1]), f.sources(&[2, 3])];
    for sources in [&first, &second, &first] {
        let fed = f.calls(|| f.replay(sources).unwrap());
        assert_eq!(fed, [SET, Call::GraphLaunch]);
        let again = f.calls(|| f.replay(sources).unwrap());
        assert_eq!(again, [Call::GraphLaunch]);
    }
    f.check(&[0, 1]);
}

#[test]
fn each_node_is_set_once_whatever_the_size_of_its_parameter() {
    for slots in [4, 5, 66, 67, 170, 171] {
        let f = Fixture::new(slots);
        let sets = if slots > 170 { 2 } else { 1 };
        let mut expected = vec![SET; sets];
        expected.push(Call::GraphLaunch);
        let sources = f.sources(&[0, 1]);
        assert_eq!(f.calls(|| f.replay(&sources).unwrap()), expected);
        f.check(&[0, 1]);
        let again = f.calls(|| f.replay(&sources).unwrap());
        assert_eq!(again, [Call::GraphLaunch], "{slots} slots");
        // Back to copying nothing.
        assert_eq!(f.calls(|| f.exec.replay(&f.stream).unwrap()), expected);
        f.check(&[0, 1]);
    }
}

#[test]
fn slots_fed_with_themselves_at_first_cost_no_set() {
    let f = Fixture::new(3);
    let own: Vec<Address> = f.slots.iter().map(Memory::address).collect();
    let calls = f.calls(|| f.replay(&own).unwrap());
    assert_eq!(calls, [Call::GraphLaunch]);
}

#[test]
fn only_nodes_that_change_are_set() {
    let f = Fixture::new(200);
    let mut sources = f.sources(&[0]);
    let calls = f.calls(|| f.replay(&sources).unwrap());
    assert_eq!(calls, [SET, SET, Call::GraphLaunch]);
    sources[199] = f.sources[3].address();
    let calls = f.calls(|| f.replay(&sources).unwrap());
    assert_eq!(calls, [SET, Call::GraphLaunch]);
    f.stream.synchronize().unwrap();
    assert_eq!(words(&f.results[198]), random(0));
    assert_eq!(words(&f.results[199]), random(3));
}

#[test]
fn a_plain_replay_after_a_feed_sets_once() {
    let f = Fixture::new(2);
    let plain = || f.exec.replay(&f.stream).unwrap();
    assert_eq!(f.calls(plain), [Call::GraphLaunch]);
    f.replay(&f.sources(&[1])).unwrap();
    assert_eq!(f.calls(plain), [SET, Call::GraphLaunch]);
    assert_eq!(f.calls(plain), [Call::GraphLaunch]);
    f.check(&[1]);
}

#[test]
fn after_a_failed_set_nothing_ran_and_the_next_replay_sets_again() {
    for slots in [1, 180] {
        let f = Fixture::new(slots);
        for failing in 0..slots.div_ceil(170) {
            let sources = f.sources(&[failing, failing + 1]);
            let calls = f.calls(|| {
                f.sim.fail_call(failing, Code::OUT_OF_MEMORY);
                let refused = error(f.replay(&sources));
                assert!(refused.to_string().contains(SET.symbol()));
            });
            assert!(calls.iter().all(|call| *call == SET));
            let before = f.sim.ran();
            f.sim.drive();
            assert_eq!(f.sim.ran(), before);
            f.replay(&sources).unwrap();
            f.check(&[failing, failing + 1]);
        }
    }
}

#[test]
fn a_plain_replay_after_a_failed_set_copies_nothing() {
    let f = Fixture::new(180);
    // The first of two nodes is set when the second one fails.
    f.sim.fail_call(1, Code::OUT_OF_MEMORY);
    error(f.replay(&f.sources(&[2])));
    f.exec.replay(&f.stream).unwrap();
    f.stream.synchronize().unwrap();
    assert!(f.results.iter().all(|result| words(result) == all(POISON)));
}

#[test]
fn a_plain_replay_whose_set_fails_runs_nothing() {
    let f = Fixture::new(1);
    f.replay(&f.sources(&[1])).unwrap();
    f.check(&[1]);
    f.slots[0].write(&bytes(&random(2))).unwrap();
    f.sim.fail_next(SET, Code::OUT_OF_MEMORY);
    error(f.exec.replay(&f.stream));
    f.check(&[1]);
    f.exec.replay(&f.stream).unwrap();
    f.check(&[2]);
}

#[test]
fn a_failed_launch_is_made_up_for_without_a_set() {
    let f = Fixture::new(1);
    f.sim.fail_next(Call::GraphLaunch, Code::OUT_OF_MEMORY);
    error(f.replay(&f.sources(&[1])));
    let calls = f.calls(|| f.replay(&f.sources(&[1])).unwrap());
    assert_eq!(calls, [Call::GraphLaunch]);
    f.check(&[1]);
}

#[test]
fn a_refused_source_leaves_the_next_replay_right() {
    let f = Fixture::new(2);
    f.replay(&f.sources(&[0, 1])).unwrap();
    let bad = [f.sources[2].address(), f.slots[0].address().offset(4)];
    error(f.replay(&bad));
    f.check(&[0, 1]);
    f.replay(&f.sources(&[0, 1])).unwrap();
    f.check(&[0, 1]);
}

#[test]
fn the_kernel_is_loaded_once_and_goes_with_the_last_inputs() {
    let f = Fixture::new(1);
    let more = Arc::new(Template::new(&f.device).unwrap());
    let calls = f.calls(|| drop(Inputs::add(&more, &f.slots, &[]).unwrap()));
    assert!(!calls.contains(&Call::ModuleLoadData));
    assert_eq!(f.sim.live().modules, 1);
    let Fixture {
        sim,
        device,
        template,
        inputs,
        exec,
        ..
    } = f;
    drop((template, inputs, exec, more));
    device.collect();
    assert_eq!(sim.live().modules, 0);
}

#[test]
fn replays_of_several_threads_copy_and_run_as_one_step() {
    let f = Fixture::new(3);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let f = &f;
            scope.spawn(move || {
                for _ in 0..50 {
                    f.replay(&f.sources(&[n])).unwrap();
                }
            });
        }
    });
    let mut replays = 0;
    while f.sim.step() {
        let found: Vec<_> = f.results.iter().map(words).collect();
        replays += u32::from(found.iter().all(|words| *words == found[0]));
    }
    assert!(replays >= 200, "{replays}");
    assert_eq!(words(&f.results[0]), words(&f.results[2]));
}

#[test]
#[should_panic(expected = "kernel cg_inputs_128 touches")]
fn a_source_that_was_freed_is_found() {
    let mut f = Fixture::new(1);
    f.replay(&f.sources(&[3])).unwrap();
    drop(f.sources.pop());
    f.sim.drive();
}
