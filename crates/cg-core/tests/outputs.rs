//! Driver calls of outputs, and the state after one of them has failed.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::sync::Arc;

use cg_core::{
    Call, Code, Destination, Device, Exec, Inputs, InstantiateFlags, Memory, Outputs, Result, Sim,
    Stream, Template, Transfer,
};

use support::raw::{deliver, feed};
use support::{POISON, all, bytes, error, memory, poisoned, random, sim, words};

const SET: Call = Call::GraphExecKernelNodeSetParams;
/// More than the kernel copies.
const LARGE: u64 = (4 << 20) + 16;

struct Fixture {
    sim: Sim,
    device: Device,
    stream: Stream,
    results: Vec<Memory>,
    template: Arc<Template>,
    outputs: Outputs,
    exec: Exec,
}

impl Fixture {
    /// Return that many small results and large ones, the `i`-th of which begins with the words of seed `i`.
    fn new(small: u64, large: u64) -> Self {
        let (sim, device) = sim();
        let small = (0..small).map(|seed| memory(&device, &random(seed)));
        let large = (0..large).map(|seed| {
            let memory = Memory::new(&device, LARGE).unwrap();
            memory.write(&bytes(&random(seed))).unwrap();
            memory
        });
        let results: Vec<Memory> = small.chain(large).collect();
        let template = Arc::new(Template::new(&device).unwrap());
        let outputs = Outputs::add(&template, &results).unwrap();
        Self {
            stream: Stream::new(&device).unwrap(),
            exec: template.instantiate(InstantiateFlags::default()).unwrap(),
            sim,
            device,
            results,
            template,
            outputs,
        }
    }

    /// Make new memory for each result, of which as many bytes are taken as `poisoned` memory has.
    fn destinations(&self) -> (Vec<Memory>, Vec<Destination>) {
        let new: Vec<_> = self
            .results
            .iter()
            .map(|_| poisoned(&self.device))
            .collect();
        let to = new.iter().map(|memory| Destination {
            address: memory.address(),
            bytes: memory.bytes(),
        });
        let to = to.collect();
        (new, to)
    }

    fn replay(&self, to: &[Destination]) -> Result<()> {
        self.exec
            .replay_with(&deliver(&self.outputs, to)?, &self.stream)
    }

    /// Return the calls that `work` makes.
    fn calls(&self, work: impl FnOnce()) -> Vec<Call> {
        let before = self.sim.calls().len();
        work();
        self.sim.calls().split_off(before)
    }

    fn check(&self, new: &[Memory]) {
        self.stream.synchronize().unwrap();
        for (result, new) in self.results.iter().zip(new) {
            let expected = result.slice(0..new.bytes()).unwrap();
            assert_eq!(words(new), words(&expected));
        }
    }
}

#[test]
fn new_destinations_cost_one_set_and_old_ones_none() {
    let f = Fixture::new(64, 0);
    for _ in 0..3 {
        let (new, to) = f.destinations();
        assert_eq!(f.calls(|| f.replay(&to).unwrap()), [SET, Call::GraphLaunch]);
        f.check(&new);
        assert_eq!(f.calls(|| f.replay(&to).unwrap()), [Call::GraphLaunch]);
        f.check(&new);
    }
}

#[test]
fn each_node_is_set_once() {
    let f = Fixture::new(171, 2);
    let expected = [SET, SET, Call::GraphLaunch];
    let (new, mut to) = f.destinations();
    assert_eq!(f.calls(|| f.replay(&to).unwrap()), expected);
    f.check(&new);
    // Only nodes that change are set.
    let (last, others) = f.destinations();
    to[172] = others[172];
    assert_eq!(f.calls(|| f.replay(&to).unwrap()), [SET, Call::GraphLaunch]);
    f.stream.synchronize().unwrap();
    assert_eq!(words(&last[172]), random(1));
    to[3].bytes -= 1;
    assert_eq!(f.calls(|| f.replay(&to).unwrap()), [SET, Call::GraphLaunch]);
    // Back to copying nothing.
    assert_eq!(f.calls(|| f.exec.replay(&f.stream).unwrap()), expected);
    assert_eq!(
        f.calls(|| f.exec.replay(&f.stream).unwrap()),
        [Call::GraphLaunch]
    );
    f.stream.synchronize().unwrap();
}

#[test]
fn results_that_go_nowhere_cost_no_set() {
    let f = Fixture::new(2, 1);
    let own: Vec<_> = (0..3).map(|place| f.outputs.source(place)).collect();
    assert_eq!(f.calls(|| f.replay(&own).unwrap()), [Call::GraphLaunch]);
    assert_eq!(
        f.calls(|| f.exec.replay(&f.stream).unwrap()),
        [Call::GraphLaunch]
    );
}

#[test]
fn inputs_and_outputs_are_set_and_launched_together() {
    let f = Fixture::new(1, 0);
    let slot = poisoned(&f.device);
    let inputs = Inputs::add(&f.template, std::slice::from_ref(&slot), &[]).unwrap();
    let exec = f.template.instantiate(InstantiateFlags::default()).unwrap();
    let source = memory(&f.device, &random(9));
    let (new, to) = f.destinations();
    let sources = [source.address()];
    let calls = f.calls(|| {
        let feed = feed(&inputs, &sources, &[]).unwrap();
        let delivery = deliver(&f.outputs, &to).unwrap();
        let both = Transfer::new(Some(&feed), Some(&delivery));
        exec.replay_with(both, &f.stream).unwrap();
    });
    assert_eq!(calls, [SET, SET, Call::GraphLaunch]);
    f.check(&new);
    assert_eq!(words(&slot), random(9));
}

#[test]
fn after_a_failed_set_nothing_ran_and_the_next_replay_sets_again() {
    let f = Fixture::new(171, 2);
    for (failing, call) in [SET, SET].into_iter().enumerate() {
        let (new, to) = f.destinations();
        f.sim.fail_call(failing, Code::OUT_OF_MEMORY);
        let refused = error(f.replay(&to));
        assert!(refused.to_string().contains(call.symbol()), "{refused}");
        f.sim.drive();
        assert!(new.iter().all(|new| words(new) == all(POISON)));
        f.replay(&to).unwrap();
        f.check(&new);
        // Nor does a plain one after it copy.
        let (new, to) = f.destinations();
        f.sim.fail_call(failing, Code::OUT_OF_MEMORY);
        error(f.replay(&to));
        f.exec.replay(&f.stream).unwrap();
        f.stream.synchronize().unwrap();
        assert!(new.iter().all(|new| words(new) == all(POISON)));
    }
}

#[test]
fn a_refused_destination_leaves_the_next_replay_right() {
    let f = Fixture::new(2, 1);
    let (new, to) = f.destinations();
    let mut bad = to.clone();
    bad[1].address = f.results[2].address().offset(4);
    error(f.replay(&bad));
    f.exec.replay(&f.stream).unwrap();
    f.stream.synchronize().unwrap();
    assert!(new.iter().all(|new| words(new) == all(POISON)));
    f.replay(&to).unwrap();
    f.check(&new);
}

#[test]
fn the_kernel_is_loaded_once_and_goes_with_the_last_outputs() {
    let f = Fixture::new(1, 1);
    let more = Arc::new(Template::new(&f.device).unwrap());
    let calls = f.calls(|| drop(Outputs::add(&more, &f.results).unwrap()));
    assert!(!calls.contains(&Call::ModuleLoadData));
    assert_eq!(f.sim.live().modules, 1);
    let Fixture {
        sim,
        device,
        results,
        template,
        outputs,
        exec,
        ..
    } = f;
    drop((template, outputs, exec, more, results));
    device.collect();
    let live = sim.live();
    assert_eq!((live.modules, live.memory), (0, 0));
}

#[test]
#[should_panic(expected = "kernel cg_outputs_128 touches")]
fn a_destination_that_was_freed_is_found() {
    let f = Fixture::new(1, 0);
    let (new, to) = f.destinations();
    f.replay(&to).unwrap();
    drop(new);
    f.sim.drive();
}
