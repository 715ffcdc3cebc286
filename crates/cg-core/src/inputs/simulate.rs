//! What the kernels do, for the simulator.

use super::layout::{Copy, KERNELS, Parameter};
use super::padding::Fill;
use crate::driver::handle::Address;
use crate::driver::sim::{KernelCall, Sim};

/// Tells a simulator what the kernels do.
pub(crate) fn register(sim: &Sim) {
    for kernel in KERNELS {
        sim.kernel(kernel.name, |call| {
            simulate(call);
            Ok(())
        });
    }
}

/// # Panics
/// If what is copied is also written: on a GPU, the result would be anybody's guess.
fn simulate(call: &KernelCall<'_>) {
    let parameter = Parameter::from_bytes(call.arg(0));
    let copies = parameter.all_copies();
    let copies: Vec<_> = copies.iter().filter(|c| c.bytes > 0).collect();
    let padding = parameter.padding();
    let is_padded = |copy: &Copy| padding.is_some() && copy.has_rows;
    let does_more = |copy: &&&Copy| copy.src != copy.dst || is_padded(copy);
    for copy in copies.iter().filter(does_more) {
        let padding = padding.filter(|_| copy.has_rows);
        let head = padding.map_or(copy.bytes, |(_, rows, of)| {
            copy.bytes / u64::from(of) * u64::from(rows)
        });
        let end = copy.first_block + copy.blocks;
        assert!(
            copy.blocks > 0 && end <= call.grid.x,
            "{copy:?} has no block in {}",
            call.grid
        );
        for other in &copies {
            let apart = copy.src >= other.dst + other.bytes || other.dst >= copy.src + head;
            assert!(
                apart || copy.src == copy.dst,
                "{copy:?} reads what {other:?} writes"
            );
        }
        let mut bytes = call.memory_at(Address(copy.src), head).to_vec();
        if let Some((fill, _, of)) = padding {
            let row = usize::try_from(copy.bytes / u64::from(of)).expect("it is in memory");
            let last = match fill {
                Fill::Zeros => vec![0; row],
                Fill::LastRow => bytes[bytes.len() - row..].to_vec(),
            };
            let left = (copy.bytes - head).try_into().expect("it is in memory");
            bytes.extend(last.iter().cycle().take(left));
        }
        call.memory_at(Address(copy.dst), copy.bytes)
            .copy_from(&bytes);
    }
    for (address, value) in parameter.all_stores() {
        assert_eq!(address.0 % 8, 0, "a store of eight bytes at {address:?}");
        call.memory_at(address, 8).copy_from(&value.to_le_bytes());
    }
}
