//! `GuardedTensor`: the place and the layout that a tensor had.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::{Comparison, FastReader, KnownClass, LayoutWords, TensorPlace};
use crate::tensors::{Dtype, Lazy, Place, TensorReader, View};

/// A tensor as it was when a guard was made.
pub(super) struct GuardedTensor {
    class: Py<PyType>,
    reader: Py<TensorReader>,
    requires_grad: bool,
    /// Enough in most calls: compared by fields.
    words: Option<(KnownClass, LayoutWords)>,
    /// Used where the words cannot tell.
    place: Option<TensorPlace>,
    /// Used where the place cannot tell.
    layout: Layout,
}

/// The layout as the slowest way reads it.
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
    /// Read what a tensor is now.
    pub(super) fn new(tensor: &Bound<'_, PyAny>, reader: &Py<TensorReader>) -> PyResult<Self> {
        let (py, of_reader) = (tensor.py(), reader.get());
        by_torch(py, || {
            let read = |view: &View<'_>| (Layout::of(view), view.element_bytes);
            let (layout, element_bytes) = of_reader.with(tensor, read)?;
            let fast = of_reader.fast();
            let words = fast.and_then(|fast| {
                let class = fast.known_class(&tensor.get_type())?;
                let words = fast.words(tensor, element_bytes, &layout.extents)?;
                Some((class, words))
            });
            let place = |fast: &FastReader| {
                fast.tensor_place(tensor, layout.address, layout.extents.clone())
            };
            let mut new = Self {
                class: tensor.get_type().unbind(),
                reader: reader.clone_ref(py),
                requires_grad: of_reader.requires_grad(tensor)?,
                words,
                place: fast.map(place),
                layout,
            };
            if new.fits_by_fields(tensor) != Some(true) {
                new.words = None;
            }
            Ok(new)
        })
    }

    /// Return whether a value is a tensor of the same class that lies there, is laid out so, and requires a
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
        let fast = reader.fast().zip(self.place.as_ref());
        match fast.and_then(|(fast, place)| fast.is_laid_out_at(value, place)) {
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
        let fields = self.reader.get().fast()?.field_reader()?;
        match fields.see(class.member(value)?, words) {
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

/// Read tensors without the functions that their classes may have instead of torch's.
fn by_torch<T>(py: Python<'_>, read: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    let torch = py.import(intern!(py, "torch._C"))?;
    let disabled = torch.call_method0(intern!(py, "DisableTorchFunctionSubclass"))?;
    disabled.call_method0(intern!(py, "__enter__"))?;
    let found = read();
    let none = py.None();
    disabled.call_method1(intern!(py, "__exit__"), (&none, &none, &none))?;
    found
}
