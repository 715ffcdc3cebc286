//! [`Inputs`]: root nodes that copy sources into a template's memory and store words, set and
//! launched at each replay by one call.

use std::fmt;
use std::sync::Arc;

use crate::driver::handle::Address;
use crate::driver::owned::same_driver;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::ranges::Ranges;
use crate::retain::Retained;
use crate::template::Template;
use crate::transfer::{self, Direction, Fill, Nodes, Padding, Shared, Sources};

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

/// The sources and the values of one replay; made by [`Inputs::feed`].
#[derive(Debug, Clone, Copy)]
pub struct Feed<'a> {
    pub(crate) inputs: &'a Inputs,
    pub(crate) sources: Sources<'a>,
}

impl Inputs {
    /// Add nodes for any number of slots and store, which come before all nodes that the template
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
        let kernels = transfer::kernels(template.device(), Direction::In)?;
        let owners = slots.iter().chain(stores).filter_map(Memory::owner);
        let mut named: Vec<Retained> = owners.cloned().collect();
        named.push(Arc::clone(&kernels) as Retained);
        let own: Vec<_> = slots.iter().map(|m| (m.address(), m.bytes())).collect();
        let stores: Vec<Address> = stores.iter().map(Memory::address).collect();
        let nodes = Nodes::new(&kernels, &own, &stores);
        let shared = template.add_roots(&nodes.specs(), &named, |handles| {
            Arc::new(nodes.shared(handles, own, destinations, named.clone()))
        })?;
        Ok(Self {
            template: Arc::clone(template),
            shared,
        })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Return the template that they were added to.
    #[must_use]
    pub fn template(&self) -> &Arc<Template> {
        &self.template
    }

    /// Return how many slots there are.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.shared.own().len()
    }

    /// Return how many stores there are.
    #[must_use]
    pub fn stores(&self) -> usize {
        self.shared.stores()
    }

    /// Return whether a slot cannot be copied from this address, since the bytes there are themselves
    /// copied or stored to, in no order that anybody knows. The slot's own address is no conflict.
    ///
    /// # Panics
    /// If there is no such slot.
    #[must_use]
    pub fn conflicts(&self, slot: usize, source: Address) -> bool {
        let (own, bytes) = self.shared.own()[slot];
        source != own && self.shared.overlaps(source, bytes)
    }

    /// Return what a replay is to copy, an address for each slot, and store, a value for each store. The
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

    /// Padding for sources that have the first `rows` rows of as many as `of`, side by side in
    /// memory, in the slots for which `has_rows` is true; the other sources are whole.
    ///
    /// ```
    /// # use cg_core::{Device, Fill, Inputs, InstantiateFlags, Memory, Sim, Stream, Template};
    /// # use std::sync::Arc;
    /// # let device = Device::sim(&Sim::default());
    /// let slot = Memory::new(&device, 8)?;
    /// let template = Arc::new(Template::new(&device)?);
    /// let inputs = Inputs::add(&template, &[slot.clone()], &[])?;
    /// let exec = template.instantiate(InstantiateFlags::default())?;
    ///
    /// let (stream, three) = (Stream::new(&device)?, Memory::new(&device, 6)?);
    /// three.write(&[1, 2, 3, 4, 5, 6])?;
    /// let padding = inputs.padding(3, 4, Fill::LastRow, [true])?;
    /// let sources = [three.address()];
    /// // SAFETY: `three` has three rows, and lives until the stream has passed the replay.
    /// let feed = unsafe { inputs.feed_padded(&sources, &[], &padding) }?;
    /// exec.replay_with(&feed, &stream)?;
    /// stream.synchronize()?;
    /// assert_eq!(slot.read()?, [1, 2, 3, 4, 5, 6, 5, 6]);
    /// # Ok::<(), cg_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if `has_rows` is not one for each slot, for no rows or more than `of`, and for
    /// a slot with rows whose bytes are not those of so many, or that has none.
    pub fn padding(
        &self,
        rows: u32,
        of: u32,
        fill: Fill,
        has_rows: impl Into<Box<[bool]>>,
    ) -> Result<Padding> {
        Padding::new(&self.shared, rows, of, fill, has_rows.into())
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
            sources: Sources {
                addresses: sources,
                values,
                padding,
                is_checked,
            },
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
