//! Memory, modules and kernels.

use cg_core::{Code, Device, Error, Memory, Module, Stream, Work};

use crate::support::kernels::PTX;
use crate::support::{
    BYTES, POISON, all, bytes, code, error, is_foreign, is_invalid, memory, other_device, poisoned,
    random, words,
};

on_every_driver! {
    what_is_written_is_read_back,
    a_slice_is_a_part_of_its_memory,
    nothing_is_read_or_written_beyond_the_end,
    memory_has_at_least_one_byte,
    an_absurd_allocation_is_refused_with_the_numbers,
    allocated_memory_is_missing_from_the_free_memory,
    memory_outlives_its_clones,
    a_kernel_is_found_by_its_name_only,
    a_text_that_does_not_compile_is_refused,
    a_copy_needs_two_memories_of_one_size,
    a_memset_needs_whole_words,
    a_copy_stays_on_one_device,
}

fn what_is_written_is_read_back(device: &Device) {
    let memory = poisoned(device);
    memory.write(&bytes(&random(1))).unwrap();
    assert_eq!(words(&memory), random(1));
    assert_eq!(memory.bytes(), BYTES);
}

fn a_slice_is_a_part_of_its_memory(device: &Device) {
    let whole = memory(device, &random(2));
    let slice = whole.slice(400..800).unwrap();
    assert_eq!(slice.address(), whole.address().offset(400));
    assert_eq!(words(&slice)[..], random(2)[100..200]);

    slice.write(&bytes(&random(3)[..50])).unwrap();
    let mut expected = random(2);
    expected[100..150].copy_from_slice(&random(3)[..50]);
    assert_eq!(words(&whole), expected);
}

fn nothing_is_read_or_written_beyond_the_end(device: &Device) {
    let whole = memory(device, &random(4));
    let slice = whole.slice(0..40).unwrap();
    assert!(is_invalid(slice.write(&[7; 41])));
    assert!(is_invalid(slice.slice(20..41)));
    assert!(is_invalid(whole.slice(0..BYTES + 1)));
    #[expect(clippy::reversed_empty_ranges, reason = "what is refused here")]
    let reversed = whole.slice(20..10);
    assert!(is_invalid(reversed));
    assert_eq!(words(&whole), random(4));
}

fn memory_has_at_least_one_byte(device: &Device) {
    assert!(is_invalid(Memory::new(device, 0)));
    assert_eq!(Memory::new(device, 1).unwrap().bytes(), 1);
}

fn an_absurd_allocation_is_refused_with_the_numbers(device: &Device) {
    let absurd = 1 << 50;
    let total = device.memory_info().unwrap().total;
    match error(Memory::new(device, absurd)) {
        Error::OutOfMemory {
            requested,
            in_use,
            reserved,
            limit,
        } => {
            assert_eq!((requested, limit), (absurd, total));
            assert!(in_use <= limit && reserved == in_use);
        }
        other => panic!("{other}"),
    }
}

fn allocated_memory_is_missing_from_the_free_memory(device: &Device) {
    let bytes = 16 << 20;
    let before = device.memory_info().unwrap();
    let memory = Memory::new(device, bytes).unwrap();
    let during = device.memory_info().unwrap();
    assert_eq!(before.total, during.total);
    assert!(before.free - during.free >= bytes);
    drop(memory);
    assert!(device.memory_info().unwrap().free >= during.free + bytes);
}

fn memory_outlives_its_clones(device: &Device) {
    let first = memory(device, &random(5));
    let slice = first.slice(0..4).unwrap();
    drop(first.clone());
    drop(first);
    assert_eq!(words(&slice)[..], random(5)[..1]);
}

fn a_kernel_is_found_by_its_name_only(device: &Device) {
    let module = Module::load(device, PTX.as_bytes()).unwrap();
    assert_eq!(module.function("fill").unwrap().name(), "fill");
    assert_eq!(code(module.function("fil")), Code::NOT_FOUND);
}

fn a_text_that_does_not_compile_is_refused(device: &Device) {
    let text = ".version 8.4\n.target sm_75\n.address_size 64\n\nthis is no kernel\n";
    let refused = code(Module::load(device, text.as_bytes()));
    assert_eq!(refused, Code::INVALID_PTX);
}

fn a_copy_needs_two_memories_of_one_size(device: &Device) {
    let (a, b) = (poisoned(device), poisoned(device));
    assert!(is_invalid(Work::memcpy(&a, &b.slice(0..40).unwrap())));
}

fn a_memset_needs_whole_words(device: &Device) {
    let memory = poisoned(device);
    assert!(is_invalid(Work::memset(&memory.slice(0..41).unwrap(), 1)));
}

fn a_copy_stays_on_one_device(device: &Device) {
    let (here, there) = (poisoned(device), poisoned(&other_device()));
    assert!(is_foreign(Work::memcpy(&here, &there)));

    let work = Work::memset(&there, 1).unwrap();
    assert!(is_foreign(Stream::new(device).unwrap().enqueue(&work)));
    assert_eq!(words(&here), all(POISON));
}
