//! `FastReader`: reads tensors of torch's own classes without a call by Python.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::field_reader::{FieldReader, KnownClass, KnownTensor, object, requires_grad};
use super::fields::{Fields, LayoutWords, Placement};
use super::is_instance;
use super::stable_functions::{Answer, Form, Functions};
use super::view::Comparison;
use crate::error::argument;

/// Reads tensors of just some classes: by their fields where these are known, else by torch's stable
/// functions.
pub(crate) struct FastReader {
    functions: Functions,
    fields: Option<Fields>,
    classes: Box<[Py<PyType>]>,
    /// Offset of the functions' handle in a tensor's object, in bytes.
    offset: usize,
    /// torch writes a trace to stderr for each failure: after one there are no more.
    has_failed: AtomicBool,
}

/// The place of a tensor.
pub(crate) struct TensorPlace {
    address: u64,
    /// Compared first; has the layout.
    placement: Option<Placement>,
    /// Compared where fields are not known: form, shape and strides.
    like: Option<(Form, Vec<i64>)>,
}

/// A tensor's storage, and the tensor's place there.
pub(crate) struct Stored {
    /// The address of the storage, the object.
    pub(crate) storage: u64,
    /// In elements.
    pub(crate) offset: u64,
    /// The number of dimensions.
    pub(crate) dim: u64,
    /// A word for dtype and device.
    pub(crate) kind: u64,
}

impl FastReader {
    /// Take the functions from where they are, by their names, for tensors of just the classes of
    /// the samples; none if some are missing, or if the samples' objects are built in another way.
    /// `fields` are where torch's objects have what they are, if all are known. `class` is
    /// `torch.Tensor`.
    pub(crate) fn new(
        functions: &HashMap<String, usize>,
        fields: &HashMap<String, usize>,
        samples: &[Bound<'_, PyAny>],
        class: &Py<PyType>,
    ) -> PyResult<Option<Self>> {
        // Of all readers, as what one of them knows another one may be asked about.
        static OFFSET: OnceLock<usize> = OnceLock::new();
        let Some(first) = samples.first() else {
            return Ok(None);
        };
        for sample in samples {
            if !is_instance(sample, class) {
                let given = sample.get_type().name()?.to_string();
                return Err(argument("a sample", &given, "a torch.Tensor"));
            }
        }
        let Some(offset) = handle_offset(first)? else {
            return Ok(None);
        };
        for sample in samples {
            if handle_offset(sample)? != Some(*OFFSET.get_or_init(|| offset)) {
                return Ok(None);
            }
        }
        let mut classes: Vec<Bound<'_, PyType>> = Vec::new();
        for class in samples.iter().map(PyAnyMethods::get_type) {
            if !classes.iter().any(|known| known.is(&class)) {
                classes.push(class);
            }
        }
        let fields = Fields::find(fields)?;
        let can_tell = |one: &Functions| one.layout.is_some() || fields.is_some();
        let functions = Functions::find(functions).filter(can_tell);
        Ok(functions.map(|functions| Self {
            functions,
            fields,
            classes: classes.into_iter().map(Bound::unbind).collect(),
            offset,
            has_failed: AtomicBool::new(false),
        }))
    }

    /// Return what [`Self::look`] compares others with; none if it could not tell of such tensors.
    pub(crate) fn form(&self, tensor: &Bound<'_, PyAny>) -> Option<Form> {
        let handle = self
            .handle(tensor)
            .filter(|_| self.functions.lazy.is_some())?;
        // SAFETY: the handle is the tensor's.
        self.noted(unsafe { self.functions.form(handle) })?
    }

    /// Return what [`Self::field_reader`] compares others with, which have these extents, the shape and then the
    /// strides; none if it could not tell of such tensors.
    pub(crate) fn words(
        &self,
        tensor: &Bound<'_, PyAny>,
        element_bytes: u64,
        extents: &[i64],
    ) -> Option<LayoutWords> {
        let (fields, handle) = (self.fields.as_ref()?, self.handle(tensor)?);
        // SAFETY: the handle is the tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's, and strided, as `handle` has seen by the fields.
        unsafe { fields.words(object, element_bytes, extents) }
    }

    /// Return whether fields are looked at.
    pub(crate) fn has_fields(&self) -> bool {
        self.fields.is_some()
    }

    /// Return a class, if its tensors are read.
    pub(crate) fn known_class(&self, class: &Bound<'_, PyType>) -> Option<KnownClass> {
        let known = self.classes.iter().find(|one| class.is(*one))?;
        Some(KnownClass(known.clone_ref(class.py())))
    }

    /// Return a tensor, if its class is one of those that are read.
    #[inline]
    pub(crate) fn known_tensor<'a, 'py>(
        &self,
        tensor: &'a Bound<'py, PyAny>,
    ) -> Option<KnownTensor<'a, 'py>> {
        let class = tensor.get_type_ptr();
        let mut classes = self.classes.iter();
        let is_known = classes.any(|one| one.as_ptr().cast() == class);
        is_known.then_some(KnownTensor(tensor))
    }

    /// Return what compares tensors in the fastest way; none where fields are not looked at.
    #[inline]
    pub(crate) fn field_reader(&self) -> Option<FieldReader<'_>> {
        let fields = self.fields.as_ref().filter(|_| !self.has_failed())?;
        Some(FieldReader {
            fields,
            offset: self.offset,
            requires_grad: self.functions.requires_grad,
        })
    }

    /// Compare a tensor with a form and with extents, which are the shape and then the strides, by
    /// torch's functions.
    pub(crate) fn look(
        &self,
        tensor: &Bound<'_, PyAny>,
        form: &Form,
        extents: &[i64],
    ) -> Comparison {
        let Some(handle) = self.handle(tensor) else {
            return Comparison::Unknown;
        };
        // SAFETY: the handle is the tensor's. No Python code runs here, which might change the tensor;
        // who does that on another thread races with torch's own functions, too.
        match self.noted(unsafe { self.ask(handle, form, extents) }) {
            Some(Some(address)) => Comparison::At(address, self.requires_grad(tensor)),
            Some(None) => Comparison::Other,
            None => Comparison::Unknown,
        }
    }

    /// Return where a tensor is that has this address now, and these extents, the shape and then the strides; it
    /// stays there as long as [`Self::is_at`] says so.
    pub(crate) fn tensor_place(
        &self,
        tensor: &Bound<'_, PyAny>,
        address: u64,
        extents: Vec<i64>,
    ) -> TensorPlace {
        let mut spot = TensorPlace {
            address,
            placement: None,
            like: None,
        };
        if self.address(tensor) != Some(address) {
            return spot;
        }
        spot.placement = self.placement(tensor);
        if spot.placement.is_none()
            && let Some(form) = self.form(tensor)
            && matches!(self.look(tensor, &form, &extents), Comparison::At(at, _) if at == address)
        {
            spot.like = Some((form, extents));
        }
        spot
    }

    /// Return whether a tensor, maybe another one, is there and laid out as it was; none where that cannot be said
    /// in this way.
    #[inline]
    pub(crate) fn is_laid_out_at(
        &self,
        tensor: &Bound<'_, PyAny>,
        spot: &TensorPlace,
    ) -> Option<bool> {
        if let Some((form, extents)) = &spot.like {
            return match self.look(tensor, form, extents) {
                Comparison::At(now, _) => Some(now == spot.address),
                Comparison::Other => Some(false),
                Comparison::Unknown => None,
            };
        }
        let (before, now) = (spot.placement?, self.placement(tensor)?);
        if now == before {
            return Some(true);
        }
        if now.form != before.form {
            return Some(false);
        }
        self.address(tensor).map(|now| now == spot.address)
    }

    #[inline]
    fn placement(&self, tensor: &Bound<'_, PyAny>) -> Option<Placement> {
        let (fields, handle) = (self.fields.as_ref()?, self.handle(tensor)?);
        // SAFETY: the handle is the tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's, and strided; as in `look`.
        unsafe { fields.placement(object) }
    }

    /// Return where a tensor's memory is; none for classes that are derived from `torch.Tensor`.
    #[inline]
    pub(crate) fn address(&self, tensor: &Bound<'_, PyAny>) -> Option<u64> {
        let handle = self.handle(tensor)?;
        // SAFETY: the handle is the tensor's.
        self.noted(unsafe { self.functions.address(handle) })
    }

    /// Return the address of a tensor's storage, the object; none if that is not known here.
    #[inline]
    pub(crate) fn storage(&self, tensor: &Bound<'_, PyAny>) -> Option<u64> {
        let (fields, handle) = (self.fields.as_ref()?, self.handle(tensor)?);
        // SAFETY: the handle is the tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's, and strided, as `handle` has seen by the fields.
        Some(unsafe { fields.storage(object) })
    }

    /// Return a tensor's storage and its place there; none if that is not known here, and where there is no
    /// memory: torch says of such a storage whether it has elements all the same, as one of zeros has.
    #[inline]
    pub(crate) fn stored(&self, tensor: &Bound<'_, PyAny>) -> Option<Stored> {
        let placement = self.placement(tensor).filter(|one| one.data != 0)?;
        let [kind, _, dim] = placement.form.0;
        Some(Stored {
            storage: self.storage(tensor)?,
            offset: placement.offset,
            dim,
            kind,
        })
    }

    /// Return where the memory of a tensor's storage begins, 0 if it has none; none if that is not known here.
    #[inline]
    pub(crate) fn memory(&self, tensor: &Bound<'_, PyAny>) -> Option<u64> {
        let (fields, handle) = (self.fields.as_ref()?, self.handle(tensor)?);
        // SAFETY: the handle is the tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's, and strided, as `handle` has seen by the fields.
        unsafe { fields.memory(object) }
    }

    /// Return whether a tensor has no gradient, hook or name, and never had; none if that is not known here.
    #[inline]
    pub(crate) fn is_untouched(&self, tensor: &Bound<'_, PyAny>) -> Option<bool> {
        let (fields, handle) = (self.fields.as_ref()?, self.handle(tensor)?);
        // SAFETY: the handle is the tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's, and strided, as `handle` has seen by the fields.
        Some(unsafe { fields.is_untouched(object) })
    }

    /// Return whether a tensor requires a gradient; none if that is not known here.
    #[inline]
    pub(crate) fn requires_grad(&self, tensor: &Bound<'_, PyAny>) -> Option<bool> {
        let handle = self.handle(tensor)?;
        // SAFETY: the handle is the tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's, and strided where fields are known, as `handle` has seen.
        unsafe { requires_grad(self.fields.as_ref(), self.functions.requires_grad, object) }
    }

    /// Return whether a tensor's bytes are the conjugates of its values, and whether they are the negatives;
    /// none if that is not known here.
    pub(crate) fn is_lazy(&self, tensor: &Bound<'_, PyAny>) -> Option<[bool; 2]> {
        let (functions, handle) = (self.functions.lazy?, self.handle(tensor)?);
        // SAFETY: the handle points at the tensor's `at::Tensor`. The functions only read it.
        Some(functions.map(|is| unsafe { is(handle) }))
    }

    /// Take what the samples say otherwise than the private functions for none of these.
    pub(crate) fn require(&mut self, gradients_agree: bool, lazy_agree: bool) {
        let functions = &mut self.functions;
        functions.requires_grad = functions.requires_grad.filter(|_| gradients_agree);
        functions.lazy = functions.lazy.filter(|_| lazy_agree);
    }

    /// Return whether a tensor could not be read, so that none is any more.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// Return what the functions take for a tensor of a known class; it is strided where fields are known.
    #[inline]
    fn handle(&self, tensor: &Bound<'_, PyAny>) -> Option<*mut c_void> {
        let tensor = self.known_tensor(tensor).filter(|_| !self.has_failed())?;
        // `new` has found the handles of such tensors there. For these functions that is the address of an
        // `at::Tensor`.
        let handle = tensor.handle(self.offset);
        let Some(fields) = &self.fields else {
            return Some(handle);
        };
        // The functions complain about what has no strides.
        // SAFETY: the handle is a tensor's.
        let object = unsafe { object(handle) };
        // SAFETY: the object is the tensor's.
        unsafe { fields.is_strided(object) }.then_some(handle)
    }

    /// [`Self::look`] by torch's functions: where the tensor lies, none if it is another one.
    ///
    /// # Safety
    /// The handle is a tensor's, and nothing changes the tensor meanwhile.
    unsafe fn ask(&self, handle: *mut c_void, form: &Form, extents: &[i64]) -> Answer<Option<u64>> {
        // SAFETY: the caller keeps the same contract; so below.
        if !unsafe { self.functions.is_like(handle, form, extents) }? {
            return Ok(None);
        }
        let mut lazy = self.functions.lazy.iter().flatten();
        // SAFETY: the handle points at the tensor's `at::Tensor`. The functions only read it.
        if lazy.any(|is| unsafe { is(handle) }) {
            return Ok(None);
        }
        // SAFETY: as above.
        let object = unsafe { object(handle) };
        let fields = self.fields.as_ref();
        // SAFETY: the object is the tensor's, and strided; as in `look`.
        if fields.and_then(|fields| unsafe { fields.is_empty(object) }) == Some(true) {
            // torch would add the offset.
            return Ok(Some(0));
        }
        // SAFETY: as above.
        unsafe { self.functions.address(handle) }.map(Some)
    }

    #[inline]
    fn noted<T>(&self, read: Answer<T>) -> Option<T> {
        if read.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        read.ok()
    }
}

/// Return where in a tensor's object the pointer is that torch calls its `_cdata`.
fn handle_offset(tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let py = tensor.py();
    let size = |class: &Bound<'_, PyType>| class.getattr(intern!(py, "__basicsize__"))?.extract();
    let wanted: usize = tensor.getattr(intern!(py, "_cdata"))?.extract()?;
    let (begin, end): (usize, usize) = (size(&py.get_type::<PyAny>())?, size(&tensor.get_type())?);
    // Up to torch 2.9, a word before it says who owns it.
    let words = (begin..end).step_by(size_of::<usize>()).take(2);
    let mut offsets = words.filter(|offset| offset + size_of::<usize>() <= end);
    Ok(offsets.find(|offset| {
        // SAFETY: an object has as many bytes as its class says, and the word ends before them; what
        // begins at a multiple of a word is aligned for one.
        let word = unsafe { tensor.as_ptr().byte_add(*offset) }.cast::<usize>();
        // SAFETY: as above; nothing writes to it while the interpreter is held.
        wanted == unsafe { word.read() }
    }))
}
