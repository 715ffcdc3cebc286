//! Nodes that copy between a template's memory and what a replay is given: the common part of
//! [`crate::Inputs`] and [`crate::Outputs`].

mod bound;
mod layout;
mod padding;
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
use crate::ranges::Ranges;
use crate::retain::Retained;
use crate::work::{Function, Module};

pub(crate) use bound::Bound;
pub use padding::{Fill, Padding};
pub(crate) use simulate::register;

use layout::{KERNELS, Parameter, THREADS};

/// The sources and the values of one replay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sources<'a> {
    /// An address for each slot.
    pub(crate) addresses: &'a [Address],
    /// A value for each store.
    pub(crate) values: &'a [u64],
    /// Sources with fewer rows than their slots.
    pub(crate) padding: Option<&'a Padding>,
    /// True if the caller has seen that no source conflicts.
    pub(crate) is_checked: bool,
}

/// A destination for one piece of memory, and the number of bytes from its start on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The address; that of the memory itself copies nothing.
    pub address: Address,
    /// No more than the memory has, and maybe none.
    pub bytes: u64,
}

/// The direction in which nodes copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Direction {
    /// To the template's memory.
    In,
    /// From the template's memory.
    Out,
}

/// The kernels of all nodes of a direction: a node has the smallest that does its copies and stores.
pub(crate) type Kernels = Vec<Function>;

/// The part of inputs or outputs that the template and its execs share.
pub(crate) struct Shared {
    parts: Vec<Part>,
    /// The template's memory, in the caller's order.
    own: Vec<(Address, u64)>,
    stores: usize,
    /// Memory that the other side must not lie in: of inputs, what the nodes write; of outputs, what they read.
    ranges: Ranges,
    /// True if the template still has all nodes. It changes only while [`Self::in_use`] is locked.
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

    /// Return what the driver is to add.
    pub(crate) fn specs(&self) -> Vec<NodeSpec> {
        self.parts.iter().map(Part::spec).collect()
    }

    /// Return what they become once the driver has added them.
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
    /// Return the template's memory, in the caller's order.
    #[inline]
    pub(crate) fn own(&self) -> &[(Address, u64)] {
        &self.own
    }

    /// Return how many stores there are.
    #[inline]
    pub(crate) fn stores(&self) -> usize {
        self.stores
    }

    /// Return whether so many bytes at an address lie in what the other side must not lie in.
    #[inline]
    pub(crate) fn overlaps(&self, address: Address, bytes: u64) -> bool {
        self.ranges.overlap(address, bytes)
    }

    /// Return whether one of the nodes is this one.
    pub(crate) fn has(&self, node: NodeHandle) -> bool {
        self.parts.iter().any(|part| part.node == node)
    }

    /// Return whether the template still has the nodes.
    pub(crate) fn is_live(&self) -> bool {
        self.is_live.load(Ordering::Acquire)
    }

    /// Until the result is dropped no node goes.
    pub(crate) fn hold(&self) -> MutexGuard<'_, ()> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Note that the template has lost a node, which nobody uses.
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

/// Return the kernels of a direction.
pub(crate) fn kernels(device: &Device, direction: Direction) -> Result<Arc<Kernels>> {
    device.load_once(KERNELS[0].name(direction), || {
        // Loading is no reason to break a capture of another thread.
        relaxed(&**device.driver(), || {
            let module = Module::load(device, layout::ptx(direction).as_bytes())?;
            let names = KERNELS.iter().map(|kernel| kernel.name(direction));
            names.map(|name| module.function(name)).collect()
        })
    })
}
