//! What the nodes of a template do, with addresses as they are.

use std::collections::HashMap;

use super::graph::SavedEdge;
use super::{Images, small};
use crate::driver::handle::{FunctionHandle, NodeHandle};
use crate::driver::owned::OwnedGraph;
use crate::driver::spec::{LaunchAttribute, NodeDetail, WorkSpec};
use crate::error::{Error, Result};

/// The graphs of a template: itself, then child graphs, each behind the one that it is in.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ReadGraphs {
    pub(super) graphs: Vec<ReadGraph>,
}

/// Nodes and edges.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ReadGraph {
    pub(super) nodes: Vec<ReadNode>,
    pub(super) edges: Vec<SavedEdge>,
}

/// What a node does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ReadNode {
    Kernel(ReadKernel),
    Memcpy {
        dst: u64,
        src: u64,
        bytes: u64,
    },
    Memset {
        dst: u64,
        value: u32,
        element_bytes: u8,
        count: u64,
    },
    Empty,
    Child(u32),
}

/// A launch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ReadKernel {
    /// The number of the kernel among those of the images.
    pub(super) function: u32,
    pub(super) name: String,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    pub(super) args: Vec<Vec<u8>>,
    pub(super) attributes: Vec<(u32, Vec<u8>)>,
}

impl ReadGraphs {
    /// Read a graph and its child graphs, but for nodes that are to be left out.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a node that no file can have, by its number.
    pub(super) fn read(
        graph: &OwnedGraph,
        is_left_out: &dyn Fn(NodeHandle) -> bool,
        images: &mut Images<'_>,
    ) -> Result<Self> {
        let mut reader = Reader {
            read: Self::default(),
            numbers: HashMap::new(),
            is_left_out,
            images,
        };
        reader.graph(graph)?;
        Ok(reader.read)
    }
}

struct Reader<'a, 'i> {
    read: ReadGraphs,
    /// The number of each kernel that was found.
    numbers: HashMap<FunctionHandle, u32>,
    is_left_out: &'a dyn Fn(NodeHandle) -> bool,
    images: &'a mut Images<'i>,
}

impl Reader<'_, '_> {
    /// Read a graph, and behind it its child graphs; return its number.
    fn graph(&mut self, graph: &OwnedGraph) -> Result<u32> {
        let place = self.read.graphs.len();
        self.read.graphs.push(ReadGraph::default());
        let mut handles = graph.nodes()?;
        handles.retain(|node| !(self.is_left_out)(*node));
        let mut nodes = Vec::with_capacity(handles.len());
        for (number, handle) in handles.iter().enumerate() {
            let node = self.node(graph, *handle);
            nodes.push(node.map_err(|error| at_node(number, None, error))?);
        }
        let edges = edges_of(graph, &handles, self.is_left_out)?;
        self.read.graphs[place] = ReadGraph { nodes, edges };
        small(place)
    }

    fn node(&mut self, graph: &OwnedGraph, node: NodeHandle) -> Result<ReadNode> {
        let detail = graph.detail(node)?;
        match detail {
            NodeDetail::Empty => return Ok(ReadNode::Empty),
            NodeDetail::Child(child) => {
                return Ok(ReadNode::Child(self.graph(&graph.child(child))?));
            }
            _ => {}
        }
        match graph.work(node)? {
            Some(WorkSpec::Kernel {
                function,
                grid,
                block,
                shared_bytes,
                args,
            }) => Ok(ReadNode::Kernel(ReadKernel {
                function: self.function((graph, node), name_of(&detail), function)?,
                name: name_of(&detail).to_owned(),
                grid: [grid.x, grid.y, grid.z],
                block: [block.x, block.y, block.z],
                shared_bytes,
                args: args.iter().map(|arg| arg.to_vec()).collect(),
                attributes: attributes_of(graph, node)?,
            })),
            Some(WorkSpec::Memcpy { dst, src, bytes }) => Ok(ReadNode::Memcpy {
                dst: dst.0,
                src: src.0,
                bytes,
            }),
            Some(WorkSpec::Memset {
                dst,
                value,
                element_bytes,
                count,
            }) => Ok(ReadNode::Memset {
                dst: dst.0,
                value,
                element_bytes,
                count,
            }),
            Some(WorkSpec::Host(_)) | None => {
                let expected =
                    "a kernel, a memset, a copy in a row, a child graph or an empty node";
                Err(Error::invalid("a node", &kind_of(&detail), expected))
            }
        }
    }

    fn function(
        &mut self,
        node: (&OwnedGraph, NodeHandle),
        name: &str,
        handle: FunctionHandle,
    ) -> Result<u32> {
        if let Some(number) = self.numbers.get(&handle) {
            return Ok(*number);
        }
        let number = self.images.find(node, name, handle)?;
        self.numbers.insert(handle, number);
        Ok(number)
    }
}

fn attributes_of(graph: &OwnedGraph, node: NodeHandle) -> Result<Vec<(u32, Vec<u8>)>> {
    let attributes = graph.attributes(node)?;
    let refused = [
        (
            LaunchAttribute::ACCESS_POLICY,
            "a window of the cache for an address",
        ),
        (LaunchAttribute::UPDATABLE, "updates by the device"),
    ];
    for (id, what) in refused {
        if attributes.iter().any(|one| one.id == id) {
            let given = format!("a kernel with {what}");
            return Err(Error::invalid("a node", &given, "a kernel without"));
        }
    }
    let attributes = attributes.into_iter();
    Ok(attributes.map(|one| (one.id, one.value.to_vec())).collect())
}

fn edges_of(
    graph: &OwnedGraph,
    nodes: &[NodeHandle],
    is_left_out: &dyn Fn(NodeHandle) -> bool,
) -> Result<Vec<SavedEdge>> {
    let numbers: HashMap<NodeHandle, usize> = nodes.iter().copied().zip(0..).collect();
    let (left, edges): (Vec<_>, Vec<_>) = graph
        .edges()?
        .into_iter()
        .partition(|edge| is_left_out(edge.from) || is_left_out(edge.to));
    let is_between = |node| left.iter().any(|edge| edge.to == node);
    if left
        .iter()
        .any(|edge| is_left_out(edge.from) && is_between(edge.from))
    {
        let given = "inputs or outputs between other nodes";
        let expected = "one with inputs before and outputs behind all nodes";
        return Err(Error::invalid("the template", &given, expected));
    }
    let edges = edges.into_iter().map(|edge| {
        Ok(SavedEdge {
            from: small(numbers[&edge.from])?,
            to: small(numbers[&edge.to])?,
            from_port: edge.from_port,
            to_port: edge.to_port,
            kind: edge.kind.number(),
        })
    });
    let mut edges = edges.collect::<Result<Vec<_>>>()?;
    edges.sort_unstable();
    Ok(edges)
}

/// Say which node an error is about.
pub(super) fn at_node(number: usize, kernel: Option<&str>, error: Error) -> Error {
    let kernel = kernel.map_or_else(String::new, |name| format!(" ({name})"));
    match error {
        Error::Invalid {
            argument,
            given,
            expected,
        } => Error::Invalid {
            argument: format!("node {number}{kernel}: {argument}"),
            given,
            expected,
        },
        other => other,
    }
}

fn name_of(detail: &NodeDetail) -> &str {
    match detail {
        NodeDetail::Kernel { name, .. } => name.as_deref().unwrap_or_default(),
        _ => "",
    }
}

fn kind_of(detail: &NodeDetail) -> &'static str {
    match detail {
        NodeDetail::Kernel { .. } => "a kernel of which the driver does not tell all",
        NodeDetail::Memcpy { .. } => "a copy that is not in a row, or of the host",
        NodeDetail::Memset { .. } => "a memset of several rows",
        NodeDetail::Host { .. } => "a host function",
        NodeDetail::EventRecord(_) => "an event that is recorded",
        NodeDetail::EventWait(_) => "a wait for an event",
        NodeDetail::Empty => "an empty node",
        NodeDetail::Child(_) => "a child graph",
        NodeDetail::ExternalSignal | NodeDetail::ExternalWait => "a semaphore of another process",
        NodeDetail::MemAlloc { .. } | NodeDetail::MemFree { .. } => "a node for memory",
        NodeDetail::BatchMemOp => "a batch of memory operations",
        NodeDetail::Conditional { .. } => "a conditional node",
        NodeDetail::Other(_) => "a node of another kind",
    }
}
