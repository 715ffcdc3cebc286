//! Properties of templates, execs and their nodes.

use std::collections::HashSet;

use cg_core::{
    Device, Event, InstantiateFlags, Node, NodeDetail, Sim, Template, TemplateData, Work,
};

use crate::support::kernels::Kernels;
use crate::support::{memory, poisoned, random, random_word, sim_from};

on_every_driver! {
    a_host_node_tells_its_function_and_data,
    event_nodes_tell_their_event,
    the_data_of_a_memcpy_and_a_memset_has_addresses,
    the_data_of_a_diamond_has_its_dependencies,
    the_data_of_a_child_is_nested_at_any_depth,
    ids_name_graphs_nodes_and_execs_where_the_driver_tells_them,
}

/// The first driver that tells ids.
const TELLS_IDS: u32 = 13_010;

fn a_host_node_tells_its_function_and_data(device: &Device) {
    let template = Template::new(device).unwrap();
    let (work, other) = (Work::host(|| {}), Work::host(|| {}));
    let told = |work: &Work| {
        let node = template.add(work, &[]).unwrap();
        match template.detail(node).unwrap() {
            NodeDetail::Host { function, data } => (function, data),
            other => panic!("{other:?}"),
        }
    };
    let (first, again, third) = (told(&work), told(&work), told(&other));
    assert!(first.0 != 0 && first.1 != 0);
    assert_eq!(first, again);
    assert_eq!(first.0, third.0);
    assert_ne!(first.1, third.1);
    let data = template.data().unwrap();
    let functions: Vec<_> = data.nodes.iter().map(|node| node.host_function).collect();
    assert_eq!(functions, [Some(first.0); 3]);
}

fn event_nodes_tell_their_event(device: &Device) {
    let (event, other) = (Event::new(device).unwrap(), Event::new(device).unwrap());
    let template = Template::new(device).unwrap();
    let record = template.add_event_record(&event, &[]).unwrap();
    let wait = template.add_event_wait(&event, &[record]).unwrap();
    template.add_event_wait(&other, &[wait]).unwrap();
    let data = template.data().unwrap();
    let events: Vec<u64> = data.nodes.iter().map(|node| node.event.unwrap()).collect();
    assert_eq!(events[0], events[1]);
    assert_ne!(events[1], events[2]);
}

fn the_data_of_a_memcpy_and_a_memset_has_addresses(device: &Device) {
    let (a, b, value) = (poisoned(device), poisoned(device), random_word(1));
    let template = Template::new(device).unwrap();
    let copy = template.add(&Work::memcpy(&b, &a).unwrap(), &[]).unwrap();
    let set = Work::memset(&a, value).unwrap();
    template.add(&set, &[copy]).unwrap();
    let data = template.data().unwrap();
    let (copy, set) = (&data.nodes[0], &data.nodes[1]);
    assert_eq!(
        (copy.dst, copy.src),
        (Some(b.address().0), Some(a.address().0))
    );
    assert_eq!((set.dst, set.src), (Some(a.address().0), None));
    assert_eq!((set.value, set.element_bytes), (Some(value), Some(4)));
    assert_eq!((copy.bytes, set.bytes), (Some(4000), Some(4000)));
}

fn the_data_of_a_diamond_has_its_dependencies(device: &Device) {
    let memory = poisoned(device);
    let template = Template::new(device).unwrap();
    let set = |after: &[Node]| {
        let work = Work::memset(&memory, random_word(2)).unwrap();
        template.add(&work, after).unwrap()
    };
    let first = set(&[]);
    let (left, right) = (set(&[first]), set(&[first]));
    let last = set(&[left, right]);
    let data = template.data().unwrap();
    let place = |node: Node| {
        let found = data
            .nodes
            .iter()
            .find(|data| data.handle == node.handle().0);
        found.unwrap().index
    };
    let dependencies = data.dependencies();
    assert_eq!(dependencies[place(first)], [0; 0]);
    assert_eq!(dependencies[place(left)], [place(first)]);
    assert_eq!(dependencies[place(right)], [place(first)]);
    let mut both = [place(left), place(right)];
    both.sort_unstable();
    assert_eq!(dependencies[place(last)], both);
    assert!(data.edges.iter().all(|edge| edge.number == 0));
}

fn the_data_of_a_child_is_nested_at_any_depth(device: &Device) {
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let mut template = Template::new(device).unwrap();
    let work = Kernels::load(device).axpy(2, &x, &y);
    template.add(&work, &[]).unwrap();
    for _ in 0..3 {
        let outer = Template::new(device).unwrap();
        outer.add_child(&template, &[]).unwrap();
        template = outer;
    }
    let data = template.data().unwrap();
    let mut inner = &data;
    for _ in 0..3 {
        assert_eq!(inner.nodes[0].kind, "child");
        inner = &inner.nodes[0].bodies[0];
    }
    assert_eq!(inner.nodes[0].name.as_deref(), Some("axpy"));
    let graphs: HashSet<u64> = graphs(&data).into_iter().map(|g| g.handle).collect();
    assert_eq!(graphs.len(), 4);
}

fn ids_name_graphs_nodes_and_execs_where_the_driver_tells_them(device: &Device) {
    let memory = poisoned(device);
    let child = Template::new(device).unwrap();
    let work = Work::memset(&memory, random_word(3)).unwrap();
    child.add(&work, &[]).unwrap();
    let template = Template::new(device).unwrap();
    let first = template.add(&work, &[]).unwrap();
    template.add_child(&child, &[first]).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let data = template.data().unwrap();
    if device.driver().version() < TELLS_IDS {
        assert_eq!(template.graph_id().unwrap(), None);
        assert_eq!(exec.graph_id().unwrap(), None);
        assert_eq!(template.node_ids(first).unwrap(), None);
        assert_eq!((data.graph_id, data.nodes[0].tools_id), (None, None));
        return;
    }
    let ids = template.node_ids(first).unwrap().unwrap();
    assert_eq!(ids.graph, template.handle());
    assert_eq!(ids.tools & 0xffff_ffff, u64::from(ids.local));
    assert_eq!(Some(ids.local), data.nodes[0].node_id);
    assert_ne!(template.graph_id().unwrap(), exec.graph_id().unwrap());
    for graph in graphs(&data) {
        assert!(graph.graph_id.is_some());
        for node in &graph.nodes {
            let tools = u64::from(node.graph_id.unwrap()) << 32 | u64::from(node.node_id.unwrap());
            assert_eq!(node.tools_id, Some(tools));
            assert_eq!(node.graph_id, graph.graph_id);
        }
    }
    let tools: HashSet<_> = graphs(&data)
        .into_iter()
        .flat_map(|graph| graph.nodes.iter().map(|node| node.tools_id))
        .collect();
    assert_eq!(tools.len(), 3);
}

/// Return the graph and all inside it.
fn graphs(data: &TemplateData) -> Vec<&TemplateData> {
    let bodies = data.nodes.iter().flat_map(|node| &node.bodies);
    let inner = bodies.flat_map(graphs);
    std::iter::once(data).chain(inner).collect()
}

#[test]
fn a_simulator_of_a_new_driver_tells_ids() {
    let (_sim, device) = sim_from(Sim::builder().driver_version(TELLS_IDS));
    ids_name_graphs_nodes_and_execs_where_the_driver_tells_them(&device);
}
