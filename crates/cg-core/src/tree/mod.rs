//! [`Tree`]: which recorded graph answers a call, where graphs share memory. No driver is called here.
//!
//! A graph was recorded while outputs of the calls before it were in use, and uses no memory of those. So
//! it can run only behind the same calls, with no more outputs in use: graphs are nodes of a tree, and the
//! calls of one step are a path that begins at a root.

mod call;
mod node;
mod path;
mod recording;

use std::collections::HashMap;

pub use call::{Answer, Call, Function, FunctionId, Holders, Mode, Reason, Step};
pub use node::{Input, NodeId, OutputId};
use node::{Moves, Node};
use path::{Path, PathState};
pub use recording::Open;
use recording::Recordings;

/// A path that is over: its outputs are nobody's from here on.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Ended {
    /// The outputs that somebody still holds, and where each begins.
    pub live: Vec<(OutputId, u64)>,
    /// The outputs own their blocks of the pool, as the path was recorded and not replayed.
    pub owns: bool,
}

/// A function may stand on one path so often.
const MOST_REPEATS: u32 = 256;
/// A function is put off so often: where nothing says that steps begin, the first run of another one never gets
/// old.
const MOST_PUT_OFF: u32 = 8;

/// The graphs of a pool, and the path that calls have taken since their step began.
#[derive(Debug, Default)]
pub struct Tree {
    functions: Vec<Known>,
    nodes: Vec<Node>,
    roots: HashMap<FunctionId, Vec<NodeId>>,
    root_moves: HashMap<FunctionId, Moves>,
    path: Option<Path>,
    ended: Option<Ended>,
    /// The step of the last call.
    step: Option<i64>,
    /// A function has run for the first time since the step began.
    has_first_run: bool,
}

#[derive(Debug)]
struct Known {
    function: Function,
    has_run: bool,
    /// How often it was put off, as another one ran for the first time in the same step.
    put_off: u32,
    /// Its inputs that were said to be static and are not.
    moving: Vec<u32>,
    recordings: Recordings,
}

impl Tree {
    /// Add a function.
    ///
    /// # Panics
    /// With 2^32 functions.
    pub fn add(&mut self, function: Function) -> FunctionId {
        let id = u32::try_from(self.functions.len()).expect("fewer functions");
        self.functions.push(Known {
            function,
            has_run: false,
            put_off: 0,
            moving: Vec::new(),
            recordings: Recordings::default(),
        });
        FunctionId(id)
    }

    /// Decide what is to be done with a call.
    ///
    /// It may end the path: see [`Self::ended`]. There is none from before.
    pub fn decide(&mut self, call: &Call<'_>, holders: &mut impl Holders) -> Answer {
        let answer = self.answer(call, holders);
        self.follow(call.function);
        answer
    }

    /// Return the path that a decision has ended: who holds an output of it must lose its memory before anything
    /// else uses that. Then [`Self::forget_ended`] follows.
    #[must_use]
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.as_ref()
    }

    /// Forget the path that a decision has ended.
    pub fn forget_ended(&mut self) {
        self.ended = None;
    }

    /// End the path.
    pub fn end_path(&mut self, holders: &impl Holders) {
        if let Some(path) = self.path.take() {
            let live = self.held(Some(&path), holders);
            let owns = path.owns();
            self.ended = Some(Ended { live, owns });
        }
    }

    /// Note that a function runs without the tree; return whether that is its first run.
    pub fn ran(&mut self, function: FunctionId) -> bool {
        let is_first = self.note_run(function);
        self.follow(function);
        is_first
    }

    /// Note that a backward pass runs without the tree: that of a pair, if this is known.
    pub fn set_running_backward(&mut self, pair: Option<u32>) {
        if let Some(path) = &mut self.path {
            path.end_waiting(pair);
        }
    }

    /// Drop all nodes; functions stay. The path has been ended.
    pub fn clear(&mut self) {
        let mut functions = std::mem::take(&mut self.functions);
        for known in &mut functions {
            known.function.statics.append(&mut known.moving);
            known.recordings = Recordings::default();
        }
        *self = Self {
            functions,
            ..Self::default()
        };
    }

    /// Return whether a forward pass of the path waits for its backward pass.
    #[must_use]
    pub fn has_pending_backward(&self) -> bool {
        self.path.as_ref().is_some_and(Path::is_waiting)
    }

    /// Return how many outputs of the path somebody holds.
    #[must_use]
    pub fn count_held(&self, holders: &impl Holders) -> usize {
        self.held(self.path.as_ref(), holders).len()
    }

    /// Return a node.
    ///
    /// # Panics
    /// If there is none of this number.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Return where an output begins.
    ///
    /// # Panics
    /// If there is none of this number.
    #[must_use]
    pub fn memory(&self, output: OutputId) -> u64 {
        self.node(output.node).outputs[output.index as usize]
    }

    /// Note that the outputs of the path own their blocks of the pool from here on.
    pub fn own_path(&mut self) {
        if let Some(path) = &mut self.path {
            path.state = PathState::Recorded;
        }
    }

    /// Return all nodes.
    pub fn nodes(&self) -> impl Iterator<Item = (NodeId, &Node)> {
        (0..).map(NodeId).zip(&self.nodes)
    }

    /// Return the nodes of the path, the root first.
    #[must_use]
    pub fn path(&self) -> &[NodeId] {
        self.path.as_ref().map_or(&[], |path| &path.nodes)
    }

    /// Return whether the outputs of the path own their blocks.
    #[must_use]
    pub fn path_owns(&self) -> bool {
        self.path.as_ref().is_some_and(Path::owns)
    }

    /// Note that an enqueued node is the end of the path; `decide` has answered it.
    pub fn entered(&mut self, id: NodeId) {
        self.extend_path(id, PathState::Replayed);
        let (parent, function) = (self.node(id).parent, self.node(id).function);
        let siblings = self.siblings_mut(parent, function);
        if let Some(place) = siblings.iter().position(|one| *one == id) {
            siblings[..=place].rotate_right(1);
        }
        if let Some(moves) = self.moves_mut(parent).get_mut(&function) {
            moves.replayed();
        }
        self.functions[function.0 as usize].recordings.replayed();
    }
}

impl Tree {
    fn answer(&mut self, call: &Call<'_>, holders: &mut impl Holders) -> Answer {
        let is_next = self.step != Some(call.step.number);
        let begins = is_next && (call.step.is_marked || !self.has_pending_backward());
        self.step = Some(call.step.number);
        self.has_first_run &= !begins;
        if begins || (self.path_owns() && self.is_dead(holders)) {
            self.end_path(holders);
        }
        if let Some(node) = self.fitting(call, holders) {
            return Answer::Run(node);
        }
        if self.path.is_some() && !self.path_owns() && self.is_dead(holders) {
            self.end_path(holders);
            if let Some(node) = self.fitting(call, holders) {
                return Answer::Run(node);
            }
        }
        self.answer_anew(call, holders)
    }

    /// Note that a function has run; return whether that was its first run.
    fn note_run(&mut self, function: FunctionId) -> bool {
        let known = &mut self.functions[function.0 as usize];
        let is_first = !std::mem::replace(&mut known.has_run, true);
        self.has_first_run |= is_first;
        is_first
    }

    /// Let the forward pass whose backward pass a function is wait no more.
    fn follow(&mut self, function: FunctionId) {
        let function = &self.functions[function.0 as usize].function;
        if function.mode == Mode::Backward && function.part == 0 {
            let pair = function.pair;
            self.set_running_backward(pair);
        }
    }

    /// Answer a call that no node fits.
    fn answer_anew(&mut self, call: &Call<'_>, holders: &impl Holders) -> Answer {
        let current = self.path.as_ref().map(Path::current);
        let repeats = self.repeats(current, call.function);
        if repeats >= MOST_REPEATS {
            return Answer::Eager(Reason::Repeats(repeats));
        }
        let may_put_off = self.has_first_run && call.step.is_counted();
        if self.note_run(call.function) {
            return Answer::Eager(Reason::FirstRun);
        }
        let known = &mut self.functions[call.function.0 as usize];
        if may_put_off && known.put_off < MOST_PUT_OFF {
            known.put_off += 1;
            return Answer::Eager(Reason::PutOff);
        }
        if let Some(place) = self.foreign_mutation(call, holders) {
            return Answer::Eager(Reason::Mutation(place));
        }
        if let Some(reason) = self.note_moves(current, call) {
            return Answer::Eager(reason);
        }
        Answer::Record(current)
    }

    /// Return a node behind the end of the path that answers the call.
    fn fitting(&mut self, call: &Call<'_>, holders: &mut impl Holders) -> Option<NodeId> {
        if self.path_owns() {
            return None;
        }
        let current = self.path.as_ref().map(Path::current);
        for id in self.siblings(current, call.function) {
            let node = self.node(*id);
            if !node.is_at(call.inputs) || !are_dead(&node.dead_before, holders) {
                continue;
            }
            holders.release(*id);
            if are_dead(&node.dead_after, holders) {
                return Some(*id);
            }
            holders.take_back(*id);
        }
        None
    }

    /// Return a written input that is neither static nor in an output of the path.
    fn foreign_mutation(&self, call: &Call<'_>, holders: &impl Holders) -> Option<u32> {
        let function = &self.functions[call.function.0 as usize].function;
        if function.mutated.is_empty() {
            return None;
        }
        let (held, ending) = (self.held(self.path.as_ref(), holders), self.ending());
        let is_managed = |input: &Input| held.iter().any(|(_, memory)| *memory == input.memory);
        let mut mutated = function.mutated.iter().copied();
        mutated.find(|place| {
            let input = call
                .inputs
                .get(*place as usize)
                .copied()
                .unwrap_or_default();
            let is_own = is_managed(&input) || is_static(function, *place, input, &ending);
            input.memory != 0 && !is_own
        })
    }

    /// Return whether nobody holds an output of the path.
    fn is_dead(&self, holders: &impl Holders) -> bool {
        let current = self.path.as_ref().map(|path| self.node(path.current()));
        current.is_none_or(|node| are_dead(&node.live_after, holders))
    }

    /// Return where outputs of a path that has ended with this call begin.
    fn ending(&self) -> Vec<u64> {
        let ending = self.ended.iter().flat_map(|ended| &ended.live);
        ending.map(|(_, memory)| *memory).collect()
    }

    /// Return the outputs of a path that somebody holds, and where each begins.
    fn held(&self, path: Option<&Path>, holders: &impl Holders) -> Vec<(OutputId, u64)> {
        let Some(path) = path else {
            return Vec::new();
        };
        let outputs = self.node(path.current()).live_after.iter();
        let held = outputs.filter(|one| holders.is_alive(**one));
        held.map(|one| (*one, self.memory(*one))).collect()
    }

    /// Return how often a function stands on the path up to a node.
    fn repeats(&self, from: Option<NodeId>, function: FunctionId) -> u32 {
        let mut next = from;
        while let Some(id) = next {
            let node = self.node(id);
            if node.function == function {
                return node.repeats;
            }
            next = node.parent;
        }
        0
    }

    fn extend_path(&mut self, id: NodeId, state: PathState) {
        let function = self.node(id).function;
        let of = &self.functions[function.0 as usize].function;
        let path = self.path.get_or_insert_with(Path::default);
        path.state = state;
        path.nodes.push(id);
        if of.mode == Mode::Forward && of.part == 0 {
            // One that runs without the tree has memory of its own.
            path.wait(of.pair);
        }
    }

    fn siblings(&self, parent: Option<NodeId>, function: FunctionId) -> &[NodeId] {
        let children = parent.map_or(&self.roots, |id| &self.node(id).children);
        children.get(&function).map_or(&[], Vec::as_slice)
    }

    fn siblings_mut(&mut self, parent: Option<NodeId>, function: FunctionId) -> &mut Vec<NodeId> {
        let children = match parent {
            Some(id) => &mut self.node_mut(id).children,
            None => &mut self.roots,
        };
        children.entry(function).or_default()
    }

    fn moves_mut(&mut self, parent: Option<NodeId>) -> &mut HashMap<FunctionId, Moves> {
        match parent {
            Some(id) => &mut self.node_mut(id).moves,
            None => &mut self.root_moves,
        }
    }

    fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.nodes[id.0 as usize]
    }
}

fn are_dead(outputs: &[OutputId], holders: &impl Holders) -> bool {
    !outputs.iter().any(|one| holders.is_alive(*one))
}

/// Return whether an input that is in no output of the path stays where it is. What lies in an output of
/// a path that ends does not.
fn is_static(function: &Function, place: u32, input: Input, ending: &[u64]) -> bool {
    function.statics.contains(&place) && !ending.contains(&input.memory)
}
