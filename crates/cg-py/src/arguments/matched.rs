//! `MatchedArguments`: the tensors of a call that fit, each with the way into its static one.

use std::ops::Deref;

use cg_core::Address;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;

use crate::tensors::Match;

/// A tensor of a call, and how it gets into its static one.
pub(crate) struct MatchedTensor<'a, 'py> {
    pub(crate) tensor: Argument<'a, 'py>,
    pub(crate) fit: Match,
}

/// Something among the arguments of a call.
pub(crate) enum Argument<'a, 'py> {
    /// From the tuple of the call, where it stays.
    Positional(Borrowed<'a, 'py, PyAny>),
    /// From what others may change meanwhile.
    Held(Bound<'py, PyAny>),
}

/// The tensors of a call that are copied, in order.
#[derive(Default)]
pub(crate) struct MatchedArguments<'a, 'py> {
    each: Each<'a, 'py>,
    /// The objects that guards look into, in order.
    objects: SmallVec<[Bound<'py, PyAny>; 4]>,
    /// Their addresses instead, if they are the first arguments and some that lay there have fitted. No
    /// others are added then.
    again: Option<Vec<Address>>,
}

/// So many have room without an allocation, which takes as long as the comparison of ten.
type Each<'a, 'py> = SmallVec<[MatchedTensor<'a, 'py>; 64]>;

/// The same for who uses them.
#[derive(Clone, Copy)]
pub(crate) enum MatchedTensors<'a, 'py> {
    Each(&'a [MatchedTensor<'a, 'py>]),
    /// The first arguments, at these addresses, where others have fitted. Most calls need to know no more.
    Again(&'a Bound<'py, PyTuple>, &'a [Address]),
}

impl<'py> Deref for Argument<'_, 'py> {
    type Target = Bound<'py, PyAny>;

    #[inline]
    fn deref(&self) -> &Bound<'py, PyAny> {
        match self {
            Self::Positional(value) => value,
            Self::Held(value) => value,
        }
    }
}

impl<'a, 'py> MatchedArguments<'a, 'py> {
    /// Start anew.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.each.clear();
        self.objects.clear();
        self.again = None;
    }

    #[inline]
    pub(crate) fn push(&mut self, matched: MatchedTensor<'a, 'py>) {
        debug_assert!(self.again.is_none(), "these are all tensors");
        self.each.push(matched);
    }

    #[inline]
    pub(crate) fn push_object(&mut self, object: Bound<'py, PyAny>) {
        self.objects.push(object);
    }

    /// Return the objects of [`Pattern::Object`](super::pattern::Pattern::Object).
    #[inline]
    pub(crate) fn objects(&self) -> &[Bound<'py, PyAny>] {
        &self.objects
    }

    /// Each of them; none where it is known where they lie.
    #[inline]
    pub(crate) fn each(&self) -> &[MatchedTensor<'a, 'py>] {
        &self.each
    }

    /// Say where the first arguments lie, which are all tensors.
    #[inline]
    pub(crate) fn put_again(&mut self, addresses: Vec<Address>) {
        self.again = Some(addresses);
    }

    #[inline]
    pub(crate) fn is_again(&self) -> bool {
        self.again.is_some()
    }

    /// Take out where they lie, if that was said.
    #[inline]
    pub(crate) fn take_again(&mut self) -> Option<Vec<Address>> {
        self.again.take()
    }

    /// Return those of a call with these arguments.
    #[inline]
    pub(crate) fn tensors<'b>(&'b self, args: &'b Bound<'py, PyTuple>) -> MatchedTensors<'b, 'py>
    where
        'a: 'b,
    {
        match &self.again {
            Some(addresses) => MatchedTensors::Again(args, addresses),
            None => MatchedTensors::Each(&self.each),
        }
    }
}

impl<'a, 'py> FromIterator<MatchedTensor<'a, 'py>> for MatchedArguments<'a, 'py> {
    fn from_iter<T: IntoIterator<Item = MatchedTensor<'a, 'py>>>(all: T) -> Self {
        Self {
            each: all.into_iter().collect(),
            ..Self::default()
        }
    }
}

impl<'a, 'py> MatchedTensors<'a, 'py> {
    #[inline]
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Each(matched) => matched.len(),
            Self::Again(_, addresses) => addresses.len(),
        }
    }

    /// One of them.
    #[inline]
    pub(crate) fn get(self, place: usize) -> Borrowed<'a, 'py, PyAny> {
        match self {
            Self::Each(matched) => matched[place].tensor.as_borrowed(),
            Self::Again(args, _) => {
                let arg = args.get_borrowed_item(place);
                arg.expect("there are as many arguments")
            }
        }
    }

    /// Return how one of them gets into its static one, which begins there, as its pattern says, too.
    #[inline]
    pub(crate) fn fit(self, place: usize, own: Address) -> Match {
        match self {
            Self::Each(matched) => matched[place].fit,
            Self::Again(_, addresses) if addresses[place] == own => Match::Same,
            Self::Again(_, addresses) => Match::Copy(addresses[place].0),
        }
    }

    /// As Python takes them.
    pub(crate) fn to_tuple(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match self {
            Self::Each(matched) => PyTuple::new(py, matched.iter().map(|one| &*one.tensor)),
            Self::Again(args, addresses) => Ok(args.get_slice(0, addresses.len())),
        }
    }
}
