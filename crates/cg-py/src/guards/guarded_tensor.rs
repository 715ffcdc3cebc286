//! `GuardedTensor`: the layout that a tensor had, and where it lay.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;
use pyo3::{PyTraverseError, PyVisit};

use crate::raw::{Comparison, FastReader, KnownClass, LayoutWords, StillTensors, TensorPlace};
use crate::tensors::{Dtype, Lazy, Place, TensorReader, View};

/// A tensor as it was when a guard was made.
pub(super) struct GuardedTensor {
    class: Py<PyType>,
    reader: Py<TensorReader>,
    requires_grad: bool,
    /// True if it also has to lie where it lay.
    is_placed: bool,
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
    /// Read what a tensor is now; with `is_placed` others have to lie there, too.
    pub(super) fn new(
        tensor: &Bound<'_, PyAny>,
        reader: &Py<TensorReader>,
        is_placed: bool,
    ) -> PyResult<Self> {
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
                is_placed,
                words,
                place: fast.filter(|_| is_placed).map(place),
                layout,
            };
            if new.fits_by_fields(tensor) != Some(true) {
                new.words = None;
            }
            Ok(new)
        })
    }

    /// Return whether a value is a tensor of the same class that is laid out so, requires a gradient or not, as it
    /// did, and lies there if it has to. It may be another object.
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
                let is_there = !self.is_placed || address == self.layout.address;
                Some(is_there && flag == self.requires_grad)
            }
            Comparison::Other => Some(false),
            Comparison::At(_, None) | Comparison::Unknown => None,
        }
    }

    #[cold]
    fn fits_as_read(&self, value: &Bound<'_, PyAny>) -> bool {
        let reader = self.reader.get();
        let fits = by_torch(value.py(), || {
            let is_like = reader.with(value, |view| {
                let mut now = Layout::of(view);
                if !self.is_placed {
                    now.address = self.layout.address;
                }
                now == self.layout
            })?;
            Ok(is_like && reader.requires_grad(value)? == self.requires_grad)
        });
        fits.unwrap_or(false)
    }

    /// Add a tensor that fits to others that are compared by fields; whether it can be.
    pub(super) fn add_to(&self, others: &mut StillTensors, tensor: &Bound<'_, PyAny>) -> bool {
        let (Some((class, words)), true) = (&self.words, self.is_placed) else {
            return false;
        };
        others.push(
            tensor,
            class,
            words,
            self.layout.address,
            self.requires_grad,
        );
        true
    }

    pub(super) fn reader(&self) -> &Py<TensorReader> {
        &self.reader
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
