//! Replays: where they run, in which order, and what they keep alive.

use cg_core::{Device, Event, InstantiateFlags, Memory, Stream, Template, Work};

use crate::support::kernels::Kernels;
use crate::support::{
    Gate, POISON, Words, all, axpy, memory, poisoned, random, random_word, raw, words,
};

on_every_driver! {
    replays_of_one_stream_run_in_order,
    an_exec_runs_on_several_streams,
    replays_of_one_exec_never_overlap,
    a_replay_waits_for_the_work_before_it,
    an_upload_runs_nothing,
    two_execs_run_in_turn,
    everything_may_be_dropped_right_after_a_replay,
    everything_may_be_dropped_after_replays_on_two_streams,
    a_foreign_stream_may_be_destroyed_right_after_a_replay,
    an_exec_runs_on_the_legacy_stream,
    what_an_exec_takes_is_known_where_it_was_measured,
}

/// Return a template of two kernels, `y = a * x + y` and then `x = y + x`, as an exec.
fn two_sums(device: &Device, a: u32, x: &Memory, y: &Memory) -> cg_core::Exec {
    let kernels = Kernels::load(device);
    let template = Template::new(device).unwrap();
    let first = template.add(&kernels.axpy(a, x, y), &[]).unwrap();
    template.add(&kernels.axpy(1, y, x), &[first]).unwrap();
    template.instantiate(InstantiateFlags::default()).unwrap()
}

/// Return what [`two_sums`] makes of its memory.
fn after_two_sums(a: u32, x: &[u32], y: &[u32]) -> (Words, Words) {
    let y = axpy(a, x, y);
    (axpy(1, &y, x), y)
}

fn replays_of_one_stream_run_in_order(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let exec = two_sums(device, 3, &x, &y);
    let mut expected = (random(1), random(2));
    for _ in 0..10 {
        exec.replay(&stream).unwrap();
        expected = after_two_sums(3, &expected.0, &expected.1);
    }
    stream.synchronize().unwrap();
    assert_eq!((words(&x), words(&y)), expected);
}

fn an_exec_runs_on_several_streams(device: &Device) {
    let streams: Vec<Stream> = (0..3).map(|_| Stream::new(device).unwrap()).collect();
    let (x, y) = (memory(device, &random(3)), memory(device, &random(4)));
    let exec = two_sums(device, 5, &x, &y);
    let mut expected = (random(3), random(4));
    for stream in streams.iter().chain(&streams) {
        exec.replay(stream).unwrap();
        stream.synchronize().unwrap();
        expected = after_two_sums(5, &expected.0, &expected.1);
        assert_eq!(words(&y), expected.1);
    }
    assert_eq!((words(&x), words(&y)), expected);
}

fn replays_of_one_exec_never_overlap(device: &Device) {
    let streams: Vec<Stream> = (0..4).map(|_| Stream::new(device).unwrap()).collect();
    let (x, y) = (memory(device, &random(5)), memory(device, &random(6)));
    let exec = two_sums(device, 7, &x, &y);
    let mut expected = (random(5), random(6));
    for _ in 0..5 {
        for stream in &streams {
            exec.replay(stream).unwrap();
            expected = after_two_sums(7, &expected.0, &expected.1);
        }
    }
    for stream in &streams {
        stream.synchronize().unwrap();
    }
    assert_eq!((words(&x), words(&y)), expected);
}

fn a_replay_waits_for_the_work_before_it(device: &Device) {
    let (stream, other) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let (gate, event) = (Gate::new(), Event::new(device).unwrap());
    let value = random_word(1);
    let template = Template::new(device).unwrap();
    template.add(&Work::memcpy(&b, &a).unwrap(), &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();

    exec.upload(&stream).unwrap();
    stream.synchronize().unwrap();
    other.enqueue(&gate.work()).unwrap();
    other.enqueue(&Work::memset(&a, value).unwrap()).unwrap();
    other.record(&event).unwrap();
    stream.wait(&event).unwrap();
    exec.replay(&stream).unwrap();
    stream.enqueue(&Work::memcpy(&c, &b).unwrap()).unwrap();
    gate.open();
    stream.synchronize().unwrap();
    assert_eq!(words(&c), all(value));
}

fn an_upload_runs_nothing(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let a = poisoned(device);
    let template = Template::new(device).unwrap();
    template.add(&Work::memset(&a, 4).unwrap(), &[]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.upload(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(POISON));
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(4));
}

fn two_execs_run_in_turn(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (x, y) = (memory(device, &random(7)), memory(device, &random(8)));
    let (forth, back) = (two_sums(device, 3, &x, &y), two_sums(device, 11, &y, &x));
    let mut expected = (random(7), random(8));
    for _ in 0..3 {
        forth.replay(&stream).unwrap();
        expected = after_two_sums(3, &expected.0, &expected.1);
        back.replay(&stream).unwrap();
        let (y, x) = after_two_sums(11, &expected.1, &expected.0);
        expected = (x, y);
    }
    stream.synchronize().unwrap();
    assert_eq!((words(&x), words(&y)), expected);
}

/// Return an exec that takes long and then writes memory that nothing else keeps alive.
fn slow_exec(device: &Device, result: &Memory) -> cg_core::Exec {
    let kernels = Kernels::load(device);
    let between = poisoned(device);
    let template = Template::new(device).unwrap();
    let slow = template.add(&kernels.slow_fill(&between, 6), &[]).unwrap();
    let copy = Work::memcpy(result, &between).unwrap();
    template.add(&copy, &[slow]).unwrap();
    template.instantiate(InstantiateFlags::default()).unwrap()
}

fn everything_may_be_dropped_right_after_a_replay(device: &Device) {
    let (stream, last) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (result, done) = (poisoned(device), Event::new(device).unwrap());
    let exec = slow_exec(device, &result);
    exec.replay(&stream).unwrap();
    stream.record(&done).unwrap();
    drop((exec, stream));
    // What was freed too early would be given out here.
    let others: Vec<Memory> = (0..8).map(|i| memory(device, &random(i))).collect();
    last.wait(&done).unwrap();
    last.synchronize().unwrap();
    assert_eq!(words(&result), all(6));
    for (i, other) in (0..).zip(&others) {
        assert_eq!(words(other), random(i));
    }
}

fn everything_may_be_dropped_after_replays_on_two_streams(device: &Device) {
    let (first, second) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let result = poisoned(device);
    let exec = slow_exec(device, &result);
    exec.replay(&first).unwrap();
    exec.replay(&second).unwrap();
    drop(exec);
    first.synchronize().unwrap();
    let other = memory(device, &random(9));
    second.synchronize().unwrap();
    assert_eq!(words(&result), all(6));
    assert_eq!(words(&other), random(9));
}

fn a_foreign_stream_may_be_destroyed_right_after_a_replay(device: &Device) {
    let (theirs, last) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let (result, done) = (poisoned(device), Event::new(device).unwrap());
    let exec = slow_exec(device, &result);
    exec.replay(&raw::foreign_stream(&theirs)).unwrap();
    theirs.record(&done).unwrap();
    drop(theirs);
    let replay = exec.last_replay().unwrap();
    assert!(replay.stream().is_none());
    drop(exec);
    let others: Vec<Memory> = (0..8).map(|i| memory(device, &random(i))).collect();
    last.wait(&done).unwrap();
    replay.synchronize().unwrap();
    assert_eq!(words(&result), all(6));
    for (i, other) in (0..).zip(&others) {
        assert_eq!(words(other), random(i));
    }
}

fn an_exec_runs_on_the_legacy_stream(device: &Device) {
    let legacy = raw::legacy_stream(device);
    let (x, y) = (memory(device, &random(10)), memory(device, &random(11)));
    let exec = two_sums(device, 13, &x, &y);
    exec.replay(&legacy).unwrap();
    legacy.synchronize().unwrap();
    let expected = after_two_sums(13, &random(10), &random(11));
    assert_eq!((words(&x), words(&y)), expected);
}

fn what_an_exec_takes_is_known_where_it_was_measured(device: &Device) {
    let memory = memory(device, &random(1));
    let template = Template::new(device).unwrap();
    let work = Work::memset(&memory, 1).unwrap();
    template.add(&work, &[]).unwrap();
    let flags = InstantiateFlags::default();
    let plain = template.instantiate(flags).unwrap();
    assert_eq!(plain.device_bytes(), None);
    let measured = template.instantiate_measured(flags).unwrap();
    assert!(measured.device_bytes().is_some());
}
