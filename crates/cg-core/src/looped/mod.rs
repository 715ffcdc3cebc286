//! Loops of a step: a template whose one launch makes all steps, publishes what each has made, and ends by itself.

mod parameters;
mod simulate;

use std::sync::Arc;

use crate::body::Body;
use crate::device::Device;
use crate::driver::handle::Address;
use crate::driver::owned::{OwnedGraph, relaxed};
use crate::driver::spec::{Dim3, NodeDetail, NodeSpec, WorkSpec};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::node::Node;
use crate::retain::Retained;
use crate::template::Template;
use crate::work::{Function, Module, Work};

pub(crate) use simulate::register;

/// The most tensors that a step may publish.
const MOST_PIECES: usize = 8;
/// The most random states that a step may draw from.
const MOST_OFFSETS: usize = 4;
/// Threads of the kernels, for many bytes and for a few, where they end sooner.
const THREADS: u32 = 256;
const FEW_THREADS: u32 = 32;
/// Of pieces and flags together.
const FEW_BYTES: u64 = 512;
/// The kernel at the end of a step.
const STEP_END: &str = "cg_step_end";
/// The one at the end of a stage that is not the last.
const STAGE_END: &str = "cg_stage_end";
/// The one that lets a stage run.
const DECIDE: &str = "cg_decide";
/// They are made from the source beside it.
const PTX: &str = include_str!("loop.ptx");
/// Bytes of their state: the number of steps that were made, and whether the loop is over.
const STATE_BYTES: u64 = 8;

/// Elements that count once all of them are other than zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flags {
    /// The first element.
    pub address: Address,
    /// The number of elements, one after the other.
    pub elements: u32,
    /// Bytes of each.
    pub element_bytes: u32,
}

/// Memory that a step publishes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Its start.
    pub address: Address,
    /// The number of bytes.
    pub bytes: u64,
}

/// A random state that a stage of a step draws from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draws {
    /// The word with its offset.
    pub offset: Address,
    /// How far the stage moves it.
    pub increment: u64,
}

/// A stage of a step, of which each comes after the one before.
#[derive(Debug, Clone)]
pub struct Stage<'a> {
    /// What it does.
    pub template: &'a Template,
    /// It runs only where these are set; none for a stage of each step.
    pub only_if: Option<Flags>,
    /// The random states that it draws from.
    pub draws: Vec<Draws>,
}

/// What a loop does around its steps.
#[derive(Debug, Clone)]
pub struct LoopPlan {
    /// The most steps that a replay makes, at least one.
    pub most_steps: u32,
    /// The steps of one iteration: the loop ends at the end of one, and the steps behind its last one are dropped.
    pub unroll: u32,
    /// Ends the loop.
    pub until: Option<Flags>,
    /// The memory that each step publishes, at most 8 pieces.
    pub pieces: Vec<Piece>,
    /// 40 bytes of the host, which the device reaches. Two 32-bit words: how many steps are there, which the loop
    /// writes, and whether it is to stop after an iteration, which the host writes. Then four 64-bit words, for the
    /// offsets of random states after the last step, in the order in which stages name them first.
    pub host: Address,
    /// Memory of the host, which the device reaches: the pieces of each step, one after the other.
    pub ring: Address,
}

impl LoopPlan {
    /// Return the bytes that a step publishes.
    #[must_use]
    pub fn bytes_of_step(&self) -> u64 {
        self.pieces.iter().map(|piece| piece.bytes).sum()
    }

    fn require_valid(&self) -> Result<()> {
        let at_least_one = "at least one";
        if self.most_steps == 0 {
            return Err(Error::invalid("most_steps", &self.most_steps, at_least_one));
        }
        if self.unroll == 0 {
            return Err(Error::invalid("unroll", &self.unroll, at_least_one));
        }
        if self.pieces.len() > MOST_PIECES {
            return Err(Error::invalid("pieces", &self.pieces.len(), "at most 8"));
        }
        Ok(())
    }
}

impl Template {
    /// Return a template that makes a step again and again, as a plan says; the step is copied. `owner` is kept as
    /// long as the template and its execs.
    ///
    /// Before a replay both words of the host are zero.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plan that cannot be, more than four random states, and for a node that the driver
    /// does not repeat; what it reports.
    ///
    /// # Safety
    /// Until each replay has ended, all addresses are mapped for what is read and written there, and the ring has
    /// room for all steps.
    #[expect(unsafe_code, reason = "the caller vouches for addresses")]
    pub unsafe fn looped(
        device: &Device,
        step: &[Stage<'_>],
        plan: &LoopPlan,
        owner: Retained,
    ) -> Result<Self> {
        plan.require_valid()?;
        for stage in step {
            stage.template.require_repeatable()?;
        }
        let steps = Steps::new(device, step, plan)?;
        let template = Self::repeated(device, 1, |body| {
            let mut before = Vec::new();
            for number in 1..=plan.unroll {
                before = vec![steps.add(body, &before, number == plan.unroll)?];
            }
            Ok(())
        })?;
        let repeated = template.nodes()?;
        let begin = template.add(&Work::memset(&steps.state, 0)?, &[])?;
        for node in repeated {
            template.add_edge(begin, node)?;
        }
        template.retain(Arc::new((steps.kernels, steps.state, owner)));
        Ok(template)
    }

    /// Raise unless a body takes all nodes.
    fn require_repeatable(&self) -> Result<()> {
        self.with(|graph, _, _| require_repeatable(graph))
    }
}

fn require_repeatable(graph: &OwnedGraph) -> Result<()> {
    for (place, node) in graph.nodes()?.into_iter().enumerate() {
        let found = match graph.detail(node)? {
            NodeDetail::Kernel { .. }
            | NodeDetail::Memcpy { .. }
            | NodeDetail::Memset { .. }
            | NodeDetail::Empty => continue,
            NodeDetail::Child(child) => {
                require_repeatable(&graph.child(child))?;
                continue;
            }
            NodeDetail::Host { .. } => "a host function",
            NodeDetail::EventRecord(_) | NodeDetail::EventWait(_) => "an event",
            NodeDetail::MemAlloc { .. } | NodeDetail::MemFree { .. } => "memory of the graph",
            NodeDetail::Conditional { .. } => "a conditional node",
            _ => "of another kind",
        };
        let node = format!("node {place} of the step");
        let expected = "a kernel, a copy, a memset, an empty node or a child graph";
        return Err(Error::invalid(node, &found, expected));
    }
    Ok(())
}

/// What the steps of a loop have in common.
struct Steps<'a> {
    step: &'a [Stage<'a>],
    plan: &'a LoopPlan,
    kernels: Arc<Kernels>,
    state: Memory,
    /// All random states, with what the last stage moves them by.
    last: Vec<Draws>,
}

impl<'a> Steps<'a> {
    fn new(device: &Device, step: &'a [Stage<'a>], plan: &'a LoopPlan) -> Result<Self> {
        let mut last: Vec<Draws> = Vec::new();
        for (place, stage) in step.iter().enumerate() {
            let is_last = place + 1 == step.len() && stage.only_if.is_none();
            for one in &stage.draws {
                let increment = if is_last { one.increment } else { 0 };
                match last.iter_mut().find(|known| known.offset == one.offset) {
                    Some(known) => known.increment += increment,
                    None => last.push(Draws { increment, ..*one }),
                }
            }
        }
        if last.len() > MOST_OFFSETS {
            return Err(Error::invalid("draws", &last.len(), "at most 4"));
        }
        let kernels = device.load_once(STEP_END, || {
            // Loading is no reason to break a capture of another thread.
            relaxed(&**device.driver(), || Kernels::load(device))
        })?;
        Ok(Self {
            step,
            plan,
            kernels,
            state: Memory::new(device, STATE_BYTES)?,
            last,
        })
    }

    /// Add a step after other nodes; return its last node.
    fn add(&self, body: &mut Body<'_>, before: &[Node], decides: bool) -> Result<Node> {
        let mut before = before.to_vec();
        for (place, stage) in self.step.iter().enumerate() {
            let node = if let Some(flags) = stage.only_if {
                self.add_if(body, &before, stage, flags)?
            } else {
                let is_last = place + 1 == self.step.len();
                self.add_stage(body, &before, stage, !is_last)?
            };
            before = vec![node];
        }
        let (condition, state) = (body.condition(), self.state.address());
        let parameter = parameters::of_step_end(self.plan, condition, state, &self.last, decides);
        let threads = threads(self.plan.bytes_of_step(), self.plan.until);
        body.add_node(
            &kernel(&self.kernels.step_end, threads, [parameter]),
            &before,
        )
    }

    fn add_if(
        &self,
        body: &mut Body<'_>,
        before: &[Node],
        stage: &Stage<'_>,
        flags: Flags,
    ) -> Result<Node> {
        let condition = body.new_condition(0)?;
        let parameters = parameters::of_decide(condition, flags);
        let kernel = kernel(&self.kernels.decide, threads(0, Some(flags)), parameters);
        let decided = body.add_node(&kernel, before)?;
        body.add_if(condition, &[decided], |inner| {
            self.add_stage(inner, &[], stage, true).map(|_| ())
        })
    }

    /// Add the nodes of a stage; return the last one.
    fn add_stage(
        &self,
        body: &mut Body<'_>,
        before: &[Node],
        stage: &Stage<'_>,
        moves: bool,
    ) -> Result<Node> {
        let node = body.add_child(stage.template, before)?;
        if !moves || stage.draws.is_empty() {
            return Ok(node);
        }
        let parameter = parameters::of_stage_end(self.state.address(), &stage.draws);
        let kernel = kernel(&self.kernels.stage_end, 1, [parameter]);
        body.add_node(&kernel, &[node])
    }
}

struct Kernels {
    step_end: Function,
    stage_end: Function,
    decide: Function,
}

impl Kernels {
    fn load(device: &Device) -> Result<Self> {
        let module = Module::load(device, PTX.as_bytes())?;
        Ok(Self {
            step_end: module.function(STEP_END)?,
            stage_end: module.function(STAGE_END)?,
            decide: module.function(DECIDE)?,
        })
    }
}

/// Return how many threads look at so many bytes and at flags.
fn threads(bytes: u64, flags: Option<Flags>) -> u32 {
    let of_flags = flags.map_or(0, |one| {
        u64::from(one.elements) * u64::from(one.element_bytes)
    });
    if bytes + of_flags <= FEW_BYTES {
        FEW_THREADS
    } else {
        THREADS
    }
}

fn kernel<const COUNT: usize>(
    function: &Function,
    threads: u32,
    parameters: [Vec<u8>; COUNT],
) -> NodeSpec {
    NodeSpec::Work(WorkSpec::Kernel {
        function: function.handle(),
        grid: 1.into(),
        block: Dim3::from(threads),
        shared_bytes: 0,
        args: Arc::new(parameters.map(Into::into)),
    })
}
