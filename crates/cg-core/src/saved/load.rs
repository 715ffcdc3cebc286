//! Data becomes a template again.

use std::collections::HashMap;

use super::graph::{Body, NamedMemory, Place, SavedGraph, SavedKernel, SavedNode};
use crate::device::Device;
use crate::driver::handle::{Address, NodeHandle};
use crate::driver::owned::{OwnedGraph, same_driver};
use crate::driver::spec::{
    Dim3, EdgeKind, EdgeSpec, FunctionAttribute, LaunchAttribute, NodeSpec, WorkSpec,
};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::retain::Retained;
use crate::template::Template;
use crate::work::{Function, Module};

/// Build a template of a saved graph, with memory of these names.
///
/// The data is as [`take`](super::take::take) made it: files are read only if nothing has changed them.
pub(super) fn build(
    device: &Device,
    graph: &SavedGraph,
    images: &[Module],
    memory: &HashMap<&str, &Memory>,
) -> Result<Template> {
    let bound = bind(device, graph, memory)?;
    let mut retained: Vec<Retained> = bound
        .iter()
        .filter_map(|one| one.owner().cloned())
        .collect();
    let mut functions = Vec::with_capacity(graph.functions.len());
    for saved in &graph.functions {
        let image = images.get(saved.image as usize).ok_or_else(damaged)?;
        let function = image.function(&saved.name)?;
        for (id, value) in &saved.attributes {
            function.set_attribute(FunctionAttribute {
                id: *id,
                value: *value,
            })?;
        }
        retained.push(function.retained());
        functions.push(function);
    }
    let builder = Builder {
        device,
        memory: &bound,
        functions: &functions,
    };
    // A child graph comes behind the one that it is in, and is built before it: the last one is the first here.
    let mut built: Vec<OwnedGraph> = Vec::with_capacity(graph.bodies.len());
    for body in graph.bodies.iter().rev() {
        let child = |number: u32| {
            let place = graph.bodies.len().checked_sub(number as usize + 1);
            place.and_then(|place| built.get(place))
        };
        let one = builder.body(body, &child)?;
        built.push(one);
    }
    let whole = built.pop().ok_or_else(damaged)?;
    Ok(Template::with_graph(device, whole, retained))
}

fn bind<'a>(
    device: &Device,
    graph: &SavedGraph,
    memory: &HashMap<&str, &'a Memory>,
) -> Result<Vec<&'a Memory>> {
    let find = |saved: &NamedMemory| {
        let Some(found) = memory.get(&*saved.name).copied() else {
            let mut names: Vec<_> = memory.keys().copied().collect();
            names.sort_unstable();
            let expected = format!("memory named {:?}", saved.name);
            return Err(Error::invalid(
                "the memory of a saved graph",
                &names.join(", "),
                expected,
            ));
        };
        same_driver(&**device.driver(), &**found.driver(), &saved.name)?;
        if found.bytes() != saved.bytes {
            let given = format!("of {} bytes", found.bytes());
            let expected = format!("of the {} bytes that were saved", saved.bytes);
            return Err(Error::invalid(
                format!("memory {:?}", saved.name),
                &given,
                expected,
            ));
        }
        Ok(found)
    };
    graph.memory.iter().map(find).collect()
}

struct Builder<'a> {
    device: &'a Device,
    memory: &'a [&'a Memory],
    functions: &'a [Function],
}

impl Builder<'_> {
    fn body<'g>(
        &self,
        body: &Body,
        child: &impl Fn(u32) -> Option<&'g OwnedGraph>,
    ) -> Result<OwnedGraph> {
        let graph = OwnedGraph::new(self.device.driver())?;
        let mut handles = Vec::with_capacity(body.nodes.len());
        for node in &body.nodes {
            handles.push(self.node(&graph, node, child)?);
        }
        for edge in &body.edges {
            let node = |number: u32| handles.get(number as usize).copied().ok_or_else(damaged);
            graph.add_edge(EdgeSpec {
                from: node(edge.from)?,
                to: node(edge.to)?,
                from_port: edge.from_port,
                to_port: edge.to_port,
                kind: EdgeKind::from(edge.kind),
            })?;
        }
        Ok(graph)
    }

    fn node<'g>(
        &self,
        graph: &OwnedGraph,
        node: &SavedNode,
        child: &impl Fn(u32) -> Option<&'g OwnedGraph>,
    ) -> Result<NodeHandle> {
        let work = match node {
            SavedNode::Empty => return graph.add_node(&[], &NodeSpec::Empty),
            SavedNode::Child(number) => {
                // The driver copies it.
                let child = child(*number).ok_or_else(damaged)?;
                return graph.add_node(&[], &NodeSpec::Child(child.handle()));
            }
            SavedNode::Kernel(kernel) => {
                let node = graph.add_node(&[], &NodeSpec::Work(self.kernel(kernel)?))?;
                for (id, value) in &kernel.attributes {
                    let value = <[u8; 64]>::try_from(&**value).map_err(|_| damaged())?;
                    graph.set_attribute(node, &LaunchAttribute { id: *id, value })?;
                }
                return Ok(node);
            }
            SavedNode::Memcpy { dst, src, bytes } => WorkSpec::Memcpy {
                dst: self.address(*dst, *bytes)?,
                src: self.address(*src, *bytes)?,
                bytes: *bytes,
            },
            SavedNode::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => WorkSpec::Memset {
                dst: self.address(*dst, count.saturating_mul(u64::from(*element_bytes)))?,
                value: *value,
                element_bytes: *element_bytes,
                count: *count,
            },
        };
        graph.add_node(&[], &NodeSpec::Work(work))
    }

    fn kernel(&self, kernel: &SavedKernel) -> Result<WorkSpec> {
        let function = self.functions.get(kernel.function as usize);
        let function = function.ok_or_else(damaged)?.handle();
        let mut args = kernel.args.clone();
        for pointer in &kernel.pointers {
            let address = self.address(pointer.place, 0)?.0.to_le_bytes();
            let begin = pointer.offset as usize;
            let arg = args.get_mut(pointer.arg as usize);
            let word = arg.and_then(|arg| arg.get_mut(begin..begin + address.len()));
            word.ok_or_else(damaged)?.copy_from_slice(&address);
        }
        let [grid, block] = [kernel.grid, kernel.block].map(|[x, y, z]| Dim3 { x, y, z });
        Ok(WorkSpec::Kernel {
            function,
            grid,
            block,
            shared_bytes: kernel.shared_bytes,
            args: args.into_iter().map(Vec::into_boxed_slice).collect(),
        })
    }

    /// Return the address of a place behind which so many bytes lie.
    fn address(&self, place: Place, bytes: u64) -> Result<Address> {
        let memory = self.memory.get(place.memory as usize).ok_or_else(damaged)?;
        let end = place.offset.checked_add(bytes);
        let is_inside = end.is_some_and(|end| end <= memory.bytes());
        let address = memory.address().offset(place.offset);
        is_inside.then_some(address).ok_or_else(damaged)
    }
}

fn damaged() -> Error {
    let expected = "one whose parts are all there";
    Error::invalid(
        "the saved graph",
        &"one that names parts it has not",
        expected,
    )
}
