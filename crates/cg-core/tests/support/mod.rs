//! Shared by the test binaries: devices, data, kernels and a gate that holds a stream up.
#![allow(dead_code, reason = "each test binary uses a part of it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub(crate) mod graphs;
pub(crate) mod kernels;
pub(crate) mod raw;

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cg_core::{Code, Device, Error, Memory, NodeDetail, Result, Sim, SimBuilder, Template, Work};

/// Words of a test's memory: no multiple of a block's threads.
pub(crate) const WORDS: usize = 1000;

/// As bytes.
pub(crate) const BYTES: u64 = WORDS as u64 * 4;

/// The contents of outputs before the work under test.
pub(crate) const POISON: u32 = 0xA5A5_A5A5;

/// Return a simulated device that knows the kernels of `contract/kernels.cu`.
pub(crate) fn sim() -> (Sim, Device) {
    sim_from(Sim::builder())
}

/// The same with other options.
pub(crate) fn sim_from(builder: SimBuilder) -> (Sim, Device) {
    let sim = builder.build();
    kernels::register(&sim);
    let device = Device::sim(&sim);
    (sim, device)
}

/// Return a second device, to take foreign objects from.
pub(crate) fn other_device() -> Device {
    sim().1
}

/// Contents of memory; printed in short.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Words(Vec<u32>);

impl Deref for Words {
    type Target = Vec<u32>;

    fn deref(&self) -> &Vec<u32> {
        &self.0
    }
}

impl DerefMut for Words {
    fn deref_mut(&mut self) -> &mut Vec<u32> {
        &mut self.0
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sum = self
            .iter()
            .fold(0_u32, |sum, word| sum.rotate_left(1) ^ word);
        let first = &self[..self.len().min(4)];
        write!(f, "{} words {first:x?}…, together {sum:x}", self.len())
    }
}

/// Words that look random and are never zero; the same seed gives the same words.
pub(crate) fn random(seed: u64) -> Words {
    let words = (0..WORDS as u64).map(|i| split_mix(seed << 32 | i).max(1));
    Words(words.collect())
}

/// One such word.
pub(crate) fn random_word(seed: u64) -> u32 {
    split_mix(!seed).max(1)
}

fn split_mix(seed: u64) -> u32 {
    let mut mixed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    u32::try_from(mixed >> 32).unwrap()
}

/// `a * x + y`, as the kernel `axpy` leaves it in `y`.
pub(crate) fn axpy(a: u32, x: &[u32], y: &[u32]) -> Words {
    let sum = |(x, y): (&u32, &u32)| a.wrapping_mul(*x).wrapping_add(*y);
    Words(x.iter().zip(y).map(sum).collect())
}

/// Memory that holds `words`.
pub(crate) fn memory(device: &Device, words: &[u32]) -> Memory {
    let bytes = bytes(words);
    let memory = Memory::new(device, bytes.len() as u64).unwrap();
    memory.write(&bytes).unwrap();
    memory
}

/// Memory that holds nothing but [`POISON`].
pub(crate) fn poisoned(device: &Device) -> Memory {
    memory(device, &[POISON; WORDS])
}

/// Return what memory holds.
pub(crate) fn words(memory: &Memory) -> Words {
    try_words(memory).unwrap()
}

/// Return what memory holds, if it can be read.
pub(crate) fn try_words(memory: &Memory) -> Result<Words> {
    let bytes = memory.read()?;
    let (words, rest) = bytes.as_chunks();
    assert!(rest.is_empty());
    let words = words.iter().map(|word| u32::from_le_bytes(*word));
    Ok(Words(words.collect()))
}

/// Words as memory holds them.
pub(crate) fn bytes(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// [`WORDS`] times the same word.
pub(crate) fn all(word: u32) -> Words {
    Words(vec![word; WORDS])
}

/// Return the driver's code behind the error of a call that must fail.
pub(crate) fn code<T>(result: Result<T>) -> Code {
    let error = error(result);
    error
        .code()
        .unwrap_or_else(|| panic!("no code behind: {error}"))
}

/// Return the error of a call that must fail.
pub(crate) fn error<T>(result: Result<T>) -> Error {
    match result {
        Ok(_) => panic!("it did not fail"),
        Err(error) => error,
    }
}

/// Return whether the call failed because something belongs elsewhere.
pub(crate) fn is_foreign<T>(result: Result<T>) -> bool {
    matches!(error(result), Error::Foreign { .. })
}

/// Return whether the call failed because an argument is not acceptable.
pub(crate) fn is_invalid<T>(result: Result<T>) -> bool {
    matches!(error(result), Error::Invalid { .. })
}

/// Return the edges of a template by the memory that their memset and memcpy nodes write, in order of
/// address.
pub(crate) fn edges(template: &Template, names: &[(&Memory, &'static str)]) -> Vec<String> {
    let name = |node| match template.detail(node).unwrap() {
        NodeDetail::Memset { dst, .. } | NodeDetail::Memcpy { dst, .. } => {
            let found = names.iter().find(|(memory, _)| memory.address() == dst);
            found.unwrap_or_else(|| panic!("no name for {dst:?}")).1
        }
        other => panic!("no memory is written by {other:?}"),
    };
    let edges = template.edges().unwrap();
    let mut edges: Vec<String> = edges
        .into_iter()
        .map(|edge| format!("{} {}", name(edge.from), name(edge.to)))
        .collect();
    edges.sort();
    edges
}

/// Holds a stream up until it is opened or dropped. While it is closed, nothing may be freed or
/// loaded: a GPU would wait for the stream. So that such a mistake fails the test and does not hang
/// it, the gate opens by itself in the end.
pub(crate) struct Gate {
    open: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    pub(crate) fn new() -> Self {
        Self {
            open: Arc::default(),
        }
    }

    /// Return the work that waits at the gate.
    pub(crate) fn work(&self) -> Work {
        let shared = Arc::clone(&self.open);
        Work::host(move || {
            let (open, opened) = &*shared;
            let mut open = open.lock().unwrap_or_else(PoisonError::into_inner);
            let end = Instant::now() + Duration::from_secs(20);
            while !*open && Instant::now() < end {
                let waited = opened.wait_timeout(open, Duration::from_secs(1));
                open = waited.unwrap_or_else(PoisonError::into_inner).0;
            }
        })
    }

    pub(crate) fn open(&self) {
        let (open, opened) = &*self.open;
        *open.lock().unwrap_or_else(PoisonError::into_inner) = true;
        opened.notify_all();
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}
