//! Sole owners of driver objects: a handle, its driver, and a `Drop` that destroys it once.
//!
//! This is the only place above the driver that calls its `unsafe` methods. What it promises them:
//!
//! - a handle in an owner is live, since only the owner's `Drop` destroys it;
//! - two owners that meet in a call are of one driver (`same_driver`);
//! - what work names outlives its use: [`crate::Template`] and [`crate::Exec`] retain what their
//!   nodes name, [`crate::Stream`] retains what was enqueued until the stream has passed it.
//!
//! Once the process exits ([`crate::begin_exit`]) nothing is destroyed: the driver may be gone by then.
#![expect(
    unsafe_code,
    reason = "owners vouch for the handles that they pass to the driver"
)]

mod conditional;
pub(crate) mod pages;
mod query;
mod rebuild;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use super::handle::{
    Address, EventHandle, ExecHandle, FunctionHandle, GraphHandle, ModuleHandle, NodeHandle,
    StreamHandle,
};
use super::spec::{Dim3, EdgeSpec, NodeDetail, NodeSpec, WorkSpec};
use super::{
    CaptureInfo, CaptureMode, CaptureStatus, Driver, InstantiateFailure, InstantiateFlags,
    UpdateFailure, is_exiting,
};
use crate::error::{Error, Result};

/// Fail unless both are the same driver.
pub(crate) fn same_driver(expected: &dyn Driver, found: &dyn Driver, object: &str) -> Result<()> {
    if expected.id() == found.id() {
        return Ok(());
    }
    Err(Error::Foreign {
        object: object.to_owned(),
        found: found.name(),
        expected: expected.name(),
    })
}

/// Run `work` with this thread's capture mode relaxed, so that it breaks no capture.
pub(crate) fn relaxed<T>(driver: &dyn Driver, work: impl FnOnce() -> T) -> T {
    let before = driver.exchange_capture_mode(CaptureMode::Relaxed);
    let result = catch_unwind(AssertUnwindSafe(work));
    if let Ok(before) = before
        && driver.exchange_capture_mode(before).is_err()
    {
        // It worked a moment ago; if the second try fails too, the thread stays relaxed.
        let _ = driver.exchange_capture_mode(before);
    }
    result.unwrap_or_else(|panic| resume_unwind(panic))
}

/// Destroy something, unless the process exits.
fn destroy(driver: &dyn Driver, with: impl FnOnce()) {
    if !is_exiting() {
        relaxed(driver, with);
    }
}

/// Device memory.
#[derive(Debug)]
pub(crate) struct OwnedMemory {
    driver: Arc<dyn Driver>,
    address: Address,
}

impl OwnedMemory {
    /// Allocate `bytes`.
    pub(crate) fn new(driver: Arc<dyn Driver>, bytes: u64) -> Result<Self> {
        let address = driver.mem_alloc(bytes)?;
        Ok(Self { driver, address })
    }

    /// Return where it starts.
    pub(crate) fn address(&self) -> Address {
        self.address
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        destroy(&*self.driver, || {
            // SAFETY: `address` is from `mem_alloc` and freed only here; whoever enqueued work on
            // it has retained this owner until the work was passed.
            unsafe { self.driver.mem_free(self.address) }
        });
    }
}

/// Copy to memory that the caller keeps alive, and wait.
pub(crate) fn write(driver: &dyn Driver, dst: Address, src: &[u8]) -> Result<()> {
    relaxed(driver, || {
        // SAFETY: `Memory::write` passes the start of a range of at least `src.len()` bytes that it
        // holds for the call.
        unsafe { driver.memcpy_to_device(dst, src) }
    })
}

/// Copy from memory that the caller keeps alive, and wait.
pub(crate) fn read(driver: &dyn Driver, dst: &mut [u8], src: Address) -> Result<()> {
    relaxed(driver, || {
        // SAFETY: `Memory::read` passes the start of a range of at least `dst.len()` bytes that it
        // holds for the call.
        unsafe { driver.memcpy_to_host(dst, src) }
    })
}

/// Loaded kernels.
#[derive(Debug)]
pub(crate) struct OwnedModule {
    driver: Arc<dyn Driver>,
    handle: ModuleHandle,
}

impl OwnedModule {
    /// Load PTX text or a binary image.
    pub(crate) fn new(driver: Arc<dyn Driver>, image: &[u8]) -> Result<Self> {
        let handle = driver.module_load(image)?;
        Ok(Self { driver, handle })
    }

    /// Return its driver.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Return a kernel by name.
    pub(crate) fn function(&self, name: &str) -> Result<FunctionHandle> {
        // SAFETY: the module is loaded as long as `self`.
        unsafe { self.driver.module_function(self.handle, name) }
    }
}

impl Drop for OwnedModule {
    fn drop(&mut self) {
        destroy(&*self.driver, || {
            // SAFETY: unloaded only here; work, templates and execs that name a kernel of this
            // module retain this owner.
            unsafe { self.driver.module_unload(self.handle) }
        });
    }
}

/// A stream: made here and destroyed on drop, or borrowed from somebody who keeps it alive.
#[derive(Debug)]
pub(crate) struct OwnedStream {
    driver: Arc<dyn Driver>,
    handle: StreamHandle,
    borrowed: bool,
}

impl OwnedStream {
    /// Create a stream.
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Result<Self> {
        let handle = driver.stream_create()?;
        Ok(Self {
            driver,
            handle,
            borrowed: false,
        })
    }

    /// Use a stream of somebody else. Only [`crate::Stream::from_raw`] and
    /// [`crate::Stream::from_foreign`] call this, whose callers promise that the stream outlives the result.
    pub(crate) fn borrowed(driver: Arc<dyn Driver>, handle: StreamHandle) -> Self {
        Self {
            driver,
            handle,
            borrowed: true,
        }
    }

    /// Return its driver.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Return the raw stream.
    pub(crate) fn handle(&self) -> StreamHandle {
        self.handle
    }

    /// Return whether somebody else destroys it.
    pub(crate) fn is_borrowed(&self) -> bool {
        self.borrowed
    }

    /// Wait for all work on it.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is live as long as `self`.
        unsafe { self.driver.stream_synchronize(self.handle) }
    }

    /// Return whether all work on it has finished.
    pub(crate) fn query(&self) -> Result<bool> {
        // SAFETY: the stream is live as long as `self`.
        unsafe { self.driver.stream_query(self.handle) }
    }

    /// Enqueue one operation; the caller retains what it names.
    pub(crate) fn enqueue(&self, work: &WorkSpec) -> Result<()> {
        // SAFETY: the stream is live as long as `self`; `Work` holds what its spec names, and
        // `Stream::enqueue` retains it until the stream has passed or the capture's template dies.
        unsafe { self.driver.stream_enqueue(self.handle, work) }
    }

    /// Make later work wait for the event.
    pub(crate) fn wait_event(&self, event: &OwnedEvent) -> Result<()> {
        // SAFETY: both are live as long as their owners, and of one driver (`Stream::wait`).
        unsafe { self.driver.stream_wait_event(self.handle, event.handle) }
    }

    /// Begin a capture.
    pub(crate) fn begin_capture(&self, mode: CaptureMode) -> Result<()> {
        // SAFETY: the stream is live as long as `self`.
        unsafe { self.driver.stream_begin_capture(self.handle, mode) }
    }

    /// End a capture.
    pub(crate) fn end_capture(&self) -> Result<OwnedGraph> {
        // SAFETY: the stream is live as long as `self`.
        let handle = unsafe { self.driver.stream_end_capture(self.handle) }?;
        Ok(OwnedGraph::made(&self.driver, handle))
    }

    /// Return whether it captures.
    pub(crate) fn capture_status(&self) -> Result<CaptureStatus> {
        // SAFETY: the stream is live as long as `self`.
        unsafe { self.driver.stream_capture_status(self.handle) }
    }

    /// Return what it captures.
    pub(crate) fn capture_info(&self) -> Result<Option<CaptureInfo>> {
        // SAFETY: the stream is live as long as `self`.
        unsafe { self.driver.stream_capture_info(self.handle) }
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if !self.borrowed {
            destroy(&*self.driver, || {
                // SAFETY: created by `new`, destroyed only here, and not while it captures: a
                // `Capture` holds its stream, and a forked `Stream` parks it until the end.
                unsafe { self.driver.stream_destroy(self.handle) }
            });
        }
    }
}

/// An event.
#[derive(Debug)]
pub(crate) struct OwnedEvent {
    driver: Arc<dyn Driver>,
    handle: EventHandle,
}

impl OwnedEvent {
    /// Create an event.
    pub(crate) fn new(driver: Arc<dyn Driver>) -> Result<Self> {
        let handle = driver.event_create()?;
        Ok(Self { driver, handle })
    }

    /// Return its driver.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    /// Return the raw event.
    pub(crate) fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Record it on a stream of the same driver.
    pub(crate) fn record(&self, stream: &OwnedStream) -> Result<()> {
        // SAFETY: both are live as long as their owners, and of one driver (`Stream::record`).
        unsafe { self.driver.event_record(self.handle, stream.handle) }
    }

    /// Return whether the work before the last record has finished.
    pub(crate) fn query(&self) -> Result<bool> {
        // SAFETY: the event is live as long as `self`.
        unsafe { self.driver.event_query(self.handle) }
    }

    /// Wait until the work before the last record has finished.
    pub(crate) fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is live as long as `self`.
        unsafe { self.driver.event_synchronize(self.handle) }
    }
}

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        destroy(&*self.driver, || {
            // SAFETY: created by `new` and destroyed only here.
            unsafe { self.driver.event_destroy(self.handle) }
        });
    }
}

/// A `CUgraph`: made here and destroyed on drop, or borrowed from somebody who keeps it alive.
#[derive(Debug)]
pub(crate) struct OwnedGraph {
    driver: Arc<dyn Driver>,
    handle: GraphHandle,
    borrowed: bool,
}

impl OwnedGraph {
    /// Create an empty graph.
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        Ok(Self::made(driver, driver.graph_create()?))
    }

    fn made(driver: &Arc<dyn Driver>, handle: GraphHandle) -> Self {
        let mut graph = Self::borrowed(Arc::clone(driver), handle);
        graph.borrowed = false;
        graph
    }

    /// Use a graph of somebody else, who keeps it: that of [`crate::Template::from_raw`], or of an open
    /// capture. Callers promise that it outlives the result.
    pub(crate) fn borrowed(driver: Arc<dyn Driver>, handle: GraphHandle) -> Self {
        Self {
            driver,
            handle,
            borrowed: true,
        }
    }

    /// Return the raw graph.
    pub(crate) fn handle(&self) -> GraphHandle {
        self.handle
    }

    /// Return a copy.
    pub(crate) fn duplicate(&self) -> Result<Self> {
        // SAFETY: the graph is live as long as `self`.
        let handle = unsafe { self.driver.graph_clone(self.handle) }?;
        Ok(Self::made(&self.driver, handle))
    }

    /// Add a node; the caller retains what it names and has checked `after`.
    pub(crate) fn add_node(&self, after: &[NodeHandle], spec: &NodeSpec) -> Result<NodeHandle> {
        // SAFETY: the graph is live as long as `self`; `Template` checks that `after` are its
        // nodes and retains what `spec` names. `Capture` names nothing.
        unsafe { self.driver.graph_add_node(self.handle, after, spec) }
    }

    /// Add an edge between nodes that the caller has checked.
    pub(crate) fn add_edge(&self, edge: EdgeSpec<NodeHandle>) -> Result<()> {
        // SAFETY: the graph is live as long as `self`, and `Template` checks the nodes.
        unsafe { self.driver.graph_add_edge(self.handle, edge) }
    }

    /// Take an edge away between nodes that the caller has checked.
    pub(crate) fn remove_edge(&self, edge: EdgeSpec<NodeHandle>) -> Result<()> {
        // SAFETY: the graph is live as long as `self`, and `Template` checks the nodes.
        unsafe { self.driver.graph_remove_edge(self.handle, edge) }
    }

    /// Remove a node that the caller has checked.
    pub(crate) fn remove_node(&self, node: NodeHandle) -> Result<()> {
        // SAFETY: `Template` checks that the node is one of this live graph.
        unsafe { self.driver.graph_remove_node(node) }
    }

    /// Return its nodes.
    pub(crate) fn nodes(&self) -> Result<Vec<NodeHandle>> {
        // SAFETY: the graph is live as long as `self`.
        unsafe { self.driver.graph_nodes(self.handle) }
    }

    /// Return what one of its nodes does; the caller has checked the node.
    pub(crate) fn detail(&self, node: NodeHandle) -> Result<NodeDetail> {
        // SAFETY: `Template` checks that the node is one of this live graph.
        unsafe { self.driver.node_detail(node) }
    }

    /// Return the graph of a child node, which lives as long as `self`.
    pub(crate) fn child(&self, handle: GraphHandle) -> Self {
        Self::borrowed(Arc::clone(&self.driver), handle)
    }

    /// Make an exec.
    pub(crate) fn instantiate(
        &self,
        flags: InstantiateFlags,
    ) -> Result<OwnedExec, InstantiateFailure> {
        // SAFETY: the graph is live as long as `self`.
        let handle = unsafe { self.driver.graph_instantiate(self.handle, flags) }?;
        Ok(OwnedExec {
            driver: Arc::clone(&self.driver),
            handle,
        })
    }
}

impl Drop for OwnedGraph {
    fn drop(&mut self) {
        if !self.borrowed {
            destroy(&*self.driver, || {
                // SAFETY: this owner made the graph, it is no child's, and only this destroys it.
                unsafe { self.driver.graph_destroy(self.handle) }
            });
        }
    }
}

/// A `CUgraphExec`.
#[derive(Debug)]
pub(crate) struct OwnedExec {
    driver: Arc<dyn Driver>,
    handle: ExecHandle,
}

impl OwnedExec {
    /// Return the raw exec.
    pub(crate) fn handle(&self) -> ExecHandle {
        self.handle
    }

    /// Send it to the device.
    pub(crate) fn upload(&self, stream: &OwnedStream) -> Result<()> {
        // SAFETY: both are live as long as their owners, and of one driver (`Exec::upload`).
        unsafe { self.driver.exec_upload(self.handle, stream.handle) }
    }

    /// Enqueue one replay; the caller retains this owner and what the nodes name.
    #[inline]
    pub(crate) fn launch(&self, stream: &OwnedStream) -> Result<()> {
        // SAFETY: both are live as long as their owners, and of one driver (`Exec::replay`); `Exec`
        // retains what its nodes name until every stream has passed its replays.
        unsafe { self.driver.exec_launch(self.handle, stream.handle) }
    }

    /// Take over the parameters of a graph; the caller retains what they name.
    pub(crate) fn update(&self, graph: &OwnedGraph) -> Result<(), UpdateFailure> {
        // SAFETY: both are live as long as their owners; `Exec::update` retains what the
        // template's nodes name.
        unsafe { self.driver.exec_update(self.handle, graph.handle) }
    }

    /// Change what a node does; the caller retains what `work` names and holds the node's graph.
    pub(crate) fn set_work(&self, node: NodeHandle, work: &WorkSpec) -> Result<()> {
        // SAFETY: `Exec` calls this from `Template::with_node`, and `Bound` as for `set_parameter`, so
        // `node` is one of a live graph; both retain what `work` names, as far as not promised there.
        unsafe { self.driver.exec_set_work(self.handle, node, work) }
    }

    /// Change a kernel node's grid and block and its one argument, as `transfer::Bound` does.
    #[inline]
    pub(crate) fn set_parameter(
        &self,
        node: NodeHandle,
        function: FunctionHandle,
        extents: [Dim3; 2],
        bytes: &[u8],
    ) -> Result<()> {
        let (driver, exec) = (&self.driver, self.handle);
        // SAFETY: `Bound` locks the node's graph, keeps the function loaded, passes what the kernel
        // declares, and retains what it names but for what `feed` and `deliver` are promised.
        unsafe { driver.exec_set_parameter(exec, node, function, extents, bytes) }
    }

    /// Switch a node on or off; the caller holds the node's graph.
    pub(crate) fn set_enabled(&self, node: NodeHandle, enabled: bool) -> Result<()> {
        // SAFETY: `Exec` calls this from `Template::with_node`, so `node` is one of a live graph.
        unsafe { self.driver.exec_set_enabled(self.handle, node, enabled) }
    }

    /// Return whether a node is on; the caller holds the node's graph.
    pub(crate) fn is_enabled(&self, node: NodeHandle) -> Result<bool> {
        // SAFETY: `Exec` calls this from `Template::with_node`, so `node` is one of a live graph.
        unsafe { self.driver.exec_is_enabled(self.handle, node) }
    }
}

impl Drop for OwnedExec {
    fn drop(&mut self) {
        destroy(&*self.driver, || {
            // SAFETY: made by `OwnedGraph::instantiate`, destroyed only here, and `Exec` drops it
            // only after every stream has passed its replays.
            unsafe { self.driver.exec_destroy(self.handle) }
        });
    }
}
