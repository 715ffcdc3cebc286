//! Uses that are undefined on a GPU: the simulator panics and names both parties.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(unsafe_code, reason = "breaks the contracts of the driver's methods")]

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use cg_core::driver::handle::{EventHandle, ExecHandle, GraphHandle, PageHandle};
use cg_core::driver::spec::{NodeSpec, WorkSpec};
use cg_core::driver::{GraphCalls as _, MemoryCalls as _, PageCalls as _, StreamCalls as _};
use cg_core::{
    Address, Args, Capture, CaptureMode, Condition, Device, InstantiateFlags, Memory, Module, Sim,
    Stream, StreamHandle, Template, Work,
};

use support::kernels::{Kernels, PTX};
use support::{BYTES, sim};

/// Return what the simulator says when it panics.
fn panic_of<T>(with: impl FnOnce() -> T) -> String {
    let Err(payload) = catch_unwind(AssertUnwindSafe(with)) else {
        panic!("it did not panic")
    };
    match payload.downcast::<String>() {
        Ok(text) => *text,
        Err(payload) => (*payload.downcast::<&str>().unwrap()).to_owned(),
    }
}

/// Check that the panic names all parties.
fn assert_names(text: &str, parties: &[&str]) {
    for party in parties {
        assert!(text.contains(party), "{party:?} is missing in {text:?}");
    }
}

fn hex(number: u64) -> String {
    format!("{number:#x}")
}

/// Memory that nobody owns, so that nothing but the test frees it.
fn unowned(sim: &Sim, device: &Device) -> Memory {
    let address = sim.mem_alloc(BYTES).unwrap();
    // SAFETY: tests free it only to see the simulator panic at its next use.
    unsafe { Memory::from_raw(device, address, BYTES) }
}

fn free(sim: &Sim, memory: &Memory) {
    // SAFETY: the simulator panics if the memory is not to be freed.
    unsafe { sim.mem_free(memory.address()) }
}

#[test]
fn a_kernel_that_touches_freed_memory_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = unowned(&sim, &device);
    stream.enqueue(&Kernels::load(&device).fill(&a, 1)).unwrap();
    free(&sim, &a);
    let text = panic_of(|| stream.synchronize());
    assert_names(&text, &["kernel fill", &hex(a.address().0), "was freed"]);
}

#[test]
fn a_copy_from_freed_memory_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (a, b) = (unowned(&sim, &device), unowned(&sim, &device));
    free(&sim, &a);
    stream.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    let text = panic_of(|| sim.drive());
    assert_names(
        &text,
        &["memcpy of 4000 bytes", &hex(a.address().0), "was freed"],
    );
}

#[test]
fn reading_freed_memory_is_found() {
    let (sim, device) = sim();
    let a = unowned(&sim, &device);
    free(&sim, &a);
    assert_names(&panic_of(|| a.read()), &[&hex(a.address().0), "was freed"]);
    assert_names(
        &panic_of(|| a.write(&[1])),
        &[&hex(a.address().0), "was freed"],
    );
}

#[test]
fn freeing_memory_of_work_in_flight_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (a, b) = (unowned(&sim, &device), unowned(&sim, &device));
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    stream.enqueue(&Work::memcpy(&b, &a).unwrap()).unwrap();
    let on = hex(stream.handle().0);
    let text = panic_of(|| free(&sim, &a));
    assert_names(
        &text,
        &["mem_free", &hex(a.address().0), "memset", "in flight", &on],
    );
    sim.step();
    let text = panic_of(|| free(&sim, &a));
    assert_names(
        &text,
        &["mem_free", &hex(a.address().0), "memcpy", "in flight", &on],
    );
    sim.step();
    free(&sim, &a);
}

#[test]
fn freeing_memory_of_a_replay_in_flight_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (a, b) = (unowned(&sim, &device), unowned(&sim, &device));
    let template = cg_core::Template::new(&device).unwrap();
    let first = template.add(&Work::memset(&a, 1).unwrap(), &[]).unwrap();
    template
        .add(&Work::memset(&b, 1).unwrap(), &[first])
        .unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    sim.step();
    let text = panic_of(|| free(&sim, &b));
    assert_names(
        &text,
        &["mem_free", &hex(b.address().0), "memset", "in flight"],
    );
    // The first node has run.
    free(&sim, &a);
    sim.drive();
    free(&sim, &b);
}

#[test]
fn freeing_twice_is_found() {
    let (sim, device) = sim();
    let a = unowned(&sim, &device);
    free(&sim, &a);
    let text = panic_of(|| free(&sim, &a));
    assert_names(
        &text,
        &["mem_free", &hex(a.address().0), "no live allocation"],
    );
}

#[test]
fn freeing_a_part_is_found() {
    let (sim, device) = sim();
    let part = unowned(&sim, &device).slice(512..600).unwrap();
    let text = panic_of(|| free(&sim, &part));
    assert_names(
        &text,
        &["mem_free", &hex(part.address().0), "no live allocation"],
    );
}

#[test]
fn an_address_that_was_never_given_out_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let on_the_host = Address(std::ptr::from_ref(&sim).addr() as u64);
    // SAFETY: the simulator panics where the memory is used.
    let memory = unsafe { Memory::from_raw(&device, on_the_host, 64) };
    stream.enqueue(&Work::memset(&memory, 1).unwrap()).unwrap();
    let text = panic_of(|| stream.synchronize());
    assert_names(&text, &["memset", &hex(on_the_host.0), "no device address"]);
}

#[test]
fn work_beyond_the_end_of_its_memory_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let address = sim.mem_alloc(BYTES).unwrap();
    // SAFETY: the simulator panics where the memory is used.
    let too_long = unsafe { Memory::from_raw(&device, address, BYTES + 4) };
    stream
        .enqueue(&Kernels::load(&device).fill(&too_long, 1))
        .unwrap();
    let text = panic_of(|| stream.synchronize());
    let parties = ["kernel fill", "4004 bytes", "beyond the end", "4000 bytes"];
    assert_names(&text, &parties);
}

#[test]
fn arguments_of_another_size_are_found() {
    let (_sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let module = Module::load(&device, PTX.as_bytes()).unwrap();
    let function = module.function("axpy").unwrap();
    let args = Args::new().u32(1).u64(2).u32(3).u32(4);
    // SAFETY: the simulator panics before the kernel runs.
    let work = unsafe { Work::kernel(&function, 1, 1, args) }.unwrap();
    let text = panic_of(|| stream.enqueue(&work));
    assert_names(&text, &["kernel axpy", "[4, 8, 8, 4]", "[4, 8, 4, 4]"]);
}

#[test]
fn a_kernel_of_an_unloaded_module_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = support::poisoned(&device);
    let module = sim.module_load(PTX.as_bytes()).unwrap();
    // SAFETY: the module is loaded.
    let function = unsafe { sim.module_function(module, "fill") }.unwrap();
    let words = [
        &a.address().0.to_le_bytes()[..],
        &[1, 0, 0, 0],
        &[1, 0, 0, 0],
    ];
    let work = WorkSpec::Kernel {
        function,
        grid: 1.into(),
        block: 1.into(),
        shared_bytes: 0,
        args: words.map(Into::into).into(),
    };
    // SAFETY: the stream is live.
    unsafe { sim.stream_enqueue(stream.handle(), &work) }.unwrap();
    // SAFETY: the module is loaded; the simulator panics where its kernel runs.
    unsafe { sim.module_unload(module) };
    let text = panic_of(|| stream.synchronize());
    assert_names(&text, &["kernel fill", "module was unloaded"]);
    // SAFETY: the simulator panics if the module is not loaded.
    let text = panic_of(|| unsafe { sim.module_unload(module) });
    assert_names(
        &text,
        &["module_unload", &format!("{module:?}"), "not loaded"],
    );
}

#[test]
fn a_kernel_that_the_simulator_was_not_told_of_is_found() {
    let device = Device::sim(&Sim::default());
    let module = Module::load(&device, PTX.as_bytes()).unwrap();
    let text = panic_of(|| module.function("slow_fill"));
    assert_names(&text, &["kernel slow_fill", "Sim::kernel"]);
}

/// Return an exec of one memset, its graph destroyed.
fn raw_exec(sim: &Sim) -> (GraphHandle, ExecHandle) {
    let graph = sim.graph_create().unwrap();
    let work = WorkSpec::Memset {
        dst: sim.mem_alloc(BYTES).unwrap(),
        value: 1,
        element_bytes: 1,
        count: BYTES,
    };
    // SAFETY: the graph is live, and the memory is never freed.
    unsafe { sim.graph_add_node(graph, &[], &NodeSpec::Work(work)) }.unwrap();
    // SAFETY: the graph is live.
    let exec = unsafe { sim.graph_instantiate(graph, InstantiateFlags::NONE) }.unwrap();
    // SAFETY: the graph is live and no child's.
    unsafe { sim.graph_destroy(graph) };
    (graph, exec)
}

fn destroy_exec(sim: &Sim, exec: ExecHandle) {
    // SAFETY: the simulator panics if the exec is not to be destroyed.
    unsafe { sim.exec_destroy(exec) }
}

#[test]
fn destroying_an_exec_in_flight_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (_, exec) = raw_exec(&sim);
    // SAFETY: both are live.
    unsafe { sim.exec_launch(exec, stream.handle()) }.unwrap();
    let text = panic_of(|| destroy_exec(&sim, exec));
    let parties = ["exec_destroy", &format!("{exec:?}"), "in flight on stream"];
    assert_names(&text, &parties);
    assert_names(&text, &[&hex(stream.handle().0)]);
    stream.synchronize().unwrap();
    destroy_exec(&sim, exec);
}

#[test]
fn using_a_destroyed_exec_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (_, exec) = raw_exec(&sim);
    destroy_exec(&sim, exec);
    // SAFETY: the simulator panics if the exec is not live.
    let text = panic_of(|| unsafe { sim.exec_launch(exec, stream.handle()) });
    assert_names(&text, &[&format!("{exec:?}"), "not live"]);
    assert_names(
        &panic_of(|| destroy_exec(&sim, exec)),
        &["exec_destroy", "not live"],
    );
}

#[test]
fn using_a_destroyed_graph_is_found() {
    let (sim, _device) = sim();
    let (graph, _) = raw_exec(&sim);
    // SAFETY: the simulator panics if the graph is not live.
    let text = panic_of(|| unsafe { sim.graph_nodes(graph) });
    assert_names(&text, &[&format!("{graph:?}"), "not live"]);
    // SAFETY: the simulator panics if the graph is not live.
    let text = panic_of(|| unsafe { sim.graph_destroy(graph) });
    assert_names(&text, &["graph_destroy", "not live"]);
}

#[test]
fn destroying_a_capturing_stream_is_found() {
    let (sim, _device) = sim();
    let stream = sim.stream_create().unwrap();
    // SAFETY: the stream is live.
    unsafe { sim.stream_begin_capture(stream, CaptureMode::Global) }.unwrap();
    // SAFETY: the simulator panics if the stream is not to be destroyed.
    let text = panic_of(|| unsafe { sim.stream_destroy(stream) });
    assert_names(
        &text,
        &[&format!("{stream:?}"), "destroyed while it captures"],
    );
}

#[test]
fn handles_that_are_not_live_are_found() {
    let (sim, _device) = sim();
    let (stream, event) = (StreamHandle(0x77), EventHandle(0x78));
    // SAFETY: the simulator panics if the stream is not live.
    let text = panic_of(|| unsafe { sim.stream_synchronize(stream) });
    assert_names(&text, &["StreamHandle(0x77)", "not live"]);
    // SAFETY: the simulator panics if the event is not live.
    let text = panic_of(|| unsafe { sim.event_query(event) });
    assert_names(&text, &["EventHandle(0x78)", "not live"]);
    // SAFETY: the simulator panics if the event is not live.
    let text = panic_of(|| unsafe { sim.event_destroy(event) });
    assert_names(&text, &["event_destroy", "EventHandle(0x78)", "not live"]);
}

#[test]
fn an_operation_that_waits_for_its_own_device_is_named() {
    let sim = Sim::default();
    let stream = Stream::new(&Device::sim(&sim)).unwrap();
    let waits = stream.clone();
    let closure =
        move |_: &cg_core::KernelCall<'_>| waits.synchronize().map_err(|error| error.to_string());
    sim.launch_closure(stream.handle(), "waits", std::sync::Arc::new(closure))
        .unwrap();
    assert!(stream.synchronize().is_err());
    let text = sim.take_failure().unwrap();
    assert_names(&text, &["waits", "cuStreamSynchronize", "NOT_PERMITTED"]);
}

#[test]
fn destroying_the_graph_of_an_open_capture_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let a = Memory::new(&device, BYTES).unwrap();
    let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
    stream.enqueue(&Work::memset(&a, 1).unwrap()).unwrap();
    // SAFETY: the stream is live as long as `stream`.
    let info = unsafe { sim.stream_capture_info(stream.handle()) };
    let info = info.unwrap().unwrap();
    // SAFETY: the simulator panics, as the graph is the capture's.
    let text = panic_of(|| unsafe { sim.graph_destroy(info.graph) });
    assert_names(&text, &["graph_destroy", &hex(info.graph.0), "capture"]);
    // SAFETY: the node is one of the capture's graph; the simulator panics.
    let text = panic_of(|| unsafe { sim.graph_remove_node(info.after[0]) });
    assert_names(&text, &["graph_remove_node", &hex(info.graph.0), "capture"]);
    drop(capture);
}

#[test]
fn a_replay_of_a_conditional_node_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (body, template) = (
        Template::new(&device).unwrap(),
        Template::new(&device).unwrap(),
    );
    sim.add_conditional(template.handle(), &[], Condition::While, &[body.handle()])
        .unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let text = panic_of(|| exec.replay(&stream));
    assert_names(&text, &[&hex(exec.handle().0), "conditional"]);
}

/// Reserved addresses with a page in their second half: what the page has, and how many bytes.
fn half_mapped(sim: &Sim) -> (Address, Address, u64) {
    let bytes = sim.page_granularity().unwrap();
    let start = sim.address_reserve(2 * bytes, Address(0)).unwrap();
    let (page, mapped) = (sim.page_create(bytes).unwrap(), start.offset(bytes));
    // SAFETY: the page was made just now with as many bytes.
    unsafe { sim.page_map(mapped, bytes, page) }.unwrap();
    (start, mapped, bytes)
}

#[test]
fn touching_an_address_with_nothing_behind_it_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (start, mapped, bytes) = half_mapped(&sim);
    // SAFETY: tests touch it only to see the simulator panic.
    let empty = unsafe { Memory::from_raw(&device, start, BYTES) };
    let parties = [&*hex(start.0), "nothing is mapped"];
    assert_names(&panic_of(|| empty.read()), &parties);
    let fill = Kernels::load(&device).fill(&empty, 1);
    stream.enqueue(&fill).unwrap();
    let text = panic_of(|| stream.synchronize());
    assert_names(&text, &["kernel fill", parties[0], parties[1]]);
    let end = mapped.offset(bytes - 4);
    let text = panic_of(|| sim.view(end, 8));
    assert_names(&text, &["8 bytes", &hex(end.0), "beyond", &hex(mapped.0)]);
}

#[test]
fn unmapping_memory_of_work_in_flight_is_found() {
    let (sim, device) = sim();
    let stream = Stream::new(&device).unwrap();
    let (_, mapped, bytes) = half_mapped(&sim);
    // SAFETY: it is mapped as long as the test.
    let memory = unsafe { Memory::from_raw(&device, mapped, BYTES) };
    stream.enqueue(&Work::memset(&memory, 1).unwrap()).unwrap();
    // SAFETY: the simulator panics.
    let text = panic_of(|| unsafe { sim.page_unmap(mapped, bytes) });
    assert_names(
        &text,
        &["page_unmap", &hex(mapped.0), "memset", "in flight"],
    );
    stream.synchronize().unwrap();
}

#[test]
fn giving_back_what_is_not_there_or_in_use_is_found() {
    let (sim, _device) = sim();
    let (start, mapped, bytes) = half_mapped(&sim);
    // SAFETY: the simulator panics.
    let text = panic_of(|| unsafe { sim.address_free(start, 2 * bytes) });
    assert_names(&text, &["address_free", &hex(start.0), &hex(mapped.0)]);
    // SAFETY: the simulator panics.
    let text = panic_of(|| unsafe { sim.page_unmap(start, 2 * bytes) });
    assert_names(&text, &["page_unmap", &hex(start.0)]);
    let page = sim.page_create(2 * bytes).unwrap();
    // SAFETY: the simulator panics.
    let text = panic_of(|| drop(unsafe { sim.page_map(mapped, 2 * bytes, page) }));
    assert_names(&text, &["page_map", &hex(mapped.0), "no range"]);
    // SAFETY: the simulator panics.
    let text = panic_of(|| unsafe { sim.page_release(PageHandle(1)) });
    assert_names(&text, &["page_release", "not live"]);
    // SAFETY: the simulator panics.
    let text = panic_of(|| unsafe { sim.host_unpin(std::ptr::null_mut()) });
    assert_names(&text, &["host_unpin", "not pinned"]);
}
