//! Loops of a step: a template whose one launch makes all steps, publishes what each has made, and ends by itself.

mod simulate;

use std::sync::Arc;

use crate::device::Device;
use crate::driver::handle::Address;
use crate::driver::owned::relaxed;
use crate::driver::spec::{NodeDetail, NodeSpec, WorkSpec};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::retain::Retained;
use crate::template::Template;
use crate::work::{Module, Work};

pub(crate) use simulate::register;

/// The most tensors that a step may publish.
const MOST_PIECES: usize = 8;
/// The most random states that a step may draw from.
const MOST_OFFSETS: usize = 4;
/// Threads of the kernel that ends a step.
const THREADS: u32 = 256;
/// The name of that kernel.
const STEP_END: &str = "cg_step_end";
/// It is made from the source beside it.
const PTX: &str = include_str!("step_end.ptx");
/// Bytes of its state: the number of steps that were made, and whether the loop is over.
const STATE_BYTES: u64 = 8;

/// Elements that end a loop once all of them are other than zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Until {
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

/// A random state that a step draws from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Draws {
    /// The word with its offset.
    pub offset: Address,
    /// How far a step moves it.
    pub increment: u64,
}

/// What a loop does around its steps.
#[derive(Debug, Clone)]
pub struct LoopPlan {
    /// The most steps that a replay makes, at least one.
    pub most_steps: u32,
    /// The steps of one iteration: the loop ends at the end of one, and the steps behind its last one are dropped.
    pub unroll: u32,
    /// Ends the loop.
    pub until: Option<Until>,
    /// The memory that each step publishes, at most 8 pieces.
    pub pieces: Vec<Piece>,
    /// The random states that each step draws from, at most 4.
    pub draws: Vec<Draws>,
    /// Two 32-bit words of the host, which the device reaches: how many steps are there, which the loop writes, and
    /// whether it is to stop, which the host writes.
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
        if self.draws.len() > MOST_OFFSETS {
            return Err(Error::invalid("draws", &self.draws.len(), "at most 4"));
        }
        Ok(())
    }

    /// Return the bytes of the kernel's parameter; see `step_end.cu`.
    fn parameter(&self, condition: u64, state: &Memory, decides: bool) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut word = |value: u64| bytes.extend(value.to_le_bytes());
        word(condition);
        word(state.address().0);
        word(self.host.0);
        word(self.ring.0);
        word(self.bytes_of_step());
        let until = self.until;
        word(until.map_or(0, |one| one.address.0));
        let pair = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        word(until.map_or(0, |one| pair(one.elements, one.element_bytes)));
        word(pair(self.most_steps, u32::from(decides)));
        let count = |length: usize| u32::try_from(length).expect("a few");
        word(pair(count(self.pieces.len()), count(self.draws.len())));
        for place in 0..MOST_PIECES {
            let piece = self.pieces.get(place);
            word(piece.map_or(0, |piece| piece.address.0));
            word(piece.map_or(0, |piece| piece.bytes));
        }
        for place in 0..MOST_OFFSETS {
            let draws = self.draws.get(place);
            word(draws.map_or(0, |draws| draws.offset.0));
            word(draws.map_or(0, |draws| draws.increment));
        }
        bytes
    }
}

impl Template {
    /// Return a template that makes copies of a step again and again, as a plan says. `owner` is kept as long as the
    /// template and its execs.
    ///
    /// Before a replay both words of the host are zero.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a plan that cannot be, and for a node that the driver does not repeat; what it reports.
    ///
    /// # Safety
    /// All addresses of the plan are mapped for what is read and written there, as long as `owner`, and the ring has
    /// room for all steps.
    #[expect(unsafe_code, reason = "the caller vouches for addresses")]
    pub unsafe fn looped(
        device: &Device,
        step: &Self,
        plan: &LoopPlan,
        owner: Retained,
    ) -> Result<Self> {
        plan.require_valid()?;
        step.require_repeatable()?;
        let kernel = device.load_once(STEP_END, || {
            // Loading is no reason to break a capture of another thread.
            relaxed(&**device.driver(), || {
                Module::load(device, PTX.as_bytes())?.function(STEP_END)
            })
        })?;
        let state = Memory::new(device, STATE_BYTES)?;
        let template = Self::repeated(device, 1, |body| {
            let mut before = Vec::new();
            for number in 1..=plan.unroll {
                let step = body.add_child(step, &before)?;
                let parameter = plan.parameter(body.condition(), &state, number == plan.unroll);
                let end = NodeSpec::Work(WorkSpec::Kernel {
                    function: kernel.handle(),
                    grid: 1.into(),
                    block: THREADS.into(),
                    shared_bytes: 0,
                    args: Arc::new([parameter.into()]),
                });
                before = vec![body.add_node(&end, &[step])?];
            }
            Ok(())
        })?;
        let repeated = template.nodes()?;
        let begin = template.add(&Work::memset(&state, 0)?, &[])?;
        for node in repeated {
            template.add_edge(begin, node)?;
        }
        template.retain(Arc::new((kernel, state, owner)));
        Ok(template)
    }

    /// Raise unless a body takes all nodes.
    fn require_repeatable(&self) -> Result<()> {
        for (place, node) in self.nodes()?.into_iter().enumerate() {
            let found = match self.detail(node)? {
                NodeDetail::Kernel { .. }
                | NodeDetail::Memcpy { .. }
                | NodeDetail::Memset { .. }
                | NodeDetail::Empty
                | NodeDetail::Child(_) => continue,
                NodeDetail::Host { .. } => "a host function",
                NodeDetail::EventRecord(_) | NodeDetail::EventWait(_) => "an event",
                NodeDetail::MemAlloc { .. } | NodeDetail::MemFree { .. } => "memory of the graph",
                NodeDetail::Conditional { .. } => "a conditional node",
                _ => "of another kind",
            };
            let expected = "a kernel, a copy, a memset, an empty node or a child graph";
            return Err(Error::invalid(
                format!("node {place} of the step"),
                &found,
                expected,
            ));
        }
        Ok(())
    }
}
