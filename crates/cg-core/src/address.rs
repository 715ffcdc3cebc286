//! [`NodeAddress`]: which memory the nodes of a template name.

use std::collections::HashSet;

use crate::driver::handle::{Address, NodeHandle};
use crate::driver::owned::OwnedGraph;
use crate::driver::spec::NodeDetail;
use crate::error::Result;
use crate::pool::Pool;
use crate::template::Template;

/// An address that a node names, and the allocation that it lies in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeAddress {
    /// The raw node.
    pub node: NodeHandle,
    /// The name of its kernel, where the driver tells it; `memcpy` or `memset` for such a node.
    pub name: Option<String>,
    /// The address.
    pub address: Address,
    /// Start of the allocation.
    pub base: Address,
    /// Bytes of the allocation.
    pub bytes: u64,
}

/// The least number that may be an address.
const LOWEST: u64 = 1 << 16;

impl Template {
    /// Return the addresses that its kernels, memcpys and memsets name, those in child graphs included, as
    /// far as something is allocated there now. Each comes once for each node, in the order of the
    /// parameters.
    ///
    /// Of a kernel these are the words among its parameters, also inside structs, that the driver
    /// knows as addresses. A number that happens to be one is among them; addresses that a kernel
    /// finds in memory, and those that are packed, as in TMA descriptors, are not.
    #[doc(alias = "cuGraphKernelNodeGetParams")]
    pub fn addresses(&self) -> Result<Vec<NodeAddress>> {
        let mut found = Vec::new();
        let mut note = |node, name: Option<String>, words: Vec<u64>| {
            for address in words.into_iter().map(Address) {
                if let Some((base, bytes)) = self.device().memory_range(address)? {
                    found.push(NodeAddress {
                        node,
                        name: name.clone(),
                        address,
                        base,
                        bytes,
                    });
                }
            }
            Ok(())
        };
        self.with(|graph, _, _| visit(graph, true, &mut note))?;
        Ok(found)
    }

    /// Return for each pool whether a kernel, memcpy or memset names an address of it, as [`Self::addresses`]
    /// finds them.
    #[doc(alias = "cuGraphKernelNodeGetParams")]
    pub fn named_pools(&self, pools: &[&Pool]) -> Result<Vec<bool>> {
        let mut named = vec![false; pools.len()];
        let mut ranges: Vec<(u64, u64, usize)> = (0..)
            .zip(pools)
            .flat_map(|(number, pool)| {
                let of_pool = pool.ranges().into_iter();
                of_pool.map(move |(start, bytes)| (start.0, start.0 + bytes, number))
            })
            .collect();
        ranges.sort_unstable();
        let mut note = |_, _, words: Vec<u64>| {
            for word in words {
                let behind = ranges.partition_point(|(start, ..)| *start <= word);
                if let Some((_, end, number)) = behind.checked_sub(1).map(|place| ranges[place]) {
                    named[number] |= word < end;
                }
            }
            Ok(())
        };
        self.with(|graph, _, _| visit(graph, false, &mut note))?;
        Ok(named)
    }
}

/// Call a function with each node that may name memory: the node, what it is called, and its words that may be
/// addresses, each once and in their order. A kernel's name, which takes longer to ask for than its words, is
/// there if that is wanted.
fn visit(
    graph: &OwnedGraph,
    names_kernels: bool,
    note: &mut impl FnMut(NodeHandle, Option<String>, Vec<u64>) -> Result<()>,
) -> Result<()> {
    for node in graph.nodes()? {
        let of_kernel = graph.words(node)?;
        if !of_kernel.is_empty() && !names_kernels {
            note(node, None, addresses_in(of_kernel))?;
            continue;
        }
        let detail = graph.detail(node)?;
        for body in detail.bodies() {
            visit(&graph.child(*body), names_kernels, note)?;
        }
        let (name, words) = match detail {
            NodeDetail::Kernel { name, .. } => (name, of_kernel),
            NodeDetail::Memcpy { dst, src, .. } => (Some("memcpy".to_owned()), vec![dst.0, src.0]),
            NodeDetail::Memset { dst, .. } => (Some("memset".to_owned()), vec![dst.0]),
            _ => continue,
        };
        note(node, name, addresses_in(words))?;
    }
    Ok(())
}

/// Return the words that may be addresses, each once and in their order.
fn addresses_in(mut words: Vec<u64>) -> Vec<u64> {
    let mut seen = HashSet::new();
    words.retain(|word| *word >= LOWEST && seen.insert(*word));
    words
}
