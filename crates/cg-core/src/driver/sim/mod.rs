//! The simulated driver: CUDA's streams, captures and graphs in ordinary memory, without a GPU.
//!
//! It is chosen only by name, never as a fallback. Its rules:
//!
//! - **Asynchronous.** Streams are queues. Nothing runs until somebody waits, or [`Sim::step`] or
//!   [`Sim::drive`] is called. There is no clock.
//! - **Seeded.** Among operations that are ready, a seeded choice is made; the same seed gives the
//!   same run.
//! - **Strict.** What is undefined on a GPU panics and names both parties: use after free, free in
//!   flight, a handle that is not live. What CUDA reports gives the same code.
//! - **Poisoned.** Fresh memory is `0xFF`: NaN as a float, -1 as an integer.
//! - **Faults.** Every fallible call can be made to fail: [`Sim::fail_next`], [`Sim::fail_call`].
//!
//! Memcpy, memset and host nodes are real; a kernel is a host closure registered under the name
//! that a module's PTX text declares. Not simulated: kernel code, time, bandwidth, peers.

mod capture;
mod exec;
mod graph;
mod memory;
mod pages;
mod ptx;
mod rebuild;
mod run;
mod stream;
mod template;
mod work;

use std::any::Any;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::handle::{Address, StreamHandle};
use super::{CaptureMode, Driver, failed, next_driver_id};
use crate::code::{Call, Code};
use crate::error::{Error, Result};

pub use memory::SimMemory;
pub use run::KernelCall;

/// The work of a simulated kernel; an error text makes the launch fail as a faulting kernel does.
pub type KernelFn = dyn Fn(&KernelCall<'_>) -> Result<(), String> + Send + Sync;

/// How to reach memory of the host at its own addresses: any address that is none of the device, also that of
/// host memory behind the device's. No rule of the simulator looks at such copies.
///
/// Whoever enqueues a copy keeps that memory until the copy has run, as a real device needs it.
#[derive(Debug, Clone, Copy)]
pub struct HostMemory {
    /// Fills a slice with the bytes at an address.
    pub read: fn(Address, &mut [u8]),
    /// Writes bytes to an address.
    pub write: fn(Address, &[u8]),
}

/// Objects that exist on a simulated device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Live {
    /// Allocations.
    pub memory: usize,
    /// Reserved ranges of addresses.
    pub ranges: usize,
    /// Pages that are mapped or not given up.
    pub pages: usize,
    /// Pieces of host memory that are pinned.
    pub pinned: usize,
    /// Loaded modules.
    pub modules: usize,
    /// Streams, without the legacy default stream.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Graphs, child graphs not counted.
    pub graphs: usize,
    /// Execs.
    pub execs: usize,
}

/// A simulated device and its driver. Clones are the same device.
#[derive(Clone)]
pub struct Sim {
    inner: Arc<Inner>,
}

struct Inner {
    id: u64,
    version: u32,
    host: Option<HostMemory>,
    state: Mutex<State>,
    /// Signalled when an operation has finished.
    finished: Condvar,
}

/// Everything that the lock guards.
struct State {
    next: u64,
    random: u64,
    memory: memory::Map,
    /// Start and size of pinned host memory.
    pinned: BTreeMap<usize, usize>,
    modules: BTreeMap<u64, work::Module>,
    functions: HashMap<u64, Arc<work::Function>>,
    kernels: HashMap<String, Arc<KernelFn>>,
    /// True if modules keep what they are loaded from.
    records_images: bool,
    streams: BTreeMap<u64, stream::Stream>,
    events: BTreeMap<u64, stream::Event>,
    captures: BTreeMap<u64, capture::Capture>,
    thread_modes: HashMap<std::thread::ThreadId, CaptureMode>,
    graphs: BTreeMap<u64, template::Graph>,
    /// By number: the value that each replay begins with. They stay, as execs outlive their graphs.
    conditions: BTreeMap<u64, u32>,
    execs: BTreeMap<u64, exec::Exec>,
    calls: Vec<Call>,
    fail_next: Vec<(Call, Code)>,
    fail_call: Option<(usize, Code)>,
    failure: Option<String>,
    ran: u64,
    /// Removed things that own closures: dropped with the lock open, since a closure may own
    /// anything, even the last reference to memory of this device.
    trash: Vec<Box<dyn Any + Send>>,
}

/// The state, locked.
struct Locked<'a> {
    guard: Option<MutexGuard<'a, State>>,
}

impl Locked<'_> {
    /// Open the lock until `signal` comes.
    fn wait(mut self, signal: &Condvar) {
        self.guard = self
            .guard
            .take()
            .map(|guard| signal.wait(guard).unwrap_or_else(PoisonError::into_inner));
    }
}

impl Deref for Locked<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.guard.as_ref().expect("taken only by drop")
    }
}

impl DerefMut for Locked<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.guard.as_mut().expect("taken only by drop")
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let trash = std::mem::take(&mut self.trash);
        self.guard = None;
        drop(trash);
    }
}

impl State {
    /// Return a handle that was never used before.
    fn fresh(&mut self) -> u64 {
        self.next += 0x10;
        self.next
    }
}

/// Builds a [`Sim`].
#[derive(Debug, Clone)]
pub struct SimBuilder {
    seed: u64,
    memory_bytes: u64,
    version: u32,
    host: Option<HostMemory>,
}

impl SimBuilder {
    /// Set the seed of the order in which ready operations run. Default 0.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Bytes of device memory. Default 16 GiB (used only as it is allocated).
    #[must_use]
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// Set the driver version, as CUDA numbers it. Default 13000.
    #[must_use]
    pub fn driver_version(mut self, version: u32) -> Self {
        self.version = version;
        self
    }

    /// Let copies of inputs and outputs reach memory of the host. By default an address that is no device
    /// address panics.
    #[must_use]
    pub fn host_memory(mut self, host: HostMemory) -> Self {
        self.host = Some(host);
        self
    }

    /// Return the device.
    #[must_use]
    pub fn build(self) -> Sim {
        let state = State {
            next: 0x5100_0000,
            random: self.seed,
            memory: memory::Map::new(self.memory_bytes),
            pinned: BTreeMap::new(),
            modules: BTreeMap::new(),
            functions: HashMap::new(),
            kernels: HashMap::new(),
            records_images: false,
            streams: BTreeMap::from([(StreamHandle::LEGACY.0, stream::Stream::default())]),
            events: BTreeMap::new(),
            captures: BTreeMap::new(),
            thread_modes: HashMap::new(),
            graphs: BTreeMap::new(),
            conditions: BTreeMap::new(),
            execs: BTreeMap::new(),
            calls: Vec::new(),
            fail_next: Vec::new(),
            fail_call: None,
            failure: None,
            ran: 0,
            trash: Vec::new(),
        };
        Sim {
            inner: Arc::new(Inner {
                id: next_driver_id(),
                version: self.version,
                host: self.host,
                state: Mutex::new(state),
                finished: Condvar::new(),
            }),
        }
    }
}

impl Default for Sim {
    fn default() -> Self {
        Self::builder().build()
    }
}

impl Sim {
    /// Return a builder with the defaults.
    #[must_use]
    pub fn builder() -> SimBuilder {
        SimBuilder {
            seed: 0,
            memory_bytes: 16 << 30,
            version: 13_000,
            host: None,
        }
    }

    /// Register what the kernel `name` does, for modules whose PTX text declares it.
    pub fn kernel(
        &self,
        name: &str,
        kernel: impl Fn(&KernelCall<'_>) -> Result<(), String> + Send + Sync + 'static,
    ) {
        self.state()
            .kernels
            .insert(name.to_owned(), Arc::new(kernel));
    }

    /// Enqueue a closure on a stream as if it were a kernel called `name`, or record it as a
    /// kernel node where the stream captures.
    pub fn launch_closure(
        &self,
        stream: StreamHandle,
        name: &str,
        closure: Arc<KernelFn>,
    ) -> Result<()> {
        let mut state = self.enter(Call::LaunchKernel)?;
        let work = work::Work::closure(name, closure);
        stream::enqueue(&mut state, stream, work, Call::LaunchKernel)
    }

    /// Run one ready operation; false if there is none.
    #[expect(clippy::must_use_candidate, reason = "called for what it runs")]
    pub fn step(&self) -> bool {
        run::step(self)
    }

    /// Run until nothing is in flight.
    pub fn drive(&self) {
        while self.step() {}
    }

    /// Hold the stream's operations back until nothing else can run, or until released.
    pub fn delay(&self, stream: StreamHandle, delayed: bool) {
        stream::get(&mut self.state(), stream).delayed = delayed;
    }

    /// Make the next `call` fail with `code`.
    pub fn fail_next(&self, call: Call, code: Code) {
        self.state().fail_next.push((call, code));
    }

    /// Make the `n`-th fallible call from now fail with `code`; zero is the next one.
    pub fn fail_call(&self, n: usize, code: Code) {
        self.state().fail_call = Some((n, code));
    }

    /// Take back the faults that were asked for and have not happened.
    pub fn clear_faults(&self) {
        let mut state = self.state();
        state.fail_next.clear();
        state.fail_call = None;
    }

    /// Return what the last failed kernel said, if one has failed; taking it makes the device usable
    /// again, which a real one is not.
    #[expect(
        clippy::must_use_candidate,
        reason = "called to make the device usable again"
    )]
    pub fn take_failure(&self) -> Option<String> {
        self.state().failure.take()
    }

    /// Return what exists on the device.
    #[must_use]
    pub fn live(&self) -> Live {
        let state = self.state();
        Live {
            memory: state.memory.live(),
            ranges: state.memory.pages.ranges(),
            pages: state.memory.pages.count(),
            pinned: state.pinned.len(),
            modules: state.modules.len(),
            streams: state.streams.values().filter(|s| !s.dying).count() - 1,
            events: state.events.len(),
            graphs: state.graphs.values().filter(|g| g.parent.is_none()).count(),
            execs: state.execs.len(),
        }
    }

    /// Return the calls made so far, failed ones included.
    #[must_use]
    pub fn calls(&self) -> Vec<Call> {
        self.state().calls.clone()
    }

    /// Return how many operations have run so far.
    #[must_use]
    pub fn ran(&self) -> u64 {
        self.state().ran
    }

    /// Return the bytes at an address as they are now, whatever is in flight.
    #[must_use]
    pub fn peek(&self, address: Address, bytes: u64) -> Vec<u8> {
        self.view(address, bytes).to_vec()
    }

    /// Return the memory at an address, which stays readable and writable after it was freed.
    #[must_use]
    pub fn view(&self, address: Address, bytes: u64) -> SimMemory {
        self.state().memory.view(address, bytes, "view")
    }

    fn state(&self) -> Locked<'_> {
        // A strict panic of ours under the lock leaves a state that later calls may still read.
        let guard = self.inner.state.lock();
        Locked {
            guard: Some(guard.unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Begin an infallible call: log it.
    fn enter_infallible(&self, call: Call) -> Locked<'_> {
        let mut state = self.state();
        state.calls.push(call);
        state
    }

    /// Begin a fallible call: log it and let the faults that were asked for happen.
    fn enter(&self, call: Call) -> Result<Locked<'_>> {
        let mut state = self.enter_infallible(call);
        if let Some(position) = state.fail_next.iter().position(|(asked, _)| *asked == call) {
            let (_, code) = state.fail_next.remove(position);
            return Err(failed(call, code));
        }
        match state.fail_call {
            Some((0, code)) => {
                state.fail_call = None;
                Err(failed(call, code))
            }
            Some((n, code)) => {
                state.fail_call = Some((n - 1, code));
                Ok(state)
            }
            None => Ok(state),
        }
    }

    /// Begin a call that CUDA calls potentially unsafe: refused while a capture forbids it.
    fn enter_unsafe(&self, call: Call) -> Result<Locked<'_>> {
        let mut state = self.enter(call)?;
        capture::check_unsafe(&mut state, call)?;
        Ok(state)
    }
}

impl Driver for Sim {
    fn id(&self) -> u64 {
        self.inner.id
    }

    fn name(&self) -> String {
        format!("sim:{}", self.inner.id)
    }

    fn version(&self) -> u32 {
        self.inner.version
    }

    fn model(&self) -> String {
        "simulator".to_owned()
    }
}

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sim").field(&self.inner.id).finish()
    }
}

/// Return the error of a call with an argument that CUDA refuses.
fn refuse(call: Call, code: Code) -> Error {
    failed(call, code)
}
