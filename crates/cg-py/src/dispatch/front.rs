//! `Front`: the tensors that the arguments of an entry begin with, compared one right after the other.

use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::pattern::{Argument, Found, FoundAll, Pattern};
use crate::raw;
use crate::signature::{Quick, Told};
use crate::tensor::TensorReader;

/// What the first arguments are compared with in the fastest way. Most of a call with many tensors is
/// this comparison: here it is a loop over what lies side by side, with nothing else in between. Reading
/// the same in the patterns takes half as long again.
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
    /// does not fit. There are as many arguments as patterns.
    #[inline(never)]
    pub(super) fn fit<'a, 'py>(
        &self,
        args: &'a Bound<'py, PyTuple>,
        found: &mut FoundAll<'a, 'py>,
    ) -> Option<usize> {
        let reader = self.reader.as_ref();
        let by_fields = reader.and_then(|reader| reader.get().by_fields());
        let (Some(by_fields), Some(items)) = (by_fields, raw::items(args)) else {
            return Some(0);
        };
        let tensors = self.tensors.iter().zip(items).enumerate();
        for (place, (quick, value)) in tensors {
            let fit = match quick.tell_plain(&by_fields, value) {
                Some(fit) => fit,
                None => match quick.tell(&by_fields, value) {
                    Told::Fits(fit) => fit,
                    Told::Other => return None,
                    Told::Unknown => return Some(place),
                },
            };
            let tensor = Argument::Positional(value.as_borrowed());
            found.push(Found { tensor, fit });
        }
        Some(self.tensors.len())
    }
}
