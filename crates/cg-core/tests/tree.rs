//! Graph trees: steps, limits, and calls that run without the tree.

use std::collections::BTreeSet;

use cg_core::tree::{
    Answer, Call, Function, FunctionId, Holders, Input, Mode, NodeId, OutputId, Reason, Step, Tree,
};

/// Outputs that somebody holds.
#[derive(Default)]
struct Held {
    by_user: BTreeSet<OutputId>,
}

impl Holders for Held {
    fn is_alive(&self, output: OutputId) -> bool {
        self.by_user.contains(&output)
    }

    fn release(&mut self, _node: NodeId) {}

    fn take_back(&mut self, _node: NodeId) {}
}

/// A tree with one function, and its call at an address.
fn one_function(function: Function) -> (Tree, FunctionId) {
    let mut tree = Tree::default();
    let id = tree.add(function);
    tree.ran(id);
    tree.set_running_backward(None);
    (tree, id)
}

fn at(address: u64) -> Input {
    Input {
        address,
        memory: address,
    }
}

fn step(number: i64) -> Step {
    Step {
        number,
        is_marked: false,
    }
}

fn function(mode: Mode) -> Function {
    Function {
        mode,
        pair: None,
        part: 0,
        statics: vec![0],
        mutated: vec![],
        limit: Some(2),
    }
}

/// Record a call that returns one piece of memory.
fn recorded(tree: &mut Tree, call: &Call<'_>, held: &mut Held, output: u64) -> Option<NodeId> {
    let Answer::Record(_) = tree.decide(call, held) else {
        return None;
    };
    tree.forget_ended();
    let open = tree.open(call, held);
    Some(tree.close(open, vec![output], held))
}

#[test]
fn a_function_whose_static_inputs_move_is_recorded_anew_only_as_often_as_its_limit() {
    let (mut tree, id) = one_function(function(Mode::Inference));
    let mut held = Held::default();
    let mut answers = vec![];
    for number in 1..=5 {
        let inputs = [at(100 * u64::try_from(number).expect("positive"))];
        let call = Call {
            function: id,
            inputs: &inputs,
            step: step(10 + number),
        };
        answers.push(recorded(&mut tree, &call, &mut held, 1).is_some());
    }
    // The first one is no repetition.
    assert_eq!(answers, [true, true, true, false, false]);
    let inputs = [at(900)];
    let call = Call {
        function: id,
        inputs: &inputs,
        step: step(20),
    };
    assert_eq!(
        tree.decide(&call, &mut held),
        Answer::Eager(Reason::Rerecords(2))
    );
}

/// Call a function in a step of its own with its input at an address: record, replay or neither.
fn called(tree: &mut Tree, function: FunctionId, number: i64, address: u64) -> Answer {
    let mut held = Held::default();
    let inputs = [at(address)];
    let call = Call {
        function,
        inputs: &inputs,
        step: step(number),
    };
    let answer = tree.decide(&call, &mut held);
    tree.forget_ended();
    match answer {
        Answer::Run(node) => tree.entered(node),
        Answer::Record(_) => {
            let open = tree.open(&call, &held);
            tree.close(open, vec![1], &held);
        }
        Answer::Eager(_) => {}
    }
    answer
}

#[test]
fn only_eight_replays_let_a_function_be_recorded_anew_as_often_again() {
    for (replays, answer) in [
        (7, Answer::Eager(Reason::Rerecords(2))),
        (8, Answer::Record(None)),
    ] {
        let (mut tree, id) = one_function(function(Mode::Inference));
        let mut number = 10;
        let mut next = |tree: &mut Tree, address| {
            number += 1;
            called(tree, id, number, address)
        };
        for place in 1..=3_u64 {
            assert_eq!(next(&mut tree, 100 * place), Answer::Record(None));
        }
        for _ in 0..replays {
            assert!(matches!(next(&mut tree, 100), Answer::Run(_)));
        }
        assert_eq!(next(&mut tree, 500), answer);
    }
}

#[test]
fn an_input_that_is_elsewhere_in_eight_recordings_in_a_row_is_copied_unless_it_is_written() {
    for is_written in [false, true] {
        let (mut tree, id) = one_function(Function {
            limit: None,
            mutated: if is_written { vec![0] } else { vec![] },
            ..function(Mode::Inference)
        });
        let numbers = 1..=20_i64;
        let answers =
            numbers.map(|number| called(&mut tree, id, number, 100 * number.unsigned_abs()));
        let recorded = answers.filter(|one| *one == Answer::Record(None)).count();
        // The first one has not moved.
        assert_eq!(recorded, if is_written { 20 } else { 9 });
        assert_eq!(tree.moving(id), if is_written { &[][..] } else { &[0] });
    }
}

#[test]
fn a_function_is_recorded_in_one_place_at_most_256_times_whatever_differs() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        statics: vec![],
        ..function(Mode::Inference)
    });
    let first = tree.add(function(Mode::Inference));
    tree.ran(first);
    let mut held = Held::default();
    let mut recordings = 0;
    for number in 1..=300_u64 {
        let inputs = [at(100)];
        let call = |function| Call {
            function,
            inputs: &inputs,
            step: step(i64::try_from(number).expect("small")),
        };
        let node = if let Answer::Run(node) = tree.decide(&call(first), &mut held) {
            tree.entered(node);
            node
        } else {
            tree.forget_ended();
            let open = tree.open(&call(first), &held);
            tree.close(open, (1..=300).collect(), &held)
        };
        tree.forget_ended();
        // One more is in use in each step: what is recorded for fewer does not fit.
        let indices = 0..u32::try_from(number).expect("small");
        held.by_user = indices.map(|index| OutputId { node, index }).collect();
        match tree.decide(&call(id), &mut held) {
            Answer::Record(_) => {
                let open = tree.open(&call(id), &held);
                tree.close(open, vec![1000], &held);
                recordings += 1;
            }
            answer => assert_eq!(answer, Answer::Eager(Reason::Variants)),
        }
        held.by_user.clear();
    }
    assert_eq!(recordings, 256);
}

#[test]
fn a_function_that_many_layers_have_keeps_the_inputs_of_each_in_place() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        ..function(Mode::Inference)
    });
    let mut held = Held::default();
    for number in 1..=12 {
        for layer in 1..=40_u64 {
            let inputs = [at(100 * layer)];
            let call = Call {
                function: id,
                inputs: &inputs,
                step: step(number),
            };
            if let Some(node) = recorded(&mut tree, &call, &mut held, layer) {
                held.by_user = BTreeSet::from([OutputId { node, index: 0 }]);
            } else if let Answer::Run(node) = tree.decide(&call, &mut held) {
                tree.entered(node);
                held.by_user = BTreeSet::from([OutputId { node, index: 0 }]);
            }
        }
        held.by_user.clear();
    }
    assert!(tree.moving(id).is_empty());
}

#[test]
fn a_function_has_a_count_of_recordings_for_each_node_before_it() {
    let (mut tree, id) = one_function(function(Mode::Inference));
    let before = [(); 2].map(|()| {
        let one = tree.add(function(Mode::Inference));
        tree.ran(one);
        one
    });
    let mut held = Held::default();
    let mut counts = [0, 0];
    for number in 1..=12_u64 {
        for (parent, count) in before.into_iter().zip(&mut counts) {
            let step = step(10 * i64::try_from(number).expect("small") + *count);
            let inputs = [at(parent.0.into())];
            let first = Call {
                function: parent,
                inputs: &inputs,
                step,
            };
            let node = match tree.decide(&first, &mut held) {
                Answer::Run(node) => {
                    tree.entered(node);
                    node
                }
                _ => recorded(&mut tree, &first, &mut held, 1).expect("a recording"),
            };
            held.by_user.insert(OutputId { node, index: 0 });
            let inputs = [at(1000 + number)];
            let call = Call {
                function: id,
                inputs: &inputs,
                step,
            };
            *count += i64::from(recorded(&mut tree, &call, &mut held, 2).is_some());
            held.by_user.clear();
        }
    }
    assert_eq!(counts, [3, 3]);
}

#[test]
fn a_function_stands_at_most_256_times_on_one_path() {
    let (mut tree, id) = one_function(function(Mode::Forward));
    let mut held = Held::default();
    let inputs = [at(100)];
    for count in 0..256_u64 {
        let call = Call {
            function: id,
            inputs: &inputs,
            step: step(1),
        };
        let node = recorded(&mut tree, &call, &mut held, 1000 + count).expect("a recording");
        held.by_user.insert(OutputId { node, index: 0 });
    }
    let call = Call {
        function: id,
        inputs: &inputs,
        step: step(2),
    };
    assert_eq!(
        tree.decide(&call, &mut held),
        Answer::Eager(Reason::Repeats(256))
    );
}

#[test]
fn a_step_does_not_begin_while_a_backward_pass_is_pending_unless_it_is_marked() {
    let mut tree = Tree::default();
    let forward = tree.add(function(Mode::Forward));
    let backward = tree.add(function(Mode::Backward));
    tree.ran(forward);
    tree.ran(backward);
    let (inputs, mut held) = ([at(100)], Held::default());
    let call = |function, step| Call {
        function,
        inputs: &inputs,
        step,
    };
    let node = recorded(&mut tree, &call(forward, step(1)), &mut held, 1).expect("a recording");
    held.by_user.insert(OutputId { node, index: 0 });
    assert!(tree.has_pending_backward());
    assert_eq!(
        tree.decide(&call(forward, step(2)), &mut held),
        Answer::Record(Some(node))
    );
    assert_eq!(tree.ended(), None);
    tree.decide(&call(backward, step(2)), &mut held);
    assert!(!tree.has_pending_backward());
    assert_eq!(
        tree.decide(&call(forward, step(3)), &mut held),
        Answer::Run(node)
    );
    let ended = tree.ended().expect("the step has ended");
    assert_eq!(ended.live, [(OutputId { node, index: 0 }, 1)]);
    let marked = Step {
        number: -1,
        is_marked: true,
    };
    assert_eq!(
        tree.decide(&call(forward, marked), &mut held),
        Answer::Run(node)
    );
}

#[test]
fn a_forward_pass_waits_for_its_own_backward_pass() {
    let mut tree = Tree::default();
    let of = |mode, pair, part| Function {
        pair: Some(pair),
        part,
        ..function(mode)
    };
    let [first, second] = [1, 2].map(|pair| tree.add(of(Mode::Forward, pair, 0)));
    let [of_first, of_second] = [1, 2].map(|pair| tree.add(of(Mode::Backward, pair, 0)));
    let rest_of_second = tree.add(of(Mode::Backward, 2, 1));
    for id in [first, second, of_first, of_second, rest_of_second] {
        tree.ran(id);
    }
    let (inputs, mut held) = ([at(100)], Held::default());
    let call = |function, number| Call {
        function,
        inputs: &inputs,
        step: step(number),
    };
    let made = [(first, 1), (second, 2), (second, 3)];
    for (place, (id, number)) in made.into_iter().enumerate() {
        let output = 10 + u64::try_from(place).expect("small");
        let node = recorded(&mut tree, &call(id, number), &mut held, output).expect("a recording");
        held.by_user.insert(OutputId { node, index: 0 });
    }
    // Two forward passes of the second pair wait, and one of the first.
    for (id, waits) in [
        (of_second, true),
        (rest_of_second, true),
        (of_second, true),
        (of_second, true),
        (of_first, false),
    ] {
        tree.decide(&call(id, 3), &mut held);
        assert_eq!(tree.has_pending_backward(), waits);
    }
}

#[test]
fn an_input_that_is_written_must_be_static_or_an_output_of_the_path() {
    let mut tree = Tree::default();
    let maker = tree.add(Function {
        mutated: vec![],
        ..function(Mode::Inference)
    });
    let writer = tree.add(Function {
        mutated: vec![1],
        ..function(Mode::Inference)
    });
    tree.ran(maker);
    tree.ran(writer);
    let mut held = Held::default();
    let others = [at(100), at(200)];
    let call = Call {
        function: writer,
        inputs: &others,
        step: step(1),
    };
    assert_eq!(
        tree.decide(&call, &mut held),
        Answer::Eager(Reason::Mutation(1))
    );
    let inputs = [at(100)];
    let made = Call {
        function: maker,
        inputs: &inputs,
        step: step(1),
    };
    let node = recorded(&mut tree, &made, &mut held, 7).expect("a recording");
    held.by_user.insert(OutputId { node, index: 0 });
    let written = [at(100), at(7)];
    let call = Call {
        function: writer,
        inputs: &written,
        step: step(1),
    };
    assert_eq!(tree.decide(&call, &mut held), Answer::Record(Some(node)));
    // In the next step it is no output of the path any more.
    let call = Call {
        function: writer,
        inputs: &written,
        step: step(2),
    };
    assert_eq!(
        tree.decide(&call, &mut held),
        Answer::Eager(Reason::Mutation(1))
    );
}

#[test]
fn a_step_with_a_first_run_records_nothing() {
    let mut tree = Tree::default();
    let one = tree.add(function(Mode::Inference));
    let other = tree.add(function(Mode::Inference));
    let (inputs, mut held) = ([at(100)], Held::default());
    let mut decide = |function, number| {
        let call = Call {
            function,
            inputs: &inputs,
            step: step(number),
        };
        tree.decide(&call, &mut held)
    };
    assert_eq!(decide(one, 1), Answer::Eager(Reason::FirstRun));
    assert_eq!(decide(one, 1), Answer::Eager(Reason::PutOff));
    assert_eq!(decide(other, 2), Answer::Eager(Reason::FirstRun));
    assert_eq!(decide(one, 2), Answer::Eager(Reason::PutOff));
    assert_eq!(decide(one, 3), Answer::Record(None));
}
