//! Addresses become places in memory that has a name.

use super::graph::{Body, NamedMemory, Place, Pointer, SavedKernel, SavedNode};
use super::read::{ReadGraph, ReadGraphs, ReadKernel, ReadNode, at_node};
use super::{Names, Taken, small};
use crate::device::Device;
use crate::driver::handle::Address;
use crate::error::{Error, Result};

/// Finds what is an address among the words of one template, or of two of the same work with other memory.
pub(super) struct Places<'a> {
    device: &'a Device,
    memory: &'a Names<'a>,
    moved: Option<&'a Names<'a>>,
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
        require_apart(memory)?;
        if let Some(moved) = moved {
            require_apart(moved)?;
            let are_alike = |(one, other): (&(&str, _), &(&str, _))| one.0 == other.0;
            let sizes = |names: &Names<'_>| -> Vec<u64> {
                names.iter().map(|(_, memory)| memory.bytes()).collect()
            };
            let is_same = memory.len() == moved.len()
                && sizes(memory) == sizes(moved)
                && memory.iter().zip(moved).all(are_alike);
            if !is_same {
                let expected = "those of the first template, in their order";
                let given = "with other names or sizes";
                let argument = "the memory of the second template";
                return Err(Error::invalid(argument, &given, expected));
            }
        }
        Ok(Self {
            device,
            memory,
            moved,
            taken: Taken::default(),
        })
    }

    /// Return the graphs with places in memory for addresses, and how these were found.
    pub(super) fn bodies(
        mut self,
        read: &ReadGraphs,
        other: Option<&ReadGraphs>,
    ) -> Result<(Vec<Body>, Taken)> {
        if other.is_some_and(|other| other.graphs.len() != read.graphs.len()) {
            return Err(unlike("one with other child graphs"));
        }
        let mut bodies = Vec::with_capacity(read.graphs.len());
        for (number, graph) in read.graphs.iter().enumerate() {
            let other = other.map(|other| &other.graphs[number]);
            bodies.push(self.body(graph, other)?);
        }
        Ok((bodies, self.taken))
    }

    /// The memory, as a file has it.
    pub(super) fn named(memory: &Names<'_>) -> Vec<NamedMemory> {
        let named = memory.iter().map(|(name, memory)| NamedMemory {
            name: (*name).to_owned(),
            bytes: memory.bytes(),
            alignment: alignment_of(memory.address()),
        });
        named.collect()
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
            nodes.push(saved.map_err(|error| at_node(number, error))?);
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
        let (Some(names), Some(other)) = (self.moved, moved) else {
            let place = self.only_place(word)?;
            if place.is_none() && self.is_memory(word)? {
                return Err(unnamed(word));
            }
            self.taken.assumed += usize::from(place.is_some());
            return Ok(place.map_or(Word::Number, Word::Address));
        };
        if word == other {
            // An address of memory that has not moved, or a number.
            let still = self.still_place(word, names)?;
            if still.is_none() && !is_in(self.memory, word) && self.is_memory(word)? {
                return Err(unnamed(word));
            }
            self.taken.assumed += usize::from(still.is_some());
            return Ok(still.map_or(Word::Number, Word::Address));
        }
        let (here, there) = (places_in(self.memory, word)?, places_in(names, other)?);
        let mut both = here.iter().filter(|place| there.contains(place));
        match (both.next(), both.next()) {
            (Some(place), None) => {
                self.taken.proven += 1;
                Ok(Word::Address(*place))
            }
            (Some(_), Some(_)) => Err(ambiguous(word)),
            // Bytes between the fields of a struct may be anything, but nothing that lies in memory.
            (None, _) if !self.is_memory(word)? && !self.is_memory(other)? => {
                self.taken.left += 1;
                Ok(Word::Number)
            }
            (None, _) => {
                let given = format!("{word:#x}, and {other:#x} in the second template");
                let expected = "the same place in memory of one name";
                Err(Error::invalid("an address", &given, expected))
            }
        }
    }

    /// Return where a range of memory lies, which must have a name.
    fn range(&mut self, address: u64, moved: Option<u64>, bytes: u64) -> Result<Place> {
        let whole = |place: &Place| {
            let memory = self.memory[place.memory as usize].1.bytes();
            place
                .offset
                .checked_add(bytes)
                .is_some_and(|end| end <= memory)
                && place.offset < memory
        };
        let here: Vec<Place> = places_in(self.memory, address)?
            .into_iter()
            .filter(whole)
            .collect();
        let Some(place) = here.first().copied() else {
            return Err(unnamed(address));
        };
        let Some((names, other)) = self.moved.zip(moved) else {
            self.taken.assumed += 1;
            return Ok(place);
        };
        if !places_in(names, other)?.contains(&place) {
            let given = format!("{address:#x}, and {other:#x} in the second template");
            let expected = "the same place in memory of one name";
            return Err(Error::invalid("an address", &given, expected));
        }
        if address == other {
            self.taken.assumed += 1;
        } else {
            self.taken.proven += 1;
        }
        Ok(place)
    }

    /// Return the place inside of memory where an address is. Nothing shows whether a number at the very end is one.
    fn only_place(&self, address: u64) -> Result<Option<Place>> {
        let places = places_in(self.memory, address)?.into_iter();
        let mut inside =
            places.filter(|place| place.offset < self.memory[place.memory as usize].1.bytes());
        Ok(inside.next())
    }

    /// The same for memory that is where it is in both templates.
    fn still_place(&self, address: u64, names: &Names<'_>) -> Result<Option<Place>> {
        let place = self.only_place(address)?;
        Ok(place.filter(|place| {
            let number = place.memory as usize;
            names[number].1.address() == self.memory[number].1.address()
        }))
    }

    /// Return whether something is allocated at an address.
    fn is_memory(&self, address: u64) -> Result<bool> {
        Ok(address >= LOWEST && self.device.memory_range(Address(address))?.is_some())
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

fn require_apart(memory: &Names<'_>) -> Result<()> {
    for (number, (name, one)) in memory.iter().enumerate() {
        for (other_name, other) in &memory[..number] {
            if name == other_name {
                let expected = "one for each piece of memory";
                return Err(Error::invalid("a name of memory", &name, expected));
            }
            let (one, other) = (one.range(), other.range());
            if one.start < other.end && other.start < one.end {
                let given = format!("where {other_name:?} is as well");
                let argument = format!("memory {name:?}");
                return Err(Error::invalid(argument, &given, "memory of its own"));
            }
        }
    }
    Ok(())
}

/// Return the places where an address may be: inside of memory, or just behind it.
fn places_in(memory: &Names<'_>, address: u64) -> Result<Vec<Place>> {
    let mut places = Vec::new();
    for (number, (_, memory)) in memory.iter().enumerate() {
        let range = memory.range();
        if range.contains(&address) || address == range.end {
            places.push(Place {
                memory: small(number)?,
                offset: address - range.start,
            });
        }
    }
    Ok(places)
}

fn is_in(memory: &Names<'_>, address: u64) -> bool {
    let mut all = memory.iter();
    all.any(|(_, memory)| memory.range().contains(&address))
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

fn ambiguous(address: u64) -> Error {
    let given = format!("{address:#x}, the end of one piece of memory and the begin of another");
    let expected = "one of the two: give a second template, with memory that lies apart";
    Error::invalid("an address", &given, expected)
}

fn unlike(given: &str) -> Error {
    Error::invalid("the second template", &given, "the work of the first one")
}
