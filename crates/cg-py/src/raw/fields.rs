//! Fields of torch's tensors, read where they lie.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::PyResult;

use super::view::Comparison;
use crate::error::argument;

/// The fields of a `c10::TensorImpl` and of its storage.
///
/// `cgraph._torch.fields` has found them where the constants say, has compared each with what torch says
/// of samples, and knows no others than the versions of torch that it was written for.
#[derive(Clone, Copy)]
pub(super) struct Fields {
    /// Of torch's own class of such objects; those of sparse tensors, for example, have another one.
    vtable: u64,
    /// The flags of storages whose memory torch must be asked for.
    guard: u64,
}

// Where they are, in bytes: constants, so that a call that reads a dozen or more of each tensor reads no
// offsets beside them.
const STORAGE: usize = 16;
const AUTOGRAD: usize = 24;
const EXTRA: usize = 32;
const DIM: usize = 64;
const SIZES: usize = 72;
const STRIDES: usize = SIZES + MOST_DIMENSIONS * WORD;
const OFFSET: usize = STRIDES + MOST_DIMENSIONS * WORD;
const KIND: usize = OFFSET + 2 * WORD;
const KEYS: usize = KIND + WORD;
// In the storage.
const DATA: usize = 16;
const FLAGS: usize = 56;

pub(crate) const PLACES: [(&str, usize); 11] = [
    ("storage", STORAGE),
    ("autograd", AUTOGRAD),
    ("extra", EXTRA),
    ("dim", DIM),
    ("sizes", SIZES),
    ("strides", STRIDES),
    ("offset", OFFSET),
    ("kind", KIND),
    ("keys", KEYS),
    ("data", DATA),
    ("flags", FLAGS),
];

/// The words that tensors of a dtype, a device, a shape and strides have in common: in one piece, as calls look at
/// one for each tensor, and in this order, so that what those of two dimensions need of it is 64 bytes
/// side by side.
#[derive(Debug, Clone)]
#[repr(C)]
pub(crate) struct LayoutWords {
    kind: u64,
    keys: u64,
    element_bytes: u64,
    dim: usize,
    /// Size and stride of each dimension.
    extents: [[u64; 2]; MOST_DIMENSIONS],
}

/// The place of a tensor, and its layout there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Placement {
    /// The memory of its storage.
    pub(super) data: u64,
    /// In elements.
    pub(super) offset: u64,
    /// Dtype and device, dispatch keys, the number of dimensions; then the sizes, and the strides.
    pub(super) form: ([u64; 3], [[u64; MOST_DIMENSIONS]; 2]),
}

/// Of more dimensions the extents lie elsewhere.
const MOST_DIMENSIONS: usize = 5;

/// Objects of C++ begin with it.
const VTABLE: usize = 0;

const WORD: usize = size_of::<u64>();

/// The bits for dtype and device: the others are flags that follow from the extents, or do not matter.
const OF_KIND: u64 = 0xFF_FFFF_FFFF;

impl Fields {
    /// By their names; none if none are known, or if one is elsewhere.
    pub(super) fn find(known: &HashMap<String, usize>) -> PyResult<Option<Self>> {
        if known.is_empty() {
            return Ok(None);
        }
        let at = |name: &str| {
            let missing = || {
                let given = format!("no {name}");
                argument("the fields of tensors", &given, "all or none")
            };
            known.get(name).copied().ok_or_else(missing)
        };
        for (name, place) in PLACES {
            if at(name)? != place {
                return Ok(None);
            }
        }
        Ok(Some(Self {
            vtable: at("vtable")? as u64,
            guard: at("guard")? as u64,
        }))
    }

    /// Return whether it is torch's own kind of tensor, which has memory and strides.
    ///
    /// # Safety
    /// The object is the `c10::TensorImpl` of a tensor that is alive.
    #[inline]
    pub(super) unsafe fn is_strided(&self, object: *const c_void) -> bool {
        // SAFETY: the caller keeps the same contract.
        unsafe { word(object, VTABLE) == self.vtable }
    }

    /// Return what others are compared with that have these extents, the shape and then the strides; none for
    /// more dimensions, and for names or symbolic sizes.
    ///
    /// # Safety
    /// The object is the `c10::TensorImpl` of a tensor that is alive and [strided](Self::is_strided).
    #[expect(
        clippy::unused_self,
        reason = "only where there are fields are the words where the constants say"
    )]
    pub(super) unsafe fn words(
        &self,
        object: *const c_void,
        element_bytes: u64,
        extents: &[i64],
    ) -> Option<LayoutWords> {
        // SAFETY: the caller keeps the same contract.
        let at = |field| unsafe { word(object, field) };
        let dim = extents.len() / 2;
        if at(EXTRA) != 0 || dim > MOST_DIMENSIONS {
            return None;
        }
        let (shape, strides) = extents.split_at(dim);
        let mut words = LayoutWords {
            kind: at(KIND) & OF_KIND,
            keys: at(KEYS),
            element_bytes,
            dim,
            extents: [[0; 2]; MOST_DIMENSIONS],
        };
        for (extent, (size, stride)) in words.extents.iter_mut().zip(shape.iter().zip(strides)) {
            *extent = [size.cast_unsigned(), stride.cast_unsigned()];
        }
        Some(words)
    }

    /// Compare a tensor with these words, and do not say whether it requires a gradient.
    ///
    /// # Safety
    /// As for [`Self::words`], and its storage is not exchanged meanwhile.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `FieldReader::see`")]
    pub(super) unsafe fn compare(&self, object: *const c_void, words: &LayoutWords) -> Comparison {
        // SAFETY: the caller keeps the same contract.
        let at = |field| unsafe { word(object, field) };
        // It has neither names nor symbolic sizes.
        if at(EXTRA) != 0 {
            return Comparison::Unknown;
        }
        if at(DIM) != words.dim as u64 {
            return Comparison::Other;
        }
        // All sizes first: with most of them the strides before change, too.
        let mut apart = 0;
        for (i, [size, stride]) in words.extents.iter().take(words.dim).enumerate() {
            if at(SIZES + WORD * i) != *size {
                return Comparison::Other;
            }
            apart |= at(STRIDES + WORD * i) ^ *stride;
        }
        // Other strides may mean nothing, as those of dimensions of size one. The dispatch keys say what
        // else it is not: sparse, nested, quantized, a conjugate or a negative, of a subclass or a
        // transform.
        if apart != 0 || at(KEYS) != words.keys || at(KIND) & OF_KIND != words.kind {
            return Comparison::Unknown;
        }
        // SAFETY: the caller keeps the same contract.
        let Some([data, offset]) = (unsafe { self.place(object) }) else {
            return Comparison::Unknown;
        };
        let inside = offset.wrapping_mul(words.element_bytes);
        let address = if data == 0 {
            0
        } else {
            data.wrapping_add(inside)
        };
        Comparison::At(address, None)
    }

    /// Return whether a tensor is [strided](Self::is_strided), has these words and nothing noted for autograd, and
    /// lies there. The fields decide together, in three steps: a branch for each takes longer.
    ///
    /// # Safety
    /// The object is the `c10::TensorImpl` of a tensor that is alive, strided or not, and its storage is not
    /// exchanged meanwhile.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as for `FieldReader::see`")]
    pub(super) unsafe fn is_at(
        &self,
        object: *const c_void,
        words: &LayoutWords,
        address: u64,
    ) -> bool {
        // SAFETY: the object is of that class or of one that is derived from it, which has its fields.
        let at = |field| unsafe { word(object, field) };
        let of_other_kind = (at(VTABLE) ^ self.vtable) | at(AUTOGRAD) | at(EXTRA);
        if of_other_kind | (at(DIM) ^ words.dim as u64) != 0 {
            return false;
        }
        let mut apart = (at(KEYS) ^ words.keys) | ((at(KIND) ^ words.kind) & OF_KIND);
        for (i, [size, stride]) in words.extents.iter().take(words.dim).enumerate() {
            apart |= (at(SIZES + WORD * i) ^ size) | (at(STRIDES + WORD * i) ^ stride);
        }
        let storage = at(STORAGE) as *const c_void;
        if apart != 0 || storage.is_null() {
            return false;
        }
        // SAFETY: the tensor, which is strided, holds this storage, which is not exchanged meanwhile.
        let of_storage = |field| unsafe { word(storage, field) };
        let data = of_storage(DATA);
        let now = data.wrapping_add(at(OFFSET).wrapping_mul(words.element_bytes));
        data != 0 && ((of_storage(FLAGS) & self.guard) | (now ^ address)) == 0
    }

    /// Return where a tensor is and how it is laid out; none where torch must be asked, as for more dimensions.
    ///
    /// # Safety
    /// As for [`Self::compare`].
    #[inline]
    pub(super) unsafe fn placement(&self, object: *const c_void) -> Option<Placement> {
        // SAFETY: the caller keeps the same contract.
        let at = |field| unsafe { word(object, field) };
        let dim = at(DIM);
        if dim > MOST_DIMENSIONS as u64 {
            return None;
        }
        // SAFETY: the caller keeps the same contract.
        let [data, offset] = unsafe { self.place(object) }?;
        let mut extents = [[0; MOST_DIMENSIONS]; 2];
        for (first, words) in [SIZES, STRIDES].into_iter().zip(&mut extents) {
            for (i, one) in words
                .iter_mut()
                .take(usize::try_from(dim).ok()?)
                .enumerate()
            {
                *one = at(first + WORD * i);
            }
        }
        let form = ([at(KIND) & OF_KIND, at(KEYS), dim], extents);
        Some(Placement { data, offset, form })
    }

    /// Return the address of a tensor's storage, the object.
    ///
    /// # Safety
    /// As for [`Self::words`].
    #[inline]
    #[expect(clippy::unused_self, reason = "as for `words`")]
    pub(super) unsafe fn storage(&self, object: *const c_void) -> u64 {
        // SAFETY: the caller keeps the same contract.
        unsafe { word(object, STORAGE) }
    }

    /// Return where the memory of a tensor's storage begins; none where torch must be asked.
    ///
    /// # Safety
    /// As for [`Self::compare`].
    #[inline]
    pub(super) unsafe fn memory(&self, object: *const c_void) -> Option<u64> {
        // SAFETY: the caller keeps the same contract.
        unsafe { self.place(object) }.map(|[data, _]| data)
    }

    /// Return whether the memory of a tensor's storage was taken away; none where torch must be asked.
    ///
    /// # Safety
    /// As for [`Self::compare`].
    #[inline]
    pub(super) unsafe fn is_empty(&self, object: *const c_void) -> Option<bool> {
        // SAFETY: the caller keeps the same contract.
        let place = unsafe { self.place(object) };
        place.map(|[data, _]| data == 0)
    }

    /// Return the memory of a tensor's storage and the offset there, in elements; none where torch must be
    /// asked, as for memory that is shared until somebody does.
    ///
    /// # Safety
    /// As for [`Self::compare`].
    #[inline]
    unsafe fn place(&self, object: *const c_void) -> Option<[u64; 2]> {
        // SAFETY: the caller keeps the same contract.
        let at = |field| unsafe { word(object, field) };
        let storage = at(STORAGE) as *const c_void;
        if storage.is_null() {
            return None;
        }
        // SAFETY: the tensor holds this storage, which is not exchanged meanwhile.
        let of_storage = |field| unsafe { word(storage, field) };
        let is_free = of_storage(FLAGS) & self.guard == 0;
        is_free.then(|| [of_storage(DATA), at(OFFSET)])
    }

    /// Return whether nothing is noted for autograd, no hook and no gradient, and there are no names.
    ///
    /// # Safety
    /// As for [`Self::words`].
    #[inline]
    #[expect(clippy::unused_self, reason = "as for `words`")]
    pub(super) unsafe fn is_untouched(&self, object: *const c_void) -> bool {
        // SAFETY: the caller keeps the same contract.
        let at = |field| unsafe { word(object, field) };
        at(AUTOGRAD) == 0 && at(EXTRA) == 0
    }

    /// Return whether nothing is noted for autograd, as of tensors that require no gradient and are no views.
    ///
    /// # Safety
    /// As for [`Self::words`].
    #[inline]
    #[expect(clippy::unused_self, reason = "as for `words`")]
    pub(super) unsafe fn has_no_history(&self, object: *const c_void) -> bool {
        // SAFETY: the caller keeps the same contract.
        unsafe { word(object, AUTOGRAD) == 0 }
    }
}

/// # Safety
/// There are [`Fields`]. The object is a tensor's or a storage's, and the field is [`VTABLE`], one of
/// [`PLACES`] in such an object, or one of the [`MOST_DIMENSIONS`] words there of sizes or of strides.
#[inline]
unsafe fn word(object: *const c_void, field: usize) -> u64 {
    // SAFETY: the field lies inside of the object, by the contract.
    let word = unsafe { object.byte_add(field) }.cast::<u64>().cast_mut();
    // SAFETY: `cgraph._torch.fields` has found a word there, at a multiple of a word. Nothing is written
    // through this; another thread that writes to the word, as torch may without the interpreter where
    // a user changes the tensor that is passed here, gives the one value or the other.
    unsafe { AtomicU64::from_ptr(word) }.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const FIELDS: Fields = Fields {
        vtable: 0x7000,
        guard: 0xFF << 24,
    };

    /// A float tensor [2, 3] with an offset of four elements, and its storage.
    struct Tensor {
        object: [AtomicU64; 24],
        storage: Arc<[AtomicU64; 8]>,
    }

    impl Tensor {
        fn new() -> Self {
            let new = Self {
                object: Default::default(),
                storage: Arc::default(),
            };
            new.at(DATA, true).store(0x1000, Ordering::Relaxed);
            let storage = Arc::as_ptr(&new.storage).expose_provenance() as u64;
            let fields = [
                (VTABLE, FIELDS.vtable),
                (STORAGE, storage),
                (DIM, 2),
                (SIZES, 2),
                (SIZES + WORD, 3),
                (STRIDES, 3),
                (STRIDES + WORD, 1),
                (OFFSET, 4),
                (KIND, 6 | 1 << 50),
                (KEYS, 0x8003),
            ];
            for (field, word) in fields {
                new.at(field, false).store(word, Ordering::Relaxed);
            }
            new
        }

        fn at(&self, field: usize, is_of_storage: bool) -> &AtomicU64 {
            if is_of_storage {
                &self.storage[field / WORD]
            } else {
                &self.object[field / WORD]
            }
        }

        fn is_at(&self, words: &LayoutWords, address: u64) -> bool {
            // SAFETY: the words are laid out as those of a tensor, and nothing else uses them.
            unsafe { FIELDS.is_at(self.object.as_ptr().cast(), words, address) }
        }

        /// Return what calls ask that do not know where it may lie.
        fn lies_plainly_at(&self, words: &LayoutWords, address: u64) -> bool {
            let object = self.object.as_ptr().cast();
            // SAFETY: as in `is_at`; so below.
            let is_strided = unsafe { FIELDS.is_strided(object) };
            // SAFETY: as above.
            let has_no_history = unsafe { FIELDS.has_no_history(object) };
            // SAFETY: as above.
            let seen = unsafe { FIELDS.compare(object, words) };
            let is_there = matches!(seen, Comparison::At(now, _) if now == address && now != 0);
            is_strided && has_no_history && is_there
        }
    }

    fn words() -> LayoutWords {
        let tensor = Tensor::new();
        // SAFETY: as in `Tensor::is_at`.
        let words = unsafe { FIELDS.words(tensor.object.as_ptr().cast(), 4, &[2, 3, 3, 1]) };
        words.expect("a tensor of two dimensions has them")
    }

    #[test]
    fn a_tensor_is_at_an_address_as_far_as_each_of_its_words_says_so() {
        let (words, address) = (words(), 0x1010);
        assert!(Tensor::new().is_at(&words, address));
        for other in [0, 0x1000, address + 1] {
            assert!(!Tensor::new().is_at(&words, other), "{other:#x}");
        }
        let of_tensor = [
            VTABLE,
            AUTOGRAD,
            EXTRA,
            DIM,
            SIZES,
            SIZES + WORD,
            STRIDES,
            STRIDES + WORD,
            OFFSET,
            KIND,
            KEYS,
        ];
        let of_tensor = of_tensor.map(|field| (field, false));
        for (field, is_of_storage) in of_tensor.into_iter().chain([(DATA, true)]) {
            let tensor = Tensor::new();
            tensor
                .at(field, is_of_storage)
                .fetch_xor(1, Ordering::Relaxed);
            assert!(!tensor.is_at(&words, address), "{field}");
            assert!(!tensor.lies_plainly_at(&words, address), "{field}");
        }
        let guarded = Tensor::new();
        guarded.at(FLAGS, true).store(1 << 24, Ordering::Relaxed);
        assert!(!guarded.is_at(&words, address));
        assert!(!guarded.lies_plainly_at(&words, address));
    }

    #[test]
    fn words_that_do_not_matter_change_nothing() {
        let words = words();
        for (field, mask) in [
            (SIZES + 2 * WORD, 1),
            (STRIDES + 2 * WORD, 1),
            (KIND, 1 << 51),
        ] {
            let tensor = Tensor::new();
            tensor.at(field, false).fetch_xor(mask, Ordering::Relaxed);
            assert!(tensor.is_at(&words, 0x1010), "{field}");
            assert!(tensor.lies_plainly_at(&words, 0x1010), "{field}");
        }
    }

    #[test]
    fn a_tensor_whose_memory_was_taken_away_lies_nowhere() {
        let (words, tensor) = (words(), Tensor::new());
        tensor.at(DATA, true).store(0, Ordering::Relaxed);
        // What the offset alone would make, and what others say of it.
        for address in [4 * 4, 0] {
            assert!(!tensor.is_at(&words, address));
        }
        tensor.at(STORAGE, false).store(0, Ordering::Relaxed);
        assert!(!tensor.is_at(&words, 0x1010));
    }
}
