//! `FieldReader`: compares the tensors of a call, one right after the other.

use std::ffi::c_void;

use pyo3::prelude::*;
use pyo3::types::PyType;

use super::fields::{Fields, LayoutWords};
use super::stable_functions::Is;
use super::view::Comparison;

/// A class whose tensors some reader reads.
pub(crate) struct KnownClass(pub(super) Py<PyType>);

/// A tensor of just such a class.
#[derive(Clone, Copy)]
pub(crate) struct KnownTensor<'a, 'py>(pub(super) &'a Bound<'py, PyAny>);

/// Compares tensors by their fields. A call asks its reader for one, which looks once at what would be
/// looked at for each tensor.
#[derive(Clone, Copy)]
pub(crate) struct FieldReader<'a> {
    pub(super) fields: &'a Fields,
    /// See [`KnownTensor::handle`].
    pub(super) offset: usize,
    pub(super) requires_grad: Option<Is>,
}

impl KnownClass {
    /// Return a value as a tensor of this class; none if it is no such one.
    #[inline]
    pub(crate) fn member<'a, 'py>(
        &self,
        value: &'a Bound<'py, PyAny>,
    ) -> Option<KnownTensor<'a, 'py>> {
        let is_one = value.get_type_ptr().cast() == self.0.as_ptr();
        is_one.then_some(KnownTensor(value))
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        Self(self.0.clone_ref(py))
    }
}

impl KnownTensor<'_, '_> {
    /// Return what torch's functions take for it, which readers have found so many bytes behind the begin of
    /// the object.
    #[inline]
    pub(super) fn handle(self, offset: usize) -> *mut c_void {
        self.0.as_ptr().wrapping_byte_add(offset).cast()
    }
}

impl FieldReader<'_> {
    /// Compare a tensor with words.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "calls ask for up to hundreds of tensors one after the other"
    )]
    pub(crate) fn see(&self, tensor: KnownTensor<'_, '_>, words: &LayoutWords) -> Comparison {
        let Some(object) = self.strided(tensor) else {
            return Comparison::Unknown;
        };
        // SAFETY: the object is the tensor's, and strided. No Python code runs here, which might exchange
        // its storage; who does that on another thread races with torch's own functions, too.
        match unsafe { self.fields.compare(object, words) } {
            Comparison::At(address, _) => {
                // SAFETY: as above.
                let asks = unsafe { requires_grad(Some(self.fields), self.requires_grad, object) };
                Comparison::At(address, asks)
            }
            other => other,
        }
    }

    /// Return where a tensor lies that has these words, and of which nothing is noted for autograd, as of most:
    /// they require no gradient. None for all others. A loop with a call of torch's in it, as
    /// [`Self::see`] makes one for the others, keeps less in registers and takes half as long again.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `see`")]
    pub(crate) fn plain_address(
        &self,
        tensor: KnownTensor<'_, '_>,
        words: &LayoutWords,
    ) -> Option<u64> {
        let object = self.strided(tensor)?;
        // SAFETY: the object is the tensor's, and strided.
        if !unsafe { self.fields.has_no_history(object) } {
            return None;
        }
        // SAFETY: as in `see`.
        match unsafe { self.fields.compare(object, words) } {
            Comparison::At(address, _) => Some(address),
            Comparison::Other | Comparison::Unknown => None,
        }
    }

    /// Return whether a tensor has these words and lies there, and nothing is noted of it for autograd.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `see`")]
    pub(crate) fn is_at(
        &self,
        tensor: KnownTensor<'_, '_>,
        words: &LayoutWords,
        address: u64,
    ) -> bool {
        let object = self.object(tensor);
        // SAFETY: the object is the tensor's, and its storage stays what it is, as in `see`.
        unsafe { self.fields.is_at(object, words, address) }
    }

    /// Return a tensor's object, if it is strided.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `see`")]
    fn strided(&self, tensor: KnownTensor<'_, '_>) -> Option<*const c_void> {
        let object = self.object(tensor);
        // SAFETY: the object is the tensor's.
        unsafe { self.fields.is_strided(object) }.then_some(object)
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `see`")]
    fn object(&self, tensor: KnownTensor<'_, '_>) -> *const c_void {
        // SAFETY: the handle is the tensor's. Each reader's classes are derived from `torch.Tensor`, and
        // all readers have found the handle at the same offset, as `FastReader::new` sees to.
        unsafe { object(tensor.handle(self.offset)) }
    }
}

/// Return whether a tensor requires a gradient, by its fields where these are known and else by a method of
/// torch's; none if that is not known either.
///
/// # Safety
/// The object is the tensor's, and strided where fields are known.
#[inline]
pub(super) unsafe fn requires_grad(
    fields: Option<&Fields>,
    method: Option<Is>,
    object: *const c_void,
) -> Option<bool> {
    // SAFETY: the caller keeps the same contract.
    if fields.is_some_and(|fields| unsafe { fields.has_no_history(object) }) {
        return Some(false);
    }
    // SAFETY: a method of such objects, which only reads it.
    method.map(|method| unsafe { method(object) })
}

/// Return the `c10::TensorImpl` of a tensor.
///
/// # Safety
/// The handle is a tensor's.
#[inline]
pub(super) unsafe fn object(handle: *mut c_void) -> *const c_void {
    // SAFETY: an `at::Tensor`, which the handle points at, is a pointer to one.
    unsafe { handle.cast::<*const c_void>().read() }
}
