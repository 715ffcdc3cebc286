//! Saved graphs: what is refused, and by which name.

use std::slice;
use std::sync::Arc;

use cg_core::saved::Saved;
use cg_core::{Device, Error, Event, Inputs, Memory, Module, Template, Work};

use crate::support::graphs::{Job, kernels, load, saved_axpy};
use crate::support::{BYTES, error, is_foreign, memory, other_device, random};

on_every_driver! {
    an_address_without_a_name_is_refused,
    a_second_template_of_other_work_is_refused,
    nodes_that_no_file_can_have_are_refused_by_kind,
    a_kernel_of_no_module_is_refused,
    what_is_of_another_device_is_refused,
    a_template_with_inputs_is_refused,
    memory_is_bound_by_name_and_size,
}
/// Return what is said of a template that cannot be saved.
fn refused(device: &Device, template: &Template, memory: &[(&str, &Memory)]) -> String {
    let module = kernels(device);
    let added = Saved::new(device).add("no", template, memory, None, &[&module]);
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
    let added = Saved::new(device).add("no", template, memory, None, &[module]);
    error(added).to_string()
}

fn a_second_template_of_other_work_is_refused(device: &Device) {
    let module = kernels(device);
    let (job, moved) = (Job::new(device, 1), Job::new(device, 3));
    let one = job.template(device, &module);
    let add = |other: &Template, names: &[(&str, &Memory)]| {
        let mut saved = Saved::new(device);
        let proof = Some((other, names));
        error(saved.add("job", &one, &job.names(), proof, &[&module])).to_string()
    };
    let names = moved.names();
    let shorter = Template::new(device).unwrap();
    shorter
        .add(&Work::memset(&moved.set, 7).unwrap(), &[])
        .unwrap();
    assert!(add(&shorter, &names).contains("1 nodes"));
    let unordered = Template::new(device).unwrap();
    for _ in 0..4 {
        unordered.add_empty(&[]).unwrap();
    }
    assert!(add(&unordered, &names).contains("second template"));
    let right = moved.template(device, &module);
    assert!(add(&right, &names[1..]).contains("names or sizes"));
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

fn a_kernel_of_no_module_is_refused(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let template = job.template(device, &module);
    let mut saved = Saved::new(device);
    let text = error(saved.add("job", &template, &job.names(), None, &[])).to_string();
    assert!(
        text.contains("kernel axpy, which is of none of the modules"),
        "{text}"
    );
    // Nothing of it is left.
    assert_eq!(saved, Saved::new(device));
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
        &template,
        &names,
        None,
        &modules[..1]
    )));
    assert!(is_foreign(
        saved.add("job", &template, &mine, None, &modules)
    ));
    let proof = Some((&their_template, &mine[..]));
    assert!(is_foreign(saved.add(
        "job",
        &template,
        &mine,
        proof,
        &modules[..1]
    )));
    assert_eq!(saved, Saved::new(device));
}

fn a_template_with_inputs_is_refused(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let template = Arc::new(job.template(device, &module));
    Inputs::add(&template, slice::from_ref(&job.x), &[]).unwrap();
    let text = refused_with(device, &template, &job.names(), &module);
    assert!(text.contains("one with inputs or outputs"), "{text}");
}

fn memory_is_bound_by_name_and_size(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let saved = saved_axpy(device, &module, &x, &y);
    let bind = |memory: &[(&str, &Memory)]| error(load(&saved, device, "axpy", memory)).to_string();
    let text = bind(&[("x", &x), ("z", &y)]);
    assert!(text.contains("x, z, expected memory named \"y\""), "{text}");
    let longer = Memory::new(device, BYTES + 4).unwrap();
    let text = bind(&[("x", &x), ("y", &longer)]);
    let sizes = format!("of {} bytes, expected of the {BYTES} bytes", BYTES + 4);
    assert!(text.contains(&sizes), "{text}");
    // What the graph does not need is not looked at.
    let more = [("y", &y), ("other", &longer), ("x", &x)];
    assert!(load(&saved, device, "axpy", &more).is_ok());
}
