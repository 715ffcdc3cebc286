//! Hooks of one graph, whose errors reach the caller, and of all graphs, whose errors are reported.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

mod common;

use std::sync::Arc;

use cg_core::hook::Phase::{CaptureEnd, CaptureStart, Destroy, ReplayEnd};
use cg_core::hook::{Phase, Policy, Registry};
use cg_core::{Capture, CaptureMode, Device, Error, Exec, InstantiateFlags, Result, Stream, Work};

type Hook = Arc<dyn Fn(Phase) -> Result<()> + Send + Sync>;
type Hooks = Registry<Hook, Error>;

fn main() -> Result<()> {
    let device = common::device()?;
    let stream = Stream::new(&device)?;
    let report = |error| {
        println!("reported: {error}");
        Ok(())
    };
    let of_all = Hooks::new(Policy::Report(Box::new(report)));
    let complain = hook(|_| Err(failure("nobody is stopped by this")));
    of_all.register(Phase::Instantiate, complain);

    let of_one = Hooks::new(Policy::Propagate);
    let say = hook(|phase| {
        println!("{phase:?}");
        Ok(())
    });
    for phase in [CaptureStart, CaptureEnd, ReplayEnd, Destroy] {
        of_one.register(phase, Arc::clone(&say));
    }

    let graph = Graph::capture(&device, &stream, [of_all, of_one.clone()])?;
    graph.replay(&stream)?;
    let veto = of_one.register(Phase::ReplayStart, hook(|_| Err(failure("not now"))));
    if let Err(error) = graph.replay(&stream) {
        println!("no replay: {error}");
    }
    veto.remove();
    graph.replay(&stream)?;
    stream.synchronize()
}

fn hook(hook: impl Fn(Phase) -> Result<()> + Send + Sync + 'static) -> Hook {
    Arc::new(hook)
}

fn failure(reason: &str) -> Error {
    let reason = reason.to_owned();
    Error::Hook { reason }
}

/// An exec with the hooks of all graphs and its own.
struct Graph {
    exec: Exec,
    hooks: [Hooks; 2],
}

impl Graph {
    fn capture(device: &Device, stream: &Stream, hooks: [Hooks; 2]) -> Result<Self> {
        let memory = common::memory(device, &[1, 2, 3])?;
        let capture = Capture::begin(stream, CaptureMode::Global)?;
        run(&hooks, Phase::CaptureStart)?;
        stream.enqueue(&Work::memset(&memory, 0)?)?;
        let template = capture.finish()?;
        run(&hooks, Phase::CaptureEnd)?;
        let exec = template.instantiate(InstantiateFlags::default())?;
        run(&hooks, Phase::Instantiate)?;
        Ok(Self { exec, hooks })
    }

    /// A start hook that fails prevents the replay; after that, `ReplayEnd` comes in any case.
    fn replay(&self, stream: &Stream) -> Result<()> {
        run(&self.hooks, Phase::ReplayStart)?;
        let replayed = self.exec.replay(stream);
        let ended = run(&self.hooks, Phase::ReplayEnd);
        replayed.and(ended)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Err(error) = run(&self.hooks, Phase::Destroy) {
            println!("a graph dies in any case: {error}");
        }
    }
}

fn run(hooks: &[Hooks; 2], phase: Phase) -> Result<()> {
    hooks
        .iter()
        .try_for_each(|hooks| hooks.run(phase, |hook| hook(phase)))
}
