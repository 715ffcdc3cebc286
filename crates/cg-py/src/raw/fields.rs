//! Fields of torch's tensors, read where they lie.
#![expect(
    unsafe_code,
    reason = "torch hands over pointers; this file says what it relies on"
)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::PyResult;

use crate::error::argument;

/// Where the fields of a `c10::TensorImpl` are, in bytes.
///
/// `cgraph._torch.fields` has compared each with what torch says of samples, and knows no others than
/// the versions of torch that it was written for.
pub(super) struct Fields {
    /// Of torch's own class of such objects; those of sparse tensors, for example, have another one.
    vtable: u64,
    /// The flags of storages whose memory torch must be asked for.
    guard: u64,
    storage: usize,
    autograd: usize,
    extra: usize,
    dim: usize,
    sizes: usize,
    strides: usize,
    /// More sizes, and strides, lie elsewhere.
    most_dimensions: usize,
    offset: usize,
    kind: usize,
    keys: usize,
    /// In the storage, as the next one.
    data: usize,
    flags: usize,
}

/// What all tensors of a dtype, a device and a layout have in common.
#[derive(Debug)]
pub(super) struct Words {
    kind: u64,
    keys: u64,
    element_bytes: u64,
}

/// Objects of C++ begin with it.
const VTABLE: usize = 0;

const WORD: usize = size_of::<u64>();

/// The bits for dtype and device: the others are flags that follow from the extents, or do not matter.
const KIND: u64 = 0xFF_FFFF_FFFF;

impl Fields {
    /// By their names; none if none are known.
    pub(super) fn find(known: &HashMap<String, usize>) -> PyResult<Option<Self>> {
        if known.is_empty() {
            return Ok(None);
        }
        let at = |name: &str| {
            let missing = || {
                argument(
                    "the fields of tensors",
                    &format!("no {name}"),
                    "all or none",
                )
            };
            known.get(name).copied().ok_or_else(missing)
        };
        let (sizes, strides) = (at("sizes")?, at("strides")?);
        Ok(Some(Self {
            vtable: at("vtable")? as u64,
            guard: at("guard")? as u64,
            storage: at("storage")?,
            autograd: at("autograd")?,
            extra: at("extra")?,
            dim: at("dim")?,
            sizes,
            strides,
            most_dimensions: strides.saturating_sub(sizes) / WORD,
            offset: at("offset")?,
            kind: at("kind")?,
            keys: at("keys")?,
            data: at("data")?,
            flags: at("flags")?,
        }))
    }

    /// Whether it is torch's own kind of tensor, which has memory and strides.
    ///
    /// # Safety
    /// The object is the `c10::TensorImpl` of a tensor that is alive.
    #[inline]
    pub(super) unsafe fn is_strided(&self, object: *const c_void) -> bool {
        // SAFETY: the contract is that of this function.
        unsafe { word(object, VTABLE) == self.vtable }
    }

    /// What others are compared with; none for more dimensions, and for names or symbolic sizes.
    ///
    /// # Safety
    /// The object is the `c10::TensorImpl` of a tensor that is alive and [strided](Self::is_strided).
    pub(super) unsafe fn words(
        &self,
        object: *const c_void,
        dim: usize,
        element_bytes: u64,
    ) -> Option<Words> {
        // SAFETY: the contract is that of this function.
        let at = |field| unsafe { word(object, field) };
        let is_plain = at(self.extra) == 0 && dim <= self.most_dimensions;
        is_plain.then(|| Words {
            kind: at(self.kind) & KIND,
            keys: at(self.keys),
            element_bytes,
        })
    }

    /// Where a tensor lies that has these words and extents, which are the shape and then the strides,
    /// or 0 if its memory was taken away; none if that cannot be said in this way.
    ///
    /// # Safety
    /// As for [`Self::words`], and its storage is not exchanged meanwhile.
    #[inline]
    pub(super) unsafe fn address_if(
        &self,
        object: *const c_void,
        words: &Words,
        extents: &[i64],
    ) -> Option<u64> {
        // SAFETY: the contract is that of this function.
        let at = |field| unsafe { word(object, field) };
        // It has neither names nor symbolic sizes, and the dispatch keys say what else it is not: sparse,
        // nested, quantized, a conjugate or a negative, of a subclass or a transform.
        let is_like = at(self.extra) == 0
            && at(self.keys) == words.keys
            && at(self.kind) & KIND == words.kind;
        let (shape, strides) = extents.split_at(extents.len() / 2);
        let has = |first: usize, numbers: &[i64]| {
            let mut numbers = numbers.iter().enumerate();
            numbers.all(|(i, number)| at(first + WORD * i) == number.cast_unsigned())
        };
        let is_same = is_like
            && at(self.dim) == shape.len() as u64
            && has(self.sizes, shape)
            && has(self.strides, strides);
        if !is_same {
            return None;
        }
        // SAFETY: the contract is that of this function.
        let [data, offset] = unsafe { self.place(object) }?;
        let inside = offset.wrapping_mul(words.element_bytes);
        Some(if data == 0 {
            0
        } else {
            data.wrapping_add(inside)
        })
    }

    /// Dtype and device, memory and offset in elements of a tensor; none where torch must be asked.
    ///
    /// # Safety
    /// As for [`Self::address_if`].
    #[inline]
    pub(super) unsafe fn spot(&self, object: *const c_void) -> Option<[u64; 3]> {
        // SAFETY: the contract is that of this function.
        let kind = unsafe { word(object, self.kind) } & KIND;
        // SAFETY: the contract is that of this function.
        let [data, offset] = unsafe { self.place(object) }?;
        Some([kind, data, offset])
    }

    /// The memory of a tensor's storage and the offset there, in elements; none where torch must be
    /// asked, as for memory that is shared until somebody does.
    ///
    /// # Safety
    /// As for [`Self::address_if`].
    #[inline]
    unsafe fn place(&self, object: *const c_void) -> Option<[u64; 2]> {
        // SAFETY: the contract is that of this function.
        let at = |field| unsafe { word(object, field) };
        let storage = at(self.storage) as *const c_void;
        if storage.is_null() {
            return None;
        }
        // SAFETY: the tensor holds this storage, which is not exchanged meanwhile.
        let of_storage = |field| unsafe { word(storage, field) };
        let is_free = of_storage(self.flags) & self.guard == 0;
        is_free.then(|| [of_storage(self.data), at(self.offset)])
    }

    /// Whether nothing is noted for autograd, as of tensors that require no gradient and are no views.
    ///
    /// # Safety
    /// As for [`Self::words`].
    #[inline]
    pub(super) unsafe fn has_no_history(&self, object: *const c_void) -> bool {
        // SAFETY: the contract is that of this function.
        unsafe { word(object, self.autograd) == 0 }
    }
}

/// # Safety
/// The object is a tensor's or a storage's, and the field is one of [`Fields`] in such an object.
#[inline]
unsafe fn word(object: *const c_void, field: usize) -> u64 {
    // SAFETY: the field lies inside of the object, by the contract.
    let word = unsafe { object.byte_add(field) }.cast::<u64>().cast_mut();
    // SAFETY: `cgraph._torch.fields` has found a word there, at a multiple of a word. Nothing is written
    // through this; another thread that writes to the word, as torch may without the interpreter where
    // a user changes the tensor that is passed here, gives the one value or the other.
    unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed)
}
