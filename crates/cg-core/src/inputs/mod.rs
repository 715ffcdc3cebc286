//! [`Inputs`]: root nodes that copy sources into a template's memory and store words, set and
//! launched at each replay by one call.

mod bound;
mod layout;
mod padding;
mod places;
mod simulate;

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::device::Device;
use crate::driver::handle::{Address, FunctionHandle, NodeHandle};
use crate::driver::owned::{relaxed, same_driver};
use crate::driver::spec::{NodeSpec, WorkSpec};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::ranges::Ranges;
use crate::retain::Retained;
use crate::template::Template;
use crate::work::{Function, Module};

pub(crate) use bound::Bound;
use layout::{KERNELS, PTX, Parameter, THREADS};
pub use padding::{Fill, Padding};
pub(crate) use simulate::register;

/// Nodes at the root of a template that copy what a replay is given into the template's memory.
///
/// [`Inputs::feed`] and [`crate::Exec::replay_with`] say what a replay copies and stores, and
/// [`Inputs::padding`] what becomes of rows that a source does not have. Any other replay copies and
/// stores nothing. It keeps its template alive, since an exec's node is changed through the
/// template's; so does an exec that was fed once.
///
/// ```
/// # use cg_core::{Device, Inputs, InstantiateFlags, Memory, Sim, Stream, Template, Work};
/// # use std::sync::Arc;
/// # let device = Device::sim(&Sim::default());
/// let (a, b) = (Memory::new(&device, 64)?, Memory::new(&device, 64)?);
/// let template = Arc::new(Template::new(&device)?);
/// template.add(&Work::memcpy(&b, &a)?, &[])?;
/// let inputs = Inputs::add(&template, &[a], &[])?;
/// let exec = template.instantiate(InstantiateFlags::default())?;
///
/// let (stream, new) = (Stream::new(&device)?, Memory::new(&device, 64)?);
/// new.write(&[7; 64])?;
/// let sources = [new.address()];
/// // SAFETY: `new` lives until the stream has passed the replay.
/// let feed = unsafe { inputs.feed(&sources, &[]) }?;
/// exec.replay_with(&feed, &stream)?;
/// stream.synchronize()?;
/// assert_eq!(b.read()?, [7; 64]);
/// # Ok::<(), cg_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Inputs {
    template: Arc<Template>,
    shared: Arc<Shared>,
}

/// What one replay copies and stores; made by [`Inputs::feed`].
#[derive(Debug, Clone, Copy)]
pub struct Feed<'a> {
    inputs: &'a Inputs,
    sources: &'a [Address],
    values: &'a [u64],
    /// Which sources have fewer rows than their slots.
    padding: Option<&'a Padding>,
    /// Whether the caller has seen that no source conflicts.
    is_checked: bool,
}

/// The kernels of all inputs of a device: a node has the smallest that does its copies and stores.
pub(crate) type Kernels = Vec<Function>;

/// What the template and its execs know of the inputs.
pub(crate) struct Shared {
    parts: Vec<Part>,
    /// Where each slot is, and its bytes.
    slots: Vec<(Address, u64)>,
    stores: usize,
    /// What the nodes write: what they copy must not lie there, since nothing orders the two.
    destinations: Ranges,
    /// Whether the template still has all nodes. It changes only while [`Self::in_use`] is locked.
    is_live: AtomicBool,
    /// Locked while the driver uses a node.
    in_use: Mutex<()>,
    /// The memory and the kernels.
    _named: Vec<Retained>,
}

/// One node.
pub(crate) struct Part {
    node: NodeHandle,
    function: FunctionHandle,
    copies: Range<usize>,
    stores: Range<usize>,
    /// The parameter that the template's node has: it changes nothing.
    neutral: Parameter,
}

impl Inputs {
    /// Adds nodes for any number of slots and stores, which come before all nodes that the template
    /// has now. A slot is memory that replays copy to, a store eight bytes that they set.
    ///
    /// Execs that were made before do not have them.
    ///
    /// # Errors
    /// [`Error::Invalid`] if two destinations overlap, or a store is not eight bytes at a multiple
    /// of eight; [`Error::Foreign`] for memory of another device; what the driver reports.
    pub fn add(template: &Arc<Template>, slots: &[Memory], stores: &[Memory]) -> Result<Self> {
        let driver = template.device().driver();
        for memory in slots.iter().chain(stores) {
            let object = format!("{memory:?}, destination of inputs");
            same_driver(&**driver, &**memory.driver(), &object)?;
        }
        for store in stores {
            if store.bytes() != 8 || !store.address().0.is_multiple_of(8) {
                let given = format!("{store:?}");
                let expected = "eight bytes at a multiple of eight";
                return Err(Error::invalid("memory of a store", &given, expected));
            }
        }
        let destinations = slots.iter().chain(stores).map(Memory::range);
        let destinations = Ranges::disjoint(destinations).map_err(|at| {
            let given = format!("{:#x}, inside of another destination", at.0);
            let expected = "memory that no other slot or store writes";
            Error::invalid("destination", &given, expected)
        })?;
        let kernels = template.device().inputs_kernels(load)?;
        let owners = slots.iter().chain(stores).filter_map(Memory::owner);
        let mut named: Vec<Retained> = owners.cloned().collect();
        named.push(Arc::clone(&kernels) as Retained);
        let mut parts = parts(&kernels, slots, stores);
        let specs: Vec<NodeSpec> = parts.iter().map(Part::spec).collect();
        let shared = template.add_roots(&specs, &named, |nodes| {
            for (part, node) in parts.iter_mut().zip(nodes) {
                part.node = *node;
            }
            Arc::new(Shared {
                parts,
                slots: slots.iter().map(|m| (m.address(), m.bytes())).collect(),
                stores: stores.len(),
                destinations,
                is_live: AtomicBool::new(true),
                in_use: Mutex::default(),
                _named: named.clone(),
            })
        })?;
        Ok(Self {
            template: Arc::clone(template),
            shared,
        })
    }

    /// The template that they were added to.
    #[must_use]
    pub fn template(&self) -> &Arc<Template> {
        &self.template
    }

    /// How many slots there are.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.shared.slots.len()
    }

    /// How many stores there are.
    #[must_use]
    pub fn stores(&self) -> usize {
        self.shared.stores
    }

    /// Whether a slot cannot be copied from this address, since the bytes there are themselves
    /// copied or stored to, in no order that anybody knows. The slot's own address is no conflict.
    ///
    /// # Panics
    /// If there is no such slot.
    #[must_use]
    pub fn conflicts(&self, slot: usize, source: Address) -> bool {
        let (own, bytes) = self.shared.slots[slot];
        source != own && self.shared.destinations.overlap(source, bytes)
    }

    /// What a replay is to copy, an address for each slot, and store, a value for each store. The
    /// address of the slot itself copies nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more or fewer than the inputs have.
    ///
    /// # Safety
    /// Each source is mapped for the slot's bytes until the streams have passed the replays that
    /// were given the result.
    #[expect(unsafe_code, reason = "nobody here owns the sources")]
    pub unsafe fn feed<'a>(
        &'a self,
        sources: &'a [Address],
        values: &'a [u64],
    ) -> Result<Feed<'a>> {
        self.new_feed(sources, values, None, false)
    }

    /// As [`Self::feed`], with sources that may have fewer rows than their slots.
    ///
    /// # Errors
    /// As for [`Self::feed`]; [`Error::Invalid`] for the padding of other inputs.
    ///
    /// # Safety
    /// As for [`Self::feed`], but of sources whose slots have rows, those of the padding need to be
    /// mapped alone.
    #[expect(unsafe_code, reason = "nobody here owns the sources")]
    pub unsafe fn feed_padded<'a>(
        &'a self,
        sources: &'a [Address],
        values: &'a [u64],
        padding: &'a Padding,
    ) -> Result<Feed<'a>> {
        self.new_feed(sources, values, Some(padding), false)
    }

    /// As [`Self::feed`], or with padding as [`Self::feed_padded`], for sources that the caller has
    /// looked at: a replay looks at none again.
    ///
    /// # Errors
    /// As for these.
    ///
    /// # Safety
    /// As for these; and for no source is [`Self::conflicts`] true.
    #[expect(unsafe_code, reason = "nobody here owns the sources")]
    pub unsafe fn feed_checked<'a>(
        &'a self,
        sources: &'a [Address],
        values: &'a [u64],
        padding: Option<&'a Padding>,
    ) -> Result<Feed<'a>> {
        self.new_feed(sources, values, padding, true)
    }

    fn new_feed<'a>(
        &'a self,
        sources: &'a [Address],
        values: &'a [u64],
        padding: Option<&'a Padding>,
        is_checked: bool,
    ) -> Result<Feed<'a>> {
        if sources.len() != self.slots() {
            let expected = format!("{}, one for each slot", self.slots());
            return Err(Error::invalid(
                "number of sources",
                &sources.len(),
                expected,
            ));
        }
        if values.len() != self.stores() {
            let expected = format!("{}, one for each store", self.stores());
            return Err(Error::invalid("number of values", &values.len(), expected));
        }
        if let Some(padding) = padding {
            padding.require_of(&self.shared)?;
        }
        Ok(Feed {
            inputs: self,
            sources,
            values,
            padding,
            is_checked,
        })
    }
}

impl fmt::Debug for Inputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (slots, stores) = (self.slots(), self.stores());
        write!(f, "Inputs({slots} slots and {stores} stores of ")?;
        write!(f, "{:?})", self.template)
    }
}

impl Feed<'_> {
    /// The error of a replay of an exec that does not have these inputs.
    #[cold]
    pub(crate) fn foreign(&self, template: u64) -> Error {
        let found = &self.inputs.template;
        let expected = if found.id() == template {
            format!("{found:?} when the exec was made, which was before they were added")
        } else {
            format!("template {template}, which the exec was made from")
        };
        Error::Foreign {
            object: format!("{:?}", self.inputs),
            found: format!("{found:?}"),
            expected,
        }
    }
}

impl Shared {
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

/// The nodes, without handles yet.
fn parts(kernels: &Kernels, slots: &[Memory], stores: &[Memory]) -> Vec<Part> {
    let split = layout::split(slots.len(), stores.len()).into_iter();
    let part = |(copies, to): (Range<usize>, Range<usize>)| {
        let own = &slots[copies.clone()];
        let entries: Vec<_> = own.iter().map(|m| (m.address(), m.bytes())).collect();
        let addresses: Vec<Address> = stores[to.clone()].iter().map(Memory::address).collect();
        let neutral = Parameter::new(&entries, &addresses);
        Part {
            node: NodeHandle(0),
            function: kernels[neutral.kernel()].handle(),
            copies,
            stores: to,
            neutral,
        }
    };
    split.map(part).collect()
}

fn load(device: &Device) -> Result<Kernels> {
    // Loading is no reason to break a capture of another thread.
    relaxed(&**device.driver(), || {
        let module = Module::load(device, PTX.as_bytes())?;
        KERNELS.iter().map(|k| module.function(k.name)).collect()
    })
}
