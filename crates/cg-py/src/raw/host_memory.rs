//! Memory of CPU tensors, which copies on the simulator reach by its address.

use std::ptr::{with_exposed_provenance, with_exposed_provenance_mut};

use cg_core::{Address, HostMemory};

/// The memory of this process.
pub(crate) const OF_PROCESS: HostMemory = HostMemory { read, write };

fn read(from: Address, into: &mut [u8]) {
    let from = with_exposed_provenance::<u8>(place(from));
    // SAFETY: the address is that of a slot, a source or a result of a replay, of so many bytes. Slots are
    // tensors that the template keeps, and `ReadyExec::replay` has just found them to have this memory;
    // results lie in segments of a pool that the template keeps; sources are tensors of the caller of the
    // replay, found to have such memory. That replay returns only once its copies have run, and
    // `into` is memory of its own.
    unsafe { from.copy_to_nonoverlapping(into.as_mut_ptr(), into.len()) }
}

fn write(to: Address, from: &[u8]) {
    let to = with_exposed_provenance_mut::<u8>(place(to));
    // SAFETY: as in `read`, of a slot or of a destination that was allocated for the call, which holds it.
    unsafe { to.copy_from_nonoverlapping(from.as_ptr(), from.len()) }
}

fn place(address: Address) -> usize {
    usize::try_from(address.0).expect("the address comes from a pointer")
}
