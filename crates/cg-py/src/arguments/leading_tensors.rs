//! `LeadingTensors`: the tensors that the arguments of an entry begin with, compared one right after the other,
//! and first with where those of the last call lay.

use cg_core::Address;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::matched::{Argument, MatchedArguments, MatchedTensor};
use super::pattern::Pattern;
use crate::raw::{self, Attached, FieldReader};
use crate::tensors::{FastMatch, FastSignature, TensorReader};

/// Compares the first arguments in the fastest way. Most of a call with many tensors is
/// this comparison: here it is a loop over what lies side by side, with nothing else in between. Reading
/// the same in the patterns takes half as long again.
pub(crate) struct LeadingTensors {
    tensors: Box<[FastSignature]>,
    /// Of all of them; none if there are none.
    reader: Option<Py<TensorReader>>,
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
        let first = patterns.first().and_then(Pattern::fast_signature);
        let reader = first.map(|(_, reader)| reader);
        let expected = patterns.iter().map_while(Pattern::fast_signature);
        let same = expected.take_while(|(_, of)| reader.is_some_and(|reader| reader.is(*of)));
        let tensors: Box<[FastSignature]> =
            same.map(|(expected, _)| expected.clone_ref(py)).collect();
        Self {
            keeps_last: !tensors.is_empty()
                && tensors.len() == count
                && !tensors.iter().any(FastSignature::requires_grad),
            tensors,
            reader: reader.map(|reader| reader.clone_ref(py)),
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
        let reader = self.reader.as_ref();
        let fields = reader.and_then(|reader| reader.get().fast()?.field_reader());
        let (Some(fields), Some(items)) = (fields, raw::items(args)) else {
            return Some(0);
        };
        let mut first = 0;
        if self.keeps_last {
            let last = self.last.take(args.py());
            first = self.count_at(fields, items, &last);
            if first == self.tensors.len() {
                matched.put_again(last);
                return Some(first);
            }
            for ((expected, value), at) in self.tensors.iter().zip(items).zip(&last[..first]) {
                let (tensor, fit) = (
                    Argument::Positional(value.as_borrowed()),
                    expected.fit_at(*at),
                );
                matched.push(MatchedTensor { tensor, fit });
            }
            self.keep(args.py(), last);
        }
        let tensors = self.tensors[first..].iter().zip(&items[first..]);
        for (after, (expected, value)) in tensors.enumerate() {
            let fit = match expected.tell_plain(&fields, value) {
                Some(fit) => fit,
                None => match expected.tell(&fields, value) {
                    FastMatch::Fits(fit) => fit,
                    FastMatch::Other => return None,
                    FastMatch::Unknown => return Some(first + after),
                },
            };
            let tensor = Argument::Positional(value.as_borrowed());
            matched.push(MatchedTensor { tensor, fit });
        }
        Some(self.tensors.len())
    }

    /// Note where the tensors of a call lie that fits, if that is not known.
    #[inline]
    pub(crate) fn note(&self, py: Python<'_>, matched: &MatchedArguments<'_, '_>) {
        if !self.keeps_last || matched.is_again() {
            return;
        }
        let mut last = self.last.take(py);
        let mut now = matched.each().iter().zip(&self.tensors);
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
        let tensors = self.tensors.iter().zip(values).zip(addresses);
        let mut tensors =
            tensors.map(|((expected, value), at)| expected.is_at(&fields, value, *at));
        let count = addresses.len();
        tensors.position(|is_at| !is_at).unwrap_or(count)
    }
}
