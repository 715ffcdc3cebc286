//! The border: everything cgraph asks of a CUDA driver.
//!
//! [`Driver`] is one object-safe trait in five parts, a method per CUDA call (or per family of
//! calls that differ only in the node's kind), over plain `u64` handles. It is implemented by
//! `Cuda` and by [`sim::Sim`]; nothing above it knows which one it has.
//!
//! Checks: the layers above make wrong orders impossible or report them; a driver checks
//! only what CUDA checks. Handles are not counted here: `owned` holds each exactly once.

#[cfg(feature = "cuda")]
pub mod cuda;
pub mod handle;
pub(crate) mod image;
pub(crate) mod owned;
mod pages;
mod process;
mod rebuild;
pub mod sim;
pub mod spec;

use std::fmt;

use crate::code::{Call, Code};
use crate::error::{Error, Result};
use handle::{
    Address, ConditionHandle, EventHandle, ExecHandle, FunctionHandle, GraphHandle, ModuleHandle,
    NodeHandle, StreamHandle,
};
use spec::{Condition, Dim3, EdgeSpec, NodeDetail, NodeIds, NodeSpec, WorkSpec};

pub use pages::PageCalls;
pub use process::{begin_exit, begin_forked, is_forked};
pub(crate) use process::{is_exiting, next_driver_id};
pub use rebuild::RebuildCalls;

/// Calls that other threads and streams may make while a capture is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CaptureMode {
    /// Unsafe calls fail in every thread.
    Global,
    /// Unsafe calls fail in the thread that began the capture.
    ThreadLocal,
    /// No call fails.
    Relaxed,
}

/// True if a stream captures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CaptureStatus {
    /// It does not.
    None,
    /// It does; the number is the capture's id.
    Active(u64),
    /// It does, but an earlier call has made the capture unusable.
    Invalidated,
}

/// An open capture, as one of its streams sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CaptureInfo {
    /// The capture's id.
    pub id: u64,
    /// The graph that is recorded into. It is the capture's: it may be looked at and added to, and
    /// is gone when the capture ends or breaks.
    pub graph: GraphHandle,
    /// The nodes that the next node of the stream will come after.
    pub after: Vec<NodeHandle>,
}

/// Options of an instantiate: CUDA's `CUgraphInstantiate_flags`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct InstantiateFlags(pub u64);

impl InstantiateFlags {
    /// No option.
    pub const NONE: Self = Self(0);
    /// Memory that the graph allocates and does not free is freed before the next replay.
    pub const AUTO_FREE_ON_LAUNCH: Self = Self(1);
    /// Nodes run at the priority they were captured with.
    pub const USE_NODE_PRIORITY: Self = Self(8);
}

impl Default for InstantiateFlags {
    /// Return what torch uses: memory is freed on launch and priorities are kept.
    fn default() -> Self {
        Self(Self::AUTO_FREE_ON_LAUNCH.0 | Self::USE_NODE_PRIORITY.0)
    }
}

/// Result of a failed instantiate: the code and, where the driver names it, the node at fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstantiateFailure {
    /// The code that the driver returned.
    pub code: Code,
    /// The node at fault.
    pub node: Option<NodeHandle>,
}

/// Result of a refused exec update: the reason and, where the driver names it, the node at fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpdateFailure {
    /// The code that the driver returned.
    pub code: Code,
    /// Why, in words.
    pub reason: String,
    /// The node at fault.
    pub node: Option<NodeHandle>,
}

/// A CUDA driver for one device.
///
/// Every call makes the device's context current for its own duration and leaves the thread as it
/// was; a thread that had none keeps it, as CUDA's runtime does. Calls are thread-safe; the objects behind the handles are as CUDA says.
pub trait Driver:
    MemoryCalls + PageCalls + StreamCalls + GraphCalls + RebuildCalls + fmt::Debug + Send + Sync
{
    /// Distinguish drivers: two devices never share one.
    fn id(&self) -> u64;

    /// Return the driver and device in words, as in `cuda:0`.
    fn name(&self) -> String;

    /// Return the version as CUDA numbers it: 12040 is 12.4.
    fn version(&self) -> u32;

    /// Return what kind of device it is, as kernels are compiled for: its name and compute capability.
    fn model(&self) -> String;
}

/// Memory, modules and kernels.
#[expect(
    unsafe_code,
    reason = "a trait over raw handles: the caller vouches for them"
)]
pub trait MemoryCalls {
    /// Allocate device memory.
    fn mem_alloc(&self, bytes: u64) -> Result<Address>;

    /// Free device memory.
    ///
    /// # Safety
    /// `address` comes from [`Self::mem_alloc`], was not freed, and no work that touches it is in
    /// flight or to come.
    unsafe fn mem_free(&self, address: Address);

    /// Free and total bytes of the device.
    fn mem_info(&self) -> Result<(u64, u64)>;

    /// Start and size of the allocation that an address lies in; none if it lies in none.
    fn memory_range(&self, address: Address) -> Result<Option<(Address, u64)>>;

    /// Copy from the host and wait. What work in flight sees of it is unspecified.
    ///
    /// # Safety
    /// `dst` is mapped for `src.len()` bytes.
    unsafe fn memcpy_to_device(&self, dst: Address, src: &[u8]) -> Result<()>;

    /// Copy to the host and wait. What it sees of work in flight is unspecified.
    ///
    /// # Safety
    /// `src` is mapped for `dst.len()` bytes.
    unsafe fn memcpy_to_host(&self, dst: &mut [u8], src: Address) -> Result<()>;

    /// Load kernels from PTX text.
    fn module_load(&self, image: &[u8]) -> Result<ModuleHandle>;

    /// Unload them.
    ///
    /// # Safety
    /// `module` is loaded and no template, exec or work in flight uses its kernels.
    unsafe fn module_unload(&self, module: ModuleHandle);

    /// Return a kernel by name.
    ///
    /// # Safety
    /// `module` is loaded.
    unsafe fn module_function(&self, module: ModuleHandle, name: &str) -> Result<FunctionHandle>;
}

/// Streams, events and captures.
#[expect(
    unsafe_code,
    reason = "a trait over raw handles: the caller vouches for them"
)]
pub trait StreamCalls {
    /// Create a stream that does not synchronise with the legacy default stream.
    fn stream_create(&self) -> Result<StreamHandle>;

    /// Destroy a stream; work in flight on it still finishes.
    ///
    /// # Safety
    /// `stream` comes from [`Self::stream_create`], was not destroyed and does not capture.
    unsafe fn stream_destroy(&self, stream: StreamHandle);

    /// Wait until all work on the stream has finished.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()>;

    /// Return whether all work on the stream has finished.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool>;

    /// Make later work on the stream wait for the event.
    ///
    /// # Safety
    /// `stream` and `event` are live.
    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()>;

    /// Enqueue one operation, or record it where the stream captures.
    ///
    /// # Safety
    /// `stream` is live; what `work` names stays valid, and its kernel may touch what it touches,
    /// until the stream has passed it (for a capture: as long as the graph or an exec of it lives);
    /// a kernel's arguments are those it takes, in number and size.
    unsafe fn stream_enqueue(&self, stream: StreamHandle, work: &WorkSpec) -> Result<()>;

    /// Begin a capture.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> Result<()>;

    /// End a capture; the caller owns the graph.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_end_capture(&self, stream: StreamHandle) -> Result<GraphHandle>;

    /// Return whether the stream captures.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_capture_status(&self, stream: StreamHandle) -> Result<CaptureStatus>;

    /// Return what the stream captures; nothing if it does not, or if the capture was made unusable.
    ///
    /// # Safety
    /// `stream` is live.
    unsafe fn stream_capture_info(&self, stream: StreamHandle) -> Result<Option<CaptureInfo>>;

    /// Set this thread's capture mode and returns the one before.
    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode>;

    /// Create an event without timing.
    fn event_create(&self) -> Result<EventHandle>;

    /// Destroy an event.
    ///
    /// # Safety
    /// `event` comes from [`Self::event_create`] and was not destroyed.
    unsafe fn event_destroy(&self, event: EventHandle);

    /// Record the event on the stream.
    ///
    /// # Safety
    /// `event` and `stream` are live.
    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()>;

    /// Return whether the work before the last record has finished.
    ///
    /// # Safety
    /// `event` is live.
    unsafe fn event_query(&self, event: EventHandle) -> Result<bool>;

    /// Wait until the work before the last record has finished.
    ///
    /// # Safety
    /// `event` is live.
    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()>;
}

/// Templates (`CUgraph`) and execs (`CUgraphExec`).
#[expect(
    unsafe_code,
    reason = "a trait over raw handles: the caller vouches for them"
)]
pub trait GraphCalls {
    /// Create an empty graph.
    fn graph_create(&self) -> Result<GraphHandle>;

    /// Destroy a graph and its nodes.
    ///
    /// # Safety
    /// `graph` is live and not a child graph's.
    unsafe fn graph_destroy(&self, graph: GraphHandle);

    /// Copy a graph; the caller owns the copy.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_clone(&self, graph: GraphHandle) -> Result<GraphHandle>;

    /// Return the copy of a node, in a copy that was made of its graph.
    ///
    /// # Safety
    /// `node` is a node of a live graph, and `copy` is live.
    unsafe fn node_find_in_clone(&self, node: NodeHandle, copy: GraphHandle) -> Result<NodeHandle>;

    /// Add a node after `after`.
    ///
    /// # Safety
    /// `graph` is live, `after` are nodes of it, and what `spec` names stays valid as long as the
    /// graph or an exec of it; a kernel's arguments are those it takes, in number and size.
    unsafe fn graph_add_node(
        &self,
        graph: GraphHandle,
        after: &[NodeHandle],
        spec: &NodeSpec,
    ) -> Result<NodeHandle>;

    /// Create a condition, which kernels of a graph set by its number; each replay begins with `value`.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn condition_create(&self, graph: GraphHandle, value: u32) -> Result<ConditionHandle>;

    /// Add a node that runs a graph of its own, which is empty yet, as a condition says. Return both.
    ///
    /// # Safety
    /// `graph` is live, `after` are nodes of it, and `condition` is one of it, or of the graph around it, that no
    /// other node has.
    unsafe fn graph_add_conditional(
        &self,
        graph: GraphHandle,
        after: &[NodeHandle],
        rule: Condition,
        condition: ConditionHandle,
    ) -> Result<(NodeHandle, GraphHandle)>;

    /// Add an edge.
    ///
    /// # Safety
    /// `graph` is live and holds both nodes.
    unsafe fn graph_add_edge(&self, graph: GraphHandle, edge: EdgeSpec<NodeHandle>) -> Result<()>;

    /// Take an edge away.
    ///
    /// # Safety
    /// `graph` is live and holds both nodes.
    unsafe fn graph_remove_edge(
        &self,
        graph: GraphHandle,
        edge: EdgeSpec<NodeHandle>,
    ) -> Result<()>;

    /// Remove a node and its edges.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn graph_remove_node(&self, node: NodeHandle) -> Result<()>;

    /// Return the nodes of a graph, in no promised order.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_nodes(&self, graph: GraphHandle) -> Result<Vec<NodeHandle>>;

    /// Return the nodes of a graph that come after no other, in no promised order.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_roots(&self, graph: GraphHandle) -> Result<Vec<NodeHandle>>;

    /// Return how many nodes a graph has.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_node_count(&self, graph: GraphHandle) -> Result<usize>;

    /// Return the nodes that a node comes directly after, in no promised order.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn node_dependencies(&self, node: NodeHandle) -> Result<Vec<NodeHandle>>;

    /// Return the edges of a graph, in no promised order.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_edges(&self, graph: GraphHandle) -> Result<Vec<EdgeSpec<NodeHandle>>>;

    /// Return what a node does.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn node_detail(&self, node: NodeHandle) -> Result<NodeDetail>;

    /// Return the 8-byte words, aligned as a pointer is, that a kernel node hands its kernel by value; empty
    /// for another node, or where the driver does not tell.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn node_words(&self, node: NodeHandle) -> Result<Vec<u64>>;

    /// By which numbers tools know a node; none from a driver older than CUDA 13.1.
    ///
    /// # Safety
    /// `node` is a node of a live graph.
    unsafe fn node_ids(&self, node: NodeHandle) -> Result<Option<NodeIds>>;

    /// By which number tools know a graph; none from a driver older than CUDA 13.1.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_id(&self, graph: GraphHandle) -> Result<Option<u32>>;

    /// By which number tools know an exec; none from a driver older than CUDA 13.1.
    ///
    /// # Safety
    /// `exec` is live.
    unsafe fn exec_id(&self, exec: ExecHandle) -> Result<Option<u32>>;

    /// Make an exec; the graph stays.
    ///
    /// # Safety
    /// `graph` is live.
    unsafe fn graph_instantiate(
        &self,
        graph: GraphHandle,
        flags: InstantiateFlags,
    ) -> Result<ExecHandle, InstantiateFailure>;

    /// Destroy an exec.
    ///
    /// # Safety
    /// `exec` is live and no replay of it is in flight.
    unsafe fn exec_destroy(&self, exec: ExecHandle);

    /// Send the exec to the device ahead of its first replay.
    ///
    /// # Safety
    /// `exec` and `stream` are live.
    unsafe fn exec_upload(&self, exec: ExecHandle, stream: StreamHandle) -> Result<()>;

    /// Enqueue one replay.
    ///
    /// # Safety
    /// `exec` and `stream` are live; what the exec's nodes name stays valid until the stream has
    /// passed the replay.
    unsafe fn exec_launch(&self, exec: ExecHandle, stream: StreamHandle) -> Result<()>;

    /// Take over the parameters of a graph of the same shape.
    ///
    /// # Safety
    /// `exec` and `graph` are live; what the graph's nodes name stays valid as long as the exec.
    unsafe fn exec_update(&self, exec: ExecHandle, graph: GraphHandle)
    -> Result<(), UpdateFailure>;

    /// Change what one node of the exec does; `node` names it by the graph it came from.
    ///
    /// # Safety
    /// `exec` and the graph of `node` are live; what `work` names stays valid as long as the exec; a
    /// kernel's arguments are those it takes, in number and size.
    unsafe fn exec_set_work(
        &self,
        exec: ExecHandle,
        node: NodeHandle,
        work: &WorkSpec,
    ) -> Result<()>;

    /// Change a kernel node of the exec: [`Self::exec_set_work`] for a kernel of one parameter and
    /// no dynamic shared memory, without an allocation. The extents are those of grid and block.
    ///
    /// # Safety
    /// As for [`Self::exec_set_work`].
    unsafe fn exec_set_parameter(
        &self,
        exec: ExecHandle,
        node: NodeHandle,
        function: FunctionHandle,
        extents: [Dim3; 2],
        parameter: &[u8],
    ) -> Result<()>;

    /// Switch one node of the exec on or off.
    ///
    /// # Safety
    /// `exec` and the graph of `node` are live.
    unsafe fn exec_set_enabled(
        &self,
        exec: ExecHandle,
        node: NodeHandle,
        enabled: bool,
    ) -> Result<()>;

    /// Return whether one node of the exec is on.
    ///
    /// # Safety
    /// `exec` and the graph of `node` are live.
    unsafe fn exec_is_enabled(&self, exec: ExecHandle, node: NodeHandle) -> Result<bool>;
}

/// Return the error of a failed call.
pub(crate) fn failed(call: Call, code: Code) -> Error {
    Error::Driver { call, code }
}
