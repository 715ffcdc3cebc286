//! `FastSignature`: compares tensors with a static one in most calls.

use cg_core::Address;
use pyo3::prelude::*;

use super::own_memory::{Match, OwnMemory};
use crate::raw::{Comparison, FieldReader, KnownClass, LayoutWords};

/// A static tensor as calls compare it in the fastest way: side by side what differs from one to the next.
pub(crate) struct FastSignature {
    /// Of the tensors that it tells of.
    class: KnownClass,
    words: LayoutWords,
    own: OwnMemory,
    requires_grad: bool,
}

/// Result of the fastest way.
#[derive(Clone, Copy)]
pub(crate) enum FastMatch {
    /// It gets into the static one in this way.
    Fits(Match),
    /// It does not, or only torch can copy it.
    Other,
    /// Other ways tell.
    Unknown,
}

impl FastSignature {
    pub(crate) fn new(
        class: KnownClass,
        words: LayoutWords,
        own: OwnMemory,
        requires_grad: bool,
    ) -> Self {
        Self {
            class,
            words,
            own,
            requires_grad,
        }
    }

    /// As [`crate::tensors::Signature::matches`], as far as this way tells; a value of another class is
    /// another one.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `FieldReader::see`")]
    pub(crate) fn tell(&self, fields: &FieldReader<'_>, value: &Bound<'_, PyAny>) -> FastMatch {
        match self.class.member(value) {
            Some(tensor) => {
                let seen = fields.see(tensor, &self.words);
                FastMatch::of(&seen, self.own, self.requires_grad)
            }
            None => FastMatch::Other,
        }
    }

    /// The same where nothing has to be called for it: how a tensor gets into the static one, and none
    /// where [`Self::tell`] is to be asked.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `FieldReader::see`")]
    pub(crate) fn tell_plain(
        &self,
        fields: &FieldReader<'_>,
        value: &Bound<'_, PyAny>,
    ) -> Option<Match> {
        let address = fields.plain_address(self.class.member(value)?, &self.words)?;
        let found = self.own.from(address);
        (!self.requires_grad && found != Match::Torch).then_some(found)
    }

    /// Return whether a tensor lies there and is of this class, has this layout and no history. All of these fit
    /// that lie where one has fitted, but where it [requires a gradient](Self::requires_grad).
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `FieldReader::see`")]
    pub(crate) fn is_at(
        &self,
        fields: &FieldReader<'_>,
        value: &Bound<'_, PyAny>,
        address: Address,
    ) -> bool {
        let tensor = self.class.member(value);
        tensor.is_some_and(|tensor| fields.is_at(tensor, &self.words, address.0))
    }

    /// Return whether only tensors fit that require a gradient.
    pub(crate) fn requires_grad(&self) -> bool {
        self.requires_grad
    }

    /// Return how a tensor gets into the static one that [lies](Self::is_at) where one has fitted.
    #[inline]
    pub(crate) fn fit_at(&self, address: Address) -> Match {
        if address.0 == self.own.address {
            Match::Same
        } else {
            Match::Copy(address.0)
        }
    }

    /// Return where a tensor lies that gets into the static one in this way; none if only torch knows.
    #[inline]
    pub(crate) fn address_of(&self, fit: Match) -> Option<Address> {
        match fit {
            Match::Same => Some(Address(self.own.address)),
            Match::Copy(address) => Some(Address(address)),
            Match::Torch => None,
        }
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self {
            class: self.class.clone_ref(py),
            words: self.words.clone(),
            ..*self
        }
    }
}

impl FastMatch {
    #[inline]
    pub(crate) fn of(seen: &Comparison, own: OwnMemory, requires_grad: bool) -> Self {
        let (address, given) = match *seen {
            Comparison::At(address, Some(given)) => (address, given),
            Comparison::Other => return Self::Other,
            Comparison::At(_, None) | Comparison::Unknown => return Self::Unknown,
        };
        match own.from(address) {
            Match::Torch => Self::Other,
            found if given == requires_grad => Self::Fits(found),
            Match::Same | Match::Copy(_) => Self::Other,
        }
    }
}
