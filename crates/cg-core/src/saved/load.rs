//! Data becomes a template again.

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use super::Names;
use super::graph::{Body, Index, NamedMemory, Place, SavedGraph, SavedKernel, SavedNode};
use crate::device::Device;
use crate::driver::handle::{Address, NodeHandle};
use crate::driver::owned::{OwnedGraph, same_driver};
use crate::driver::spec::{
    Dim3, EdgeKind, EdgeSpec, FunctionAttribute, LaunchAttribute, NodeSpec, WorkSpec,
};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::node::Node;
use crate::retain::Retained;
use crate::template::Template;
use crate::work::{Function, Module};

/// Build a template of a saved graph, with memory of these names; return its nodes in the order of the saved ones.
///
/// The data is as it was written: files are read only if nothing has changed them.
pub(super) fn build(
    device: &Device,
    graph: &SavedGraph,
    functions: &[Function],
    memory: &Names<'_>,
) -> Result<(Template, Vec<Node>)> {
    let bound = bind(device, graph, memory)?;
    let mut retained: Vec<Retained> = bound
        .iter()
        .filter_map(|one| one.owner().cloned())
        .collect();
    retained.extend(functions.iter().map(Function::retained));
    let builder = Builder {
        device,
        memory: &bound,
        functions,
        new: RefCell::default(),
    };
    // A child graph comes behind the one that it is in, and is built before it: the last one is the first here.
    let mut built: Vec<OwnedGraph> = Vec::with_capacity(graph.bodies.len());
    let mut nodes = Vec::new();
    for body in graph.bodies.iter().rev() {
        let child = |number: u32| {
            let place = graph.bodies.len().checked_sub(number as usize + 1);
            place.and_then(|place| built.get(place))
        };
        let (one, its_nodes) = builder.body(body, &child)?;
        built.push(one);
        nodes = its_nodes;
    }
    let whole = built.pop().ok_or_else(damaged)?;
    let template = Template::with_graph(device, whole, retained);
    let nodes = nodes.into_iter().map(|node| template.node(node)).collect();
    Ok((template, nodes))
}

/// Return the kernels of a file, with the attributes that its graphs need.
pub(super) fn functions(index: &Index, images: &[Module]) -> Result<Vec<Function>> {
    let mut functions = Vec::with_capacity(index.functions.len());
    for (number, saved) in index.functions.iter().enumerate() {
        let image = images.get(saved.image as usize).ok_or_else(damaged)?;
        let function = image.function(&saved.name)?;
        let now = function.attributes()?;
        for (id, value) in &saved.attributes {
            let wanted = FunctionAttribute {
                id: *id,
                value: *value,
            };
            if *id != FunctionAttribute::MAX_SHARED_BYTES && !now.contains(&wanted) {
                function.set_attribute(wanted)?;
            }
        }
        let needed = most_shared_bytes(index, number);
        let is_shared = |one: &&FunctionAttribute| one.id == FunctionAttribute::MAX_SHARED_BYTES;
        let allowed = now.iter().find(is_shared).map_or(0, |one| one.value);
        // It is raised alone: other graphs may need what is there.
        if i64::from(needed) > i64::from(allowed) {
            function.set_max_shared_bytes(needed)?;
        }
        functions.push(function);
    }
    Ok(functions)
}

/// Return the most dynamic shared memory that a launch of a kernel asks for.
fn most_shared_bytes(index: &Index, function: usize) -> u32 {
    let bodies = index.graphs.iter().flat_map(|graph| &graph.bodies);
    let kernels = bodies
        .flat_map(|body| &body.nodes)
        .filter_map(|node| match node {
            SavedNode::Kernel(kernel) if kernel.function as usize == function => Some(kernel),
            _ => None,
        });
    kernels.map(|kernel| kernel.shared_bytes).max().unwrap_or(0)
}

fn bind<'a>(device: &Device, graph: &SavedGraph, memory: &'a Names<'a>) -> Result<Vec<&'a Memory>> {
    let mut by_name: HashMap<&str, Vec<&'a Memory>> = HashMap::new();
    for (name, memory) in memory {
        by_name.entry(name).or_default().push(memory);
    }
    let find = |saved: &NamedMemory| {
        let argument = || format!("memory {:?}", saved.name);
        let Some([found]) = by_name.get(&*saved.name).map(Vec::as_slice) else {
            let names: Vec<_> = memory.iter().map(|(name, _)| *name).collect();
            let expected = format!("{:?}, once", saved.name);
            let argument = "the names of memory";
            return Err(Error::invalid(argument, &names.join(", "), expected));
        };
        same_driver(&**device.driver(), &**found.driver(), &argument())?;
        if found.bytes() != saved.bytes {
            let given = format!("of {} bytes", found.bytes());
            let expected = format!("of the {} bytes that were saved", saved.bytes);
            return Err(Error::invalid(argument(), &given, expected));
        }
        if !found.address().0.is_multiple_of(saved.alignment.max(1)) {
            let given = format!("at {:#x}", found.address().0);
            let expected = format!("at a multiple of {}, as it was saved", saved.alignment);
            return Err(Error::invalid(argument(), &given, expected));
        }
        Ok(*found)
    };
    graph.memory.iter().map(find).collect()
}

struct Builder<'a> {
    device: &'a Device,
    memory: &'a [&'a Memory],
    functions: &'a [Function],
    /// The launch attributes that a new node of each function has.
    new: RefCell<HashMap<u32, Vec<LaunchAttribute>>>,
}

impl Builder<'_> {
    fn body<'g>(
        &self,
        body: &Body,
        child: &impl Fn(u32) -> Option<&'g OwnedGraph>,
    ) -> Result<(OwnedGraph, Vec<NodeHandle>)> {
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
        Ok((graph, handles))
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
                self.set_attributes(graph, node, kernel)?;
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

    /// Give a node the launch attributes that its kernel had; a new one has those of its function.
    fn set_attributes(
        &self,
        graph: &OwnedGraph,
        node: NodeHandle,
        kernel: &SavedKernel,
    ) -> Result<()> {
        let mut new = self.new.borrow_mut();
        // The driver is asked once for each function: there are many attributes, and many nodes.
        let now = match new.entry(kernel.function) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(graph.attributes(node)?),
        };
        let is_saved = |id: u32| kernel.attributes.iter().any(|(saved, _)| *saved == id);
        for attribute in &*now {
            if !is_saved(attribute.id) {
                let zero = LaunchAttribute {
                    id: attribute.id,
                    value: [0; 64],
                };
                graph.set_attribute(node, &zero)?;
            }
        }
        for (id, value) in &kernel.attributes {
            let value = <[u8; 64]>::try_from(&**value).map_err(|_| damaged())?;
            let wanted = LaunchAttribute { id: *id, value };
            if !now.contains(&wanted) {
                graph.set_attribute(node, &wanted)?;
            }
        }
        Ok(())
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
