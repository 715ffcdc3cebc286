//! `TensorRow`: the tensors that arguments, a tuple or a list begin with, compared one right after the other.

use pyo3::prelude::*;

use super::matched::{Argument, MatchedArguments, MatchedTensor};
use crate::raw::FieldReader;
use crate::tensors::{FastMatch, FastSignature, TensorReader};

/// The fast signatures of tensors, side by side, and the one reader of all of them.
pub(crate) struct TensorRow {
    signatures: Box<[FastSignature]>,
    /// None if there are no tensors.
    reader: Option<Py<TensorReader>>,
}

impl TensorRow {
    /// Take signatures as long as one reader reads their tensors.
    pub(crate) fn new<'a>(
        py: Python<'_>,
        signatures: impl Iterator<Item = (&'a FastSignature, &'a Py<TensorReader>)>,
    ) -> Self {
        let mut signatures = signatures.peekable();
        let reader = signatures.peek().map(|(_, reader)| *reader);
        let same = signatures.take_while(|(_, of)| reader.is_some_and(|reader| reader.is(*of)));
        Self {
            signatures: same.map(|(expected, _)| expected.clone_ref(py)).collect(),
            reader: reader.map(|reader| reader.clone_ref(py)),
        }
    }

    #[inline]
    pub(crate) fn signatures(&self) -> &[FastSignature] {
        &self.signatures
    }

    /// Return the reader of the fields of these tensors; none if there are no tensors or no fields to read.
    #[inline]
    pub(crate) fn field_reader(&self) -> Option<FieldReader<'_>> {
        self.reader.as_ref()?.get().fast()?.field_reader()
    }

    /// Add the first values to `matched` as far as they are found to fit. Return their number; none if one
    /// does not fit.
    pub(crate) fn fit<'a, 'py>(
        &self,
        values: impl Iterator<Item = Argument<'a, 'py>>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> Option<usize> {
        let Some(fields) = self.field_reader() else {
            return Some(0);
        };
        self.fit_from(0, fields, values, matched)
    }

    /// Do the same for the values from number `first` on. The number that this returns includes those before.
    #[inline]
    pub(crate) fn fit_from<'a, 'py>(
        &self,
        first: usize,
        fields: FieldReader<'_>,
        values: impl Iterator<Item = Argument<'a, 'py>>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> Option<usize> {
        let tensors = self.signatures[first..].iter().zip(values);
        let mut count = first;
        for (expected, tensor) in tensors {
            let fit = match expected.tell_plain(&fields, &tensor) {
                Some(fit) => fit,
                None => match expected.tell(&fields, &tensor) {
                    FastMatch::Fits(fit) => fit,
                    FastMatch::Other => return None,
                    FastMatch::Unknown => return Some(count),
                },
            };
            matched.push(MatchedTensor { tensor, fit });
            count += 1;
        }
        Some(count)
    }
}
