//! What the kernels do, for the simulator.

use super::layout::{KERNELS, Parameter};
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
    for copy in copies.iter().filter(|copy| copy.src != copy.dst) {
        let end = copy.first_block + copy.blocks;
        assert!(
            copy.blocks > 0 && end <= call.grid.x,
            "{copy:?} has no block in {}",
            call.grid
        );
        for other in &copies {
            let apart = copy.src >= other.dst + other.bytes || other.dst >= copy.src + copy.bytes;
            assert!(apart, "{copy:?} reads what {other:?} writes");
        }
        let from = call.memory_at(Address(copy.src), copy.bytes);
        call.memory_at(Address(copy.dst), copy.bytes)
            .copy_from(&from.to_vec());
    }
    for (address, value) in parameter.all_stores() {
        assert_eq!(address.0 % 8, 0, "a store of eight bytes at {address:?}");
        call.memory_at(address, 8).copy_from(&value.to_le_bytes());
    }
}
