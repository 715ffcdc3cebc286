//! Saved graphs: that they do the same work when they come back.

use std::path::Path;
use std::sync::Arc;
use std::{env, fs, slice};

use cg_core::driver::spec::LaunchAttribute;
use cg_core::saved::{Names, Saved, Taken};
use cg_core::{
    Args, Capture, CaptureMode, Code, Device, Inputs, InstantiateFlags, Memory, Module, Node,
    Outputs, Stream, Template, Work,
};

use crate::support::graphs::{Job, Scratch, kernels, launch_axpy, load, replay, saved_axpy};
use crate::support::kernels::PTX;
use crate::support::{BYTES, POISON, WORDS, axpy, code, error, memory, poisoned, random, words};

on_every_driver! {
    a_kernel_is_the_same_each_time_that_it_is_asked_for,
    a_loaded_graph_does_the_same_work_on_other_memory,
    a_captured_graph_is_saved_as_well,
    several_graphs_of_a_file_share_an_image,
    a_word_that_stays_while_its_memory_moves_is_refused,
    an_address_beside_memory_that_moves_with_it_is_refused,
    more_shared_memory_than_kernels_have_must_be_allowed_first,
    what_a_kernel_is_allowed_comes_back_with_the_graph,
    what_a_kernel_was_allowed_once_is_enough_for_the_graph,
    launch_attributes_come_back_with_the_graph,
    the_end_of_memory_moves_with_it,
    a_loaded_graph_keeps_its_kernels_and_memory,
    contents_and_notes_come_back,
    contents_go_nowhere_else_than_to_memory_of_their_name,
    inputs_and_outputs_are_left_out,
    a_kernel_of_a_module_that_was_loaded_since_images_are_recorded_is_saved,
}

/// Return what another process would read.
fn through_a_file(saved: &Saved) -> Saved {
    let file = Scratch::new();
    saved.write(&file.0).unwrap();
    let read = Saved::open(&file.0).unwrap();
    assert_eq!(read, *saved);
    read
}

fn a_kernel_is_the_same_each_time_that_it_is_asked_for(device: &Device) {
    let (module, other) = (kernels(device), kernels(device));
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let template = Template::new(device).unwrap();
    template.add(&launch_axpy(&module, 3, &x, &y), &[]).unwrap();
    let names = [("x", &x), ("y", &y)];
    let mut saved = Saved::new(device);
    assert!(
        saved
            .add("a", &[&other, &module], (&template, &names), None)
            .is_ok()
    );
}

fn a_loaded_graph_does_the_same_work_on_other_memory(device: &Device) {
    let module = kernels(device);
    let (job, moved) = (Job::new(device, 1), Job::new(device, 3));
    let mut saved = Saved::new(device);
    let (one, other) = (
        job.template(device, &module),
        moved.template(device, &module),
    );
    let proof = Some((&other, &moved.names()[..]));
    let taken = saved
        .add("job", &[&module], (&one, &job.names()), proof)
        .unwrap();
    assert_eq!(
        taken,
        Taken {
            proven: 7,
            assumed: 0,
            left: 0
        }
    );
    let saved = through_a_file(&saved);
    assert_eq!(saved.names(), ["job"]);
    let memory: Vec<(&str, u64)> = saved.memory("job").unwrap();
    assert_eq!(memory, ["x", "y", "copy", "set"].map(|name| (name, BYTES)));
    let bound = Job::new(device, 5);
    replay(
        device,
        &load(&saved, device, "job", &bound.names()).unwrap(),
    );
    bound.check(5);
    // The others are as they were.
    assert_eq!(words(&job.y), random(2));
    assert_eq!(words(&moved.copy), words(&poisoned(device)));
}

fn a_captured_graph_is_saved_as_well(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let stream = Stream::new(device).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Relaxed).unwrap();
    for work in [
        launch_axpy(&module, 3, &job.x, &job.y),
        Work::memcpy(&job.copy, &job.y).unwrap(),
        Work::memset(&job.set, 7).unwrap(),
        launch_axpy(&module, 2, &job.x, &job.set),
    ] {
        stream.enqueue(&work).unwrap();
    }
    let template = capture.finish().unwrap();
    let mut saved = Saved::new(device);
    let taken = saved
        .add("job", &[&module], (&template, &job.names()), None)
        .unwrap();
    assert_eq!(
        taken,
        Taken {
            proven: 0,
            assumed: 7,
            left: 0
        }
    );
    let bound = Job::new(device, 5);
    let loaded = load(&through_a_file(&saved), device, "job", &bound.names()).unwrap();
    assert_eq!(loaded.node_count().unwrap(), 4);
    assert_eq!(
        loaded.edges().unwrap().len(),
        template.edges().unwrap().len()
    );
    replay(device, &loaded);
    bound.check(5);
}

fn several_graphs_of_a_file_share_an_image(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let (x, y) = (memory(device, &random(7)), memory(device, &random(8)));
    let mut saved = saved_axpy(device, &module, &x, &y);
    let one = Scratch::new();
    saved.write(&one.0).unwrap();
    let template = job.template(device, &module);
    saved
        .add("job", &[&module], (&template, &job.names()), None)
        .unwrap();
    let two = Scratch::new();
    saved.write(&two.0).unwrap();
    let [one, two] = [one, two].map(|file| fs::metadata(&file.0).unwrap().len());
    assert!(two - one < PTX.len() as u64, "{one} and {two} bytes");
    let again = saved.add("job", &[&module], (&template, &job.names()), None);
    assert!(error(again).to_string().contains("name of a graph is job"));
    let names = [("x", &x), ("y", &y)];
    let error = error(load(&saved, device, "none", &names)).to_string();
    assert!(error.contains("none, expected one of axpy, job"), "{error}");
    replay(device, &load(&saved, device, "axpy", &names).unwrap());
    assert_eq!(words(&y), axpy(3, &random(7), &random(8)));
}

#[expect(unsafe_code, reason = "the kernel is not run")]
fn slow(module: &Module, x: &Memory, nanoseconds: u64) -> Work {
    let args = Args::new().memory(x).u32(5).u32(1).u64(nanoseconds);
    let function = module.function("slow_fill").unwrap();
    // SAFETY: these are the arguments that kernels.cu declares.
    unsafe { Work::kernel(&function, 1, 1, args) }.unwrap()
}

fn a_word_that_stays_while_its_memory_moves_is_refused(device: &Device) {
    let module = kernels(device);
    let (x, moved) = (poisoned(device), poisoned(device));
    let number = x.address().0 + 8;
    let template = |x: &Memory| {
        let template = Template::new(device).unwrap();
        template.add(&slow(&module, x, number), &[]).unwrap();
        template
    };
    let (one, other) = (template(&x), template(&moved));
    let add = |proof| {
        let mut saved = Saved::new(device);
        saved.add("slow", &[&module], (&one, &[("x", &x)]), proof)
    };
    let assumed = Taken {
        proven: 0,
        assumed: 2,
        left: 0,
    };
    assert_eq!(add(None).unwrap(), assumed);
    // It is a number that looks like an address, or the address of memory that both have.
    let text = error(add(Some((&other, &[("x", &moved)][..])))).to_string();
    assert!(
        text.contains("in both templates, in memory that is another one"),
        "{text}"
    );
}

fn an_address_beside_memory_that_moves_with_it_is_refused(device: &Device) {
    let module = kernels(device);
    let (x, moved) = (poisoned(device), poisoned(device));
    let template = |x: &Memory| {
        let template = Template::new(device).unwrap();
        let beside = x.address().0 + (1 << 40);
        template.add(&slow(&module, x, beside), &[]).unwrap();
        template
    };
    let (one, other) = (template(&x), template(&moved));
    let proof = Some((&other, &[("x", &moved)][..]));
    let mut saved = Saved::new(device);
    let found = saved.add("slow", &[&module], (&one, &[("x", &x)]), proof);
    let text = error(found).to_string();
    assert!(
        text.contains("expected the same place in memory of one name"),
        "{text}"
    );
}

/// More dynamic shared memory than kernels have by default.
const SHARED: u32 = 64 << 10;

fn more_shared_memory_than_kernels_have_must_be_allowed_first(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let work = launch_axpy(&module, 3, &x, &y).with_shared_bytes(SHARED);
    let template = Template::new(device).unwrap();
    assert_eq!(code(template.add(&work, &[])), Code::INVALID_VALUE);
    let function = module.function("axpy").unwrap();
    assert!(function.set_max_shared_bytes(1 << 30).is_err());
    function.set_max_shared_bytes(SHARED).unwrap();
    template.add(&work, &[]).unwrap();
    replay(device, &template);
    assert_eq!(words(&y), axpy(3, &random(1), &random(2)));
}

fn what_a_kernel_is_allowed_comes_back_with_the_graph(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    module
        .function("axpy")
        .unwrap()
        .set_max_shared_bytes(SHARED)
        .unwrap();
    let template = Template::new(device).unwrap();
    let work = launch_axpy(&module, 3, &x, &y).with_shared_bytes(SHARED);
    template.add(&work, &[]).unwrap();
    let mut saved = Saved::new(device);
    let names = [("x", &x), ("y", &y)];
    saved
        .add("axpy", &[&module], (&template, &names), None)
        .unwrap();
    // The images are loaded anew.
    replay(
        device,
        &load(&through_a_file(&saved), device, "axpy", &names).unwrap(),
    );
    assert_eq!(words(&y), axpy(3, &random(1), &random(2)));
}

fn what_a_kernel_was_allowed_once_is_enough_for_the_graph(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let function = module.function("axpy").unwrap();
    function.set_max_shared_bytes(SHARED).unwrap();
    let template = Template::new(device).unwrap();
    let work = launch_axpy(&module, 3, &x, &y).with_shared_bytes(SHARED);
    template.add(&work, &[]).unwrap();
    function.set_max_shared_bytes(48 << 10).unwrap();
    let mut saved = Saved::new(device);
    let names = [("x", &x), ("y", &y)];
    saved
        .add("axpy", &[&module], (&template, &names), None)
        .unwrap();
    replay(device, &load(&saved, device, "axpy", &names).unwrap());
    assert_eq!(words(&y), axpy(3, &random(1), &random(2)));
}

#[expect(unsafe_code, reason = "no other way sets one yet")]
fn launch_attributes_come_back_with_the_graph(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let template = Template::new(device).unwrap();
    let work = launch_axpy(&module, 3, &x, &y);
    let node = template.add(&work, &[]).unwrap();
    template.add(&work, &[node]).unwrap();
    let mut value = [0; 64];
    value[..4].copy_from_slice(&(-1_i32).to_le_bytes());
    let id = LaunchAttribute::PRIORITY;
    let priority = LaunchAttribute { id, value };
    // SAFETY: it is a kernel node of a live graph.
    unsafe { device.driver().node_set_attribute(node.handle(), &priority) }.unwrap();
    let mut saved = Saved::new(device);
    let names = [("x", &x), ("y", &y)];
    saved
        .add("axpy", &[&module], (&template, &names), None)
        .unwrap();
    let loaded = through_a_file(&saved).load(device).unwrap();
    // SAFETY: the kernels touch the memory that they are given.
    let (_template, nodes) = unsafe { loaded.template("axpy", &names) }.unwrap();
    let attributes_of = |node: &Node| {
        // SAFETY: it is a node of a live graph.
        unsafe { device.driver().node_attributes(node.handle()) }.unwrap()
    };
    assert!(attributes_of(&nodes[0]).contains(&priority));
    assert!(!attributes_of(&nodes[1]).contains(&priority));
}

fn the_end_of_memory_moves_with_it(device: &Device) {
    let module = kernels(device);
    // The end of the first half is the begin of the second.
    let (whole, moved) = (
        Memory::new(device, 2 * BYTES).unwrap(),
        Memory::new(device, 2 * BYTES).unwrap(),
    );
    let apart = Memory::new(device, BYTES).unwrap();
    let half = |whole: &Memory| whole.slice(0..BYTES).unwrap();
    let template = |x: &Memory| {
        let template = Template::new(device).unwrap();
        let end = x.address().0 + x.bytes();
        template.add(&slow(&module, x, end), &[]).unwrap();
        template
    };
    let (one, other) = (template(&half(&whole)), template(&half(&moved)));
    let second = whole.slice(BYTES..2 * BYTES).unwrap();
    let (first, its) = (half(&whole), half(&moved));
    let names = [("first", &first), ("second", &second)];
    let others = [("first", &its), ("second", &apart)];
    let mut saved = Saved::new(device);
    let proof: Option<(&Template, &Names<'_>)> = Some((&other, &others));
    let taken = saved
        .add("slow", &[&module], (&one, &names), proof)
        .unwrap();
    assert_eq!((taken.proven, taken.assumed, taken.left), (2, 0, 0));
}

fn a_loaded_graph_keeps_its_kernels_and_memory(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let saved = saved_axpy(device, &module, &x, &y);
    drop((module, y));
    let z = memory(device, &random(3));
    let kept = z.clone();
    let template = load(&saved, device, "axpy", &[("x", &x), ("y", &z)]).unwrap();
    drop((x, z, saved));
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    drop(template);
    let stream = Stream::new(device).unwrap();
    exec.replay(&stream).unwrap();
    drop(exec);
    stream.synchronize().unwrap();
    assert_eq!(words(&kept), axpy(3, &random(1), &random(3)));
    assert_ne!(words(&kept)[0], POISON);
}

fn inputs_and_outputs_are_left_out(device: &Device) {
    let (module, job) = (kernels(device), Job::new(device, 1));
    let template = Arc::new(job.template(device, &module));
    let nodes = template.node_count().unwrap();
    Inputs::add(&template, slice::from_ref(&job.x), &[]).unwrap();
    Outputs::add(&template, slice::from_ref(&job.copy)).unwrap();
    let mut saved = Saved::new(device);
    saved
        .add("job", &[&module], (&template, &job.names()), None)
        .unwrap();
    let bound = Job::new(device, 5);
    let loaded = load(&saved, device, "job", &bound.names()).unwrap();
    assert_eq!(loaded.node_count().unwrap(), nodes);
    replay(device, &loaded);
    bound.check(5);
}

fn a_kernel_of_a_module_that_was_loaded_since_images_are_recorded_is_saved(device: &Device) {
    let (early, job) = (kernels(device), Job::new(device, 1));
    let mut saved = Saved::new(device);
    let names = job.names();
    // Before, only a kernel of a module that is given is known.
    let template = job.template(device, &early);
    for modules in [&[][..], &[&kernels(device)]] {
        let refused = error(saved.add("early", modules, (&template, &names), None));
        let text = refused.to_string();
        assert!(
            text.contains("kernel axpy, which is of no module that is known"),
            "{text}"
        );
    }
    // Where the loader does not find it, as in a wheel, the variable says where it is.
    let cupti = env::var_os("CGRAPH_CUPTI").unwrap_or("libcupti.so.13".into());
    device.record_images(Path::new(&cupti)).unwrap();
    assert!(saved.add("early", &[], (&template, &names), None).is_err());
    let late = kernels(device);
    let template = job.template(device, &late);
    saved.add("job", &[], (&template, &names), None).unwrap();
    let bound = Job::new(device, 5);
    let loaded = load(&through_a_file(&saved), device, "job", &bound.names()).unwrap();
    replay(device, &loaded);
    bound.check(5);
}

fn contents_and_notes_come_back(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let mut saved = saved_axpy(device, &module, &x, &y);
    saved.set_notes("by whom");
    let half = BYTES / 2;
    saved
        .add_contents("y", half, &y.slice(half..BYTES).unwrap())
        .unwrap();
    let read = through_a_file(&saved);
    assert_eq!(read.notes(), "by whom");
    let bound = memory(device, &random(3));
    let loaded = read.load(device).unwrap();
    loaded.restore(&[("x", &x), ("y", &bound)]).unwrap();
    let (first, last) = (&random(3)[..WORDS / 2], &random(2)[WORDS / 2..]);
    assert_eq!(words(&bound)[..], [first, last].concat());
    assert_eq!(words(&x), random(1));
}

fn contents_go_nowhere_else_than_to_memory_of_their_name(device: &Device) {
    let module = kernels(device);
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let mut saved = saved_axpy(device, &module, &x, &y);
    saved
        .add_contents("y", 4, &y.slice(4..BYTES).unwrap())
        .unwrap();
    let loaded = saved.load(device).unwrap();
    let text = error(loaded.restore(&[("x", &x)])).to_string();
    assert!(text.contains("expected \"y\" among them"), "{text}");
    let shorter = Memory::new(device, BYTES - 4).unwrap();
    let text = error(loaded.restore(&[("x", &x), ("y", &shorter)])).to_string();
    assert!(text.contains("slice of memory"), "{text}");
}
