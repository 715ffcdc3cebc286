//! `Front`: the tensors that the arguments of an entry begin with, compared one right after the other.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::pattern::{Argument, Found, FoundAll, Pattern};
use crate::raw;
use crate::signature::{Quick, Told};
use crate::tensor::TensorReader;

/// What the first arguments are compared with in the fastest way. Most of a call with many tensors is
/// this comparison: here it is a loop over what lies side by side, with nothing else in between.
pub(super) struct Front {
    tensors: Box<[Quick]>,
    /// Of all of them; none if there are none.
    reader: Option<Py<TensorReader>>,
}

impl Front {
    /// Of those tensors that patterns begin with.
    pub(super) fn of(py: Python<'_>, patterns: &[Pattern]) -> Self {
        let first = patterns.first().and_then(Pattern::quick);
        let reader = first.map(|(_, reader)| reader);
        let quick = patterns.iter().map_while(Pattern::quick);
        let same = quick.take_while(|(_, of)| reader.is_some_and(|reader| reader.is(*of)));
        Self {
            tensors: same.map(|(quick, _)| quick.clone_ref(py)).collect(),
            reader: reader.map(|reader| reader.clone_ref(py)),
        }
    }

    /// Adds the first arguments to `found` as far as they are found to fit here; how many. None if one
    /// does not fit.
    #[inline(never)]
    pub(super) fn fit<'a, 'py>(
        &self,
        args: &'a Bound<'py, PyTuple>,
        found: &mut FoundAll<'a, 'py>,
    ) -> Option<usize> {
        let places = self
            .reader
            .as_ref()
            .and_then(|reader| reader.get().places());
        let (Some(places), Some(items)) = (places, raw::items(args)) else {
            return Some(0);
        };
        let tensors = self.tensors.iter().zip(items).enumerate();
        for (place, (quick, value)) in tensors {
            let fit = match quick.tell_plain(&places, value) {
                Some(fit) => fit,
                None => match quick.tell(&places, value) {
                    Told::Fits(fit) => fit,
                    Told::Other => return None,
                    Told::Unknown => return Some(place),
                },
            };
            let tensor = Argument::Positional(value.as_borrowed());
            found.push(Found { tensor, fit });
        }
        Some(self.tensors.len().min(items.len()))
    }
}
