//! A tree with one function, and its calls.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeSet;

use cg_core::tree::{
    Answer, Call, Function, FunctionId, Holders, Input, Mode, NodeId, OutputId, Step, Tree,
};

/// Outputs that somebody holds.
#[derive(Default)]
pub(crate) struct Held {
    pub(crate) by_user: BTreeSet<OutputId>,
}

impl Holders for Held {
    fn is_alive(&self, output: OutputId) -> bool {
        self.by_user.contains(&output)
    }

    fn release(&mut self, _node: NodeId) {}

    fn take_back(&mut self, _node: NodeId) {}
}

/// A tree with one function, and its call at an address.
pub(crate) fn one_function(function: Function) -> (Tree, FunctionId) {
    let mut tree = Tree::default();
    let id = tree.add(function);
    tree.ran(id);
    tree.set_running_backward(None);
    (tree, id)
}

pub(crate) fn at(address: u64) -> Input {
    Input {
        address,
        memory: address,
    }
}

pub(crate) fn step(number: i64) -> Step {
    Step {
        number,
        is_marked: false,
    }
}

pub(crate) fn function(mode: Mode) -> Function {
    Function {
        mode,
        pair: None,
        part: 0,
        statics: vec![0],
        mutated: vec![],
        limit: Some(2),
    }
}

/// Record calls of a function with inputs that are elsewhere in each, one in a step.
pub(crate) fn recorded_each(
    tree: &mut Tree,
    function: FunctionId,
    inputs: impl IntoIterator<Item = [Input; 2]>,
) {
    let mut held = Held::default();
    for (number, inputs) in (1..).zip(inputs) {
        let call = Call {
            function,
            inputs: &inputs,
            step: step(number),
        };
        recorded(tree, &call, &mut held, 1);
    }
}

/// Record a call that returns one piece of memory.
pub(crate) fn recorded(
    tree: &mut Tree,
    call: &Call<'_>,
    held: &mut Held,
    output: u64,
) -> Option<NodeId> {
    let Answer::Record(_) = tree.decide(call, held) else {
        return None;
    };
    tree.forget_ended();
    let mut open = tree.open(call, held);
    tree.let_move(&mut open, &[0, 1]);
    Some(tree.close(open, vec![output], held))
}

/// Call a function in a step with its input at an address: record, replay or neither. Memory of the recording
/// before at the places `gone` is gone.
pub(crate) fn called(
    tree: &mut Tree,
    function: FunctionId,
    number: i64,
    address: u64,
    gone: &[u32],
) -> Answer {
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
            let mut open = tree.open(&call, &held);
            tree.let_move(&mut open, gone);
            tree.close(open, vec![1], &held);
        }
        Answer::Eager(_) => {}
    }
    answer
}
