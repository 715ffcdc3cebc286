//! A graph as data: nodes with all that a driver needs to add them again, and addresses as places in memory that has
//! a name.

use serde::{Deserialize, Serialize};

/// The contents of a file, but for the images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Index {
    /// What must be as it was, by name.
    pub(super) key: Vec<(String, String)>,
    pub(super) functions: Vec<SavedFunction>,
    pub(super) graphs: Vec<SavedGraph>,
    /// Where contents lie, in the order of their sections.
    pub(super) contents: Vec<SavedContents>,
    /// What the program that saved wants to know when it loads.
    pub(super) notes: String,
}

/// Bytes in memory that has a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedContents {
    pub(super) memory: String,
    /// In bytes.
    pub(super) offset: u64,
}

/// One graph.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedGraph {
    pub(super) name: String,
    pub(super) memory: Vec<NamedMemory>,
    /// The graph itself, then child graphs, each behind the one that it is in: none holds itself.
    pub(super) bodies: Vec<Body>,
}

/// Memory that nodes work on, and that is bound to other memory of the same size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NamedMemory {
    pub(super) name: String,
    pub(super) bytes: u64,
    /// What its address is a multiple of.
    pub(super) alignment: u64,
}

/// A kernel of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedFunction {
    /// The number of the image in the file.
    pub(super) image: u32,
    pub(super) name: String,
    /// Attributes that were set, by CUDA's numbers.
    pub(super) attributes: Vec<(u32, i32)>,
}

/// The nodes and edges of a graph, or of a child graph.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Body {
    pub(super) nodes: Vec<SavedNode>,
    pub(super) edges: Vec<SavedEdge>,
}

impl Body {
    /// All places in memory.
    pub(super) fn places_mut(&mut self) -> Vec<&mut Place> {
        let mut places = Vec::new();
        for node in &mut self.nodes {
            match node {
                SavedNode::Kernel(kernel) => {
                    places.extend(kernel.pointers.iter_mut().map(|one| &mut one.place));
                }
                SavedNode::Memcpy { dst, src, .. } => places.extend([dst, src]),
                SavedNode::Memset { dst, .. } => places.push(dst),
                SavedNode::Empty | SavedNode::Child(_) => {}
            }
        }
        places
    }
}

/// What a node does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum SavedNode {
    Kernel(SavedKernel),
    Memcpy {
        dst: Place,
        src: Place,
        bytes: u64,
    },
    Memset {
        dst: Place,
        value: u32,
        element_bytes: u8,
        count: u64,
    },
    Empty,
    /// The number of the body.
    Child(u32),
}

/// A launch of a kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct SavedKernel {
    /// Its number among the functions of the file.
    pub(super) function: u32,
    pub(super) grid: [u32; 3],
    pub(super) block: [u32; 3],
    pub(super) shared_bytes: u32,
    /// The bytes of each argument, with zeros for addresses.
    pub(super) args: Vec<Vec<u8>>,
    pub(super) pointers: Vec<Pointer>,
    /// Launch attributes that were set: CUDA's number and the bytes of the value.
    pub(super) attributes: Vec<(u32, Vec<u8>)>,
}

/// An address among the arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Pointer {
    pub(super) arg: u32,
    /// In bytes.
    pub(super) offset: u32,
    pub(super) place: Place,
}

/// A place in memory that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    /// Its number among the memory of the graph.
    pub(super) memory: u32,
    /// In bytes.
    pub(super) offset: u64,
}

/// An edge, by the numbers of the nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct SavedEdge {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) from_port: u8,
    pub(super) to_port: u8,
    /// CUDA's number.
    pub(super) kind: u8,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn any_bytes_are_an_index_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = postcard::from_bytes::<Index>(&bytes);
        }
    }

    #[test]
    fn bytes_that_promise_more_than_there_is_are_refused() {
        // A number of seven bits a byte: as many parts as one can say, where the number of graphs stands.
        let mut bytes = vec![0, 0];
        bytes.extend([0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0x01]);
        bytes.extend([1; 40]);
        assert!(postcard::from_bytes::<Index>(&bytes).is_err());
    }
}
