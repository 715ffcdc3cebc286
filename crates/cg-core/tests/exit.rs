//! Once the process exits, dropping calls no driver. The only test of its process, since what it
//! begins does not end.

mod support;

use std::sync::Arc;

use cg_core::{
    Capture, CaptureMode, Event, InstantiateFlags, Memory, Stream, Template, Work, begin_exit,
};

use support::kernels::Kernels;
use support::{poisoned, sim};

#[test]
fn once_the_process_exits_nothing_that_is_dropped_calls_the_driver() {
    let (sim, device) = sim();
    let (stream, other) = (Stream::new(&device).unwrap(), Stream::new(&device).unwrap());
    let (a, b) = (poisoned(&device), Memory::new(&device, 4).unwrap());
    let (kernels, event) = (Kernels::load(&device), Event::new(&device).unwrap());
    let template = Template::new(&device).unwrap();
    template.add(&kernels.fill(&a, 1), &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    let called = Arc::new(());
    let by_work = Arc::clone(&called);
    stream
        .enqueue(&Work::host(move || drop(by_work.clone())))
        .unwrap();
    let capture = Capture::begin(&other, CaptureMode::Global).unwrap();

    let calls = sim.calls();
    begin_exit();
    drop((capture, exec, template, kernels, event));
    drop((a, b, stream, other, device));
    assert_eq!(sim.calls(), calls);
    assert_eq!(sim.live().execs, 1);
    // Work in flight may still call its host function.
    assert_eq!(Arc::strong_count(&called), 2);
}
