//! [`Bound`]: the inputs or the outputs of one exec.

use std::sync::Arc;

use super::layout::{Parameter, THREADS};
use super::{Destination, Shared, Sources};
use crate::driver::handle::{Address, NodeHandle};
use crate::driver::owned::OwnedExec;
use crate::error::{Error, Result};

/// The inputs or the outputs of one exec, and what its nodes were last set to.
pub(crate) struct Bound {
    shared: Arc<Shared>,
    nodes: Vec<Setting>,
    /// True if a node may copy or store something.
    is_used: bool,
}

/// One kernel node of the exec.
struct Setting {
    parameter: Parameter,
    /// True if the driver has this parameter.
    is_set: bool,
}

impl Bound {
    /// Return those of an exec that was made just now.
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        let setting = |part: &super::Part| Setting {
            parameter: part.neutral.clone(),
            is_set: true,
        };
        Self {
            nodes: shared.parts.iter().map(setting).collect(),
            shared,
            is_used: false,
        }
    }

    /// Return whether they are these.
    #[inline]
    pub(crate) fn is(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    /// Make the next launch copy and store what the feed says. Only nodes that do not do so yet
    /// are set.
    #[inline]
    pub(crate) fn feed(&mut self, exec: &OwnedExec, from: &Sources<'_>) -> Result<()> {
        if !from.is_checked {
            self.check_sources(from)?;
        }
        let shared = &self.shared;
        for (part, node) in shared.parts.iter().zip(&mut self.nodes) {
            let sources = &from.addresses[part.copies.clone()];
            let values = &from.values[part.stores.clone()];
            let mut changes = node.parameter.set_others(sources);
            changes |= node.parameter.set_stores(values.len());
            changes |= match from.padding {
                Some(padding) => node.parameter.pad(padding, part.copies.clone()),
                None => node.parameter.pad_nothing(),
            };
            for (i, value) in values.iter().enumerate() {
                changes |= node.parameter.set_value(i, *value);
            }
            node.is_set &= !changes;
        }
        self.set(exec)
    }

    /// Make the next launch copy where the delivery says.
    #[inline]
    pub(crate) fn deliver(&mut self, exec: &OwnedExec, to: &[Destination]) -> Result<()> {
        let shared = &self.shared;
        for (place, to) in to.iter().enumerate() {
            shared.check_destination(place, *to)?;
        }
        for (part, node) in shared.parts.iter().zip(&mut self.nodes) {
            for (i, to) in to[part.copies.clone()].iter().enumerate() {
                let changes = node.parameter.set_other(i, to.address);
                node.is_set &= !(changes | node.parameter.set_bytes(i, to.bytes));
            }
        }
        self.set(exec)
    }

    /// Fail if a slot cannot be copied from its source, as far as that is not known from before.
    fn check_sources(&self, from: &Sources<'_>) -> Result<()> {
        for (part, node) in self.shared.parts.iter().zip(&self.nodes) {
            // Which bytes an address stands for depends on the padding, too.
            let is_padded = from.padding.is_some() || node.parameter.padding().is_some();
            for (i, slot) in part.copies.clone().enumerate() {
                let source = from.addresses[slot];
                if is_padded || node.parameter.other(i) != source {
                    self.shared.check_source(slot, source, from)?;
                }
            }
        }
        Ok(())
    }

    /// Make the next launch copy and store nothing.
    #[inline]
    pub(crate) fn rest(&mut self, exec: &OwnedExec) -> Result<()> {
        if !self.is_used {
            return Ok(());
        }
        for (part, node) in self.shared.parts.iter().zip(&mut self.nodes) {
            if node.parameter != part.neutral {
                node.parameter.assign(&part.neutral);
                node.is_set = false;
            }
        }
        self.set(exec)?;
        self.is_used = false;
        Ok(())
    }

    /// The exec took over another template: what its nodes do is that template's affair.
    pub(crate) fn forget(&mut self) {
        self.nodes.iter_mut().for_each(|node| node.is_set = false);
        self.is_used = false;
    }

    /// Somebody else set a node.
    pub(crate) fn forget_node(&mut self, handle: NodeHandle) {
        for (part, node) in self.shared.parts.iter().zip(&mut self.nodes) {
            node.is_set &= part.node != handle;
        }
    }

    fn set(&mut self, exec: &OwnedExec) -> Result<()> {
        let is_set = self.nodes.iter().all(|node| node.is_set);
        // As long as this is locked, the template has the nodes that it has now.
        let _held = (!is_set).then(|| self.shared.hold());
        if !self.shared.is_live() {
            return Err(removed());
        }
        // Also where only some of the nodes can be set.
        self.is_used |= !is_set;
        for (part, node) in self.shared.parts.iter().zip(&mut self.nodes) {
            if !node.is_set {
                let grid = part.neutral.grid(part.stores.len());
                let extents = [grid.into(), THREADS.into()];
                let bytes = node.parameter.as_bytes();
                exec.set_parameter(part.node, part.function, extents, bytes)?;
                node.is_set = true;
            }
        }
        Ok(())
    }
}

#[cold]
fn removed() -> Error {
    Error::Foreign {
        object: "a node of the inputs or the outputs".to_owned(),
        found: "no template: it was removed".to_owned(),
        expected: "the template that the exec was made from".to_owned(),
    }
}

impl Shared {
    /// Fail if a slot cannot be copied from there.
    #[inline]
    fn check_source(&self, slot: usize, source: Address, from: &Sources<'_>) -> Result<()> {
        let (own, whole) = self.own[slot];
        let bytes = from.bytes(slot, whole);
        if source == own || !self.overlaps(source, bytes) {
            return Ok(());
        }
        Err(Error::invalid(
            format!("source {slot}"),
            &format!("{bytes} bytes at {:#x}", source.0),
            "memory that overlaps no slot and no store: copy it before the replay",
        ))
    }

    /// Fail if a result cannot be copied there.
    #[inline]
    fn check_destination(&self, place: usize, to: Destination) -> Result<()> {
        if to.address == self.own[place].0 || !self.overlaps(to.address, to.bytes) {
            return Ok(());
        }
        Err(Error::invalid(
            format!("destination {place}"),
            &format!("{} bytes at {:#x}", to.bytes, to.address.0),
            "memory that overlaps none that is copied from",
        ))
    }
}
