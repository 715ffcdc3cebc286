//! Running simulated work: one ready operation at a time, in seeded order.

use std::any::Any;
use std::cell::Cell;
use std::collections::VecDeque;

use super::exec::{Replay, Status};
use super::memory::SimMemory;
use super::stream::Item;
use super::template::NodeWork;
use super::work::{Function, Work, call_host};
use super::{HostMemory, Locked, Sim, State, refuse};
use crate::code::{Call, Code};
use crate::driver::handle::{Address, ConditionHandle, StreamHandle};
use crate::driver::spec::Dim3;
use crate::error::Result;

/// A launch, as a simulated kernel sees it.
pub struct KernelCall<'a> {
    sim: &'a Sim,
    stream: u64,
    name: &'a str,
    args: &'a [Box<[u8]>],
    /// Blocks.
    pub grid: Dim3,
    /// Threads per block.
    pub block: Dim3,
    /// Dynamic shared memory per block.
    pub shared_bytes: u32,
}

impl KernelCall<'_> {
    /// Return the bytes of the `index`-th argument.
    ///
    /// # Panics
    /// If the launch has fewer.
    #[must_use]
    pub fn arg(&self, index: usize) -> &[u8] {
        &self.args[index]
    }

    /// Return the `index`-th argument as a 32-bit number.
    ///
    /// # Panics
    /// If it has another size.
    #[must_use]
    pub fn u32(&self, index: usize) -> u32 {
        let bytes = self.arg(index).try_into();
        u32::from_le_bytes(bytes.expect("the argument has four bytes"))
    }

    /// Return the `bytes` bytes that the `index`-th argument points at.
    ///
    /// # Panics
    /// If the argument is no address, or the range is not inside one live allocation.
    #[must_use]
    pub fn memory(&self, index: usize, bytes: u64) -> SimMemory {
        let address = self.arg(index).try_into();
        let address = u64::from_le_bytes(address.expect("the argument has eight bytes"));
        self.memory_at(Address(address), bytes)
    }

    /// Return the `bytes` bytes at an address that the kernel got in some other way.
    ///
    /// # Panics
    /// If the range is not inside one live allocation.
    #[must_use]
    pub fn memory_at(&self, address: Address, bytes: u64) -> SimMemory {
        let user = format!("kernel {}", self.name);
        let state = self.sim.state();
        state.memory.view(address, bytes, &user)
    }

    /// Return the bytes at an address of the device, or of the host where the device reaches that.
    ///
    /// # Panics
    /// As [`Self::memory_at`].
    #[must_use]
    pub fn read(&self, address: Address, bytes: u64) -> Vec<u8> {
        let Some(host) = self.host_at(address) else {
            return self.memory_at(address, bytes).to_vec();
        };
        let mut found = vec![0; usize::try_from(bytes).expect("memory of the host")];
        (host.read)(address, &mut found);
        found
    }

    /// Write to an address of the device, or of the host where the device reaches that.
    ///
    /// # Panics
    /// As [`Self::memory_at`].
    pub fn write(&self, address: Address, data: &[u8]) {
        match self.host_at(address) {
            Some(host) => (host.write)(address, data),
            None => self.memory_at(address, data.len() as u64).copy_from(data),
        }
    }

    /// Set the condition whose number the `index`-th argument begins with, for the rest of the replay.
    ///
    /// # Panics
    /// If the launch is no step of a replay.
    pub fn set_condition(&self, index: usize, value: u32) {
        let number = self.arg(index).first_chunk();
        let number = u64::from_le_bytes(*number.expect("the argument has eight bytes"));
        let mut state = self.sim.state();
        let queue = state
            .streams
            .get_mut(&self.stream)
            .map(|stream| &mut stream.queue);
        match queue.and_then(|queue| queue.front_mut()) {
            Some(Item::Replay(replay)) => replay.set_condition(ConditionHandle(number), value),
            _ => panic!("kernel {} sets a condition outside of a replay", self.name),
        }
    }

    fn host_at(&self, address: Address) -> Option<HostMemory> {
        let host = self.sim.inner.host?;
        (!self.sim.state().memory.knows(address)).then_some(host)
    }
}

thread_local! {
    /// True if this thread is running an operation of a simulated device.
    static IN_OPERATION: Cell<bool> = const { Cell::new(false) };
}

/// The origin of a running operation.
enum Place {
    Head(u64),
    Step(u64, usize),
}

/// Fail if an earlier kernel has: on a GPU, nothing works after that.
pub(super) fn check_failure(state: &State, call: Call) -> Result<()> {
    match state.failure {
        Some(_) => Err(refuse(call, Code::LAUNCH_FAILED)),
        None => Ok(()),
    }
}

/// Run one ready operation; false if there is none.
pub(super) fn step(sim: &Sim) -> bool {
    step_locked(sim, sim.state())
}

/// Run until the stream is empty, for a call that waits for that.
pub(super) fn drive_stream(sim: &Sim, stream: StreamHandle, call: Call) -> Result<()> {
    drive_until(sim, call, |state| {
        state
            .streams
            .get(&stream.0)
            .is_none_or(|stream| stream.queue.is_empty() && !stream.busy)
    })
}

/// Run until `done` holds, for a call that waits for that.
///
/// # Errors
/// In an operation that the device runs, as a wait for that device would last for ever: CUDA's host
/// functions make no driver call. Or if an operation has failed.
///
/// # Panics
/// If nothing can run and nothing is running, which would be for ever.
pub(super) fn drive_until(sim: &Sim, call: Call, done: impl Fn(&State) -> bool) -> Result<()> {
    if IN_OPERATION.get() {
        return Err(refuse(call, Code::NOT_PERMITTED));
    }
    loop {
        let mut state = sim.state();
        retire(&mut state);
        if done(&state) {
            return check_failure(&state, call);
        }
        let running = is_running(&state);
        if step_locked(sim, state) {
            continue;
        }
        assert!(running, "waiting for work that can never run");
        let state = sim.state();
        if !done(&state) && is_running(&state) {
            state.wait(&sim.inner.finished);
        }
    }
}

fn boxed(item: Item) -> Box<dyn Any + Send> {
    Box::new(item)
}

fn is_running(state: &State) -> bool {
    state.streams.values().any(|stream| {
        stream.busy
            || matches!(stream.queue.front(), Some(Item::Replay(replay))
                if replay.status.contains(&Status::Running))
    })
}

fn step_locked(sim: &Sim, mut state: Locked<'_>) -> bool {
    retire(&mut state);
    let Some(place) = choose(&mut state) else {
        return false;
    };
    let work = start(&mut state, &place);
    drop(state);
    let mut running = Running {
        sim,
        place,
        outcome: Err("it panicked".to_owned()),
    };
    // The lock is open here: a kernel may be a Python function that takes its own locks.
    IN_OPERATION.set(true);
    let (Place::Head(stream) | Place::Step(stream, _)) = running.place;
    running.outcome = work.map_or(Ok(()), |work| execute(sim, &work, stream));
    true
}

/// An operation that is running; finished when dropped, also by a panic of the operation.
struct Running<'a> {
    sim: &'a Sim,
    place: Place,
    outcome: std::result::Result<(), String>,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        IN_OPERATION.set(false);
        let outcome = std::mem::replace(&mut self.outcome, Ok(()));
        finish(&mut self.sim.state(), &self.place, outcome);
        self.sim.inner.finished.notify_all();
    }
}

/// Take finished markers and replays from the heads of the streams.
pub(super) fn retire(state: &mut State) {
    let mut changed = true;
    while changed {
        changed = false;
        let events = &mut state.events;
        for stream in state.streams.values_mut().filter(|stream| !stream.busy) {
            let gone = match stream.queue.front() {
                Some(Item::Record(event, record)) => {
                    if let Some(event) = events.get_mut(event) {
                        event.reached = event.reached.max(*record);
                    }
                    true
                }
                Some(Item::Wait(event, record)) => events
                    .get(event)
                    .is_none_or(|event| event.reached >= *record),
                Some(Item::Replay(replay)) => replay.status.iter().all(|s| *s == Status::Done),
                Some(Item::Work(_)) | None => false,
            };
            if gone {
                state.trash.extend(stream.queue.pop_front().map(boxed));
                changed = true;
            }
        }
    }
    state
        .streams
        .retain(|_, stream| !stream.dying || stream.busy || !stream.queue.is_empty());
}

/// Return a ready operation, by seeded choice; delayed streams only where nothing else is ready.
fn choose(state: &mut State) -> Option<Place> {
    let mut ready = Vec::new();
    let mut delayed = Vec::new();
    for (handle, stream) in &state.streams {
        let places = if stream.delayed {
            &mut delayed
        } else {
            &mut ready
        };
        match stream.queue.front() {
            Some(Item::Work(_)) if !stream.busy => places.push(Place::Head(*handle)),
            Some(Item::Replay(replay)) if !is_behind(state, *handle, replay) => {
                let steps = replay.ready().filter(|&i| match &replay.steps[i].work {
                    NodeWork::Wait(event) => state
                        .events
                        .get(&event.0)
                        .is_none_or(|event| event.reached >= replay.records[i]),
                    _ => true,
                });
                places.extend(steps.map(|i| Place::Step(*handle, i)));
            }
            _ => {}
        }
    }
    if ready.is_empty() {
        ready = delayed;
    }
    if ready.is_empty() {
        return None;
    }
    let choice = random(state) % ready.len() as u64;
    let choice = usize::try_from(choice).expect("less than a length");
    Some(ready.swap_remove(choice))
}

/// Return whether another stream has an earlier replay of the same exec: its replays never overlap.
fn is_behind(state: &State, own: u64, replay: &Replay) -> bool {
    let others = state.streams.iter().filter(|(handle, _)| **handle != own);
    others.flat_map(|(_, stream)| &stream.queue).any(|item| {
        matches!(item, Item::Replay(other)
            if other.exec == replay.exec && other.number < replay.number)
    })
}

/// Mark the operation as running; what it does, if it does anything.
fn start(state: &mut State, place: &Place) -> Option<Work> {
    let (Place::Head(handle) | Place::Step(handle, _)) = place;
    let stream = state.streams.get_mut(handle).expect("chosen just now");
    match (place, stream.queue.front_mut()) {
        (Place::Head(_), Some(Item::Work(work))) => {
            let work = work.clone();
            stream.busy = true;
            Some(work)
        }
        (Place::Step(_, index), Some(Item::Replay(replay))) => {
            replay.status[*index] = Status::Running;
            let step = &replay.steps[*index];
            match &step.work {
                NodeWork::Work(work) if step.enabled => Some(work.clone()),
                _ => None,
            }
        }
        _ => unreachable!("chosen just now"),
    }
}

fn finish(state: &mut State, place: &Place, outcome: std::result::Result<(), String>) {
    state.ran += 1;
    match place {
        Place::Head(handle) => {
            if let Some(stream) = state.streams.get_mut(handle) {
                stream.busy = false;
                state.trash.extend(stream.queue.pop_front().map(boxed));
            }
        }
        Place::Step(handle, index) => {
            let queue = state
                .streams
                .get_mut(handle)
                .map(|stream| &mut stream.queue);
            if let Some(Item::Replay(replay)) = queue.and_then(|queue| queue.front_mut()) {
                replay.ran(*index, &state.conditions);
                replay.reach(*index, &mut state.events);
            }
        }
    }
    if let Err(reason) = outcome {
        // Nothing that was enqueued before the failure runs any more.
        for stream in state.streams.values_mut() {
            let running = stream.busy
                || matches!(stream.queue.front(), Some(Item::Replay(replay))
                    if replay.status.contains(&Status::Running));
            let mut first = running;
            let (kept, cancelled) = stream.queue.drain(..).partition(|item| {
                std::mem::take(&mut first) || matches!(item, Item::Record(..) | Item::Wait(..))
            });
            stream.queue = kept;
            let cancelled: VecDeque<Item> = cancelled;
            for item in &cancelled {
                if let Item::Replay(replay) = item {
                    (0..replay.steps.len()).for_each(|i| replay.reach(i, &mut state.events));
                }
            }
            state.trash.push(Box::new(cancelled));
        }
        state.failure.get_or_insert(reason);
    }
    retire(state);
}

fn execute(sim: &Sim, work: &Work, stream: u64) -> std::result::Result<(), String> {
    work.check_loaded();
    match work {
        Work::Kernel {
            function,
            grid,
            block,
            shared_bytes,
            args,
        } => {
            let Function { name, kernel, .. } = &**function;
            let call = KernelCall {
                sim,
                stream,
                name,
                args,
                grid: *grid,
                block: *block,
                shared_bytes: *shared_bytes,
            };
            return kernel(&call).map_err(|reason| format!("kernel {name}: {reason}"));
        }
        Work::Memcpy { dst, src, bytes } => {
            let user = work.to_string();
            let state = sim.state();
            let from = state.memory.view(*src, *bytes, &user);
            let to = state.memory.view(*dst, *bytes, &user);
            drop(state);
            to.copy_from(&from.to_vec());
        }
        Work::Memset {
            dst,
            value,
            element_bytes,
            count,
        } => {
            let bytes = count * u64::from(*element_bytes);
            let to = sim.state().memory.view(*dst, bytes, &work.to_string());
            let element = &value.to_le_bytes()[..usize::from(*element_bytes)];
            to.copy_from(&element.repeat(to.bytes() / element.len()));
        }
        Work::Host(function) => {
            let function = function.upgrade();
            let function = function.expect("a host function dies while work may call it");
            call_host(&function);
        }
    }
    Ok(())
}

/// `SplitMix64`.
fn random(state: &mut State) -> u64 {
    state.random = state.random.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mut mixed = state.random;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
