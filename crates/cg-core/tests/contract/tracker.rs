//! Properties of an open capture, and the nodes that are new in it.

use std::collections::HashSet;

use cg_core::{
    Capture, CaptureMode, Code, Device, Error, Event, Memory, NodeHandle, Stream, Template,
    Tracker, Work,
};

use crate::support::{code, is_foreign, other_device, poisoned, raw};

on_every_driver! {
    a_stream_says_what_it_captures,
    a_stream_that_does_not_capture_says_so,
    a_capture_that_broke_says_nothing,
    a_stream_says_what_its_next_node_comes_after,
    a_join_is_part_of_what_comes_before,
    a_look_finds_what_was_recorded_since_the_last_one,
    a_look_finds_what_is_behind_new_nodes,
    a_look_from_a_forked_stream_finds_what_it_recorded,
    a_look_finds_nodes_of_streams_that_were_not_joined,
    a_look_does_not_break_the_capture,
    a_look_from_outside_the_capture_finds_nothing,
    a_look_at_a_capture_that_is_over_finds_nothing,
    a_stream_that_does_not_capture_cannot_be_tracked,
    a_stream_of_another_device_cannot_be_looked_from,
    nodes_keep_their_handles_when_the_capture_ends,
    the_nodes_of_a_copy_are_found_by_the_originals,
    a_node_of_another_graph_is_not_found_in_a_copy,
}

fn memset(stream: &Stream, memory: &Memory, value: u32) {
    stream
        .enqueue(&Work::memset(memory, value).unwrap())
        .unwrap();
}

fn handles(template: &Template) -> HashSet<NodeHandle> {
    let nodes = template.nodes().unwrap();
    nodes.into_iter().map(cg_core::Node::handle).collect()
}

/// Two streams and memory, with a capture open on the first and the second forked into it.
struct Forked {
    main: Stream,
    side: Stream,
    memory: Memory,
    capture: Capture,
}

impl Forked {
    fn begin(device: &Device) -> Self {
        let (main, side) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
        let memory = poisoned(device);
        let capture = Capture::begin(&main, CaptureMode::Global).unwrap();
        let forked = Self {
            main,
            side,
            memory,
            capture,
        };
        forked.order(&forked.main, &forked.side);
        forked
    }

    /// Make the later work of one stream wait for the other's.
    fn order(&self, from: &Stream, to: &Stream) {
        let event = Event::new(self.main.device()).unwrap();
        from.record(&event).unwrap();
        to.wait(&event).unwrap();
    }

    fn finish(self) -> Template {
        self.order(&self.side, &self.main);
        self.capture.finish().unwrap()
    }
}

fn a_stream_says_what_it_captures(device: &Device) {
    let forked = Forked::begin(device);
    let main = raw::capture_info(&forked.main).unwrap();
    assert!(main.after.is_empty());
    assert_eq!(raw::node_count(device, main.graph), 0);
    assert_eq!(raw::capture_info(&forked.side).unwrap(), main);
    memset(&forked.main, &forked.memory, 1);
    assert_eq!(raw::node_count(device, main.graph), 1);
    assert_eq!(forked.finish().handle(), main.graph);
}

fn a_stream_that_does_not_capture_says_so(device: &Device) {
    let stream = Stream::new(device).unwrap();
    assert_eq!(raw::capture_info(&stream), None);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    assert!(raw::capture_info(&stream).is_some());
    drop(capture);
    assert_eq!(raw::capture_info(&stream), None);
}

fn a_capture_that_broke_says_nothing(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let memory = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let mut tracker = Tracker::new(&stream).unwrap();
    memset(&stream, &memory, 1);
    stream.synchronize().unwrap_err();
    assert_eq!(raw::capture_info(&stream), None);
    assert_eq!(raw::new_nodes(&mut tracker, &stream).unwrap(), []);
    assert!(matches!(
        Tracker::new(&stream).unwrap_err(),
        Error::Capture { .. }
    ));
    assert_eq!(code(capture.finish()), Code::STREAM_CAPTURE_INVALIDATED);
}

fn a_stream_says_what_its_next_node_comes_after(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let memory = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    memset(&stream, &memory, 1);
    let first = raw::capture_info(&stream).unwrap().after;
    assert_eq!(first.len(), 1);
    assert_eq!(raw::dependencies(device, first[0]), []);
    memset(&stream, &memory, 2);
    let second = raw::capture_info(&stream).unwrap().after;
    assert_eq!(second.len(), 1);
    assert_eq!(raw::dependencies(device, second[0]), first);
    capture.finish().unwrap();
}

fn a_join_is_part_of_what_comes_before(device: &Device) {
    let forked = Forked::begin(device);
    memset(&forked.main, &forked.memory, 1);
    memset(&forked.side, &forked.memory, 2);
    let on_side = raw::capture_info(&forked.side).unwrap().after;
    let on_main = raw::capture_info(&forked.main).unwrap().after;
    forked.order(&forked.side, &forked.main);
    let joined: HashSet<_> = raw::capture_info(&forked.main)
        .unwrap()
        .after
        .into_iter()
        .collect();
    let both: HashSet<_> = on_main.into_iter().chain(on_side).collect();
    assert_eq!(joined, both);
    memset(&forked.main, &forked.memory, 3);
    let last = raw::capture_info(&forked.main).unwrap().after;
    let before: HashSet<_> = raw::dependencies(device, last[0]).into_iter().collect();
    assert_eq!(before, both);
    forked.finish();
}

fn a_look_finds_what_was_recorded_since_the_last_one(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let memory = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let mut tracker = Tracker::new(&stream).unwrap();
    assert_eq!(raw::new_nodes(&mut tracker, &stream).unwrap(), []);
    let mut found = HashSet::new();
    for value in 0..5 {
        memset(&stream, &memory, value);
        let new = raw::new_nodes(&mut tracker, &stream).unwrap();
        assert_eq!(new, raw::capture_info(&stream).unwrap().after);
        assert!(found.insert(new[0]));
        assert_eq!(raw::new_nodes(&mut tracker, &stream).unwrap(), []);
    }
    assert_eq!(handles(&capture.finish().unwrap()), found);
}

fn a_look_finds_what_is_behind_new_nodes(device: &Device) {
    let forked = Forked::begin(device);
    let mut tracker = Tracker::new(&forked.main).unwrap();
    memset(&forked.main, &forked.memory, 0);
    let first = raw::new_nodes(&mut tracker, &forked.main).unwrap();
    for value in 1..4 {
        memset(&forked.main, &forked.memory, value);
        memset(&forked.side, &forked.memory, value);
    }
    forked.order(&forked.side, &forked.main);
    memset(&forked.main, &forked.memory, 4);
    let new = raw::new_nodes(&mut tracker, &forked.main).unwrap();
    assert_eq!((first.len(), new.len()), (1, 7));
    let found: HashSet<_> = first.into_iter().chain(new).collect();
    assert_eq!(handles(&forked.finish()), found);
}

fn a_look_from_a_forked_stream_finds_what_it_recorded(device: &Device) {
    let forked = Forked::begin(device);
    let mut tracker = Tracker::new(&forked.main).unwrap();
    for value in 0..3 {
        for stream in [&forked.main, &forked.side] {
            memset(stream, &forked.memory, value);
            let new = raw::new_nodes(&mut tracker, stream).unwrap();
            assert_eq!(new, raw::capture_info(stream).unwrap().after);
        }
    }
    forked.finish();
}

fn a_look_finds_nodes_of_streams_that_were_not_joined(device: &Device) {
    let forked = Forked::begin(device);
    let mut tracker = Tracker::new(&forked.main).unwrap();
    memset(&forked.main, &forked.memory, 1);
    memset(&forked.side, &forked.memory, 2);
    memset(&forked.side, &forked.memory, 3);
    let new = raw::new_nodes(&mut tracker, &forked.main).unwrap();
    assert_eq!(new.len(), 3);
    assert_eq!(handles(&forked.finish()), new.into_iter().collect());
}

fn a_look_does_not_break_the_capture(device: &Device) {
    for mode in [
        CaptureMode::Global,
        CaptureMode::ThreadLocal,
        CaptureMode::Relaxed,
    ] {
        let stream = Stream::new(device).unwrap();
        let memory = poisoned(device);
        let capture = Capture::begin(&stream, mode).unwrap();
        let mut tracker = Tracker::new(&stream).unwrap();
        memset(&stream, &memory, 1);
        raw::new_nodes(&mut tracker, &stream).unwrap();
        memset(&stream, &memory, 2);
        assert_eq!(capture.finish().unwrap().nodes().unwrap().len(), 2);
    }
}

fn a_look_from_outside_the_capture_finds_nothing(device: &Device) {
    let (stream, outside) = (Stream::new(device).unwrap(), Stream::new(device).unwrap());
    let other = Stream::new(device).unwrap();
    let memory = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    let other_capture = Capture::begin(&other, CaptureMode::Relaxed).unwrap();
    let mut tracker = Tracker::new(&stream).unwrap();
    memset(&stream, &memory, 1);
    assert_eq!(raw::new_nodes(&mut tracker, &outside).unwrap(), []);
    assert_eq!(raw::new_nodes(&mut tracker, &other).unwrap(), []);
    assert_eq!(raw::new_nodes(&mut tracker, &stream).unwrap().len(), 1);
    drop((capture, other_capture));
}

fn a_look_at_a_capture_that_is_over_finds_nothing(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let memory = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let mut tracker = Tracker::new(&stream).unwrap();
    memset(&stream, &memory, 1);
    capture.finish().unwrap();
    assert_eq!(raw::new_nodes(&mut tracker, &stream).unwrap(), []);
    let later = Capture::begin(&stream, CaptureMode::Global).unwrap();
    memset(&stream, &memory, 2);
    assert_eq!(raw::new_nodes(&mut tracker, &stream).unwrap(), []);
    drop(later);
}

fn a_stream_that_does_not_capture_cannot_be_tracked(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let refused = Tracker::new(&stream).unwrap_err();
    assert!(matches!(refused, Error::Capture { .. }), "{refused}");
}

fn a_stream_of_another_device_cannot_be_looked_from(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let foreign = Stream::new(&other_device()).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let mut tracker = Tracker::new(&stream).unwrap();
    assert!(is_foreign(raw::new_nodes(&mut tracker, &foreign)));
    drop(capture);
}

fn nodes_keep_their_handles_when_the_capture_ends(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let memory = poisoned(device);
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    let mut tracker = Tracker::new(&stream).unwrap();
    memset(&stream, &memory, 1);
    let first = raw::new_nodes(&mut tracker, &stream).unwrap();
    memset(&stream, &memory, 2);
    let second = raw::new_nodes(&mut tracker, &stream).unwrap();
    let data = capture.finish().unwrap().data().unwrap();
    let in_order: Vec<u64> = data.nodes.iter().map(|node| node.handle).collect();
    assert_eq!(in_order, [first[0].0, second[0].0]);
}

fn the_nodes_of_a_copy_are_found_by_the_originals(device: &Device) {
    let template = Template::new(device).unwrap();
    let memory = poisoned(device);
    let mut after = Vec::new();
    for value in 0..4 {
        let work = Work::memset(&memory, value).unwrap();
        after = vec![template.add(&work, &after).unwrap()];
    }
    let (copy, copies) = template.try_clone_mapped().unwrap();
    assert_eq!(copies.len(), 4);
    assert_eq!(handles(&copy).len(), 4);
    for (node, copied) in copies {
        assert!(handles(&template).contains(&node.handle()));
        assert!(handles(&copy).contains(&copied.handle()));
        assert_eq!(template.detail(node).unwrap(), copy.detail(copied).unwrap());
    }
}

fn a_node_of_another_graph_is_not_found_in_a_copy(device: &Device) {
    let (template, other) = (
        Template::new(device).unwrap(),
        Template::new(device).unwrap(),
    );
    let node = template.add_empty(&[]).unwrap();
    let foreign = other.add_empty(&[]).unwrap();
    let copy = template.try_clone().unwrap();
    let later = template.add_empty(&[]).unwrap();
    raw::find_in_clone(&copy, node.handle()).unwrap();
    for missing in [foreign, later] {
        let found = raw::find_in_clone(&copy, missing.handle());
        assert_eq!(code(found), Code::INVALID_VALUE);
    }
}
