//! [`Exec`]: a graph that can run and cannot change shape.

mod instantiate;
mod last_replay;
mod transfer;

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::code::Code;
use crate::device::Device;
use crate::driver::UpdateFailure;
use crate::driver::handle::{ExecHandle, NodeHandle};
use crate::driver::owned::{OwnedExec, same_driver};
use crate::driver::spec::WorkSpec;
use crate::error::{Error, Result};
use crate::gate::Gates;
use crate::node::Node;
use crate::retain::Retained;
use crate::stream::Stream;
use crate::template::Template;
use crate::transfer::Shared;
use crate::work::Work;

pub use last_replay::LastReplay;
pub use transfer::Transfer;
use transfer::Transfers;

/// A graph that can run and cannot change shape.
///
/// Memory and functions that its nodes name stay alive until the replays have passed, also when the exec is dropped right
/// after one.
pub struct Exec {
    device: Device,
    template: u64,
    /// Here as well, so that it can be asked for while a launch holds the state.
    handle: ExecHandle,
    device_bytes: Option<u64>,
    /// Taken only by `drop`.
    state: Mutex<Option<State>>,
}

struct State {
    owned: Arc<OwnedExec>,
    /// Things that the nodes named when the exec was made or last updated.
    retained: Vec<Retained>,
    /// Things that nodes name that were set since then.
    set: HashMap<NodeHandle, Vec<Retained>>,
    /// Things that [`Exec::retain`] was given.
    kept: Vec<Retained>,
    /// The inputs and the outputs that the template had when the exec was made.
    transfers: Transfers,
    /// Of the pools that the nodes' memory is from.
    gates: Gates,
    last: Option<LastReplay>,
}

impl Exec {
    pub(crate) fn new(
        device: &Device,
        template: u64,
        owned: OwnedExec,
        device_bytes: Option<u64>,
        retained: Vec<Retained>,
        transfers: Vec<Arc<Shared>>,
    ) -> Self {
        Self {
            device: device.clone(),
            template,
            handle: owned.handle(),
            device_bytes,
            state: Mutex::new(Some(State {
                owned: Arc::new(owned),
                gates: Gates::of(&retained),
                retained,
                set: HashMap::new(),
                kept: Vec::new(),
                transfers: Transfers::new(transfers),
                last: None,
            })),
        }
    }

    /// Return its device.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Return the raw exec. It dies with the exec.
    #[must_use]
    pub fn handle(&self) -> ExecHandle {
        self.handle
    }

    /// By how many bytes the device's free memory fell while [`Template::instantiate_measured`] made it; none if
    /// [`Template::instantiate`] did. CUDA takes memory for execs
    /// in steps of some MiB, so that one pays for those after it; what others allocated meanwhile
    /// counts too. The sum over many execs is what they take.
    #[must_use]
    #[doc(alias = "cuMemGetInfo")]
    pub fn device_bytes(&self) -> Option<u64> {
        self.device_bytes
    }

    /// Return the number by which profilers and other tools know the exec; none from a driver older than
    /// CUDA 13.1. The template's nodes keep their numbers in it.
    #[doc(alias = "cuGraphExecGetId")]
    pub fn graph_id(&self) -> Result<Option<u32>> {
        self.with(|state| state.owned.id())
    }

    /// Send it to the device ahead of its first replay.
    #[doc(alias = "cuGraphUpload")]
    pub fn upload(&self, stream: &Stream) -> Result<()> {
        self.check(stream)?;
        self.with(|state| state.owned.upload(stream.owned()))
    }

    /// Enqueue one run on a stream and return. Runs of one exec never overlap.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a stream of another device; [`Error::Paused`] if memory of the nodes is
    /// from a paused pool; [`Error::Capture`] for a stream that captures, whose capture is broken by
    /// the attempt; what else the driver reports.
    #[doc(alias = "cuGraphLaunch")]
    #[inline]
    pub fn replay(&self, stream: &Stream) -> Result<()> {
        self.replay_on(|last| last.is_same(stream), || Ok(stream.clone()))
    }

    /// As [`Self::replay`], on the stream of the last replay if `is_last` knows it, and else on the
    /// one that `other` makes: for callers that have a raw handle at each replay and no [`Stream`].
    #[inline]
    pub fn replay_on(
        &self,
        is_last: impl FnOnce(&Stream) -> bool,
        other: impl FnOnce() -> Result<Stream>,
    ) -> Result<()> {
        self.launch(Transfer::default(), is_last, other)
    }

    /// Enqueue one run that first copies and stores what a [`crate::Feed`] says, last copies where a
    /// [`crate::Delivery`] says, or both, as one step: a replay by another thread comes before or after
    /// all of it. What is unchanged since the last replay costs nothing. Only this run sees it: one
    /// without them copies and stores nothing.
    ///
    /// # Errors
    /// As [`Self::replay`]; [`Error::Foreign`] for inputs or outputs of another template, those that the
    /// template got after the exec was made, or those with a node that was removed;
    /// [`Error::Invalid`] for a source that overlaps a slot or a store ([`crate::Inputs::conflicts`]),
    /// and for a destination that overlaps what is copied. After an error nothing was enqueued.
    #[doc(alias = "cuGraphExecKernelNodeSetParams")]
    #[inline]
    pub fn replay_with<'a>(
        &self,
        transfer: impl Into<Transfer<'a>>,
        stream: &Stream,
    ) -> Result<()> {
        self.replay_with_on(transfer, |last| last.is_same(stream), || Ok(stream.clone()))
    }

    /// [`Self::replay_with`] on a stream that is found as in [`Self::replay_on`].
    #[inline]
    pub fn replay_with_on<'a>(
        &self,
        transfer: impl Into<Transfer<'a>>,
        is_last: impl FnOnce(&Stream) -> bool,
        other: impl FnOnce() -> Result<Stream>,
    ) -> Result<()> {
        self.launch(transfer.into(), is_last, other)
    }

    #[inline]
    fn launch(
        &self,
        transfer: Transfer<'_>,
        is_last: impl FnOnce(&Stream) -> bool,
        other: impl FnOnce() -> Result<Stream>,
    ) -> Result<()> {
        let before = self.with(|state| {
            let State {
                owned,
                transfers,
                last,
                gates,
                ..
            } = state;
            let _open = gates.pass()?;
            transfers.prepare(owned, transfer, self.template)?;
            let known = last.as_ref().and_then(LastReplay::stream);
            if let Some(last) = known.filter(|last| is_last(last)) {
                let launched = owned.launch(last.owned());
                return launched
                    .map_err(|error| explain(last, error))
                    .map(|()| None);
            }
            let stream = other()?;
            self.check(&stream)?;
            let now = LastReplay::on(stream.clone())?;
            let launched = owned.launch(stream.owned());
            launched.map_err(|error| explain(&stream, error))?;
            now.mark(&stream);
            Ok(last.replace(now))
        });
        // The stream before goes here, with the lock open: what it retains may be foreign.
        before.map(drop)
    }

    /// Take over the parameters of a template of the same shape.
    ///
    /// # Errors
    /// [`Error::Update`] with the reason, and the node where the driver names one; the exec is
    /// then as it was before.
    #[doc(alias = "cuGraphExecUpdate")]
    pub fn update(&mut self, template: &Template) -> Result<()> {
        same_driver(
            &**self.device.driver(),
            &**template.device().driver(),
            "template",
        )?;
        let updated = template.with(|graph, retained, _| {
            self.with(|state| {
                state.owned.update(graph)?;
                let before = std::mem::replace(&mut state.retained, retained);
                let set = std::mem::take(&mut state.set);
                state.gates = Gates::of(state.retained.iter().chain(&state.kept));
                state.transfers.forget();
                Ok((before, set))
            })
        });
        let before = updated.map_err(|failure: UpdateFailure| {
            let node = failure.node.map(|handle| format!("{:#x}", handle.0));
            let reason = format!("{} ({})", failure.reason, failure.code);
            Error::Update { node, reason }
        })?;
        self.park(Box::new(before));
        Ok(())
    }

    /// Change what a node does: the same kind of work with other parameters. `template` is the one
    /// the exec was made from.
    ///
    /// # Errors
    /// [`Error::Foreign`] for a node or template of somewhere else; [`Error::Update`] with the
    /// reason if the exec cannot take it.
    #[doc(alias = "cuGraphExecKernelNodeSetParams")]
    #[doc(alias = "cuGraphExecMemcpyNodeSetParams")]
    #[doc(alias = "cuGraphExecMemsetNodeSetParams")]
    #[doc(alias = "cuGraphExecHostNodeSetParams")]
    pub fn set(&mut self, template: &Template, node: Node, work: &Work) -> Result<()> {
        self.check_template(template)?;
        work.check(&self.device)?;
        let kind = match work.spec() {
            WorkSpec::Kernel { .. } => "kernel",
            WorkSpec::Memcpy { .. } => "memcpy",
            WorkSpec::Memset { .. } => "memset",
            WorkSpec::Host(_) => "host function",
        };
        let set = template.with_node(node, |handle| {
            self.with(|state| {
                state.owned.set_work(handle, work.spec())?;
                state.gates.extend(work.retained());
                state.transfers.forget_node(handle);
                Ok(state.set.insert(handle, work.retained().to_vec()))
            })
        });
        let rule = format!("it cannot become this {kind}");
        let before = set.map_err(|error| refused(node, &rule, &error))?;
        self.park(Box::new(before));
        Ok(())
    }

    /// Switch a kernel, memcpy or memset node on or off. A node that is off does nothing, and
    /// those after it go on.
    ///
    /// # Errors
    /// As [`Self::set`].
    #[doc(alias = "cuGraphNodeSetEnabled")]
    pub fn set_enabled(&mut self, template: &Template, node: Node, enabled: bool) -> Result<()> {
        self.check_template(template)?;
        let switch = |handle| self.with(|state| state.owned.set_enabled(handle, enabled));
        let rule = "only kernels, memcpys and memsets can be switched";
        let switched = template.with_node(node, switch);
        switched.map_err(|error| refused(node, rule, &error))
    }

    /// Return whether a node is on.
    #[doc(alias = "cuGraphNodeGetEnabled")]
    pub fn is_enabled(&self, template: &Template, node: Node) -> Result<bool> {
        self.check_template(template)?;
        template.with_node(node, |handle| {
            self.with(|state| state.owned.is_enabled(handle))
        })
    }

    /// Return the point behind the last replay.
    #[must_use]
    pub fn last_replay(&self) -> Option<LastReplay> {
        self.with(|state| state.last.clone())
    }

    /// Keep something alive as long as the exec and its replays in flight. Of a pool, or of a block
    /// of one, the exec also cannot be replayed while that pool is paused.
    pub fn retain(&self, what: Retained) {
        self.with(|state| {
            state.gates.extend([&what]);
            state.kept.push(what);
        });
    }

    /// Drop what the nodes do not name any more, once the replays in flight have passed.
    /// Called with no lock held: what is dropped may be foreign.
    fn park(&self, what: Box<dyn Any + Send>) {
        let last = self.with(|state| state.last.as_ref().map(LastReplay::fence));
        self.device.limbo().park(last, what);
    }

    fn check(&self, stream: &Stream) -> Result<()> {
        if self.device.is_same(stream.device()) {
            return Ok(());
        }
        same_driver(
            &**self.device.driver(),
            &**stream.device().driver(),
            "stream of the replay",
        )
    }

    fn check_template(&self, template: &Template) -> Result<()> {
        if template.id() == self.template {
            return Ok(());
        }
        Err(Error::Foreign {
            object: format!("{template:?}"),
            found: format!("template {}", template.id()),
            expected: format!("template {}, which the exec was made from", self.template),
        })
    }

    #[inline]
    fn with<T>(&self, with: impl FnOnce(&mut State) -> T) -> T {
        let mut state: MutexGuard<'_, _> =
            self.state.lock().unwrap_or_else(PoisonError::into_inner);
        with(state.as_mut().expect("the state is taken only by drop"))
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        let state = self
            .state
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(state) = state {
            let last = state.last.as_ref().map(LastReplay::fence);
            let named = (state.retained, state.set, state.kept, state.transfers);
            let all = (state.owned, named);
            let limbo = self.device.limbo();
            limbo.park(last, Box::new(all));
            limbo.collect();
        }
    }
}

impl fmt::Debug for Exec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Exec({:#x} of {})", self.handle().0, self.device.name())
    }
}

/// Add to a refused replay what to do about it.
#[cold]
fn explain(stream: &Stream, error: Error) -> Error {
    if error.code() != Some(Code::STREAM_CAPTURE_UNSUPPORTED) {
        return error;
    }
    let reason = format!(
        "{error}; a replay cannot be captured: capture the work itself, or add the template to \
         another one as a child"
    );
    Error::Capture {
        stream: stream.to_string(),
        reason,
        code: error.code(),
    }
}

fn refused(node: Node, rule: &str, error: &Error) -> Error {
    if matches!(error, Error::Foreign { .. }) {
        return error.clone();
    }
    Error::Update {
        node: Some(format!("{:#x}", node.handle.0)),
        reason: format!("{rule} ({error})"),
    }
}
