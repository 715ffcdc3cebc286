//! Execs and callables as one replay: their order, their errors, and what they keep alive.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use cg_core::{Device, Error, Exec, InstantiateFlags, Memory, Result, Segments, Stream, Template};
use cg_core::{Sim, Work};

use crate::support::kernels::Kernels;
use crate::support::{axpy, is_foreign, memory, other_device, poisoned, random, words};

on_every_driver! {
    a_replay_runs_all_steps_in_order,
    a_callable_sees_what_was_enqueued_before_it_and_later_steps_see_what_it_did,
    an_error_of_a_callable_stops_the_run_and_the_next_replay_works,
    an_error_of_an_exec_stops_the_run_and_comes_out_as_the_callers,
    segments_without_a_step_do_nothing,
    an_exec_may_be_a_step_twice_and_stay_the_callers,
    everything_may_be_dropped_right_after_a_replay_of_segments,
}

/// The error of a callable here.
#[derive(Debug, PartialEq)]
enum Failure {
    OfCallable(u32),
    OfDriver(Error),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::OfDriver(error)
    }
}

/// `y = a * x + y` as an exec.
fn sum(device: &Device, a: u32, x: &Memory, y: &Memory) -> Exec {
    let template = Template::new(device).unwrap();
    let work = Kernels::load(device).axpy(a, x, y);
    template.add(&work, &[]).unwrap();
    template.instantiate(InstantiateFlags::default()).unwrap()
}

fn a_replay_runs_all_steps_in_order(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut segments: Segments = Segments::new();
    for step in 0..3 {
        segments.push_exec(sum(device, 3 + step, &x, &y));
        segments.push_exec(sum(device, 5 + step, &y, &x));
        let order = Arc::clone(&order);
        segments.push_call(move |_| {
            order.lock().unwrap().push(step);
            Ok(())
        });
    }
    assert_eq!(segments.len(), 9);
    segments.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    let mut expected = (random(1), random(2));
    for step in 0..3 {
        expected.1 = axpy(3 + step, &expected.0, &expected.1);
        expected.0 = axpy(5 + step, &expected.1, &expected.0);
    }
    assert_eq!((words(&x), words(&y)), expected);
    assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
}

fn a_callable_sees_what_was_enqueued_before_it_and_later_steps_see_what_it_did(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y, z) = (
        memory(device, &random(3)),
        memory(device, &random(4)),
        poisoned(device),
    );
    let mut segments: Segments = Segments::new();
    segments.push_exec(sum(device, 7, &x, &y));
    let (from, to) = (y.clone(), z.clone());
    segments.push_call(move |stream| -> Result<()> {
        stream.synchronize()?;
        to.write(&from.read()?)
    });
    segments.push_exec(sum(device, 9, &z, &x));
    let mut expected = (random(3), random(4));
    for _ in 0..3 {
        segments.replay(&stream).unwrap();
        stream.synchronize().unwrap();
        expected.1 = axpy(7, &expected.0, &expected.1);
        expected.0 = axpy(9, &expected.1, &expected.0);
        assert_eq!((words(&x), words(&y)), expected);
    }
}

fn an_error_of_a_callable_stops_the_run_and_the_next_replay_works(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(5)), memory(device, &random(6)));
    let fails = Arc::new(AtomicBool::new(true));
    let mut segments = Segments::new();
    segments.push_exec(sum(device, 3, &x, &y));
    let asked = Arc::clone(&fails);
    segments.push_call(move |_| {
        if asked.load(Ordering::Relaxed) {
            return Err(Failure::OfCallable(41));
        }
        Ok(())
    });
    segments.push_exec(sum(device, 5, &x, &y));
    assert_eq!(segments.replay(&stream), Err(Failure::OfCallable(41)));
    stream.synchronize().unwrap();
    let first = axpy(3, &random(5), &random(6));
    assert_eq!(words(&y), first);
    fails.store(false, Ordering::Relaxed);
    segments.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(8, &random(5), &first));
}

fn an_error_of_an_exec_stops_the_run_and_comes_out_as_the_callers(device: &Device) {
    let (x, y) = (memory(device, &random(7)), memory(device, &random(8)));
    let ran = Arc::new(AtomicBool::new(false));
    let mut segments: Segments<Failure> = Segments::new();
    segments.push_exec(sum(device, 3, &x, &y));
    let seen = Arc::clone(&ran);
    segments.push_call(move |_| {
        seen.store(true, Ordering::Relaxed);
        Ok(())
    });
    let elsewhere = Stream::new(&other_device()).unwrap();
    let Err(Failure::OfDriver(error)) = segments.replay(&elsewhere) else {
        panic!("it ran on a foreign stream");
    };
    assert!(is_foreign::<()>(Err(error)));
    assert!(!ran.load(Ordering::Relaxed));
    segments.replay(&Stream::new(device).unwrap()).unwrap();
    assert!(ran.load(Ordering::Relaxed));
}

fn segments_without_a_step_do_nothing(device: &Device) {
    let segments: Segments = Segments::default();
    assert!(segments.is_empty());
    segments.replay(&Stream::new(device).unwrap()).unwrap();
}

fn an_exec_may_be_a_step_twice_and_stay_the_callers(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(9)), memory(device, &random(10)));
    let exec = Arc::new(sum(device, 3, &x, &y));
    let mut segments: Segments = Segments::new();
    segments.push_exec(Arc::clone(&exec));
    segments.push_exec(Arc::clone(&exec));
    segments.replay(&stream).unwrap();
    drop(segments);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(9, &random(9), &random(10)));
}

fn everything_may_be_dropped_right_after_a_replay_of_segments(device: &Device) {
    let (stream, result) = (Stream::new(device).unwrap(), poisoned(device));
    let template = Template::new(device).unwrap();
    let between = poisoned(device);
    let slow = Kernels::load(device).slow_fill(&between, 6);
    let slow = template.add(&slow, &[]).unwrap();
    let copy = Work::memcpy(&result, &between).unwrap();
    template.add(&copy, &[slow]).unwrap();
    let mut segments: Segments = Segments::new();
    segments.push_exec(template.instantiate(InstantiateFlags::default()).unwrap());
    segments.replay(&stream).unwrap();
    drop((segments, template, between, copy));
    stream.synchronize().unwrap();
    assert_eq!(words(&result), crate::support::all(6));
}

#[test]
fn segments_say_what_their_steps_are() {
    let device = Device::sim(&Sim::default());
    let template = Template::new(&device).unwrap();
    let mut segments: Segments = Segments::new();
    segments.push_exec(template.instantiate(InstantiateFlags::default()).unwrap());
    segments.push_call(|_| Ok(()));
    let text = format!("{segments:?}");
    assert!(
        text.contains("Exec(") && text.contains("a callable"),
        "{text}"
    );
}
