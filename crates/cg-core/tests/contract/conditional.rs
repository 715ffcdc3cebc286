//! Conditional nodes: bodies that run again and again, or not at all.

use cg_core::{Body, Code, Condition, Device, Memory, NodeDetail, Result, Stream, Template, Work};

use crate::support::kernels::Kernels;
use crate::support::{all, axpy, code, is_foreign, memory, poisoned, random, random_word, words};

on_every_driver! {
    a_body_runs_until_its_condition_is_zero,
    a_body_does_not_run_if_its_condition_begins_with_zero,
    each_replay_begins_with_the_same_condition,
    a_body_may_run_copies_of_templates,
    a_body_inside_runs_if_its_condition_says_so,
    what_comes_after_a_loop_runs_once_it_has_ended,
    a_host_function_in_a_body_is_refused,
    a_template_with_a_loop_cannot_be_a_child,
    a_template_with_a_loop_has_one_exec_at_a_time,
    nodes_of_elsewhere_are_refused_in_a_body,
    an_error_while_a_body_is_filled_comes_out,
    what_a_body_names_lives_as_long_as_its_exec,
    a_loop_is_told_as_a_conditional_node,
}

/// Return a template that does `y = a * x + y` as often as `left` says, which is zero afterwards.
fn added_up(
    device: &Device,
    kernels: &Kernels,
    x: &Memory,
    y: &Memory,
    left: &Memory,
    begins: u32,
) -> Template {
    Template::repeated(device, begins, |body| {
        let add = body.add(&kernels.axpy(3, x, y), &[])?;
        body.add(&kernels.count_down(left, body.condition()), &[add])?;
        Ok(())
    })
    .unwrap()
}

fn times(count: u32, x: &[u32], y: &[u32]) -> crate::support::Words {
    axpy(3 * count, x, y)
}

fn replayed(device: &Device, template: &Template) {
    let stream = Stream::new(device).unwrap();
    template
        .instantiate(<_>::default())
        .unwrap()
        .replay(&stream)
        .unwrap();
    stream.synchronize().unwrap();
}

fn a_body_runs_until_its_condition_is_zero(device: &Device) {
    let kernels = Kernels::load(device);
    let (of_x, of_y) = (random(1), random(2));
    for count in [1, 2, 17] {
        let (x, y) = (memory(device, &of_x), memory(device, &of_y));
        let left = memory(device, &[count]);
        replayed(device, &added_up(device, &kernels, &x, &y, &left, 1));
        assert_eq!(words(&y), times(count, &of_x, &of_y), "{count} times");
        assert_eq!(*words(&left), [0]);
    }
}

fn a_body_does_not_run_if_its_condition_begins_with_zero(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, of_y) = (memory(device, &random(1)), random(2));
    let (y, left) = (memory(device, &of_y), memory(device, &[5]));
    replayed(device, &added_up(device, &kernels, &x, &y, &left, 0));
    assert_eq!(words(&y), of_y);
}

fn each_replay_begins_with_the_same_condition(device: &Device) {
    let kernels = Kernels::load(device);
    let stream = Stream::new(device).unwrap();
    let (of_x, of_y) = (random(3), random(4));
    let (x, y) = (memory(device, &of_x), memory(device, &of_y));
    let left = memory(device, &[4]);
    let template = added_up(device, &kernels, &x, &y, &left, 1);
    let exec = template.instantiate(<_>::default()).unwrap();
    exec.replay(&stream).unwrap();
    let again = Work::memset(&left, 3).unwrap();
    stream.enqueue(&again).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&y), times(7, &of_x, &of_y));
}

fn a_body_may_run_copies_of_templates(device: &Device) {
    let kernels = Kernels::load(device);
    let (of_x, of_y) = (random(5), random(6));
    let (x, y) = (memory(device, &of_x), memory(device, &of_y));
    let left = memory(device, &[3]);
    let step = Template::new(device).unwrap();
    let first = step.add(&kernels.axpy(3, &x, &y), &[]).unwrap();
    step.add(&kernels.axpy(3, &x, &y), &[first]).unwrap();
    let template = Template::repeated(device, 1, |body| {
        let one = body.add_child(&step, &[])?;
        let other = body.add_child(&step, &[one])?;
        body.add(&kernels.count_down(&left, body.condition()), &[other])?;
        Ok(())
    })
    .unwrap();
    drop(step);
    replayed(device, &template);
    assert_eq!(words(&y), times(12, &of_x, &of_y));
}

fn a_body_inside_runs_if_its_condition_says_so(device: &Device) {
    let kernels = Kernels::load(device);
    let (of_x, of_y) = (random(7), random(8));
    let (x, y) = (memory(device, &of_x), memory(device, &of_y));
    // It is odd for 5, 3 and 1 of 6.
    let left = memory(device, &[6]);
    let template = Template::repeated(device, 1, |body| {
        let condition = body.new_condition(0)?;
        let is_odd = body.add(&kernels.if_odd(&left, condition), &[])?;
        let inner = body.add_if(condition, &[is_odd], |inner| {
            inner.add(&kernels.axpy(3, &x, &y), &[])?;
            Ok(())
        })?;
        body.add(&kernels.count_down(&left, body.condition()), &[inner])?;
        Ok(())
    })
    .unwrap();
    replayed(device, &template);
    assert_eq!(words(&y), times(3, &of_x, &of_y));
}

fn what_comes_after_a_loop_runs_once_it_has_ended(device: &Device) {
    let kernels = Kernels::load(device);
    let (of_x, of_y) = (random(9), random(10));
    let (x, y, copy) = (
        memory(device, &of_x),
        memory(device, &of_y),
        poisoned(device),
    );
    let left = memory(device, &[40]);
    let template = added_up(device, &kernels, &x, &y, &left, 1);
    let after = template.nodes().unwrap();
    template
        .add(&Work::memcpy(&copy, &y).unwrap(), &after)
        .unwrap();
    replayed(device, &template);
    assert_eq!(words(&copy), times(40, &of_x, &of_y));
}

fn a_host_function_in_a_body_is_refused(device: &Device) {
    let made = Template::repeated(device, 1, |body| {
        body.add(&Work::host(|| {}), &[])?;
        Ok(())
    });
    let refused = made.and_then(|template| template.instantiate(<_>::default()).map(drop));
    assert!(refused.is_err());
}

fn a_template_with_a_loop_cannot_be_a_child(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y, left) = (poisoned(device), poisoned(device), memory(device, &[1]));
    let template = added_up(device, &kernels, &x, &y, &left, 1);
    let around = Template::new(device).unwrap();
    assert_eq!(code(around.add_child(&template, &[])), Code::NOT_SUPPORTED);
    let made = Template::repeated(device, 1, |body| body.add_child(&template, &[]).map(drop));
    assert_eq!(code(made), Code::NOT_SUPPORTED);
    replayed(device, &template);
}

fn a_template_with_a_loop_has_one_exec_at_a_time(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y, left) = (poisoned(device), poisoned(device), memory(device, &[1]));
    let template = added_up(device, &kernels, &x, &y, &left, 1);
    let exec = template.instantiate(<_>::default()).unwrap();
    assert!(template.instantiate(<_>::default()).is_err());
    drop(exec);
    device.collect();
    template.instantiate(<_>::default()).unwrap();
}

fn nodes_of_elsewhere_are_refused_in_a_body(device: &Device) {
    let (a, value) = (poisoned(device), random_word(1));
    let set = Work::memset(&a, value).unwrap();
    let other = Template::new(device).unwrap();
    let node = other.add(&set, &[]).unwrap();
    let made = Template::repeated(device, 0, |body| {
        let own = body.add(&set, &[])?;
        assert!(is_foreign(body.add(&set, &[node])));
        let condition = body.new_condition(1)?;
        body.add_if(condition, &[own], |inner| {
            assert!(is_foreign(inner.add(&set, &[own])));
            Ok(())
        })?;
        Ok(())
    });
    made.unwrap();
}

fn an_error_while_a_body_is_filled_comes_out(device: &Device) {
    let fill = |body: &mut Body<'_>| -> Result<()> {
        let a = poisoned(device);
        body.add(&Work::memset(&a, 1).unwrap(), &[])?;
        Err(cg_core::Error::Driver {
            call: cg_core::Call::GraphAddNode,
            code: Code::UNKNOWN,
        })
    };
    assert_eq!(code(Template::repeated(device, 1, fill)), Code::UNKNOWN);
}

fn what_a_body_names_lives_as_long_as_its_exec(device: &Device) {
    let kernels = Kernels::load(device);
    let stream = Stream::new(device).unwrap();
    let (of_x, of_y) = (random(11), random(12));
    let (x, y, copy) = (
        memory(device, &of_x),
        memory(device, &of_y),
        poisoned(device),
    );
    let left = memory(device, &[6]);
    let template = added_up(device, &kernels, &x, &y, &left, 1);
    let after = template.nodes().unwrap();
    template
        .add(&Work::memcpy(&copy, &y).unwrap(), &after)
        .unwrap();
    let exec = template.instantiate(<_>::default()).unwrap();
    drop((template, x, y, left, kernels));
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&copy), times(6, &of_x, &of_y));
    drop(exec);
}

fn a_loop_is_told_as_a_conditional_node(device: &Device) {
    let kernels = Kernels::load(device);
    let (x, y, left) = (poisoned(device), poisoned(device), memory(device, &[1]));
    let template = added_up(device, &kernels, &x, &y, &left, 1);
    let nodes = template.nodes().unwrap();
    assert_eq!(nodes.len(), 1);
    let NodeDetail::Conditional { condition, bodies } = template.detail(nodes[0]).unwrap() else {
        panic!("it is another node");
    };
    // Only newer drivers tell.
    assert!(matches!(condition, None | Some(Condition::While)));
    assert_eq!(bodies.len(), usize::from(condition.is_some()));
    assert_eq!(all(1).len(), words(&x).len());
}
