//! `GuardedTensor`: where a tensor lay, and how it was laid out there.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::{Comparison, KnownClass, LayoutWords, TensorPlace};
use crate::tensors::{Dtype, Lazy, Place, TensorReader, View};

/// What a tensor was when a guard was made.
pub(super) struct GuardedTensor {
    class: Py<PyType>,
    reader: Py<TensorReader>,
    requires_grad: bool,
    /// What tells in most calls: what is compared by fields.
    words: Option<(KnownClass, LayoutWords)>,
    /// What tells where these cannot.
    spot: Option<TensorPlace>,
    /// What tells where the spot cannot.
    layout: Layout,
}

/// What is read of a tensor by what reads all.
#[derive(PartialEq)]
struct Layout {
    address: u64,
    /// The shape, and then the strides.
    extents: Vec<i64>,
    dtype: Dtype,
    place: Place,
    lazy: Lazy,
}

impl Layout {
    fn of(view: &View<'_>) -> Self {
        Self {
            address: view.address,
            extents: [view.shape, view.strides].concat(),
            dtype: view.dtype,
            place: view.place,
            lazy: view.lazy,
        }
    }
}

impl GuardedTensor {
    /// What a tensor is now.
    pub(super) fn new(tensor: &Bound<'_, PyAny>, reader: &Py<TensorReader>) -> PyResult<Self> {
        let (py, of_reader) = (tensor.py(), reader.get());
        by_torch(py, || {
            let read = |view: &View<'_>| (Layout::of(view), view.element_bytes);
            let (layout, element_bytes) = of_reader.with(tensor, read)?;
            let words = of_reader.words(tensor, element_bytes, &layout.extents);
            let mut new = Self {
                class: tensor.get_type().unbind(),
                reader: reader.clone_ref(py),
                requires_grad: of_reader.requires_grad(tensor)?,
                words: of_reader.know(&tensor.get_type()).zip(words),
                spot: of_reader.spot(tensor, layout.address),
                layout,
            };
            if new.fits_by_fields(tensor) != Some(true) {
                new.words = None;
            }
            Ok(new)
        })
    }

    /// Whether a value is a tensor of the same class that lies there, is laid out so, and requires a
    /// gradient or not, as it did. It may be another object.
    #[inline]
    pub(super) fn fits(&self, value: &Bound<'_, PyAny>) -> bool {
        if let Some(fits) = self.fits_by_fields(value) {
            return fits;
        }
        if value.get_type_ptr().cast() != self.class.as_ptr() {
            return false;
        }
        let reader = self.reader.get();
        let spot = self.spot.as_ref();
        match spot.and_then(|spot| reader.is_laid_out_at(value, spot)) {
            Some(is_there) => {
                let flag = || reader.requires_grad(value).ok();
                is_there && flag() == Some(self.requires_grad)
            }
            None => self.fits_as_read(value),
        }
    }

    /// The same in the fastest way; none if that cannot tell.
    #[inline]
    fn fits_by_fields(&self, value: &Bound<'_, PyAny>) -> Option<bool> {
        let (class, words) = self.words.as_ref()?;
        let by_fields = self.reader.get().by_fields()?;
        match by_fields.see(class.member(value)?, words) {
            Comparison::At(address, Some(flag)) => {
                Some(address == self.layout.address && flag == self.requires_grad)
            }
            Comparison::Other => Some(false),
            Comparison::At(_, None) | Comparison::Unknown => None,
        }
    }

    #[cold]
    fn fits_as_read(&self, value: &Bound<'_, PyAny>) -> bool {
        let reader = self.reader.get();
        let fits = by_torch(value.py(), || {
            let is_there = reader.with(value, |view| Layout::of(view) == self.layout)?;
            Ok(is_there && reader.requires_grad(value)? == self.requires_grad)
        });
        fits.unwrap_or(false)
    }

    pub(super) fn class(&self) -> &Py<PyType> {
        &self.class
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.class)?;
        visit.call(&self.reader)
    }
}

/// Reads tensors without the functions that their classes may have instead of torch's.
fn by_torch<T>(py: Python<'_>, read: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    let torch = py.import(intern!(py, "torch._C"))?;
    let disabled = torch.call_method0(intern!(py, "DisableTorchFunctionSubclass"))?;
    disabled.call_method0(intern!(py, "__enter__"))?;
    let found = read();
    let none = py.None();
    disabled.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
    found
}
