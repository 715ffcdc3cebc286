//! `FoundAll`: the tensors of a call, and how each gets into its static one.

use std::ops::Deref;

use cg_core::Address;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use smallvec::SmallVec;

use crate::signature::Match;

/// A tensor of a call, and how it gets into its static one.
pub(crate) struct Found<'a, 'py> {
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
pub(crate) struct FoundAll<'a, 'py> {
    each: Each<'a, 'py>,
    /// The objects that guards look into, in order.
    objects: SmallVec<[Bound<'py, PyAny>; 4]>,
    /// Where they lie instead, if they are the first arguments and some that lay there have fitted. No
    /// others are added then.
    again: Option<Vec<Address>>,
}

/// So many have room without an allocation, which takes as long as the comparison of ten.
type Each<'a, 'py> = SmallVec<[Found<'a, 'py>; 64]>;

/// The same for who uses them.
#[derive(Clone, Copy)]
pub(crate) enum Tensors<'a, 'py> {
    Each(&'a [Found<'a, 'py>]),
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

impl<'a, 'py> FoundAll<'a, 'py> {
    #[inline]
    pub(super) fn new() -> Self {
        Self {
            each: Each::new(),
            objects: SmallVec::new(),
            again: None,
        }
    }

    /// Starts anew.
    #[inline]
    pub(super) fn clear(&mut self) {
        self.each.clear();
        self.objects.clear();
        self.again = None;
    }

    #[inline]
    pub(super) fn push(&mut self, found: Found<'a, 'py>) {
        debug_assert!(self.again.is_none(), "these are all tensors");
        self.each.push(found);
    }

    #[inline]
    pub(super) fn push_object(&mut self, object: Bound<'py, PyAny>) {
        self.objects.push(object);
    }

    /// The objects of [`Pattern::Object`](super::pattern::Pattern::Object).
    #[inline]
    pub(super) fn objects(&self) -> &[Bound<'py, PyAny>] {
        &self.objects
    }

    /// Each of them; none where it is known where they lie.
    #[inline]
    pub(super) fn each(&self) -> &[Found<'a, 'py>] {
        &self.each
    }

    /// Says where the first arguments lie, which are all tensors.
    #[inline]
    pub(super) fn put_again(&mut self, addresses: Vec<Address>) {
        self.again = Some(addresses);
    }

    #[inline]
    pub(super) fn is_again(&self) -> bool {
        self.again.is_some()
    }

    /// Takes out where they lie, if that was said.
    #[inline]
    pub(super) fn take_again(&mut self) -> Option<Vec<Address>> {
        self.again.take()
    }

    /// Those of a call with these arguments.
    #[inline]
    pub(super) fn tensors<'b>(&'b self, args: &'b Bound<'py, PyTuple>) -> Tensors<'b, 'py>
    where
        'a: 'b,
    {
        match &self.again {
            Some(addresses) => Tensors::Again(args, addresses),
            None => Tensors::Each(&self.each),
        }
    }
}

impl<'a, 'py> FromIterator<Found<'a, 'py>> for FoundAll<'a, 'py> {
    fn from_iter<T: IntoIterator<Item = Found<'a, 'py>>>(all: T) -> Self {
        Self {
            each: all.into_iter().collect(),
            objects: SmallVec::new(),
            again: None,
        }
    }
}

impl<'a, 'py> Tensors<'a, 'py> {
    #[inline]
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Each(found) => found.len(),
            Self::Again(_, addresses) => addresses.len(),
        }
    }

    /// One of them.
    #[inline]
    pub(crate) fn get(self, place: usize) -> Borrowed<'a, 'py, PyAny> {
        match self {
            Self::Each(found) => found[place].tensor.as_borrowed(),
            Self::Again(args, _) => {
                let arg = args.get_borrowed_item(place);
                arg.expect("there are as many arguments")
            }
        }
    }

    /// How one of them gets into its static one, which begins there, as its pattern says, too.
    #[inline]
    pub(crate) fn fit(self, place: usize, own: Address) -> Match {
        match self {
            Self::Each(found) => found[place].fit,
            Self::Again(_, addresses) if addresses[place] == own => Match::Same,
            Self::Again(_, addresses) => Match::Copy(addresses[place].0),
        }
    }

    /// As Python takes them.
    pub(crate) fn to_tuple(self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        match self {
            Self::Each(found) => PyTuple::new(py, found.iter().map(|one| &*one.tensor)),
            Self::Again(args, addresses) => Ok(args.get_slice(0, addresses.len())),
        }
    }
}
