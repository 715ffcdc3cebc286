//! `LeadingTensors`: the tensors that the arguments of an entry begin with, compared first with where those of
//! the last call lay.

use cg_core::Address;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::matched::{Argument, MatchedArguments, MatchedTensor};
use super::pattern::Pattern;
use super::tensor_row::TensorRow;
use crate::raw::{self, Attached, FieldReader};
use crate::tensors::FastSignature;

/// Compares the first arguments in the fastest way. Most of a call with many tensors is
/// this comparison: here it is a loop over what lies side by side, with nothing else in between. Reading
/// the same in the patterns takes half as long again.
pub(crate) struct LeadingTensors {
    tensors: TensorRow,
    /// Addresses of the last call that was found to fit: all of them if the first one lay where that of
    /// the call before lay, else that one alone, as calls with new tensors would note all in vain. None
    /// while a call uses them, and after one that did not come to its end: all that is lost is time.
    last: Attached<Vec<Address>>,
    /// True if that is kept: the entry has no other tensors, and none requires a gradient.
    keeps_last: bool,
}

impl LeadingTensors {
    /// Of those tensors that patterns begin with; the entry has so many in all.
    pub(crate) fn of(py: Python<'_>, patterns: &[Pattern], count: usize) -> Self {
        let tensors = TensorRow::new(py, patterns.iter().map_while(Pattern::fast_signature));
        Self {
            keeps_last: !tensors.signatures().is_empty()
                && tensors.signatures().len() == count
                && !tensors
                    .signatures()
                    .iter()
                    .any(FastSignature::requires_grad),
            tensors,
            last: Attached::default(),
        }
    }

    /// Add the first arguments to `matched` as far as they are found to fit here; how many. None if one
    /// does not fit. There are as many arguments as patterns.
    #[inline(never)]
    pub(crate) fn fit<'a, 'py>(
        &self,
        args: &'a Bound<'py, PyTuple>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> Option<usize> {
        let (Some(fields), Some(items)) = (self.tensors.field_reader(), raw::items(args)) else {
            return Some(0);
        };
        let signatures = self.tensors.signatures();
        let mut first = 0;
        if self.keeps_last {
            let last = self.last.take(args.py());
            first = self.count_at(fields, items, &last);
            if first == signatures.len() {
                matched.put_again(last);
                return Some(first);
            }
            for ((expected, value), at) in signatures.iter().zip(items).zip(&last[..first]) {
                let (tensor, fit) = (
                    Argument::Positional(value.as_borrowed()),
                    expected.fit_at(*at),
                );
                matched.push(MatchedTensor { tensor, fit });
            }
            self.keep(args.py(), last);
        }
        let others = items[first..].iter();
        let others = others.map(|value| Argument::Positional(value.as_borrowed()));
        self.tensors.fit_from(first, fields, others, matched)
    }

    /// Note where the tensors of a call lie that fits, if that is not known.
    #[inline]
    pub(crate) fn note(&self, py: Python<'_>, matched: &MatchedArguments<'_, '_>) {
        if !self.keeps_last || matched.is_again() {
            return;
        }
        let mut last = self.last.take(py);
        let mut now = matched.each().iter().zip(self.tensors.signatures());
        let mut next = || {
            now.next()
                .and_then(|(one, expected)| expected.address_of(one.fit))
        };
        let first = next();
        let is_again = first.is_some() && last.first().copied() == first;
        last.clear();
        last.extend(first);
        if is_again {
            last.extend(std::iter::from_fn(next));
        }
        self.keep(py, last);
    }

    /// Keep again what a call has used.
    #[inline]
    pub(crate) fn give_back(&self, py: Python<'_>, matched: &mut MatchedArguments<'_, '_>) {
        if let Some(addresses) = matched.take_again() {
            self.keep(py, addresses);
        }
    }

    #[inline]
    fn keep(&self, py: Python<'_>, addresses: Vec<Address>) {
        drop(self.last.replace(py, addresses));
    }

    /// Return how many of the first ones lie at these addresses, so that they fit.
    #[inline]
    fn count_at(
        &self,
        fields: FieldReader<'_>,
        values: &[Bound<'_, PyAny>],
        addresses: &[Address],
    ) -> usize {
        let tensors = self.tensors.signatures().iter().zip(values).zip(addresses);
        let mut tensors =
            tensors.map(|((expected, value), at)| expected.is_at(&fields, value, *at));
        let count = addresses.len();
        tensors.position(|is_at| !is_at).unwrap_or(count)
    }
}
