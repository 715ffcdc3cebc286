//! `StillTensors`: tensors that must be what they were, compared one right after the other.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::field_reader::{FieldReader, KnownClass};
use super::fields::LayoutWords;
use super::view::Comparison;

/// Tensors, each with what it must be, side by side: a call compares hundreds, and waits for each line of memory
/// that it reads.
#[derive(Default)]
pub(crate) struct StillTensors(Vec<StillTensor>);

/// In this order, so that what most comparisons need is in two lines.
#[repr(C, align(64))]
struct StillTensor {
    tensor: Py<PyAny>,
    class: KnownClass,
    address: u64,
    requires_grad: bool,
    words: LayoutWords,
}

impl StillTensors {
    /// Add a tensor that is what it must be; it is held.
    pub(crate) fn push(
        &mut self,
        tensor: &Bound<'_, PyAny>,
        class: &KnownClass,
        words: &LayoutWords,
        address: u64,
        requires_grad: bool,
    ) {
        self.0.push(StillTensor {
            tensor: tensor.clone().unbind(),
            class: class.clone_ref(tensor.py()),
            address,
            requires_grad,
            words: words.clone(),
        });
    }

    /// Return whether all are what they must be; false as well where fields cannot tell.
    pub(crate) fn are_still(&self, py: Python<'_>, reader: FieldReader<'_>) -> bool {
        self.0.iter().all(|one| {
            let Some(tensor) = one.class.member(one.tensor.bind(py)) else {
                return false;
            };
            match reader.see(tensor, &one.words) {
                Comparison::At(address, Some(flag)) => {
                    address == one.address && flag == one.requires_grad
                }
                Comparison::At(_, None) | Comparison::Other | Comparison::Unknown => false,
            }
        })
    }

    /// Let them go; the caller drops what they were, which may run any code.
    pub(crate) fn clear(&mut self, dropped: &mut Vec<Py<PyAny>>) {
        dropped.extend(self.0.drain(..).map(|one| one.tensor));
    }

    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.iter().try_for_each(|one| visit.call(&one.tensor))
    }
}
