//! [`TemplateData`]: all that is known of a template, as values, as JSON and as DOT.

use std::collections::{HashMap, HashSet};
use std::fmt::Write as _;

use serde::Serialize;

use crate::driver::handle::NodeHandle;
use crate::driver::owned::OwnedGraph;
use crate::driver::spec::{Dim3, EdgeKind, NodeDetail};
use crate::error::Result;
use crate::template::Template;

/// A template as values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TemplateData {
    /// The nodes, each after those it comes after.
    pub nodes: Vec<NodeData>,
    /// The edges.
    pub edges: Vec<EdgeData>,
}

/// A node as values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeData {
    /// Its place in [`TemplateData::nodes`].
    pub index: usize,
    /// The raw node.
    pub handle: u64,
    /// What kind of node it is: `kernel`, `memcpy`, `memset`, `host`, `event_record`,
    /// `event_wait`, `empty`, `child`, or `type_N` with CUDA's number.
    pub kind: String,
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
    /// Bytes that a memcpy or memset writes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The graph of a child node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub child: Option<TemplateData>,
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
    /// How it orders.
    pub kind: EdgeKind,
}

impl Template {
    /// All that is known of it, child graphs included.
    pub fn data(&self) -> Result<TemplateData> {
        self.with(|graph, _| graph_data(graph))
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

    /// How many nodes there are, those of child graphs included.
    #[must_use]
    pub fn count(&self) -> usize {
        let children = self.nodes.iter().filter_map(|node| node.child.as_ref());
        self.nodes.len() + children.map(Self::count).sum::<usize>()
    }

    fn write_dot(&self, text: &mut String, prefix: &str, verbose: bool) {
        for node in &self.nodes {
            let label = node.label(verbose);
            let id = format!("{prefix}{}", node.index);
            let _ = writeln!(text, "  {id} [label=\"{label}\"];");
            if let Some(child) = &node.child {
                let _ = writeln!(text, "  subgraph cluster_{id} {{ label=\"child of {id}\";");
                child.write_dot(text, &format!("{id}_"), verbose);
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
    fn new(
        index: usize,
        handle: NodeHandle,
        detail: NodeDetail,
        child: Option<TemplateData>,
    ) -> Self {
        let mut data = Self {
            index,
            handle: handle.0,
            kind: kind(&detail),
            name: None,
            grid: None,
            block: None,
            shared_bytes: None,
            bytes: None,
            child,
        };
        match detail {
            NodeDetail::Kernel {
                name,
                grid,
                block,
                shared_bytes,
            } => {
                data.name = name;
                data.grid = Some(grid);
                data.block = Some(block);
                data.shared_bytes = Some(shared_bytes);
            }
            NodeDetail::Memcpy { bytes, .. } => data.bytes = Some(bytes),
            NodeDetail::Memset {
                element_bytes,
                count,
                ..
            } => data.bytes = Some(count * u64::from(element_bytes)),
            _ => {}
        }
        data
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
        NodeDetail::Kernel { .. } => "kernel",
        NodeDetail::Memcpy { .. } => "memcpy",
        NodeDetail::Memset { .. } => "memset",
        NodeDetail::Host => "host",
        NodeDetail::EventRecord(_) => "event_record",
        NodeDetail::EventWait(_) => "event_wait",
        NodeDetail::Empty => "empty",
        NodeDetail::Child(_) => "child",
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
        let detail = graph.detail(*node)?;
        let child = match detail {
            NodeDetail::Child(child) => Some(graph_data(&graph.child(child))?),
            _ => None,
        };
        nodes.push(NodeData::new(position, *node, detail, child));
    }
    let mut edges: Vec<EdgeData> = edges
        .into_iter()
        .map(|edge| EdgeData {
            from: index[&edge.from],
            to: index[&edge.to],
            from_port: edge.from_port,
            to_port: edge.to_port,
            kind: edge.kind,
        })
        .collect();
    edges.sort_by_key(|edge| (edge.from, edge.to));
    Ok(TemplateData { nodes, edges })
}

/// The nodes, each after those before it; in the driver's order where edges leave a choice.
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
