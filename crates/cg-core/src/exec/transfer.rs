//! [`Transfer`]: what a replay copies besides its own work.

use std::sync::Arc;

use crate::driver::handle::NodeHandle;
use crate::driver::owned::OwnedExec;
use crate::error::{Error, Result};
use crate::inputs::Feed;
use crate::outputs::Delivery;
use crate::template::Template;
use crate::transfer::{Bound, Shared};

/// The copies of a replay besides its own work: a [`Feed`] before it, a [`Delivery`] after it, or both.
#[derive(Debug, Clone, Copy, Default)]
pub struct Transfer<'a> {
    feed: Option<&'a Feed<'a>>,
    delivery: Option<&'a Delivery<'a>>,
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

/// The inputs and the outputs of an exec.
pub(super) struct Transfers {
    all: Vec<Bound>,
    /// Kept as long as nodes may have to be set back: an exec's node is changed through the template's.
    template: Option<Arc<Template>>,
}

impl Transfers {
    pub(super) fn new(all: Vec<Arc<Shared>>) -> Self {
        Self {
            all: all.into_iter().map(Bound::new).collect(),
            template: None,
        }
    }

    /// Make the nodes do what the next launch is to do. `template` is the number of the exec's.
    #[inline]
    pub(super) fn prepare(
        &mut self,
        exec: &OwnedExec,
        transfer: Transfer<'_>,
        template: u64,
    ) -> Result<()> {
        let Transfer {
            mut feed,
            mut delivery,
        } = transfer;
        for bound in &mut self.all {
            if let Some(feed) = feed.take_if(|feed| bound.is(feed.inputs.shared())) {
                keep(&mut self.template, feed.inputs.template());
                bound.feed(exec, &feed.sources)?;
            } else if let Some(to) = delivery.take_if(|to| bound.is(to.outputs.shared())) {
                keep(&mut self.template, to.outputs.template());
                bound.deliver(exec, to.to)?;
            } else {
                bound.rest(exec)?;
            }
        }
        if let Some(feed) = feed {
            let (object, of) = (format!("{:?}", feed.inputs), feed.inputs.template());
            return Err(foreign(object, of, template));
        }
        if let Some(to) = delivery {
            let (object, of) = (format!("{:?}", to.outputs), to.outputs.template());
            return Err(foreign(object, of, template));
        }
        Ok(())
    }

    /// Forget what the nodes were set to: the exec took over another template.
    pub(super) fn forget(&mut self) {
        self.all.iter_mut().for_each(Bound::forget);
    }

    /// Forget what a node was set to: somebody else set it.
    pub(super) fn forget_node(&mut self, node: NodeHandle) {
        self.all
            .iter_mut()
            .for_each(|bound| bound.forget_node(node));
    }
}

#[inline]
fn keep(kept: &mut Option<Arc<Template>>, template: &Arc<Template>) {
    if kept.is_none() {
        *kept = Some(Arc::clone(template));
    }
}

/// Return the error of a replay of an exec that does not have these inputs or outputs.
#[cold]
fn foreign(object: String, found: &Template, template: u64) -> Error {
    let expected = if found.id() == template {
        format!("{found:?} when the exec was made, which was before they were added")
    } else {
        format!("template {template}, which the exec was made from")
    };
    Error::Foreign {
        object,
        found: format!("{found:?}"),
        expected,
    }
}
