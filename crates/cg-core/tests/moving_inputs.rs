//! Static inputs that move: what is recorded anew, what is copied, and what runs without the tree.

#[path = "support/tree.rs"]
mod support;

use cg_core::tree::{Answer, Call, Function, Input, Mode, OutputId, Reason, Tree};

use support::{Held, at, called, function, one_function, recorded, recorded_each, step};

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
            called(tree, id, number, address, &[0])
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
fn an_input_that_is_elsewhere_in_four_recordings_without_replays_is_copied_unless_it_is_written() {
    for is_written in [false, true] {
        let (mut tree, id) = one_function(Function {
            limit: None,
            mutated: if is_written { vec![0] } else { vec![] },
            ..function(Mode::Inference)
        });
        let numbers = 1..=20_i64;
        let answers =
            numbers.map(|number| called(&mut tree, id, number, 100 * number.unsigned_abs(), &[0]));
        let recorded = answers.filter(|one| *one == Answer::Record(None)).count();
        // The first one has not moved.
        assert_eq!(recorded, if is_written { 20 } else { 5 });
        assert_eq!(tree.moving(id), if is_written { &[][..] } else { &[0] });
    }
}

#[test]
fn a_function_that_many_layers_have_keeps_the_inputs_of_each_in_place() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        ..function(Mode::Inference)
    });
    let mut recordings = 0;
    for number in 1..=4 {
        for layer in 1..=40_u64 {
            recordings +=
                u64::from(called(&mut tree, id, number, 100 * layer, &[]) == Answer::Record(None));
        }
    }
    assert_eq!(recordings, 40);
    assert!(tree.moving(id).is_empty());
}

#[test]
fn inputs_that_move_with_one_that_moves_often_are_copied_with_it() {
    for (moves_at, moving) in [(3, vec![0, 1]), (20, vec![0])] {
        let (mut tree, id) = one_function(Function {
            limit: None,
            statics: vec![0, 1],
            ..function(Mode::Inference)
        });
        let moves = (1..=9_u64).map(|number| {
            let second = if number < moves_at { 5 } else { 6 };
            [at(100 * number), at(second)]
        });
        recorded_each(&mut tree, id, moves);
        assert_eq!(tree.moving(id), moving);
    }
}

#[test]
fn an_input_that_moves_once_stays_however_often_a_written_one_moves() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        statics: vec![0, 1],
        mutated: vec![0],
        ..function(Mode::Inference)
    });
    let moves = (1..=12_u64).map(|number| [at(100 * number), at(if number < 5 { 5 } else { 6 })]);
    recorded_each(&mut tree, id, moves);
    assert!(tree.moving(id).is_empty());
}

#[test]
fn a_static_input_in_memory_that_is_written_is_never_copied() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        statics: vec![0, 1],
        mutated: vec![0],
        ..function(Mode::Inference)
    });
    let moves = (1..=12_u64).map(|number| {
        let view = Input {
            address: 100 * number + 8,
            memory: 100 * number,
        };
        [at(100 * number), view]
    });
    recorded_each(&mut tree, id, moves);
    assert!(tree.moving(id).is_empty());
}

#[test]
fn inputs_that_move_now_and_then_are_copied_before_there_are_too_many_graphs() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        ..function(Mode::Inference)
    });
    let mut number = 0;
    for weight in 1..=300_u64 {
        for _ in 0..10 {
            number += 1;
            let answer = called(&mut tree, id, number, 100 * weight, &[0]);
            assert!(!matches!(answer, Answer::Eager(_)));
        }
    }
    assert_eq!(tree.moving(id), [0]);
}

#[test]
fn an_input_is_copied_if_replays_do_not_pay_for_its_moves_however_they_fall() {
    let (mut tree, id) = one_function(Function {
        limit: None,
        ..function(Mode::Inference)
    });
    let mut number = 0;
    let mut recordings = 0;
    for weight in 1..=60_u64 {
        for _ in 0..if weight % 2 == 0 { 4 } else { 10 } {
            number += 1;
            let answer = called(&mut tree, id, number, 100 * weight, &[0]);
            recordings += u32::from(answer == Answer::Record(None));
        }
    }
    assert_eq!(tree.moving(id), [0]);
    assert!(recordings < 40, "{recordings}");
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
