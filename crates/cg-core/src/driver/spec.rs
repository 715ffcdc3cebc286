//! Work for a driver: plain values, the same for a stream, a node and an exec update.

use std::fmt;
use std::sync::Arc;

use super::handle::{Address, EventHandle, FunctionHandle, GraphHandle};

/// Three extents of a grid or a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
pub struct Dim3 {
    /// Extent in x.
    pub x: u32,
    /// Extent in y.
    pub y: u32,
    /// Extent in z.
    pub z: u32,
}

impl From<u32> for Dim3 {
    fn from(x: u32) -> Self {
        Self { x, y: 1, z: 1 }
    }
}

impl fmt::Display for Dim3 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({}, {}, {})", self.x, self.y, self.z)
    }
}

/// A host function that work on a stream or in a graph calls. It must make no driver call.
pub struct HostFunction(pub Box<dyn Fn() + Send + Sync>);

impl fmt::Debug for HostFunction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostFunction")
    }
}

/// One operation of a stream or of a node.
#[derive(Debug, Clone)]
pub enum WorkSpec {
    /// A kernel launch.
    Kernel {
        /// The kernel.
        function: FunctionHandle,
        /// Blocks.
        grid: Dim3,
        /// Threads per block.
        block: Dim3,
        /// Dynamic shared memory per block.
        shared_bytes: u32,
        /// The bytes of each argument, in order.
        args: Arc<[Box<[u8]>]>,
    },
    /// A copy of `bytes` from `src` to `dst`.
    Memcpy {
        /// Destination.
        dst: Address,
        /// Source.
        src: Address,
        /// Number of bytes.
        bytes: u64,
    },
    /// `count` elements of `element_bytes` (1, 2 or 4) set to the low bytes of `value`.
    Memset {
        /// Destination.
        dst: Address,
        /// The value.
        value: u32,
        /// Size of an element.
        element_bytes: u8,
        /// Number of elements.
        count: u64,
    },
    /// A call of a host function.
    Host(Arc<HostFunction>),
}

/// The operation of a node.
#[derive(Debug, Clone)]
pub enum NodeSpec {
    /// One operation.
    Work(WorkSpec),
    /// Records an event.
    EventRecord(EventHandle),
    /// Waits for an event.
    EventWait(EventHandle),
    /// Nothing; a point to meet at.
    Empty,
    /// A copy of another graph.
    Child(GraphHandle),
}

/// Properties of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NodeDetail {
    /// A kernel node.
    Kernel {
        /// The kernel's (mangled) name, where the driver can tell.
        name: Option<String>,
        /// Blocks.
        grid: Dim3,
        /// Threads per block.
        block: Dim3,
        /// Dynamic shared memory per block.
        shared_bytes: u32,
    },
    /// A memcpy node.
    Memcpy {
        /// Destination; zero for an array, which has no addresses.
        dst: Address,
        /// Source; zero for an array.
        src: Address,
        /// Number of bytes.
        bytes: u64,
    },
    /// A memset node.
    Memset {
        /// Destination.
        dst: Address,
        /// The value.
        value: u32,
        /// Size of an element.
        element_bytes: u8,
        /// Number of elements.
        count: u64,
    },
    /// A host node.
    Host {
        /// The address of the function that the driver calls.
        function: u64,
        /// The argument of the function.
        data: u64,
    },
    /// An event-record node.
    EventRecord(EventHandle),
    /// An event-wait node.
    EventWait(EventHandle),
    /// An empty node.
    Empty,
    /// A child-graph node, with the graph it runs.
    Child(GraphHandle),
    /// A node that signals external semaphores.
    ExternalSignal,
    /// A node that waits for external semaphores.
    ExternalWait,
    /// A node that allocates memory.
    MemAlloc {
        /// Address of the memory in every replay.
        address: Address,
        /// Number of bytes.
        bytes: u64,
    },
    /// A node that frees what another node allocated.
    MemFree {
        /// The start of the memory.
        address: Address,
    },
    /// A node of several waits for, and writes of, words in memory.
    BatchMemOp,
    /// A node that runs one of its graphs, none, or one again and again.
    Conditional {
        /// The rule that it follows, where the driver can tell (CUDA 13.2).
        condition: Option<Condition>,
        /// The graphs it chooses from; empty where the driver cannot tell.
        bodies: Vec<GraphHandle>,
    },
    /// A node of another kind, or one of which no more than the kind is known: CUDA's number for it.
    Other(u32),
}

impl NodeDetail {
    /// Return the graphs that belong to the node.
    #[must_use]
    pub fn bodies(&self) -> &[GraphHandle] {
        match self {
            Self::Child(graph) => std::slice::from_ref(graph),
            Self::Conditional { bodies, .. } => bodies,
            _ => &[],
        }
    }
}

/// The rule of a conditional node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// The first graph runs if the condition is not zero, else the second, if there is one.
    If,
    /// The graph runs as long as the condition is not zero.
    While,
    /// The graph whose place the condition names runs.
    Switch,
    /// A rule this version does not know, by CUDA's number.
    Other(u32),
}

impl Condition {
    /// CUDA's number for it.
    #[must_use]
    pub fn number(self) -> u32 {
        match self {
            Self::If => 0,
            Self::While => 1,
            Self::Switch => 2,
            Self::Other(number) => number,
        }
    }
}

/// By which numbers profilers and CUDA's own pictures of graphs name a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NodeIds {
    /// The graph that holds the node: for a node of a child graph, the child.
    pub graph: GraphHandle,
    /// Its number in that graph.
    pub local: u32,
    /// Its number for tools: the graph's id in the upper half, and its own in the lower.
    pub tools: u64,
}

/// The way in which an edge orders its two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum EdgeKind {
    /// The second node runs after the first has finished.
    Full,
    /// The second node may start early, as programmatic dependent launch allows.
    Programmatic,
    /// A kind this version does not know, by CUDA's number.
    Other(u8),
}

impl EdgeKind {
    /// CUDA's number for it.
    #[must_use]
    pub fn number(self) -> u8 {
        match self {
            Self::Full => 0,
            Self::Programmatic => 1,
            Self::Other(number) => number,
        }
    }
}

impl From<u8> for EdgeKind {
    fn from(number: u8) -> Self {
        match number {
            0 => Self::Full,
            1 => Self::Programmatic,
            _ => Self::Other(number),
        }
    }
}

/// An attribute of a kernel node's launch, by CUDA's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LaunchAttribute {
    /// `CUlaunchAttributeID`.
    pub id: u32,
    /// The bytes of a `CUlaunchAttributeValue`.
    pub value: [u8; 64],
}

impl LaunchAttribute {
    /// The number of a window of addresses that stay in the cache.
    pub const ACCESS_POLICY: u32 = 1;
    /// The number of the priority.
    pub const PRIORITY: u32 = 8;
    /// The number of whether kernels may change the node.
    pub const UPDATABLE: u32 = 13;
}

/// An attribute of a kernel, by CUDA's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FunctionAttribute {
    /// `CUfunction_attribute`.
    pub id: u32,
    /// Its value.
    pub value: i32,
}

impl FunctionAttribute {
    /// The number of the most bytes of dynamic shared memory that launches may ask for.
    pub const MAX_SHARED_BYTES: u32 = 8;
}

/// "`to` after `from`", by node handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EdgeSpec<N> {
    /// The node that comes first.
    pub from: N,
    /// The node that comes after it.
    pub to: N,
    /// The outgoing port of `from`; zero is its completion.
    pub from_port: u8,
    /// The incoming port of `to`.
    pub to_port: u8,
    /// The kind of order.
    pub kind: EdgeKind,
}

impl<N> EdgeSpec<N> {
    /// Return the edge of a node that runs after another one has finished.
    pub fn full(from: N, to: N) -> Self {
        Self {
            from,
            to,
            from_port: 0,
            to_port: 0,
            kind: EdgeKind::Full,
        }
    }
}
