//! Copies of the simulator to and from memory of the host.

mod support;

use std::sync::{Arc, Mutex};

use cg_core::{
    Address, Destination, HostMemory, Inputs, InstantiateFlags, Outputs, Sim, Stream, Template,
    Transfer,
};

use support::raw::{deliver, feed};
use support::{BYTES, all, bytes, memory, sim_from, words};

/// Memory that stands for the host's, at [`HOST`].
static HOST_BYTES: Mutex<Vec<u8>> = Mutex::new(Vec::new());
const HOST: u64 = 0x10_0000;

#[test]
fn inputs_and_outputs_reach_memory_of_the_host_where_the_device_does() {
    let read = |at: Address, into: &mut [u8]| {
        let place = usize::try_from(at.0 - HOST).unwrap();
        into.copy_from_slice(&HOST_BYTES.lock().unwrap()[place..][..into.len()]);
    };
    let write = |at: Address, from: &[u8]| {
        let place = usize::try_from(at.0 - HOST).unwrap();
        HOST_BYTES.lock().unwrap()[place..][..from.len()].copy_from_slice(from);
    };
    let builder = Sim::builder().host_memory(HostMemory { read, write });
    let (_, device) = sim_from(builder);
    *HOST_BYTES.lock().unwrap() = [bytes(&all(7)), bytes(&all(8))].concat();
    let slot = memory(&device, &all(1));
    let template = Arc::new(Template::new(&device).unwrap());
    let inputs = Inputs::add(&template, std::slice::from_ref(&slot), &[]).unwrap();
    let outputs = Outputs::add(&template, std::slice::from_ref(&slot)).unwrap();
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let stream = Stream::new(&device).unwrap();
    let sources = [Address(HOST)];
    let to = [Destination {
        address: Address(HOST + BYTES),
        bytes: BYTES,
    }];
    let (feed, delivery) = (
        feed(&inputs, &sources, &[]).unwrap(),
        deliver(&outputs, &to).unwrap(),
    );
    exec.replay_with(Transfer::new(Some(&feed), Some(&delivery)), &stream)
        .unwrap();
    stream.synchronize().unwrap();
    assert_eq!(words(&slot), all(7));
    assert_eq!(
        *HOST_BYTES.lock().unwrap(),
        [bytes(&all(7)), bytes(&all(7))].concat()
    );
}
