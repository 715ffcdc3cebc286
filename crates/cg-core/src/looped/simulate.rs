//! Simulated devices, which know what the kernel at the end of a step does.

use super::STEP_END;
use crate::driver::handle::Address;
use crate::driver::sim::{KernelCall, Sim};

/// Tell a simulator what the kernel does.
pub(crate) fn register(sim: &Sim) {
    sim.kernel(STEP_END, |call| {
        step_end(call);
        Ok(())
    });
}

fn step_end(call: &KernelCall<'_>) {
    let words = call.arg(0).as_chunks().0;
    let word = |place: usize| u64::from_le_bytes(words[place]);
    let low = |place: usize| word(place) & 0xFFFF_FFFF;
    let high = |place: usize| word(place) >> 32;
    let read = |address: u64| {
        let bytes = call.read(Address(address), 4);
        u32::from_le_bytes(bytes.try_into().expect("four bytes"))
    };
    let write = |address: u64, value: u32| call.write(Address(address), &value.to_le_bytes());
    let (state, host, ring, bytes_of_step) = (word(1), word(2), word(3), word(4));
    let step = read(state);
    if read(state + 4) == 0 {
        let mut to = ring + u64::from(step) * bytes_of_step;
        let pieces = usize::try_from(low(8)).expect("a few");
        for place in (0..pieces).map(|piece| 9 + 2 * piece) {
            let bytes = call.read(Address(word(place)), word(place + 1));
            call.write(Address(to), &bytes);
            to += word(place + 1);
        }
        let (elements, element_bytes) = (low(6), high(6));
        let is_until = element_bytes != 0 && {
            let flags = call.read(Address(word(5)), elements * element_bytes);
            let size = usize::try_from(element_bytes).expect("of a number");
            flags
                .chunks(size)
                .all(|one| one.iter().any(|byte| *byte != 0))
        };
        let draws = usize::try_from(high(8)).expect("a few");
        for place in (0..draws).map(|draw| 25 + 2 * draw) {
            let offset = call.read(Address(word(place)), 8);
            let offset = u64::from_le_bytes(offset.try_into().expect("eight bytes"));
            let moved = offset.wrapping_add(word(place + 1));
            call.write(Address(word(place)), &moved.to_le_bytes());
        }
        write(state, step + 1);
        let is_last = u64::from(step) + 1 >= low(7);
        let is_over = is_until || is_last || read(host + 4) != 0;
        write(state + 4, u32::from(is_over));
        write(host, step + 1);
    }
    if high(7) != 0 {
        call.set_condition(0, u32::from(read(state + 4) == 0));
    }
}
