//! Simulated devices, which know what the kernels do.

use super::layout::{Copy, KERNELS, Parameter};
use super::{Direction, Fill};
use crate::driver::handle::Address;
use crate::driver::sim::{KernelCall, Sim};

/// Tell a simulator what the kernels do.
pub(crate) fn register(sim: &Sim) {
    for kernel in KERNELS {
        sim.kernel(kernel.name(Direction::In), |call| {
            copy_in(call);
            Ok(())
        });
        sim.kernel(kernel.name(Direction::Out), |call| {
            copy_out(call);
            Ok(())
        });
    }
}

/// # Panics
/// If what is copied is also written: on a GPU, the result would be anybody's guess.
fn copy_out(call: &KernelCall<'_>) {
    let parameter = Parameter::from_bytes(call.arg(0));
    let copies = parameter.all_copies();
    let copies: Vec<_> = copies.iter().filter(|c| c.bytes > 0).collect();
    for copy in copies.iter().filter(|copy| copy.own != copy.other) {
        require_blocks(call, copy);
        let end = copy.other + copy.bytes;
        for (i, other) in copies.iter().enumerate() {
            let reads = copy.other < other.own + other.bytes && other.own < end;
            assert!(!reads, "{copy:?} writes what {other:?} reads");
            let writes = copy.other < other.other + other.bytes && other.other < end;
            let is_same = std::ptr::eq(*copy, copies[i]) || other.own == other.other;
            assert!(is_same || !writes, "{copy:?} writes what {other:?} writes");
        }
        let bytes = call.read(Address(copy.own), copy.bytes);
        call.write(Address(copy.other), &bytes);
    }
    assert_eq!(parameter.all_stores(), [], "outputs store nothing");
}

fn require_blocks(call: &KernelCall<'_>, copy: &Copy) {
    let end = copy.first_block + copy.blocks;
    assert!(
        copy.blocks > 0 && end <= call.grid.x,
        "{copy:?} has no block in {}",
        call.grid
    );
}

/// # Panics
/// If what is copied is also written: on a GPU, the result would be anybody's guess.
fn copy_in(call: &KernelCall<'_>) {
    let parameter = Parameter::from_bytes(call.arg(0));
    let copies = parameter.all_copies();
    let copies: Vec<_> = copies.iter().filter(|c| c.bytes > 0).collect();
    let padding = parameter.padding();
    let is_padded = |copy: &Copy| padding.is_some() && copy.has_rows;
    let does_more = |copy: &&&Copy| copy.other != copy.own || is_padded(copy);
    for copy in copies.iter().filter(does_more) {
        let padding = padding.filter(|_| copy.has_rows);
        let head = padding.map_or(copy.bytes, |(_, rows, of)| {
            copy.bytes / u64::from(of) * u64::from(rows)
        });
        require_blocks(call, copy);
        for other in &copies {
            let apart = copy.other >= other.own + other.bytes || other.own >= copy.other + head;
            assert!(
                apart || copy.other == copy.own,
                "{copy:?} reads what {other:?} writes"
            );
        }
        let mut bytes = call.read(Address(copy.other), head);
        if let Some((fill, _, of)) = padding {
            let row = usize::try_from(copy.bytes / u64::from(of)).expect("it is in memory");
            let last = match fill {
                Fill::Zeros => vec![0; row],
                Fill::LastRow => bytes[bytes.len() - row..].to_vec(),
            };
            let left = (copy.bytes - head).try_into().expect("it is in memory");
            bytes.extend(last.iter().cycle().take(left));
        }
        call.write(Address(copy.own), &bytes);
    }
    for (address, value) in parameter.all_stores() {
        assert_eq!(address.0 % 8, 0, "a store of eight bytes at {address:?}");
        call.write(address, &value.to_le_bytes());
    }
}
