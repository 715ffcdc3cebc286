//! [`TemplateData`]: all that is known of a template, as values, as JSON and as DOT.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use serde::Serialize;

use crate::driver::handle::{Address, NodeHandle};
use crate::driver::owned::OwnedGraph;
use crate::driver::spec::{Condition, Dim3, EdgeKind, NodeDetail};
use crate::error::Result;
use crate::template::Template;

/// A template as values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TemplateData {
    /// The raw graph.
    pub handle: u64,
    /// By which number tools know the graph; none from a driver older than CUDA 13.1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph_id: Option<u32>,
    /// The nodes, each after those it comes after.
    pub nodes: Vec<NodeData>,
    /// The edges.
    pub edges: Vec<EdgeData>,
}

/// A node as values. What a node of its kind does not have, or the driver does not tell, is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NodeData {
    /// Its place in [`TemplateData::nodes`].
    pub index: usize,
    /// The raw node.
    pub handle: u64,
    /// The kind of node: `kernel`, `memcpy`, `memset`, `host`, `event_record`,
    /// `event_wait`, `empty`, `child`, `mem_alloc`, `mem_free`, `batch_mem_op`, `conditional`,
    /// `external_signal`, `external_wait`, or `type_N` with CUDA's number.
    pub kind: String,
    /// Its number for tools, in the template: the graph's in the upper half, its own in the lower.
    /// Needs CUDA 13.1, as the next two.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools_id: Option<u64>,
    /// The number of the graph that holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub graph_id: Option<u32>,
    /// Its number in that graph; execs keep it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_id: Option<u32>,
    /// The kernel's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Blocks of a kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grid: Option<Dim3>,
    /// Threads per block of a kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block: Option<Dim3>,
    /// Dynamic shared memory of a kernel.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_bytes: Option<u32>,
    /// Bytes that a memcpy or memset writes, or a node allocates.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The address that a memcpy or memset writes to; none for an array.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dst: Option<u64>,
    /// The address that a memcpy reads from; none for an array.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub src: Option<u64>,
    /// The value that a memset sets each element to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<u32>,
    /// Size of an element of a memset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub element_bytes: Option<u8>,
    /// The address that is allocated or freed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub address: Option<u64>,
    /// The raw event that is recorded or waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub event: Option<u64>,
    /// The address of the function that a host node calls.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_function: Option<u64>,
    /// The argument of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub host_data: Option<u64>,
    /// The rule by which a conditional node chooses.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub condition: Option<Condition>,
    /// The graph of a child node, or those that a conditional node chooses from.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bodies: Vec<TemplateData>,
}

/// An edge as values: indices into [`TemplateData::nodes`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EdgeData {
    /// The node that comes first.
    pub from: usize,
    /// The node that comes after it.
    pub to: usize,
    /// The outgoing port.
    pub from_port: u8,
    /// The incoming port.
    pub to_port: u8,
    /// The kind of order.
    pub kind: EdgeKind,
    /// The same as CUDA's number.
    #[serde(rename = "type")]
    pub number: u8,
}

impl Template {
    /// Return all that is known of it, the graphs of its nodes included.
    pub fn data(&self) -> Result<TemplateData> {
        self.with(|graph, _, _| graph_data(graph))
    }
}

impl TemplateData {
    /// As JSON text.
    #[must_use]
    pub fn json(&self) -> String {
        serde_json::to_string_pretty(self)
            .unwrap_or_else(|_| unreachable!("strings, numbers and lists are always JSON"))
    }

    /// As a Graphviz graph; `verbose` adds launch dimensions and bytes.
    #[must_use]
    pub fn dot(&self, verbose: bool) -> String {
        let mut text = String::from("digraph cgraph {\n  node [shape=box, fontname=monospace];\n");
        self.write_dot(&mut text, "n", verbose);
        text.push_str("}\n");
        text
    }

    /// Return how many nodes there are, those of the nodes' graphs included.
    #[must_use]
    pub fn count(&self) -> usize {
        let bodies = self.nodes.iter().flat_map(|node| &node.bodies);
        self.nodes.len() + bodies.map(Self::count).sum::<usize>()
    }

    /// For each node the nodes that it comes directly after, by index.
    #[must_use]
    pub fn dependencies(&self) -> Vec<Vec<usize>> {
        let mut before = vec![Vec::new(); self.nodes.len()];
        for edge in &self.edges {
            before[edge.to].push(edge.from);
        }
        before
    }

    fn write_dot(&self, text: &mut String, prefix: &str, verbose: bool) {
        for node in &self.nodes {
            let label = node.label(verbose);
            let id = format!("{prefix}{}", node.index);
            let _ = writeln!(text, "  {id} [label=\"{label}\"];");
            for (place, body) in node.bodies.iter().enumerate() {
                let label = format!("body {place} of {}", node.label(false));
                let _ = writeln!(
                    text,
                    "  subgraph cluster_{id}_{place} {{ label=\"{label}\";"
                );
                body.write_dot(text, &format!("{id}_{place}_"), verbose);
                text.push_str("  }\n");
            }
        }
        for edge in &self.edges {
            let style = match edge.kind {
                EdgeKind::Full => "",
                EdgeKind::Programmatic | EdgeKind::Other(_) => " [style=dashed]",
            };
            let _ = writeln!(
                text,
                "  {prefix}{} -> {prefix}{}{style};",
                edge.from, edge.to
            );
        }
    }
}

impl NodeData {
    fn new(index: usize, graph: &OwnedGraph, node: NodeHandle) -> Result<Self> {
        let detail = graph.detail(node)?;
        let ids = graph.node_ids(node)?;
        let bodies = detail
            .bodies()
            .iter()
            .map(|body| graph_data(&graph.child(*body)));
        let mut data = Self {
            index,
            handle: node.0,
            kind: kind(&detail),
            tools_id: ids.map(|ids| ids.tools),
            graph_id: ids.and_then(|ids| u32::try_from(ids.tools >> 32).ok()),
            node_id: ids.map(|ids| ids.local),
            bodies: bodies.collect::<Result<_>>()?,
            ..Self::default()
        };
        data.fill(detail);
        Ok(data)
    }

    fn fill(&mut self, detail: NodeDetail) {
        let mapped = |address: Address| (address.0 != 0).then_some(address.0);
        match detail {
            NodeDetail::Kernel {
                name,
                grid,
                block,
                shared_bytes,
            } => {
                self.name = name;
                self.grid = Some(grid);
                self.block = Some(block);
                self.shared_bytes = Some(shared_bytes);
            }
            NodeDetail::Memcpy { dst, src, bytes } => {
                (self.dst, self.src) = (mapped(dst), mapped(src));
                self.bytes = Some(bytes);
            }
            NodeDetail::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => {
                self.dst = mapped(dst);
                self.value = Some(value);
                self.element_bytes = Some(element_bytes);
                self.bytes = Some(count * u64::from(element_bytes));
            }
            NodeDetail::Host { function, data } => {
                (self.host_function, self.host_data) = (Some(function), Some(data));
            }
            NodeDetail::EventRecord(event) | NodeDetail::EventWait(event) => {
                self.event = Some(event.0);
            }
            NodeDetail::MemAlloc { address, bytes } => {
                (self.address, self.bytes) = (Some(address.0), Some(bytes));
            }
            NodeDetail::MemFree { address } => self.address = Some(address.0),
            NodeDetail::Conditional { condition, .. } => self.condition = condition,
            NodeDetail::Child(_)
            | NodeDetail::Empty
            | NodeDetail::BatchMemOp
            | NodeDetail::ExternalSignal
            | NodeDetail::ExternalWait
            | NodeDetail::Other(_) => {}
        }
    }

    fn label(&self, verbose: bool) -> String {
        let mut label = format!(
            "{}: {}",
            self.index,
            self.name.as_ref().unwrap_or(&self.kind)
        );
        if verbose {
            if let (Some(grid), Some(block)) = (self.grid, self.block) {
                let _ = write!(label, "\\n{grid} x {block}");
            }
            if let Some(bytes) = self.bytes {
                let _ = write!(label, "\\n{bytes} bytes");
            }
        }
        label.replace('"', "'")
    }
}

fn kind(detail: &NodeDetail) -> String {
    match detail {
        NodeDetail::Kernel { .. } | NodeDetail::Other(0) => "kernel",
        NodeDetail::Memcpy { .. } => "memcpy",
        NodeDetail::Memset { .. } => "memset",
        NodeDetail::Host { .. } | NodeDetail::Other(3) => "host",
        NodeDetail::EventRecord(_) => "event_record",
        NodeDetail::EventWait(_) => "event_wait",
        NodeDetail::Empty => "empty",
        NodeDetail::Child(_) => "child",
        NodeDetail::ExternalSignal => "external_signal",
        NodeDetail::ExternalWait => "external_wait",
        NodeDetail::MemAlloc { .. } => "mem_alloc",
        NodeDetail::MemFree { .. } => "mem_free",
        NodeDetail::BatchMemOp => "batch_mem_op",
        NodeDetail::Conditional { .. } => "conditional",
        NodeDetail::Other(number) => return format!("type_{number}"),
    }
    .to_owned()
}

fn graph_data(graph: &OwnedGraph) -> Result<TemplateData> {
    let edges = graph.edges()?;
    let mut before: HashMap<NodeHandle, Vec<NodeHandle>> = HashMap::new();
    for edge in &edges {
        before.entry(edge.to).or_default().push(edge.from);
    }
    let order = ordered(graph.nodes()?, &before);
    let index: HashMap<NodeHandle, usize> = order
        .iter()
        .enumerate()
        .map(|(i, node)| (*node, i))
        .collect();
    let mut nodes = Vec::with_capacity(order.len());
    for (position, node) in order.iter().enumerate() {
        nodes.push(NodeData::new(position, graph, *node)?);
    }
    let mut edges: Vec<EdgeData> = edges
        .into_iter()
        .map(|edge| EdgeData {
            from: index[&edge.from],
            to: index[&edge.to],
            from_port: edge.from_port,
            to_port: edge.to_port,
            kind: edge.kind,
            number: edge.kind.number(),
        })
        .collect();
    edges.sort_by_key(|edge| (edge.from, edge.to));
    Ok(TemplateData {
        handle: graph.handle().0,
        graph_id: graph.id()?,
        nodes,
        edges,
    })
}

/// Return the nodes, each after those before it; in the driver's order where edges leave a choice.
fn ordered(
    nodes: Vec<NodeHandle>,
    before: &HashMap<NodeHandle, Vec<NodeHandle>>,
) -> Vec<NodeHandle> {
    let mut done = HashSet::new();
    let mut order = Vec::with_capacity(nodes.len());
    for root in nodes {
        // Depth first without recursion: a chain may have thousands of nodes.
        let mut stack = vec![(root, false)];
        while let Some((node, expanded)) = stack.pop() {
            if expanded {
                if done.insert(node) {
                    order.push(node);
                }
            } else if !done.contains(&node) {
                stack.push((node, true));
                let earlier = before.get(&node).into_iter().flatten();
                stack.extend(earlier.filter(|b| !done.contains(*b)).map(|b| (*b, false)));
            }
        }
    }
    order
}
