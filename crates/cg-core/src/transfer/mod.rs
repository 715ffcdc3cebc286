//! Nodes that copy between a template's memory and what a replay is given: what [`crate::Inputs`] and
//! [`crate::Outputs`] have in common.

mod bound;
mod layout;
mod places;
mod simulate;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::driver::handle::{Address, FunctionHandle, NodeHandle};
use crate::driver::owned::relaxed;
use crate::driver::spec::{NodeSpec, WorkSpec};
use crate::error::Result;
use crate::inputs::Feed;
use crate::outputs::Delivery;
use crate::ranges::Ranges;
use crate::retain::Retained;
use crate::work::{Function, Module};

pub(crate) use bound::Bound;
use layout::{KERNELS, Parameter, THREADS};
pub(crate) use simulate::register;

/// What a replay copies besides its own work: a [`Feed`] before it, a [`Delivery`] after it, or both.
#[derive(Debug, Clone, Copy, Default)]
pub struct Transfer<'a> {
    pub(crate) feed: Option<&'a Feed<'a>>,
    pub(crate) delivery: Option<&'a Delivery<'a>>,
}

impl<'a> Transfer<'a> {
    /// Both, as far as they are there.
    #[must_use]
    pub fn new(feed: Option<&'a Feed<'a>>, delivery: Option<&'a Delivery<'a>>) -> Self {
        Self { feed, delivery }
    }
}

impl<'a, 'b: 'a> From<&'a Feed<'b>> for Transfer<'a> {
    fn from(feed: &'a Feed<'b>) -> Self {
        Self::new(Some(feed), None)
    }
}

impl<'a, 'b: 'a> From<&'a Delivery<'b>> for Transfer<'a> {
    fn from(delivery: &'a Delivery<'b>) -> Self {
        Self::new(None, Some(delivery))
    }
}

/// Where nodes copy to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// To the template's memory.
    In,
    /// From the template's memory.
    Out,
}

/// The kernels of all nodes of a direction: a node has the smallest that does its copies and stores.
pub(crate) type Kernels = Vec<Function>;

/// What the template and its execs know of the inputs, or of the outputs.
pub(crate) struct Shared {
    parts: Vec<Part>,
    /// The template's memory, in the caller's order.
    own: Vec<(Address, u64)>,
    stores: usize,
    /// What the other side must not lie in: for inputs what the nodes write, for outputs what they read.
    ranges: Ranges,
    /// Whether the template still has all nodes. It changes only while [`Self::in_use`] is locked.
    is_live: AtomicBool,
    /// Locked while the driver uses a node.
    in_use: Mutex<()>,
    /// The memory and the kernels.
    _named: Vec<Retained>,
}

/// A kernel node.
pub(crate) struct Part {
    node: NodeHandle,
    function: FunctionHandle,
    /// Its copies, among all that kernels do.
    copies: Range<usize>,
    stores: Range<usize>,
    /// The parameter that the template's node has: it changes nothing.
    neutral: Parameter,
}

/// The nodes of inputs or outputs, without handles yet.
pub(crate) struct Nodes {
    parts: Vec<Part>,
}

impl Nodes {
    /// Kernel nodes for all memory and for stores.
    pub(crate) fn new(kernels: &Kernels, own: &[(Address, u64)], stores: &[Address]) -> Self {
        let split = layout::split(own.len(), stores.len()).into_iter();
        let part = |(copies, to): (Range<usize>, Range<usize>)| {
            let neutral = Parameter::new(&own[copies.clone()], &stores[to.clone()]);
            Part {
                node: NodeHandle(0),
                function: kernels[neutral.kernel()].handle(),
                copies,
                stores: to,
                neutral,
            }
        };
        Self {
            parts: split.map(part).collect(),
        }
    }

    /// What the driver is to add.
    pub(crate) fn specs(&self) -> Vec<NodeSpec> {
        self.parts.iter().map(Part::spec).collect()
    }

    /// What they become once the driver has added them.
    pub(crate) fn shared(
        mut self,
        handles: &[NodeHandle],
        own: Vec<(Address, u64)>,
        ranges: Ranges,
        named: Vec<Retained>,
    ) -> Shared {
        for (part, handle) in self.parts.iter_mut().zip(handles) {
            part.node = *handle;
        }
        Shared {
            stores: self.parts.iter().map(|part| part.stores.len()).sum(),
            parts: self.parts,
            own,
            ranges,
            is_live: AtomicBool::new(true),
            in_use: Mutex::default(),
            _named: named,
        }
    }
}

impl Shared {
    /// The template's memory, in the caller's order.
    #[inline]
    pub(crate) fn own(&self) -> &[(Address, u64)] {
        &self.own
    }

    /// How many stores there are.
    #[inline]
    pub(crate) fn stores(&self) -> usize {
        self.stores
    }

    /// Whether so many bytes at an address lie in what the other side must not lie in.
    #[inline]
    pub(crate) fn overlaps(&self, address: Address, bytes: u64) -> bool {
        self.ranges.overlap(address, bytes)
    }

    /// Whether one of the nodes is this one.
    pub(crate) fn has(&self, node: NodeHandle) -> bool {
        self.parts.iter().any(|part| part.node == node)
    }

    /// Whether the template still has the nodes.
    pub(crate) fn is_live(&self) -> bool {
        self.is_live.load(Ordering::Acquire)
    }

    /// Until the result is dropped no node goes.
    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that the template has lost a node, which nobody uses.
    pub(crate) fn lose(&self, _held: &MutexGuard<'_, ()>) {
        self.is_live.store(false, Ordering::Release);
    }
}

impl Part {
    fn spec(&self) -> NodeSpec {
        NodeSpec::Work(WorkSpec::Kernel {
            function: self.function,
            grid: self.neutral.grid(self.stores.len()).into(),
            block: THREADS.into(),
            shared_bytes: 0,
            args: Arc::new([self.neutral.as_bytes().into()]),
        })
    }
}

/// The kernels of a direction.
pub(crate) fn kernels(device: &Device, direction: Direction) -> Result<Arc<Kernels>> {
    device.kernels(direction, |device| {
        // Loading is no reason to break a capture of another thread.
        relaxed(&**device.driver(), || {
            let module = Module::load(device, layout::ptx(direction).as_bytes())?;
            let names = KERNELS.iter().map(|kernel| kernel.name(direction));
            names.map(|name| module.function(name)).collect()
        })
    })
}
