//! [`Call`], what it is to a [`Tree`](super::Tree), and [`Answer`], what is to be done with it.

use super::node::{Input, NodeId, OutputId};

/// The number of a function of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FunctionId(pub u32);

/// What a function is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// It computes without a backward pass to come.
    Inference,
    /// Its backward pass follows: until that has begun, only a marked step begins a new path.
    Forward,
    /// It is a backward pass.
    Backward,
}

/// A function whose calls are recorded.
#[derive(Debug, Clone)]
pub struct Function {
    /// What it is for.
    pub mode: Mode,
    /// The number that a forward pass and its backward pass share; none if that is not known: then any backward
    /// pass is the one that all wait for.
    pub pair: Option<u32>,
    /// Its number among the parts of that pass, which run one after another.
    pub part: u32,
    /// The inputs that are at the same address in each call.
    pub statics: Vec<u32>,
    /// The inputs that it writes.
    pub mutated: Vec<u32>,
    /// How often in a row it is recorded anew behind one node because its inputs are elsewhere, while these
    /// recordings serve few replays; none for any number of times.
    pub limit: Option<u32>,
}

/// The step that a call belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    /// Another number is another step.
    pub number: i64,
    /// Somebody has said where steps begin.
    pub is_marked: bool,
}

impl Step {
    /// Return whether anything counts steps.
    pub(super) fn is_counted(self) -> bool {
        self.is_marked || self.number != 0
    }
}

/// A call.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Its function.
    pub function: FunctionId,
    /// Its inputs.
    pub inputs: &'a [Input],
    /// Its step.
    pub step: Step,
}

/// Those who hold outputs of nodes, and the call that holds its inputs.
pub trait Holders {
    /// Return whether somebody holds an output.
    fn is_alive(&self, output: OutputId) -> bool;

    /// Let go of the inputs of the call that lie in outputs of the path, if this node is to run.
    fn release(&mut self, node: NodeId);

    /// Take them back: the node cannot run.
    fn take_back(&mut self, node: NodeId);
}

/// What is to be done with a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    /// Replay this node; the inputs that lie in outputs of the path were let go.
    Run(NodeId),
    /// Record the function behind this node, or as a root.
    Record(Option<NodeId>),
    /// Run the function without the tree.
    Eager(Reason),
}

/// Why a call runs without the tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// It is the first one: it makes what a capture cannot, and may keep memory.
    FirstRun,
    /// Another function has run for the first time in this step: in the next one, its outputs are elsewhere.
    PutOff,
    /// It writes to this input, which is neither static nor an output of the path.
    Mutation(u32),
    /// It stands on the path as often as it may.
    Repeats(u32),
    /// It was recorded anew so often, as its inputs were elsewhere.
    Rerecords(u32),
    /// It was recorded in this place as often as it may be: other outputs were in use each time.
    Variants,
}
