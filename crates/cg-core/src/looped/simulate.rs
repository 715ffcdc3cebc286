//! Simulated devices, which know what the kernels around the steps do.

use super::{DECIDE, STAGE_END, STEP_END};
use crate::driver::handle::Address;
use crate::driver::sim::{KernelCall, Sim};

/// Tell a simulator what the kernels do.
pub(crate) fn register(sim: &Sim) {
    sim.kernel(STEP_END, |call| {
        step_end(&Words::of(call, 0));
        Ok(())
    });
    sim.kernel(STAGE_END, |call| {
        stage_end(&Words::of(call, 0));
        Ok(())
    });
    sim.kernel(DECIDE, |call| {
        let are_set = Words::of(call, 1).are_set(0);
        call.set_condition(0, u32::from(are_set));
        Ok(())
    });
}

fn step_end(of: &Words<'_>) {
    let call = of.call;
    let (state, host, ring, bytes_of_step) = (of.word(1), of.word(2), of.word(3), of.word(4));
    let step = of.read(state);
    let decides = of.high(7) != 0;
    if of.read(state + 4) == 0 {
        let mut to = ring + u64::from(step) * bytes_of_step;
        let pieces = usize::try_from(of.low(8)).expect("a few");
        for place in (0..pieces).map(|piece| 9 + 2 * piece) {
            let bytes = call.read(Address(of.word(place)), of.word(place + 1));
            call.write(Address(to), &bytes);
            to += of.word(place + 1);
        }
        let draws = usize::try_from(of.high(8)).expect("a few");
        for draw in 0..draws {
            let moved = of.moved(25 + 2 * draw);
            call.write(Address(host + 8 + 8 * draw as u64), &moved.to_le_bytes());
        }
        of.write(state, step + 1);
        let is_last = u64::from(step) + 1 >= of.low(7);
        let is_stopped = decides && of.read(host + 4) != 0;
        let is_over = of.are_set(5) || is_last || is_stopped;
        of.write(state + 4, u32::from(is_over));
        of.write(host, step + 1);
    }
    if decides {
        call.set_condition(0, u32::from(of.read(state + 4) == 0));
    }
}

fn stage_end(of: &Words<'_>) {
    let draws = usize::try_from(of.low(1)).expect("a few");
    if of.read(of.word(0) + 4) == 0 {
        for draw in 0..draws {
            of.moved(2 + 2 * draw);
        }
    }
}

/// A parameter of a call, as words.
struct Words<'a> {
    call: &'a KernelCall<'a>,
    words: &'a [[u8; 8]],
}

impl<'a> Words<'a> {
    fn of(call: &'a KernelCall<'a>, place: usize) -> Self {
        let words = call.arg(place).as_chunks().0;
        Self { call, words }
    }

    fn word(&self, place: usize) -> u64 {
        u64::from_le_bytes(self.words[place])
    }

    fn low(&self, place: usize) -> u64 {
        self.word(place) & 0xFFFF_FFFF
    }

    fn high(&self, place: usize) -> u64 {
        self.word(place) >> 32
    }

    fn read(&self, address: u64) -> u32 {
        let bytes = self.call.read(Address(address), 4);
        u32::from_le_bytes(bytes.try_into().expect("four bytes"))
    }

    fn write(&self, address: u64, value: u32) {
        self.call.write(Address(address), &value.to_le_bytes());
    }

    /// Return whether the flags whose description begins with a word are all set.
    fn are_set(&self, place: usize) -> bool {
        let (elements, element_bytes) = (self.low(place + 1), self.high(place + 1));
        element_bytes != 0 && {
            let flags = self
                .call
                .read(Address(self.word(place)), elements * element_bytes);
            let size = usize::try_from(element_bytes).expect("of a number");
            flags
                .chunks(size)
                .all(|one| one.iter().any(|byte| *byte != 0))
        }
    }

    /// Move the offset whose description begins with a word; return where it is then.
    fn moved(&self, place: usize) -> u64 {
        let address = Address(self.word(place));
        let offset = self.call.read(address, 8);
        let offset = u64::from_le_bytes(offset.try_into().expect("eight bytes"));
        let moved = offset.wrapping_add(self.word(place + 1));
        self.call.write(address, &moved.to_le_bytes());
        moved
    }
}
