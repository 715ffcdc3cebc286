//! Templates: nodes, edges, copies and what is known of them.

use cg_core::{
    Code, Device, EdgeKind, Error, InstantiateFlags, Node, Result, Stream, Template, Work,
};

use crate::support::kernels::Kernels;
use crate::support::{
    POISON, all, axpy, code, edges, error, is_foreign, is_invalid, memory, poisoned, random,
    random_word, raw, words,
};

on_every_driver! {
    edges_are_those_that_were_given,
    an_edge_can_be_added_later,
    an_edge_can_be_taken_away,
    an_edge_exists_once,
    a_removed_node_takes_its_edges_along,
    a_removed_node_does_not_run,
    a_removed_node_is_refused_everywhere,
    a_node_of_another_template_is_refused,
    a_template_cannot_be_its_own_child,
    a_clone_is_independent,
    a_clone_keeps_what_its_nodes_name,
    a_cycle_is_found_when_instantiated,
    an_exec_does_not_see_later_changes,
    a_template_can_be_instantiated_again,
    a_borrowed_graph_is_not_destroyed,
    the_data_of_a_template_has_all_nodes_and_edges,
    what_a_template_retains_dies_with_its_last_exec,
    a_template_allocates_only_by_a_node_that_does,
}

fn set(template: &Template, memory: &cg_core::Memory, after: &[Node]) -> Node {
    let work = Work::memset(memory, random_word(1)).unwrap();
    template.add(&work, after).unwrap()
}

fn edges_are_those_that_were_given(device: &Device) {
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    let second = set(&template, &b, &[]);
    set(&template, &c, &[first, second]);
    let names = [(&a, "a"), (&b, "b"), (&c, "c")];
    assert_eq!(edges(&template, &names), ["a c", "b c"]);
    let kinds = template.edges().unwrap();
    assert!(kinds.iter().all(|edge| edge.kind == EdgeKind::Full));
    assert_eq!(template.nodes().unwrap().len(), 3);
}

fn an_edge_can_be_added_later(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, b) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let value = random_word(2);
    let copy = template.add(&Work::memcpy(&b, &a).unwrap(), &[]).unwrap();
    let set = template
        .add(&Work::memset(&a, value).unwrap(), &[])
        .unwrap();
    template.add_edge(set, copy).unwrap();
    assert_eq!(edges(&template, &[(&a, "a"), (&b, "b")]), ["a b"]);
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&b), all(value));
}

fn an_edge_can_be_taken_away(device: &Device) {
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    let second = set(&template, &b, &[first]);
    set(&template, &c, &[first, second]);
    let found = template
        .edges()
        .unwrap()
        .into_iter()
        .find(|edge| (edge.from, edge.to) == (first, second));
    template.remove_edge(found.unwrap()).unwrap();
    let names = [(&a, "a"), (&b, "b"), (&c, "c")];
    assert_eq!(edges(&template, &names), ["a c", "b c"]);
    assert_eq!(
        code(template.remove_edge(found.unwrap())),
        Code::INVALID_VALUE
    );
}

fn an_edge_exists_once(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    let second = set(&template, &b, &[first]);
    let again = template.add_edge(first, second);
    assert_eq!(code(again), Code::INVALID_VALUE);
    assert_eq!(edges(&template, &[(&a, "a"), (&b, "b")]), ["a b"]);
}

fn a_removed_node_takes_its_edges_along(device: &Device) {
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    let second = set(&template, &b, &[first]);
    let third = set(&template, &c, &[first, second]);
    template.remove(second).unwrap();
    let left = template.nodes().unwrap();
    assert!(left.len() == 2 && left.contains(&first) && left.contains(&third));
    assert_eq!(edges(&template, &[(&a, "a"), (&c, "c")]), ["a c"]);
}

fn a_removed_node_does_not_run(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, b) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    set(&template, &b, &[first]);
    let before = template.instantiate(InstantiateFlags::default()).unwrap();
    template.remove(first).unwrap();
    let after = template.instantiate(InstantiateFlags::default()).unwrap();
    after.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(POISON));
    assert_eq!(words(&b), all(random_word(1)));
    before.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(random_word(1)));
}

/// Return whether every call of the template refuses the node.
fn is_refused(template: &Template, node: Node, good: Node) -> bool {
    let attempts: [Result<()>; 5] = [
        template.detail(node).map(drop),
        template.add_empty(&[good, node]).map(drop),
        template.add_edge(good, node),
        template.add_edge(node, good),
        template.remove(node),
    ];
    attempts.into_iter().all(is_foreign)
}

fn a_removed_node_is_refused_everywhere(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let stays = set(&template, &a, &[]);
    let goes = set(&template, &b, &[stays]);
    let edge = template.edges().unwrap()[0];
    let mut exec = template.instantiate(InstantiateFlags::default()).unwrap();
    template.remove(goes).unwrap();
    assert!(is_refused(&template, goes, stays));
    assert!(is_foreign(template.remove_edge(edge)));
    let work = Work::memset(&b, 1).unwrap();
    assert!(is_foreign(exec.set(&template, goes, &work)));
    assert!(is_foreign(exec.set_enabled(&template, goes, false)));
    assert!(is_foreign(exec.is_enabled(&template, goes)));
    assert_eq!(template.nodes().unwrap(), [stays]);
}

fn a_node_of_another_template_is_refused(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let (template, other) = (
        Template::new(device).unwrap(),
        Template::new(device).unwrap(),
    );
    let own = set(&template, &a, &[]);
    let foreign = set(&other, &b, &[]);
    assert!(is_refused(&template, foreign, own));
    assert_eq!(other.nodes().unwrap(), [foreign]);
    let copy = template.try_clone().unwrap();
    assert!(is_refused(&copy, own, copy.nodes().unwrap()[0]));
}

fn a_template_cannot_be_its_own_child(device: &Device) {
    let template = Template::new(device).unwrap();
    assert!(is_invalid(template.add_child(&template, &[])));
    assert!(template.nodes().unwrap().is_empty());
}

fn a_clone_is_independent(device: &Device) {
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    set(&template, &b, &[first]);
    let copy = template.try_clone().unwrap();
    template.remove(first).unwrap();
    let last = copy.nodes().unwrap();
    set(&copy, &c, &last);
    let names = [(&a, "a"), (&b, "b"), (&c, "c")];
    assert_eq!(edges(&copy, &names), ["a b", "a c", "b c"]);
    assert_eq!(template.nodes().unwrap().len(), 1);
}

fn a_clone_keeps_what_its_nodes_name(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let y = memory(device, &random(1));
    let copy = {
        let (x, kernels) = (memory(device, &random(2)), Kernels::load(device));
        let template = Template::new(device).unwrap();
        template.add(&kernels.axpy(9, &x, &y), &[]).unwrap();
        template.try_clone().unwrap()
    };
    let exec = copy.instantiate(InstantiateFlags::default()).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(9, &random(2), &random(1)));
}

fn a_cycle_is_found_when_instantiated(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    let second = set(&template, &b, &[first]);
    template.add_edge(second, first).unwrap();
    let refused = error(template.instantiate(InstantiateFlags::default()));
    let Error::Instantiate { code, .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!(code, Code::INVALID_VALUE);
}

fn an_exec_does_not_see_later_changes(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let (a, b) = (poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    let first = set(&template, &a, &[]);
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    set(&template, &b, &[first]);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&a), all(random_word(1)));
    assert_eq!(words(&b), all(POISON));
}

fn a_template_can_be_instantiated_again(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kernels = Kernels::load(device);
    let (x, y) = (memory(device, &random(3)), memory(device, &random(4)));
    let template = Template::new(device).unwrap();
    template.add(&kernels.axpy(3, &x, &y), &[]).unwrap();
    let first = template.instantiate(InstantiateFlags::NONE).unwrap();
    let second = template.instantiate(InstantiateFlags::default()).unwrap();
    drop(template);
    first.replay(&stream).unwrap();
    second.replay(&stream).unwrap();
    drop(first);
    second.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), axpy(3 * 3, &random(3), &random(4)));
}

fn a_borrowed_graph_is_not_destroyed(device: &Device) {
    let a = poisoned(device);
    raw::with_borrowed_graph(device, |template| {
        let first = set(template, &a, &[]);
        template.add_empty(&[first]).unwrap();
        let exec = template.instantiate(InstantiateFlags::default()).unwrap();
        let stream = Stream::new(device).unwrap();
        exec.replay(&stream).unwrap();
        stream.synchronize().unwrap();
    });
    assert_eq!(words(&a), all(random_word(1)));
}

fn the_data_of_a_template_has_all_nodes_and_edges(device: &Device) {
    let (x, y) = (memory(device, &random(5)), memory(device, &random(6)));
    let child = Template::new(device).unwrap();
    set(&child, &x, &[]);
    let template = Template::new(device).unwrap();
    let child = template.add_child(&child, &[]).unwrap();
    let work = Kernels::load(device).axpy(2, &x, &y);
    template.add(&work, &[child]).unwrap();

    let data = template.data().unwrap();
    assert_eq!(data.count(), 3);
    assert_eq!((data.edges[0].from, data.edges[0].to), (0, 1));
    let child = &data.nodes[0].bodies[0];
    assert_eq!(child.nodes[0].bytes, Some(4000));
    let dot = data.dot(true);
    for part in ["n0 -> n1", "cluster_n0", "axpy", "(8, 1, 1)", "4000 bytes"] {
        assert!(dot.contains(part), "{part} is missing in {dot}");
    }
    let json = data.json();
    for part in [
        "\"kind\": \"child\"",
        "\"name\": \"axpy\"",
        "\"kind\": \"full\"",
    ] {
        assert!(json.contains(part), "{part} is missing in {json}");
    }
}

fn what_a_template_retains_dies_with_its_last_exec(device: &Device) {
    let stream = Stream::new(device).unwrap();
    let kept = std::sync::Arc::new("kept");
    let template = Template::new(device).unwrap();
    template.retain(kept.clone());
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let copy = template.try_clone().unwrap();
    drop(template);
    assert_eq!(std::sync::Arc::strong_count(&kept), 3);
    drop(copy);
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    drop(exec);
    assert_eq!(std::sync::Arc::strong_count(&kept), 1);
}

fn a_template_allocates_only_by_a_node_that_does(device: &Device) {
    let (template, child) = (
        Template::new(device).unwrap(),
        Template::new(device).unwrap(),
    );
    let memory = poisoned(device);
    set(&child, &memory, &[]);
    let node = set(&template, &memory, &[]);
    template.add_child(&child, &[node]).unwrap();
    assert!(!template.allocates().unwrap());
}
