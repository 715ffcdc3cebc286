//! Storages of torch's: how many references there are, and the memory that they have.

/// Where a `c10::StorageImpl` has its count, in bytes: behind the table of its class.
const COUNT: usize = 8;

/// Where it has its memory, and what frees that: three words, each of which belongs to the memory.
const MEMORY: usize = 16;

type MemoryWords = [u64; 3];

/// Return how many references a storage has, by the address of its object.
#[inline]
pub(crate) fn storage_uses(storage: u64) -> u32 {
    let count = std::ptr::with_exposed_provenance::<u32>(word(storage, COUNT));
    // SAFETY: the address is that of a `c10::StorageImpl` which the caller of `cgraph._core.TreeNode` keeps:
    // by a tensor, or by a weak reference, which keeps the object, if not its memory. There
    // `cgraph._torch.block_owners` has found the count.
    unsafe { count.read_volatile() }
}

/// Let two living storages of one device exchange their memory, with what frees it.
pub(crate) fn exchange_memory(one: u64, other: u64) {
    let place =
        |storage| std::ptr::with_exposed_provenance_mut::<MemoryWords>(word(storage, MEMORY));
    // SAFETY: both are addresses of `c10::StorageImpl`s that the caller holds, by tensors over them or by
    // their objects, and the interpreter is held; `cgraph._torch.block_owners` has found in samples that these
    // words are all that says where memory is and how it is freed. They do not overlap: two objects.
    unsafe { place(one).swap(place(other)) };
}

fn word(storage: u64, place: usize) -> usize {
    usize::try_from(storage).unwrap_or(0) + place
}
