//! A template becomes data.

use std::collections::HashMap;
use std::iter::zip;

use super::graph::{
    Body, NamedMemory, Place, Pointer, SavedEdge, SavedFunction, SavedGraph, SavedKernel, SavedNode,
};
use super::{Images, Taken};
use crate::device::Device;
use crate::driver::handle::{Address, FunctionHandle, NodeHandle};
use crate::driver::owned::OwnedGraph;
use crate::driver::spec::{EdgeSpec, NodeDetail, WorkSpec};
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::template::Template;

/// Memory with the names by which a file knows it.
pub(super) type Names<'a> = [(&'a str, &'a Memory)];

/// Return a template as data. `moved` is the same work with other memory of the same names, in the same order: what
/// differs as the memory does is an address.
pub(super) fn take(
    name: &str,
    template: &Template,
    memory: &Names<'_>,
    moved: Option<(&Template, &Names<'_>)>,
    images: &mut Images<'_>,
) -> Result<(SavedGraph, Taken)> {
    if let Some((_, others)) = moved {
        let are_alike = |(one, other): (&(&str, &Memory), &(&str, &Memory))| {
            one.0 == other.0 && one.1.bytes() == other.1.bytes()
        };
        if memory.len() != others.len() || !zip(memory, others).all(are_alike) {
            let given = "with other names or sizes";
            let expected = "those of the first template, in their order";
            return Err(Error::invalid(
                "the memory of the second template",
                &given,
                expected,
            ));
        }
    }
    let mut taker = Taker {
        device: template.device(),
        memory,
        moved: moved.map(|(_, others)| others),
        images,
        functions: Vec::new(),
        bodies: Vec::new(),
        numbers: HashMap::new(),
        taken: Taken::default(),
    };
    template.with(|graph, _, transfers| {
        if !transfers.is_empty() {
            let expected = "one without: they are added to the loaded template";
            return Err(Error::invalid(
                "the template",
                &"one with inputs or outputs",
                expected,
            ));
        }
        match moved {
            Some((other, _)) => other.with(|other, _, _| taker.body(graph, Some(other))),
            None => taker.body(graph, None),
        }
    })?;
    let memory = memory.iter().map(|(name, memory)| NamedMemory {
        name: (*name).to_owned(),
        bytes: memory.bytes(),
    });
    let graph = SavedGraph {
        name: name.to_owned(),
        memory: memory.collect(),
        functions: taker.functions,
        bodies: taker.bodies,
    };
    Ok((graph, taker.taken))
}

struct Taker<'a, 'i> {
    device: &'a Device,
    memory: &'a Names<'a>,
    moved: Option<&'a Names<'a>>,
    images: &'a mut Images<'i>,
    functions: Vec<SavedFunction>,
    bodies: Vec<Body>,
    /// The place of each function among `functions`.
    numbers: HashMap<FunctionHandle, u32>,
    taken: Taken,
}

impl Taker<'_, '_> {
    /// Take a graph, and behind it its child graphs; return its number.
    fn body(&mut self, graph: &OwnedGraph, other: Option<&OwnedGraph>) -> Result<u32> {
        let place = self.bodies.len();
        self.bodies.push(Body::default());
        let handles = graph.nodes()?;
        let others = other.map(OwnedGraph::nodes).transpose()?;
        if let Some(others) = others.as_ref().filter(|one| one.len() != handles.len()) {
            let given = format!("one of {} nodes", others.len());
            return Err(unlike(&given, &format!("{} nodes", handles.len())));
        }
        let mut nodes = Vec::with_capacity(handles.len());
        for (number, handle) in handles.iter().enumerate() {
            let other = zip(other, others.as_ref()).next();
            let other = other.map(|(graph, nodes)| (graph, nodes[number]));
            let at = |error| at_node(number, error);
            nodes.push(self.node(graph, *handle, other).map_err(at)?);
        }
        let edges = edges_of(graph, &handles)?;
        if let Some((other, nodes)) = zip(other, others.as_ref()).next()
            && edges_of(other, nodes)? != edges
        {
            return Err(unlike(
                &"one with other edges",
                "the edges of the first one",
            ));
        }
        self.bodies[place] = Body { nodes, edges };
        small(place)
    }

    fn node(
        &mut self,
        graph: &OwnedGraph,
        node: NodeHandle,
        other: Option<(&OwnedGraph, NodeHandle)>,
    ) -> Result<SavedNode> {
        let detail = graph.detail(node)?;
        match detail {
            NodeDetail::Empty => return Ok(SavedNode::Empty),
            NodeDetail::Child(child) => {
                let child = graph.child(child);
                let other = match other {
                    Some((other, node)) => match other.detail(node)? {
                        NodeDetail::Child(child) => Some(other.child(child)),
                        _ => return Err(unlike(&"another kind of node", "a child graph")),
                    },
                    None => None,
                };
                return Ok(SavedNode::Child(self.body(&child, other.as_ref())?));
            }
            _ => {}
        }
        let Some(work) = graph.work(node)? else {
            let expected = "a kernel, a memset, a copy in a row, a child graph or an empty node";
            return Err(Error::invalid("a node", &kind_of(&detail), expected));
        };
        let moved = match other {
            Some((other, node)) => other.work(node)?,
            None => None,
        };
        if other.is_some() && moved.is_none() {
            return Err(unlike(&"another kind of node", kind_of(&detail)));
        }
        match work {
            WorkSpec::Kernel {
                function,
                grid,
                block,
                shared_bytes,
                args,
            } => {
                let args: Vec<Vec<u8>> = args.iter().map(|arg| arg.to_vec()).collect();
                let others = match &moved {
                    None => None,
                    Some(WorkSpec::Kernel { args: others, .. })
                        if zip(&args, &**others).all(|(one, other)| one.len() == other.len())
                            && args.len() == others.len() =>
                    {
                        Some(others)
                    }
                    Some(_) => return Err(unlike(&"other work", "the same kernel")),
                };
                let mut pointers = Vec::new();
                for (number, arg) in args.iter().enumerate() {
                    let other = others.map(|others| &*others[number]);
                    for (offset, place) in self.pointers(arg, other)? {
                        pointers.push(Pointer {
                            arg: small(number)?,
                            offset,
                            place,
                        });
                    }
                }
                let attributes = graph.attributes(node)?.into_iter();
                let attributes = attributes.map(|one| (one.id, one.value.to_vec()));
                Ok(SavedNode::Kernel(SavedKernel {
                    function: self.function(graph, node, function)?,
                    grid: [grid.x, grid.y, grid.z],
                    block: [block.x, block.y, block.z],
                    shared_bytes,
                    args,
                    pointers,
                    attributes: attributes.collect(),
                }))
            }
            WorkSpec::Memcpy { dst, src, bytes } => Ok(SavedNode::Memcpy {
                dst: self.named(dst, bytes)?,
                src: self.named(src, bytes)?,
                bytes,
            }),
            WorkSpec::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => Ok(SavedNode::Memset {
                dst: self.named(dst, count * u64::from(element_bytes))?,
                value,
                element_bytes,
                count,
            }),
            WorkSpec::Host(_) => Err(Error::invalid("a node", &"a host function", "none")),
        }
    }

    /// Return the number of a function among those of the graph.
    fn function(
        &mut self,
        graph: &OwnedGraph,
        node: NodeHandle,
        handle: FunctionHandle,
    ) -> Result<u32> {
        if let Some(number) = self.numbers.get(&handle) {
            return Ok(*number);
        }
        let name = match graph.detail(node)? {
            NodeDetail::Kernel { name, .. } => name.unwrap_or_default(),
            _ => String::new(),
        };
        let (image, attributes) = self.images.find(&name, handle)?;
        let number = small(self.functions.len())?;
        self.functions.push(SavedFunction {
            image,
            name,
            attributes,
        });
        self.numbers.insert(handle, number);
        Ok(number)
    }

    /// Return the addresses in an argument, and where they point.
    fn pointers(&mut self, arg: &[u8], other: Option<&[u8]>) -> Result<Vec<(u32, Place)>> {
        let mut found = Vec::new();
        let (words, _) = arg.as_chunks::<WORD>();
        for (number, word) in words.iter().enumerate() {
            let address = u64::from_le_bytes(*word);
            let at = number * WORD;
            let other = other.map(|other| word_at(other, at));
            if let Some(place) = self.place(address, other)? {
                found.push((small(at)?, place));
            }
        }
        Ok(found)
    }

    /// Return where a word points, if it is an address; `other` is the word of the second template.
    fn place(&mut self, word: u64, other: Option<u64>) -> Result<Option<Place>> {
        let Some(place) = place_in(self.memory, word)? else {
            return match self.device.memory_range(Address(word))? {
                Some(_) if word >= LOWEST => Err(unnamed(word)),
                _ => Ok(None),
            };
        };
        let Some((moved, other)) = zip(self.moved, other).next() else {
            self.taken.assumed += 1;
            return Ok(Some(place));
        };
        let number = place.memory as usize;
        if moved[number].1.address() == self.memory[number].1.address() {
            self.taken.assumed += 1;
            return Ok((word == other).then_some(place));
        }
        let is_proven = place_in(moved, other)? == Some(place);
        self.taken.proven += usize::from(is_proven);
        Ok(is_proven.then_some(place))
    }

    /// Return where a range of memory lies, which must have a name.
    fn named(&self, address: Address, bytes: u64) -> Result<Place> {
        let place = place_in(self.memory, address.0)?;
        let is_inside = |place: &Place| {
            let whole = self.memory[place.memory as usize].1.bytes();
            place
                .offset
                .checked_add(bytes)
                .is_some_and(|end| end <= whole)
        };
        place.filter(is_inside).ok_or_else(|| unnamed(address.0))
    }
}

const WORD: usize = size_of::<u64>();

/// The least number that may be an address.
const LOWEST: u64 = 1 << 16;

fn place_in(memory: &Names<'_>, address: u64) -> Result<Option<Place>> {
    let mut all = memory.iter().enumerate();
    let found = all.find(|(_, (_, memory))| memory.range().contains(&address));
    found
        .map(|(number, (_, memory))| {
            Ok(Place {
                memory: small(number)?,
                offset: address - memory.address().0,
            })
        })
        .transpose()
}

fn edges_of(graph: &OwnedGraph, nodes: &[NodeHandle]) -> Result<Vec<SavedEdge>> {
    let numbers: HashMap<NodeHandle, usize> = nodes.iter().copied().zip(0..).collect();
    let edges = graph.edges()?.into_iter();
    let edges = edges.map(|edge: EdgeSpec<NodeHandle>| {
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

/// Return the word at a place where there is one.
fn word_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; WORD];
    word.copy_from_slice(&bytes[at..at + WORD]);
    u64::from_le_bytes(word)
}

fn small(number: usize) -> Result<u32> {
    u32::try_from(number)
        .map_err(|_| Error::invalid("a graph", &"too large", "fewer than 2^32 parts"))
}

fn unnamed(address: u64) -> Error {
    let given = format!("{address:#x}, which lies in memory without a name");
    Error::invalid("an address", &given, "one in memory that was given a name")
}

fn unlike(given: &impl ToString, expected: &str) -> Error {
    Error::invalid(
        "the second template",
        given,
        format!("{expected}, as of the first one"),
    )
}

/// Say which node an error is about.
fn at_node(number: usize, error: Error) -> Error {
    match error {
        Error::Invalid {
            argument,
            given,
            expected,
        } => Error::Invalid {
            argument: format!("node {number}: {argument}"),
            given,
            expected,
        },
        other => other,
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
