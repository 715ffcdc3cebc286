//! Graph trees: steps, limits, and calls that run without the tree.

#[path = "support/tree.rs"]
mod support;

use cg_core::tree::{Answer, Call, Function, Mode, OutputId, Reason, Step, Tree};

use support::{Held, at, function, one_function, recorded, step};

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
