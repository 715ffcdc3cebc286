//! Graph trees beside a slow model: nothing that somebody holds is overwritten, and calls are replayed wherever
//! the model says that they can be.

use std::collections::{BTreeMap, BTreeSet};

use cg_core::tree::{
    Answer, Call, Function, FunctionId, Holders, Input, Mode, NodeId, OutputId, Reason, Step, Tree,
};
use proptest::prelude::*;
use proptest::sample::Index;

/// Outputs that somebody holds, with the inputs of the call under way that hold them, too.
#[derive(Debug, Default)]
struct Held {
    by_user: BTreeSet<OutputId>,
    /// The output that an input lies in, until it is let go.
    by_input: Vec<Option<OutputId>>,
    /// The places of the inputs of each node that lie in outputs of the path.
    managed: BTreeMap<NodeId, Vec<usize>>,
    released: Vec<(usize, OutputId)>,
}

impl Holders for Held {
    fn is_alive(&self, output: OutputId) -> bool {
        self.by_user.contains(&output) || self.by_input.contains(&Some(output))
    }

    fn release(&mut self, node: NodeId) {
        for place in self.managed.get(&node).into_iter().flatten() {
            let output = self.by_input[*place].take();
            self.released.extend(output.map(|output| (*place, output)));
        }
    }

    fn take_back(&mut self, _node: NodeId) {
        for (place, output) in self.released.drain(..) {
            self.by_input[place] = Some(output);
        }
    }
}

/// What the model knows of a recorded call.
#[derive(Debug, Clone)]
struct Recorded {
    parent: Option<NodeId>,
    function: usize,
    inputs: Vec<Input>,
    /// The outputs in use before it, and those of them in use once its inputs were let go.
    before: BTreeSet<OutputId>,
    after: BTreeSet<OutputId>,
    /// The cells that it writes: all that nothing in use has.
    outputs: Vec<u64>,
}

/// A tree beside a model of its pool, whose memory is cells; a piece of memory has one.
struct Lab {
    tree: Tree,
    functions: Vec<FunctionId>,
    held: Held,
    recorded: BTreeMap<NodeId, Recorded>,
    path: Vec<NodeId>,
    step: i64,
    /// The model's copy: what was let go behind its back is not in use.
    owns: bool,
}

const CELLS: u64 = 12;

impl Lab {
    fn new() -> Self {
        let mut tree = Tree::default();
        let function = Function {
            mode: Mode::Inference,
            pair: None,
            part: 0,
            statics: vec![],
            mutated: vec![],
            limit: None,
        };
        let functions = (0..3).map(|_| tree.add(function.clone())).collect();
        let mut lab = Self {
            tree,
            functions,
            held: Held::default(),
            recorded: BTreeMap::new(),
            path: vec![],
            step: 1,
            owns: false,
        };
        // First runs are over.
        for function in 0..3 {
            let call = lab.call(function, None);
            let step = lab.marked();
            let call = Call {
                function: lab.functions[function],
                inputs: &call,
                step,
            };
            assert_eq!(
                lab.tree.decide(&call, &mut lab.held),
                Answer::Eager(Reason::FirstRun)
            );
        }
        lab.step += 1;
        lab
    }

    fn marked(&self) -> Step {
        Step {
            number: -self.step,
            is_marked: true,
        }
    }

    fn cell(&self, output: OutputId) -> u64 {
        self.recorded[&output.node].outputs[output.index as usize]
    }

    /// The two inputs of a call of a function: an output that is held, or something else, and another one.
    fn call(&mut self, function: usize, output: Option<OutputId>) -> Vec<Input> {
        let first = output.map_or(2000, |one| self.cell(one));
        self.held.by_input = vec![output, None];
        vec![at(first), at(1000 + function as u64)]
    }

    fn alive(&self) -> BTreeSet<OutputId> {
        let all = self.held.by_user.iter().copied();
        let by_input = self.held.by_input.iter().flatten().copied();
        all.chain(by_input)
            .filter(|one| self.path.contains(&one.node))
            .collect()
    }

    /// What the model would replay.
    fn expected(&self, function: usize, inputs: &[Input]) -> Vec<NodeId> {
        let before = self.alive();
        let fits = |(_, one): &(&NodeId, &Recorded)| {
            let is_managed = one.inputs[0].memory <= CELLS;
            // Who replays it lets go of what it does not copy.
            let source = self.held.by_input[0].filter(|_| !is_managed);
            let by_user = self.held.by_user.iter().copied();
            let mut after: BTreeSet<OutputId> = by_user.chain(source).collect();
            after.retain(|one| self.path.contains(&one.node));
            one.parent == self.path.last().copied()
                && one.function == function
                && (!is_managed || one.inputs[0] == inputs[0])
                && before.is_subset(&one.before)
                && after.is_subset(&one.after)
        };
        self.recorded
            .iter()
            .filter(fits)
            .map(|(id, _)| *id)
            .collect()
    }

    /// Call a function with an output that is held, which goes with the inputs, and keep some of its own.
    fn run(
        &mut self,
        function: usize,
        chosen: Option<OutputId>,
        kept: usize,
    ) -> Result<(), TestCaseError> {
        let inputs = self.call(function, chosen);
        if self.owns && self.alive().is_empty() {
            self.path.clear();
            self.owns = false;
        }
        let mut expected = self.expected(function, &inputs);
        if self.owns {
            expected.clear();
        }
        if expected.is_empty() && !self.owns && self.alive().is_empty() {
            self.path.clear();
            expected = self.expected(function, &inputs);
        }
        let step = self.marked();
        let call = Call {
            function: self.functions[function],
            inputs: &inputs,
            step,
        };
        let answer = self.tree.decide(&call, &mut self.held);
        let live = self.tree.ended().map_or(0, |ended| ended.live.len());
        self.tree.forget_ended();
        prop_assert_eq!(live, 0, "within a step only paths end that nobody holds");
        match answer {
            Answer::Run(id) => {
                prop_assert!(
                    expected.contains(&id),
                    "{:?} is not among {:?}",
                    id,
                    expected
                );
                self.check_writes(id)?;
                self.tree.entered(id);
                self.owns = false;
                self.keep(id, kept);
            }
            Answer::Record(parent) => {
                prop_assert!(expected.is_empty(), "{:?} could run", expected);
                prop_assert_eq!(parent, self.path.last().copied());
                if !self.owns {
                    self.tree.own_path();
                }
                self.record(function, &inputs, &call, kept);
            }
            Answer::Eager(Reason::Repeats(_)) => {}
            Answer::Eager(reason) => prop_assert!(false, "{:?}", reason),
        }
        prop_assert_eq!(self.tree.path(), &*self.path);
        Ok(())
    }

    fn record(&mut self, function: usize, inputs: &[Input], call: &Call<'_>, kept: usize) {
        let before = self.alive();
        let open = self.tree.open(call, &self.held);
        let managed = open
            .managed()
            .iter()
            .map(|(place, _)| *place as usize)
            .collect();
        self.held.by_input.clear();
        let after = self.alive();
        let used: BTreeSet<u64> = after.iter().map(|one| self.cell(*one)).collect();
        let free = (1..=CELLS).filter(|cell| !used.contains(cell));
        let outputs: Vec<u64> = free.take(2).collect();
        let id = self.tree.close(open, outputs.clone(), &self.held);
        let parent = self.path.last().copied();
        let inputs = inputs.to_vec();
        let recorded = Recorded {
            parent,
            function,
            inputs,
            before,
            after,
            outputs,
        };
        self.recorded.insert(id, recorded);
        self.held.managed.insert(id, managed);
        self.owns = true;
        self.keep(id, kept);
    }

    /// A replay writes all cells that were free while it was recorded.
    fn check_writes(&self, id: NodeId) -> Result<(), TestCaseError> {
        let safe: BTreeSet<u64> = self.recorded[&id]
            .after
            .iter()
            .map(|o| self.cell(*o))
            .collect();
        for one in self.alive() {
            prop_assert!(safe.contains(&self.cell(one)), "{:?} is overwritten", one);
        }
        Ok(())
    }

    fn keep(&mut self, id: NodeId, kept: usize) {
        self.held.by_input.clear();
        self.held.released.clear();
        self.path.push(id);
        let outputs = 0..self.recorded[&id].outputs.len();
        let outputs = outputs.filter(|index| kept & (1 << index) != 0);
        let index = |index| u32::try_from(index).expect("few outputs");
        self.held.by_user.retain(|one| one.node != id);
        self.held.by_user.extend(outputs.map(|at| OutputId {
            node: id,
            index: index(at),
        }));
    }

    fn next_step(&mut self) {
        self.step += 1;
        self.tree.end_path(&self.held);
        self.tree.forget_ended();
        self.held.by_user.clear();
        self.path.clear();
        self.owns = false;
    }
}

#[derive(Debug, Clone)]
enum Move {
    /// Call this function with one of the outputs that are held, and keep these results.
    Call(usize, Option<Index>, usize),
    /// Let go of a held output.
    Drop(Index),
    /// Begin a step.
    Step,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let call = (0..3_usize, prop::option::of(any::<Index>()), 0..4_usize)
        .prop_map(|(function, input, kept)| Move::Call(function, input, kept));
    let drop = any::<Index>().prop_map(Move::Drop);
    let one = prop_oneof![6 => call, 2 => drop, 1 => Just(Move::Step)];
    // The same moves again and again, so that there is something to replay.
    (prop::collection::vec(one, 1..12), 1..5_usize)
        .prop_map(|(moves, times)| vec![[moves, vec![Move::Step]].concat(); times].concat())
}

proptest! {
    #[test]
    fn a_tree_replays_what_a_slow_model_would_and_overwrites_nothing_in_use(moves in moves()) {
        let mut lab = Lab::new();
        for one in moves {
            let held: Vec<OutputId> = lab.held.by_user.iter().copied().collect();
            match one {
                Move::Call(function, input, kept) => {
                    let input = input.filter(|_| !held.is_empty());
                    let chosen = input.map(|index| held[index.index(held.len())]);
                    // The call takes its input over.
                    lab.held.by_user.retain(|one| Some(*one) != chosen);
                    lab.run(function, chosen, kept)?;
                }
                Move::Drop(index) if !held.is_empty() => {
                    lab.held.by_user.remove(&held[index.index(held.len())]);
                }
                Move::Drop(_) => {}
                Move::Step => lab.next_step(),
            }
        }
    }
}

fn at(address: u64) -> Input {
    Input {
        address,
        memory: address,
    }
}
