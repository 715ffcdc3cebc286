//! Saved graphs: what is refused, and by which name.

use std::slice;
use std::sync::Arc;
use std::thread;

use cg_core::saved::{Names, Saved, Taken};
use cg_core::{
    Device, Error, Event, Inputs, Keep, Memory, Module, Pool, Result, Stream, Template, Work,
};

use crate::support::graphs::{Job, kernels, launch_axpy, load, saved_axpy};
use crate::support::{BYTES, error, is_foreign, is_invalid, memory, other_device, random};

on_every_driver! {
    an_address_without_a_name_is_refused,
    a_second_template_of_other_work_is_refused,
    an_address_that_moves_otherwise_than_its_memory_is_refused,
    names_stand_for_one_piece_of_memory_each,
    memory_that_is_away_is_refused,
    two_threads_may_prove_one_template_by_the_other,
    nodes_that_no_file_can_have_are_refused_by_kind,
    what_is_of_another_device_is_refused,
    inputs_between_other_nodes_are_refused,
    memory_is_bound_by_name_and_size,
}
/// Return what is said of a template that cannot be saved.
fn refused(device: &Device, template: &Template, memory: &[(&str, &Memory)]) -> String {
    let module = kernels(device);
    let added = Saved::new(device).add("no", &[&module], (template, memory), None);
    let error = error(added);
    assert!(matches!(error, Error::Invalid { .. }), "{error}");
    error.to_string()
}

fn an_address_without_a_name_is_refused(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let template = job.template(device, &module);
    for left_out in 0..4 {
        let mut names = job.names().to_vec();
        let (_, left) = names.remove(left_out);
        let error = refused_with(device, &template, &names, &module);
        assert!(
            error.contains("node ") && error.contains("memory without a name"),
            "{error}"
        );
        assert!(
            error.contains(&format!("{:#x}", left.address().0)),
            "{error}"
        );
    }
    // A part of it is not enough.
    let part = job.set.slice(0..BYTES - 4).unwrap();
    let mut names = job.names();
    names[3].1 = &part;
    assert!(refused_with(device, &template, &names, &module).contains("without a name"));
}

fn refused_with(
    device: &Device,
    template: &Template,
    memory: &[(&str, &Memory)],
    module: &Module,
) -> String {
    let added = Saved::new(device).add("no", &[module], (template, memory), None);
    error(added).to_string()
}

/// Return what is said of a second template, of the same names in other memory.
fn second(
    device: &Device,
    module: &Module,
    (one, names): (&Template, &Names<'_>),
    (other, moved): (&Template, &Names<'_>),
) -> Result<Taken> {
    let mut saved = Saved::new(device);
    saved.add("job", &[module], (one, names), Some((other, moved)))
}

/// Adds a node to a template, another one if it is told so.
type Add<'a> = Box<dyn Fn(&Template, &Job, bool) + 'a>;

fn a_second_template_of_other_work_is_refused(device: &Device) {
    let module = kernels(device);
    let (job, moved) = (Job::new(device, 1), Job::new(device, 3));
    let (names, others) = (job.names(), moved.names());
    let kernel = |template: &Template, work: &Work| {
        template.add(work, &[]).unwrap();
    };
    let pairs: Vec<Add<'_>> = vec![
        Box::new(|template, job, is_other| {
            let value = 9 + u32::from(is_other);
            kernel(template, &Work::memset(&job.set, value).unwrap());
        }),
        Box::new(|template, job, is_other| {
            let (dst, src) = if is_other {
                (&job.x, &job.y)
            } else {
                (&job.y, &job.x)
            };
            kernel(template, &Work::memcpy(dst, src).unwrap());
        }),
        Box::new(|template, job, is_other| {
            let work = Work::memset(&job.set, 9).unwrap();
            let copy = Work::memcpy(&job.set, &job.x).unwrap();
            kernel(template, if is_other { &copy } else { &work });
        }),
        Box::new(|template, job, is_other| {
            kernel(
                template,
                &launch_axpy(&module, 3 + u32::from(is_other), &job.x, &job.y),
            );
        }),
        Box::new(|template, job, is_other| {
            let (x, y) = if is_other {
                (&job.y, &job.x)
            } else {
                (&job.x, &job.y)
            };
            kernel(template, &launch_axpy(&module, 3, x, y));
        }),
        Box::new(|template, job, is_other| {
            let work = launch_axpy(&module, 3, &job.x, &job.y);
            let shared = if is_other { 64 } else { 0 };
            kernel(template, &work.with_shared_bytes(shared));
        }),
        Box::new(|template, _, is_other| {
            let first = [template.add_empty(&[]).unwrap()];
            let after = if is_other { &[][..] } else { &first };
            template.add_empty(after).unwrap();
        }),
        Box::new(|template, job, is_other| {
            if is_other {
                kernel(template, &launch_axpy(&module, 3, &job.x, &job.y));
            } else {
                template.add_empty(&[]).unwrap();
            }
        }),
        Box::new(|template, _, is_other| {
            let child = Template::new(device).unwrap();
            child.add_empty(&[]).unwrap();
            if is_other {
                child.add_empty(&[]).unwrap();
            }
            template.add_child(&child, &[]).unwrap();
        }),
    ];
    for (number, add) in pairs.iter().enumerate() {
        let [one, same, other] =
            [(&job, false), (&moved, false), (&moved, true)].map(|(job, is)| {
                let template = Template::new(device).unwrap();
                add(&template, job, is);
                template
            });
        let found = second(device, &module, (&one, &names), (&same, &others));
        assert!(found.is_ok(), "{number}: {found:?}");
        let found = second(device, &module, (&one, &names), (&other, &others));
        assert!(is_invalid(found), "{number}");
    }
    let (one, other) = (
        job.template(device, &module),
        moved.template(device, &module),
    );
    let fewer = second(device, &module, (&one, &names), (&other, &others[1..]));
    assert!(error(fewer).to_string().contains("names or sizes"));
    // A template is its own second one: nothing has moved.
    let taken = second(device, &module, (&one, &names), (&one, &names)).unwrap();
    assert_eq!((taken.proven, taken.assumed), (0, 7));
}

fn an_address_that_moves_otherwise_than_its_memory_is_refused(device: &Device) {
    let module = kernels(device);
    let (arena, moved) = (
        Memory::new(device, 4 * BYTES).unwrap(),
        Memory::new(device, 4 * BYTES).unwrap(),
    );
    let block = |arena: &Memory, number: u64| arena.slice(number * BYTES..(number + 1) * BYTES);
    let template = |arena: &Memory, first: u64| {
        let (x, y) = (
            block(arena, first).unwrap(),
            block(arena, first + 1).unwrap(),
        );
        let template = Template::new(device).unwrap();
        template.add(&launch_axpy(&module, 3, &x, &y), &[]).unwrap();
        template
    };
    let (one, same, other) = (
        template(&arena, 0),
        template(&moved, 0),
        template(&moved, 2),
    );
    let (names, others) = ([("arena", &arena)], [("arena", &moved)]);
    let taken = second(device, &module, (&one, &names), (&same, &others)).unwrap();
    assert_eq!((taken.proven, taken.assumed), (2, 0));
    let text = error(second(device, &module, (&one, &names), (&other, &others))).to_string();
    assert!(
        text.contains("the same place in memory of one name"),
        "{text}"
    );
}

fn names_stand_for_one_piece_of_memory_each(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let template = Template::new(device).unwrap();
    template.add(&launch_axpy(&module, 3, &x, &y), &[]).unwrap();
    let add = |names: &Names<'_>| refused_with(device, &template, names, &module);
    let text = add(&[("w", &x), ("w", &y)]);
    assert!(text.contains("a name of memory is w"), "{text}");
    let part = x.slice(8..16).unwrap();
    let text = add(&[("x", &x), ("part", &part), ("y", &y)]);
    assert!(text.contains("where \"x\" is as well"), "{text}");
    let saved = saved_axpy(device, &module, &x, &y);
    let twice = load(&saved, device, "axpy", &[("x", &x), ("x", &y), ("y", &y)]);
    assert!(is_invalid(twice));
}

fn memory_that_is_away_is_refused(device: &Device) {
    let module = kernels(device);
    let pool = Pool::new(device);
    let stream = Stream::new(device).unwrap();
    let (x, y) = (
        memory(device, &random(1)),
        pool.allocate(&stream, BYTES).unwrap(),
    );
    let template = Template::new(device).unwrap();
    template.add(&launch_axpy(&module, 3, &x, &y), &[]).unwrap();
    let add = || Saved::new(device).add("no", &[&module], (&template, &[("x", &x)]), None);
    assert!(error(add()).to_string().contains("without a name"));
    pool.pause(Keep::Host).unwrap();
    assert!(matches!(error(add()), Error::Paused { .. }));
    pool.resume().unwrap();
}

fn two_threads_may_prove_one_template_by_the_other(device: &Device) {
    let module = kernels(device);
    let jobs = [Job::new(device, 1), Job::new(device, 3)];
    let templates = jobs.each_ref().map(|job| job.template(device, &module));
    thread::scope(|scope| {
        for (first, other) in [(0, 1), (1, 0)] {
            let (jobs, templates, module) = (&jobs, &templates, &module);
            scope.spawn(move || {
                let [one, two] = [first, other].map(|number: usize| &templates[number]);
                let [names, moved] = [first, other].map(|number: usize| jobs[number].names());
                for _ in 0..50 {
                    second(device, module, (one, &names), (two, &moved)).unwrap();
                }
            });
        }
    });
}

fn nodes_that_no_file_can_have_are_refused_by_kind(device: &Device) {
    let template = Template::new(device).unwrap();
    template.add(&Work::host(|| ()), &[]).unwrap();
    assert!(refused(device, &template, &[]).contains("node 0: a node is a host function"));
    let event = Event::new(device).unwrap();
    let template = Template::new(device).unwrap();
    template.add_event_record(&event, &[]).unwrap();
    assert!(refused(device, &template, &[]).contains("an event that is recorded"));
    let template = Template::new(device).unwrap();
    template.add_event_wait(&event, &[]).unwrap();
    assert!(refused(device, &template, &[]).contains("a wait for an event"));
}

fn what_is_of_another_device_is_refused(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let template = job.template(device, &module);
    let foreign = other_device();
    let (their_module, theirs) = (kernels(&foreign), Job::new(&foreign, 1));
    let their_template = theirs.template(&foreign, &their_module);
    let (names, mine) = (theirs.names(), job.names());
    let mut saved = Saved::new(device);
    let modules = [&module, &their_module];
    assert!(is_foreign(saved.add(
        "job",
        &modules[..1],
        (&template, &names),
        None
    )));
    assert!(is_foreign(saved.add(
        "job",
        &modules,
        (&template, &mine),
        None
    )));
    let proof = Some((&their_template, &mine[..]));
    assert!(is_foreign(saved.add(
        "job",
        &modules[..1],
        (&template, &mine),
        proof
    )));
    assert_eq!(saved, Saved::new(device));
}

fn inputs_between_other_nodes_are_refused(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let template = Arc::new(job.template(device, &module));
    let before = template.nodes().unwrap();
    Inputs::add(&template, slice::from_ref(&job.x), &[]).unwrap();
    let mut nodes = template.nodes().unwrap();
    nodes.retain(|node| !before.contains(node));
    let first = template.add_empty(&[]).unwrap();
    template.add_edge(first, nodes[0]).unwrap();
    let text = refused_with(device, &template, &job.names(), &module);
    assert!(
        text.contains("inputs or outputs between other nodes"),
        "{text}"
    );
}

fn memory_is_bound_by_name_and_size(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let saved = saved_axpy(device, &module, &x, &y);
    let bind = |memory: &[(&str, &Memory)]| error(load(&saved, device, "axpy", memory)).to_string();
    let text = bind(&[("x", &x), ("z", &y)]);
    assert!(text.contains("x, z, expected \"y\", once"), "{text}");
    let longer = Memory::new(device, BYTES + 4).unwrap();
    let text = bind(&[("x", &x), ("y", &longer)]);
    let sizes = format!("of {} bytes, expected of the {BYTES} bytes", BYTES + 4);
    assert!(text.contains(&sizes), "{text}");
    let unaligned = Memory::new(device, BYTES + 4).unwrap();
    let text = bind(&[("x", &x), ("y", &unaligned.slice(4..BYTES + 4).unwrap())]);
    assert!(text.contains("expected at a multiple of 256"), "{text}");
    // What the graph does not need is not looked at.
    let more = [("y", &y), ("other", &longer), ("x", &x)];
    assert!(load(&saved, device, "axpy", &more).is_ok());
}
