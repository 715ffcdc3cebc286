//! The parameters of the kernels in `loop.cu`, as bytes.

use super::{Draws, Flags, LoopPlan, MOST_OFFSETS, MOST_PIECES};
use crate::driver::handle::Address;

/// Return the bytes of `Parameter`; `draws` are moved on by this step's last stage.
pub(super) fn of_step_end(
    plan: &LoopPlan,
    condition: u64,
    state: Address,
    draws: &[Draws],
    decides: bool,
) -> Vec<u8> {
    let mut words = vec![
        condition,
        state.0,
        plan.host.0,
        plan.ring.0,
        plan.bytes_of_step(),
    ];
    words.extend(flags(plan.until));
    words.push(pair(plan.most_steps, u32::from(decides)));
    words.push(pair(count(plan.pieces.len()), count(draws.len())));
    for place in 0..MOST_PIECES {
        let piece = plan.pieces.get(place);
        words.push(piece.map_or(0, |piece| piece.address.0));
        words.push(piece.map_or(0, |piece| piece.bytes));
    }
    words.extend(offsets(draws));
    bytes(&words)
}

/// Return the bytes of `Stage`.
pub(super) fn of_stage_end(state: Address, draws: &[Draws]) -> Vec<u8> {
    let mut words = vec![state.0, pair(count(draws.len()), 0)];
    words.extend(offsets(draws));
    bytes(&words)
}

/// Return the bytes of both parameters of `cg_decide`.
pub(super) fn of_decide(condition: u64, all: Flags) -> [Vec<u8>; 2] {
    [bytes(&[condition]), bytes(&flags(Some(all)))]
}

fn flags(flags: Option<Flags>) -> [u64; 2] {
    flags.map_or([0, 0], |one| {
        [one.address.0, pair(one.elements, one.element_bytes)]
    })
}

fn offsets(draws: &[Draws]) -> Vec<u64> {
    let mut words = Vec::with_capacity(2 * MOST_OFFSETS);
    for place in 0..MOST_OFFSETS {
        let one = draws.get(place);
        words.push(one.map_or(0, |one| one.offset.0));
        words.push(one.map_or(0, |one| one.increment));
    }
    words
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn count(length: usize) -> u32 {
    u32::try_from(length).expect("a few")
}

fn bytes(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
