//! `Inputs`: static tensors of a template, and what a call copies into them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cg_core::Address;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arguments::MatchedTensors;
use crate::detach::detached;
use crate::device::Template;
use crate::error::argument;
use crate::raw;
use crate::tensors::{Match, Signature, TensorReader};

/// Root nodes of a template that copy tensors into static ones.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Inputs {
    core: cg_core::Inputs,
    slots: Vec<Slot>,
    /// Address of each static tensor. This and the next are apart from the slots, as they are all
    /// that most calls need of them.
    own: Box<[Address]>,
    /// The address that the kernel was last found able to copy from, which is not looked for among
    /// all destinations again; at first 0, where no tensor is.
    safe: Box<[AtomicU64]>,
    /// The memory that torch copies to, before the kernel runs.
    by_torch: Vec<Range<u64>>,
}

struct Slot {
    signature: Signature,
    /// The static tensor without its history, so that torch may copy to it.
    tensor: Py<PyAny>,
    /// True if the kernel can copy to it: else torch has to.
    is_plain: bool,
}

#[pymethods]
impl Inputs {
    /// Add nodes for these static tensors, and for eight bytes at each address of `stores`, which
    /// the caller keeps alive as long as the template and its execs.
    #[new]
    #[pyo3(signature = (template, reader, tensors, stores=Vec::new()))]
    fn new(
        py: Python<'_>,
        template: &Template,
        reader: &Bound<'_, TensorReader>,
        tensors: Vec<Bound<'_, PyAny>>,
        stores: Vec<u64>,
    ) -> PyResult<Self> {
        let device = template.core.device();
        let mut slots = tensors
            .into_iter()
            .map(|tensor| Slot::new(reader, &tensor))
            .collect::<PyResult<Vec<Slot>>>()?;
        leave_overlapping_to_torch(&mut slots);
        let memory = slots.iter().map(|slot| {
            let bytes = if slot.is_plain {
                slot.signature.nbytes()
            } else {
                0
            };
            raw::memory(device, slot.signature.address(), bytes)
        });
        let memory: Vec<_> = memory.collect();
        let stores = stores.into_iter().map(|at| raw::memory(device, at, 8));
        let stores: Vec<_> = stores.collect();
        let core = detached(py, || {
            cg_core::Inputs::add(&template.core, &memory, &stores)
        })?;
        // Not the tensors themselves: these own the same memory, also if a tensor is given another,
        // and nothing that they could lead back to us by.
        let owners: Vec<Py<PyAny>> = slots.iter().map(|s| s.tensor.clone_ref(py)).collect();
        template.core.retain(Arc::new(owners));
        let by_torch = slots.iter().filter(|slot| !slot.is_plain);
        let by_torch = by_torch.map(|slot| slot.signature.span()).collect();
        let own = slots.iter().map(|slot| Address(slot.signature.address()));
        Ok(Self {
            core,
            own: own.collect(),
            safe: slots.iter().map(|_| AtomicU64::default()).collect(),
            slots,
            by_torch,
        })
    }

    /// Return how many static tensors there are.
    fn __len__(&self) -> usize {
        self.slots.len()
    }

    /// Return the address that a replay copies to each static tensor from: its own where there is nothing
    /// to copy, or where torch has copied, which it does here if the strides differ.
    fn sources(&self, tensors: &Bound<'_, PyTuple>) -> PyResult<Vec<u64>> {
        let mut sources = Vec::new();
        self.collect(tensors, &mut sources)?;
        Ok(sources.into_iter().map(|source| source.0).collect())
    }
}

impl Inputs {
    pub(crate) fn core(&self) -> &cg_core::Inputs {
        &self.core
    }

    /// Return how many words are stored.
    pub(crate) fn stores(&self) -> usize {
        self.core.stores()
    }

    /// The sources of a replay that copies nothing.
    pub(crate) fn rest(&self, sources: &mut Vec<Address>) {
        sources.clear();
        sources.extend_from_slice(&self.own);
    }

    /// [`Self::sources`] into a vector that is used again.
    pub(crate) fn collect(
        &self,
        tensors: &Bound<'_, PyTuple>,
        sources: &mut Vec<Address>,
    ) -> PyResult<()> {
        self.require_count(tensors.len())?;
        sources.clear();
        let mut by_torch = Vec::new();
        for (index, (slot, tensor)) in self.slots.iter().zip(tensors.iter_borrowed()).enumerate() {
            let fit = slot.signature.fit(&tensor, index)?;
            let source = self.source(index, fit);
            if source.is_none() {
                by_torch.push((index, tensor.to_owned(), fit));
            }
            sources.push(source.unwrap_or(self.own[index]));
        }
        self.copy_by_torch(by_torch)
    }

    /// The same for tensors that are known to fit. Often they lie where those of the call before lay.
    #[inline]
    pub(crate) fn collect_found(
        &self,
        tensors: MatchedTensors<'_, '_>,
        sources: &mut Vec<Address>,
    ) -> PyResult<()> {
        let are_same = match tensors {
            MatchedTensors::Each(matched) => {
                are_sources(matched.iter().map(|one| one.fit), &self.own, sources)
            }
            MatchedTensors::Again(_, addresses) => addresses == sources,
        };
        if are_same {
            return Ok(());
        }
        self.require_count(tensors.len())?;
        sources.clear();
        let mut by_torch = Vec::new();
        for (index, own) in self.own.iter().enumerate() {
            let fit = tensors.fit(index, *own);
            let source = self.source(index, fit);
            if source.is_none() {
                by_torch.push((index, tensors.get(index).to_owned(), fit));
            }
            sources.push(source.unwrap_or(*own));
        }
        self.copy_by_torch(by_torch)
    }

    /// Return whether no tensor, each of which is known to fit, has to be copied by torch.
    #[inline]
    pub(crate) fn can_copy(&self, tensors: MatchedTensors<'_, '_>) -> bool {
        let mut places = self.own.iter().enumerate();
        let are_as_many = tensors.len() == self.own.len();
        are_as_many
            && places.all(|(index, own)| match tensors.fit(index, *own) {
                Match::Same => true,
                Match::Copy(address) => self.is_safe(index, address),
                Match::Torch => false,
            })
    }
}

impl Inputs {
    fn require_count(&self, given: usize) -> PyResult<()> {
        if given == self.slots.len() {
            return Ok(());
        }
        let expected = format!("{}, one for each static input", self.slots.len());
        Err(argument(
            "the number of tensors",
            &given.to_string(),
            &expected,
        ))
    }

    /// Return where a replay copies a tensor from; none if torch has to copy it.
    #[inline]
    fn source(&self, index: usize, fit: Match) -> Option<Address> {
        match fit {
            Match::Same => Some(self.own[index]),
            Match::Copy(address) if self.is_safe(index, address) => Some(Address(address)),
            Match::Copy(_) | Match::Torch => None,
        }
    }

    /// Let torch copy tensors to static ones. Those that lie in other static ones, as where arguments are
    /// swapped, are read before anything is written.
    fn copy_by_torch(&self, tensors: Vec<(usize, Bound<'_, PyAny>, Match)>) -> PyResult<()> {
        let are_several = tensors.len() > 1;
        let mut read = Vec::new();
        for (index, tensor, fit) in tensors {
            self.require_contents(index, &tensor)?;
            let lies_in_slot =
                matches!(fit, Match::Copy(from) if self.core.conflicts(index, Address(from)));
            let tensor = tensor.call_method0(intern!(tensor.py(), "detach"))?;
            read.push(if are_several && lies_in_slot {
                (index, tensor.call_method0(intern!(tensor.py(), "clone"))?)
            } else {
                (index, tensor)
            });
        }
        for (index, tensor) in read {
            let own = self.slots[index].tensor.bind(tensor.py());
            copy(own, &tensor)?;
        }
        Ok(())
    }

    /// Raise unless each static tensor has the memory that the graph copies to, as it may have been resized.
    pub(crate) fn require_memory(&self, py: Python<'_>) -> PyResult<()> {
        for (index, (slot, own)) in self.slots.iter().zip(&self.own).enumerate() {
            if !slot.is_plain || slot.signature.nbytes() == 0 {
                continue;
            }
            let reader = slot.signature.reader().get();
            let (now, _) = reader.location(slot.tensor.bind(py))?;
            if now != own.0 {
                return Err(argument(
                    &format!("static input {index}"),
                    &format!("at {now:#x}"),
                    &format!(
                        "at {:#x}, where it was captured: resize_ has moved it",
                        own.0
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Raise if the memory of a tensor was taken away, as by `resize_(0)` of its storage.
    fn require_contents(&self, index: usize, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let signature = &self.slots[index].signature;
        let location = signature.reader().get().location(tensor);
        // torch says itself why it cannot copy a tensor without a storage.
        if signature.nbytes() > 0 && location.is_ok_and(|(_, memory)| memory == 0) {
            let given = "without memory when the replay copies it";
            return Err(argument(
                &format!("tensor {index}"),
                given,
                "one with contents: a hook or the caller has taken its memory away",
            ));
        }
        Ok(())
    }

    /// Return whether the kernel can copy from there, which nothing writes at about the same time.
    #[inline]
    fn is_safe(&self, index: usize, address: u64) -> bool {
        self.safe[index].load(Ordering::Relaxed) == address || self.becomes_safe(index, address)
    }

    fn becomes_safe(&self, index: usize, address: u64) -> bool {
        let slot = &self.slots[index];
        let end = address + slot.signature.nbytes();
        let mut by_torch = self.by_torch.iter();
        let is_safe = slot.is_plain
            && !self.core.conflicts(index, Address(address))
            && by_torch.all(|range| end <= range.start || range.end <= address);
        if is_safe {
            self.safe[index].store(address, Ordering::Relaxed);
        }
        is_safe
    }
}

/// Let torch copy a tensor to a static one, as a node of the graph would: nothing asks for the mode.
fn copy(own: &Bound<'_, PyAny>, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = own.py();
    let copy = || own.call_method1(intern!(py, "copy_"), (tensor,)).map(drop);
    if !own.call_method0(intern!(py, "is_inference"))?.is_truthy()? {
        return copy();
    }
    let mode = py
        .import(intern!(py, "torch"))?
        .getattr(intern!(py, "inference_mode"))?;
    let mode = mode.call0()?;
    mode.call_method0(intern!(py, "__enter__"))?;
    let copied = copy();
    let none = py.None();
    mode.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
    copied
}

impl Slot {
    fn new(reader: &Bound<'_, TensorReader>, tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let signature = Signature::new(reader, tensor)?;
        Ok(Self {
            is_plain: signature.is_dense(),
            signature,
            tensor: tensor.call_method0("detach")?.unbind(),
        })
    }
}

/// Static tensors that share memory are copied by torch, in order: the last one counts.
fn leave_overlapping_to_torch(slots: &mut [Slot]) {
    let spans: Vec<Range<u64>> = slots.iter().map(|slot| slot.signature.span()).collect();
    let mut order: Vec<usize> = (0..slots.len()).filter(|i| !spans[*i].is_empty()).collect();
    order.sort_by_key(|i| spans[*i].start);
    // The one that reaches furthest so far.
    let mut furthest: Option<usize> = None;
    for next in order {
        if let Some(before) = furthest.filter(|before| spans[next].start < spans[*before].end) {
            slots[before].is_plain = false;
            slots[next].is_plain = false;
        }
        if furthest.is_none_or(|before| spans[before].end < spans[next].end) {
            furthest = Some(next);
        }
    }
}

/// Return whether tensors that get into their own places in these ways are copied from these sources, which
/// are those of an earlier replay: none of them has to be looked at again.
#[inline]
fn are_sources(
    fits: impl ExactSizeIterator<Item = Match>,
    own: &[Address],
    sources: &[Address],
) -> bool {
    let are_as_many = fits.len() == sources.len();
    let mut places = fits.zip(own).zip(sources);
    are_as_many
        && places.all(|((fit, own), source)| match fit {
            Match::Same => own == source,
            Match::Copy(address) => address == source.0,
            // It must be copied again.
            Match::Torch => false,
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_those_of_the_replay_before_only_where_all_are_copied_from_there() {
        let own = [10, 20, 30].map(Address);
        let are = |fits: &[Match], sources: &[u64]| {
            let sources: Vec<_> = sources.iter().copied().map(Address).collect();
            are_sources(fits.iter().copied(), &own, &sources)
        };
        let fits = [Match::Same, Match::Copy(200), Match::Copy(300)];
        assert!(are(&fits, &[10, 200, 300]));
        assert!(are(&[], &[]));
        // One lies elsewhere, or lay elsewhere.
        assert!(!are(&fits, &[10, 200, 301]));
        assert!(!are(&fits, &[100, 200, 300]));
        // torch has copied it to its own place, and has to again; or the kernel could not copy it.
        let torch = [Match::Same, Match::Torch, Match::Copy(300)];
        assert!(!are(&torch, &[10, 20, 300]));
        assert!(!are(&fits, &[10, 20, 300]));
        // There was none before, or one with others.
        assert!(!are(&fits, &[]));
        assert!(!are(&fits, &[10, 200]));
        assert!(!are(&fits[..2], &[10, 200, 300]));
    }
}
