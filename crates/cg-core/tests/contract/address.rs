//! Memory that a template names, still there or not.

use cg_core::{Address, Args, Device, Memory, Module, NodeAddress, Stream, Template, Work};

use crate::support::kernels::{Kernels, PTX};
use crate::support::{BYTES, memory, poisoned, random, random_word};

on_every_driver! {
    the_range_of_an_address_is_that_of_its_allocation,
    nothing_is_where_memory_was_freed,
    the_addresses_of_a_kernel_are_those_of_its_arguments,
    the_addresses_of_memcpys_and_memsets_are_their_sides,
    the_addresses_in_a_child_are_found,
    a_kernel_whose_memory_was_freed_is_found,
}

fn the_range_of_an_address_is_that_of_its_allocation(device: &Device) {
    let memory = poisoned(device);
    for offset in [0, 1, BYTES - 1] {
        let (base, bytes) = device
            .memory_range(memory.address().offset(offset))
            .unwrap()
            .unwrap();
        assert!(base <= memory.address());
        assert!(base.0 + bytes >= memory.address().0 + BYTES);
    }
}

fn nothing_is_where_memory_was_freed(device: &Device) {
    assert_eq!(device.memory_range(Address(0)).unwrap(), None);
    assert_eq!(device.memory_range(Address(1 << 20)).unwrap(), None);
    // Large enough that a driver gives it back as a whole.
    let memory = Memory::new(device, 64 << 20).unwrap();
    let address = memory.address();
    assert!(device.memory_range(address).unwrap().is_some());
    drop(memory);
    assert_eq!(device.memory_range(address).unwrap(), None);
}

fn the_addresses_of_a_kernel_are_those_of_its_arguments(device: &Device) {
    let (x, y) = (memory(device, &random(1)), memory(device, &random(2)));
    let part = y.slice(400..800).unwrap();
    let template = Template::new(device).unwrap();
    let kernels = Kernels::load(device);
    let node = template.add(&kernels.axpy(3, &x, &y), &[]).unwrap();
    let found = template.addresses().unwrap();
    assert_eq!(places(&found), sorted(&[x.address(), y.address()]));
    for one in &found {
        assert_eq!(one.node, node.handle());
        assert_eq!(one.name.as_deref(), Some("axpy"));
        let range = device.memory_range(one.address).unwrap();
        assert_eq!(range, Some((one.base, one.bytes)));
    }
    template.add(&kernels.fill(&part, 1), &[]).unwrap();
    let found = template.addresses().unwrap();
    let all = [x.address(), y.address(), part.address()];
    assert_eq!(places(&found), sorted(&all));
}

fn the_addresses_of_memcpys_and_memsets_are_their_sides(device: &Device) {
    let (a, b, c) = (poisoned(device), poisoned(device), poisoned(device));
    let template = Template::new(device).unwrap();
    template.add(&Work::memcpy(&b, &a).unwrap(), &[]).unwrap();
    let set = Work::memset(&c, random_word(1)).unwrap();
    template.add(&set, &[]).unwrap();
    let found = template.addresses().unwrap();
    let all = [a.address(), b.address(), c.address()];
    assert_eq!(places(&found), sorted(&all));
    let sets = found
        .iter()
        .filter(|one| one.name.as_deref() == Some("memset"));
    assert_eq!(sets.count(), 1);
}

fn the_addresses_in_a_child_are_found(device: &Device) {
    let memory = poisoned(device);
    let child = Template::new(device).unwrap();
    let work = Kernels::load(device).fill(&memory, random_word(2));
    child.add(&work, &[]).unwrap();
    let template = Template::new(device).unwrap();
    template.add_child(&child, &[]).unwrap();
    assert_eq!(places(&template.addresses().unwrap()), [memory.address()]);
}

#[expect(unsafe_code, reason = "a kernel with memory that dies before its node")]
fn a_kernel_whose_memory_was_freed_is_found(device: &Device) {
    let driver = device.driver();
    let address = driver.mem_alloc(64 << 20).unwrap();
    let function = Module::load(device, PTX.as_bytes())
        .unwrap()
        .function("fill")
        .unwrap();
    let args = Args::new().u64(address.0).u32(1).u32(0);
    let template = Template::new(device).unwrap();
    // SAFETY: the kernel takes these arguments, and is never run.
    let work = unsafe { Work::kernel(&function, 1, 1, args) }.unwrap();
    template.add(&work, &[]).unwrap();
    let [found] = &template.addresses().unwrap()[..] else {
        panic!("one address")
    };
    assert_eq!(found.address, address);
    Stream::new(device).unwrap().synchronize().unwrap();
    // SAFETY: it was allocated above, and no work touches it.
    unsafe { driver.mem_free(address) };
    assert_eq!(device.memory_range(found.address).unwrap(), None);
    assert_eq!(template.addresses().unwrap(), []);
}

fn places(found: &[NodeAddress]) -> Vec<Address> {
    let places: Vec<Address> = found.iter().map(|one| one.address).collect();
    sorted(&places)
}

fn sorted(addresses: &[Address]) -> Vec<Address> {
    let mut sorted = addresses.to_vec();
    sorted.sort_unstable();
    sorted
}
