//! Addresses become places in memory that has a name.

use std::collections::{BTreeMap, HashMap};

use super::graph::{Body, NamedMemory, Place, Pointer, SavedKernel, SavedNode};
use super::named::Named;
use super::read::{ReadGraph, ReadGraphs, ReadKernel, ReadNode, at_node};
use super::{Names, Taken, small};
use crate::device::Device;
use crate::driver::handle::Address;
use crate::error::{Error, Result};

/// Finds what is an address among the words of one template, or of two of the same work with other memory.
pub(super) struct Places<'a> {
    device: &'a Device,
    memory: Named<'a>,
    moved: Option<Named<'a>>,
    /// Whether something is allocated at the words that were asked for.
    allocated: HashMap<u64, bool>,
    taken: Taken,
}

/// What a word is.
enum Word {
    Number,
    Address(Place),
}

impl<'a> Places<'a> {
    /// # Errors
    /// [`Error::Invalid`] for a name that is there twice, for memory that overlaps, and for a second template with
    /// other names or sizes.
    pub(super) fn new(
        device: &'a Device,
        memory: &'a Names<'a>,
        moved: Option<&'a Names<'a>>,
    ) -> Result<Self> {
        let memory = Named::new(memory)?;
        let moved = moved.map(Named::new).transpose()?;
        if moved
            .as_ref()
            .is_some_and(|moved| moved.sizes() != memory.sizes())
        {
            let expected = "those of the first template, in their order";
            let given = "with other names or sizes";
            let argument = "the memory of the second template";
            return Err(Error::invalid(argument, &given, expected));
        }
        Ok(Self {
            device,
            memory,
            moved,
            allocated: HashMap::new(),
            taken: Taken::default(),
        })
    }

    /// Return the graphs with places in memory for addresses, the memory that has such places, and how these were
    /// found.
    pub(super) fn bodies(
        mut self,
        read: &ReadGraphs,
        other: Option<&ReadGraphs>,
    ) -> Result<(Vec<Body>, Vec<NamedMemory>, Taken)> {
        if other.is_some_and(|other| other.graphs.len() != read.graphs.len()) {
            return Err(unlike("one with other child graphs"));
        }
        let mut bodies = Vec::with_capacity(read.graphs.len());
        for (number, graph) in read.graphs.iter().enumerate() {
            let other = other.map(|other| &other.graphs[number]);
            bodies.push(self.body(graph, other)?);
        }
        let mut numbers = BTreeMap::new();
        for place in bodies.iter_mut().flat_map(Body::places_mut) {
            let next = small(numbers.len())?;
            place.memory = *numbers.entry(place.memory).or_insert(next);
        }
        let mut named: Vec<(u32, NamedMemory)> = numbers
            .into_iter()
            .map(|(before, number)| (number, self.named(before)))
            .collect();
        named.sort_unstable_by_key(|(number, _)| *number);
        let named = named.into_iter().map(|(_, memory)| memory).collect();
        Ok((bodies, named, self.taken))
    }

    /// Return memory as a file has it.
    fn named(&self, number: u32) -> NamedMemory {
        let (name, memory) = self.memory.get(number);
        NamedMemory {
            name: name.to_owned(),
            bytes: memory.bytes(),
            alignment: alignment_of(memory.address()),
        }
    }

    fn body(&mut self, graph: &ReadGraph, other: Option<&ReadGraph>) -> Result<Body> {
        if let Some(other) = other
            && (other.nodes.len() != graph.nodes.len() || other.edges != graph.edges)
        {
            return Err(unlike("one of other nodes or edges"));
        }
        let mut nodes = Vec::with_capacity(graph.nodes.len());
        for (number, node) in graph.nodes.iter().enumerate() {
            let other = other.map(|other| &other.nodes[number]);
            let saved = self.node(node, other);
            let kernel = match node {
                ReadNode::Kernel(kernel) => Some(&*kernel.name),
                _ => None,
            };
            nodes.push(saved.map_err(|error| at_node(number, kernel, error))?);
        }
        Ok(Body {
            nodes,
            edges: graph.edges.clone(),
        })
    }

    fn node(&mut self, node: &ReadNode, other: Option<&ReadNode>) -> Result<SavedNode> {
        // But for addresses, the second does the same.
        let mut like = other.cloned();
        match (node, &mut like) {
            (ReadNode::Kernel(one), Some(ReadNode::Kernel(other))) => {
                let sizes = |kernel: &ReadKernel| -> Vec<usize> {
                    kernel.args.iter().map(Vec::len).collect()
                };
                if sizes(one) == sizes(other) {
                    other.args.clone_from(&one.args);
                }
            }
            (ReadNode::Memcpy { dst, src, .. }, Some(ReadNode::Memcpy { dst: d, src: s, .. })) => {
                (*d, *s) = (*dst, *src);
            }
            (ReadNode::Memset { dst, .. }, Some(ReadNode::Memset { dst: d, .. })) => *d = *dst,
            _ => {}
        }
        if like.is_some_and(|like| like != *node) {
            return Err(unlike("one of other work"));
        }
        Ok(match node {
            ReadNode::Empty => SavedNode::Empty,
            ReadNode::Child(number) => SavedNode::Child(*number),
            ReadNode::Kernel(kernel) => {
                let other = match other {
                    Some(ReadNode::Kernel(other)) => Some(other),
                    _ => None,
                };
                SavedNode::Kernel(self.kernel(kernel, other)?)
            }
            ReadNode::Memcpy { dst, src, bytes } => {
                let (other_dst, other_src) = match other {
                    Some(ReadNode::Memcpy { dst, src, .. }) => (Some(*dst), Some(*src)),
                    _ => (None, None),
                };
                SavedNode::Memcpy {
                    dst: self.range(*dst, other_dst, *bytes)?,
                    src: self.range(*src, other_src, *bytes)?,
                    bytes: *bytes,
                }
            }
            ReadNode::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => {
                let other = match other {
                    Some(ReadNode::Memset { dst, .. }) => Some(*dst),
                    _ => None,
                };
                SavedNode::Memset {
                    dst: self.range(*dst, other, count * u64::from(*element_bytes))?,
                    value: *value,
                    element_bytes: *element_bytes,
                    count: *count,
                }
            }
        })
    }

    fn kernel(&mut self, kernel: &ReadKernel, other: Option<&ReadKernel>) -> Result<SavedKernel> {
        let (mut args, mut pointers) = (kernel.args.clone(), Vec::new());
        for (number, arg) in kernel.args.iter().enumerate() {
            let other = other.map(|other| &other.args[number]);
            let before = pointers.len();
            let mut at = 0;
            while at + WORD <= arg.len() {
                let word = word_at(arg, at);
                let moved = other.map(|other| word_at(other, at));
                // A pointer lies at a multiple of eight bytes, or of four in a packed struct.
                if let Word::Address(place) = self.word(word, moved)? {
                    pointers.push(Pointer {
                        arg: small(number)?,
                        offset: small(at)?,
                        place,
                    });
                    // A file has no addresses.
                    args[number][at..at + WORD].fill(0);
                    at += WORD;
                } else {
                    at += STEP;
                }
            }
            // A single value has no bytes between its fields.
            let is_single = arg.len() <= WORD && pointers.len() == before;
            if is_single && other.is_some_and(|other| other != arg) {
                return Err(unlike("one of other arguments"));
            }
        }
        Ok(SavedKernel {
            function: kernel.function,
            grid: kernel.grid,
            block: kernel.block,
            shared_bytes: kernel.shared_bytes,
            args,
            pointers,
            attributes: kernel.attributes.clone(),
        })
    }

    /// Tell whether a word of an argument is an address; `moved` is that of the second template.
    fn word(&mut self, word: u64, moved: Option<u64>) -> Result<Word> {
        let (Some(names), Some(other)) = (&self.moved, moved) else {
            // Nothing shows whether a number at the very end of memory is an address.
            let place = self.memory.inside(word);
            return self.assumed(word, place);
        };
        if word == other {
            // An address of memory that has not moved, or a number.
            let place = self.memory.inside(word);
            if place.is_some_and(|place| self.displacement(place.memory) != Some(0)) {
                return Err(still(word));
            }
            return self.assumed(word, place);
        }
        let there: Vec<Place> = names.around(other).collect();
        let mut here = self.memory.around(word).collect::<Vec<_>>();
        here.retain(|place| there.contains(place));
        match here[..] {
            [place] => {
                self.taken.proven += 1;
                return Ok(Word::Address(place));
            }
            [_, ..] => return Err(ambiguous(word)),
            [] => {}
        }
        // Bytes between the fields of a struct may be anything, but nothing that lies in memory or beside it.
        let distance = other.wrapping_sub(word);
        let moved_so = |number: u32| self.displacement(number) == Some(distance);
        if (0..self.memory.count()).any(moved_so)
            || self.is_memory(word)?
            || self.is_memory(other)?
        {
            return Err(moved_otherwise(word, other));
        }
        self.taken.left += 1;
        Ok(Word::Number)
    }

    /// Take a word for an address if it has a place; refuse one that lies in other memory.
    fn assumed(&mut self, word: u64, place: Option<Place>) -> Result<Word> {
        if let Some(place) = place {
            self.taken.assumed += 1;
            return Ok(Word::Address(place));
        }
        if self.is_memory(word)? {
            return Err(unnamed(word));
        }
        Ok(Word::Number)
    }

    /// Return where a range of memory lies, which must have a name.
    fn range(&mut self, address: u64, moved: Option<u64>, bytes: u64) -> Result<Place> {
        let mut whole = self
            .memory
            .around(address)
            .filter(|place| self.memory.has(*place, bytes));
        let Some(place) = whole.next() else {
            return Err(unnamed(address));
        };
        drop(whole);
        let Some((names, other)) = self.moved.as_ref().zip(moved) else {
            self.taken.assumed += 1;
            return Ok(place);
        };
        if !names.around(other).any(|there| there == place) {
            return Err(moved_otherwise(address, other));
        }
        if address == other {
            self.taken.assumed += 1;
        } else {
            self.taken.proven += 1;
        }
        Ok(place)
    }

    /// Return how far memory moved from the first template to the second.
    fn displacement(&self, number: u32) -> Option<u64> {
        let moved = self.moved.as_ref()?.get(number).1.address();
        Some(moved.0.wrapping_sub(self.memory.get(number).1.address().0))
    }

    /// Return whether something is allocated at an address.
    fn is_memory(&mut self, address: u64) -> Result<bool> {
        if address < LOWEST {
            return Ok(false);
        }
        if let Some(known) = self.allocated.get(&address) {
            return Ok(*known);
        }
        let found = self.device.driver().is_reached(Address(address))?;
        self.allocated.insert(address, found);
        Ok(found)
    }
}

const WORD: usize = size_of::<u64>();
/// Words are looked for at multiples of it.
const STEP: usize = 4;
/// The least number that may be an address.
const LOWEST: u64 = 1 << 16;
/// Kernels may count on no larger alignment than the allocator's.
const LARGEST_ALIGNMENT: u64 = 256;

/// Return what an address is a multiple of, as far as a kernel may need it.
pub(super) fn alignment_of(address: Address) -> u64 {
    let largest = 1 << address.0.trailing_zeros().min(63);
    LARGEST_ALIGNMENT.min(largest)
}

/// Return the word at a place that is there.
fn word_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; WORD];
    word.copy_from_slice(&bytes[at..at + WORD]);
    u64::from_le_bytes(word)
}

fn unnamed(address: u64) -> Error {
    let given = format!("{address:#x}, which lies in memory without a name");
    Error::invalid("an address", &given, "one in memory that was given a name")
}

fn moved_otherwise(address: u64, other: u64) -> Error {
    let given = format!("{address:#x}, and {other:#x} in the second template");
    let expected = "the same place in memory of one name";
    Error::invalid("an address", &given, expected)
}

fn still(address: u64) -> Error {
    let given =
        format!("{address:#x} in both templates, in memory that is another one in the second");
    let expected = "an address that moves with its memory";
    Error::invalid("an address", &given, expected)
}

fn ambiguous(address: u64) -> Error {
    let given = format!("{address:#x}, the end of one piece of memory and the begin of another");
    let expected = "one of the two: give a second template, with memory that lies apart";
    Error::invalid("an address", &given, expected)
}

fn unlike(given: &str) -> Error {
    Error::invalid("the second template", &given, "the work of the first one")
}
