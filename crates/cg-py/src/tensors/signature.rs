//! `Signature`: the tensors that a static one takes, and the way in which each gets into it.

use std::ops::Range;

use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyType;

use super::fast_signature::{FastMatch, FastSignature};
use super::own_memory::{Match, OwnMemory};
use super::{Dtype, Lazy, Place, TensorReader, View, describe, in_words, is_lazy};
use crate::error::argument;
use crate::raw::{Comparison, Form, LayoutWords};

/// The layout of a static tensor.
#[derive(Debug)]
struct Layout {
    own: OwnMemory,
    /// From the first element to the end of the last one.
    span_bytes: u64,
    /// The shape, then the strides: side by side, as both are compared.
    extents: Box<[i64]>,
    dtype: Dtype,
    place: Place,
}

impl Layout {
    fn of(view: &View<'_>) -> Self {
        let elements: u64 = view.shape.iter().map(|size| size.unsigned_abs()).product();
        Self {
            own: OwnMemory {
                address: view.address,
                bytes: elements * view.element_bytes,
                is_dense: is_dense(view.shape, view.strides),
            },
            span_bytes: if elements == 0 {
                0
            } else {
                steps(view).sum::<u64>() + view.element_bytes
            },
            extents: [view.shape, view.strides].concat().into(),
            dtype: view.dtype,
            place: view.place,
        }
    }

    fn shape(&self) -> &[i64] {
        &self.extents[..self.extents.len() / 2]
    }

    /// Return how a tensor gets into this one; none if shape, dtype or device differ.
    fn compare(&self, view: &View<'_>) -> Option<Match> {
        let (shape, strides) = self.extents.split_at(self.extents.len() / 2);
        if shape != view.shape || self.dtype != view.dtype || self.place != view.place {
            return None;
        }
        if self.own.bytes == 0 {
            return Some(Match::Same);
        }
        // The stride of a dimension of size one means nothing.
        let mut sizes = shape.iter().zip(strides).zip(view.strides);
        let same_strides = sizes.all(|((size, a), b)| *size == 1 || a == b);
        Some(if view.lazy == Lazy::Yes || !same_strides {
            Match::Torch
        } else {
            self.own.from(view.address)
        })
    }
}

/// Return how far apart the first and the last element of each dimension are, in bytes.
fn steps(view: &View<'_>) -> impl Iterator<Item = u64> {
    let sizes = view.shape.iter().zip(view.strides);
    sizes.map(|(size, stride)| ((size - 1) * stride).unsigned_abs() * view.element_bytes)
}

/// Return whether elements of these strides fill their memory with no gap and no overlap.
fn is_dense(shape: &[i64], strides: &[i64]) -> bool {
    let mut steps: Vec<(i64, i64)> = strides.iter().copied().zip(shape.iter().copied()).collect();
    steps.retain(|(_, size)| *size != 1);
    steps.sort_unstable();
    let mut next = 1;
    let mut fits = |(stride, size): &(i64, i64)| {
        let is_next = *stride == next;
        next *= size;
        is_next
    };
    shape.contains(&0) || steps.iter().all(&mut fits)
}

/// The tensors that a static tensor takes.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Signature {
    layout: Layout,
    /// The same for the reader, which compares by them in faster ways; none where it cannot, or where
    /// there are no elements.
    words: Option<LayoutWords>,
    form: Option<Form>,
    /// torch's objects, for messages.
    dtype: Py<PyAny>,
    device: Py<PyAny>,
    reader: Py<TensorReader>,
}

#[pymethods]
impl Signature {
    /// Read the static tensor.
    #[new]
    pub(crate) fn new(
        reader: &Bound<'_, TensorReader>,
        tensor: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let (layout, lazy, element_bytes) = reader.get().with(tensor, |view| {
            (Layout::of(view), view.lazy, view.element_bytes)
        })?;
        let py = tensor.py();
        let refused = |expected| Err(argument("a static input", &describe(tensor)?, expected));
        if layout.own.address == 0 && layout.own.bytes > 0 {
            return refused("a tensor with memory of its own");
        }
        if layout.place == Place::Elsewhere {
            return refused("a tensor in memory of the CPU or of a CUDA device");
        }
        if lazy == Lazy::Yes || (lazy == Lazy::Unknown && is_lazy(tensor)?) {
            return refused(
                "a tensor of plain values: call resolve_conj(), resolve_neg() or dequantize()",
            );
        }
        let fast = reader.get().fast().filter(|_| layout.own.bytes > 0);
        let words = fast.and_then(|fast| fast.words(tensor, element_bytes, &layout.extents));
        Ok(Self {
            words,
            form: fast.and_then(|fast| fast.form(tensor)),
            layout,
            dtype: tensor.getattr(intern!(py, "dtype"))?.unbind(),
            device: tensor.getattr(intern!(py, "device"))?.unbind(),
            reader: reader.clone().unbind(),
        })
    }

    /// Return how a tensor gets into the static one: `"same"`, `"copy"` of the bytes at the address that
    /// is returned too, or by `"torch"`. Raises if it does not fit; `index` is for the message.
    #[pyo3(signature = (tensor, index=0))]
    fn check(&self, tensor: &Bound<'_, PyAny>, index: usize) -> PyResult<(&'static str, u64)> {
        Ok(match self.fit(tensor, index)? {
            Match::Same => ("same", self.layout.own.address),
            Match::Copy(address) => ("copy", address),
            Match::Torch => ("torch", 0),
        })
    }

    /// Return where the static tensor begins.
    #[getter]
    pub(crate) fn address(&self) -> u64 {
        self.layout.own.address
    }

    /// Return how many bytes its elements have together.
    #[getter]
    pub(crate) fn nbytes(&self) -> u64 {
        self.layout.own.bytes
    }

    /// Return whether the elements lie side by side, so that a copy of bytes is a copy of the tensor.
    #[getter]
    pub(crate) fn is_dense(&self) -> bool {
        self.layout.own.is_dense
    }
}

impl Signature {
    /// Return the addresses from the first element to the end of the last one.
    pub(crate) fn span(&self) -> Range<u64> {
        let start = self.layout.own.address;
        start..start + self.layout.span_bytes
    }

    /// Return how a tensor gets into the static one.
    #[inline]
    pub(crate) fn fit(&self, tensor: &Bound<'_, PyAny>, index: usize) -> PyResult<Match> {
        if let Comparison::At(address, _) = self.see(tensor) {
            return Ok(self.layout.own.from(address));
        }
        match self.look(tensor) {
            Comparison::At(address, _) => Ok(self.layout.own.from(address)),
            Comparison::Other | Comparison::Unknown => self.fit_any(tensor, index),
        }
    }

    #[cold]
    fn fit_any(&self, tensor: &Bound<'_, PyAny>, index: usize) -> PyResult<Match> {
        let compare = |view: &View<'_>| (self.layout.compare(view), view.lazy);
        let read = self.reader.get().with(tensor, compare);
        match read {
            Ok((Some(Match::Torch), _)) => Ok(Match::Torch),
            Ok((Some(_), Lazy::Unknown)) if is_lazy(tensor)? => Ok(Match::Torch),
            Ok((Some(found), _)) => Ok(found),
            Ok((None, _)) => Err(self.misfit(tensor.py(), &describe(tensor)?, index)),
            Err(error) => Err(self.unreadable(tensor, index, error)),
        }
    }

    /// As [`Self::fit`], but none for whatever is not copied as it is: another value than a tensor,
    /// another shape, dtype, device or strides, what cannot be read, where only torch can copy, and a
    /// tensor that requires a gradient where another one does not.
    #[inline]
    pub(crate) fn matches(
        &self,
        value: &Bound<'_, PyAny>,
        requires_grad: bool,
    ) -> PyResult<Option<Match>> {
        let told = FastMatch::of(&self.see(value), self.layout.own, requires_grad);
        self.matches_after(told, value, requires_grad)
    }

    /// The same after [`FastSignature::tell`].
    #[inline]
    pub(crate) fn matches_after(
        &self,
        told: FastMatch,
        value: &Bound<'_, PyAny>,
        requires_grad: bool,
    ) -> PyResult<Option<Match>> {
        match told {
            FastMatch::Fits(found) => Ok(Some(found)),
            FastMatch::Other => Ok(None),
            FastMatch::Unknown => self.matches_slowly(value, requires_grad),
        }
    }

    /// The same without the fastest way.
    #[inline(never)]
    fn matches_slowly(
        &self,
        value: &Bound<'_, PyAny>,
        requires_grad: bool,
    ) -> PyResult<Option<Match>> {
        let found = match self.look(value) {
            Comparison::At(address, Some(given)) => {
                let found = self.layout.own.from(address);
                return Ok((given == requires_grad && found != Match::Torch).then_some(found));
            }
            Comparison::At(address, None) => Some(self.layout.own.from(address)),
            Comparison::Other => return Ok(None),
            Comparison::Unknown => self.matches_any(value)?,
        };
        let found = found.filter(|found| *found != Match::Torch);
        let is_same = found.is_some() && self.reader.get().requires_grad(value)? == requires_grad;
        Ok(found.filter(|_| is_same))
    }

    /// Return the fastest way for tensors of a class, for who compares at each call; none where there is none.
    pub(crate) fn fast(
        &self,
        class: &Bound<'_, PyType>,
        requires_grad: bool,
    ) -> Option<FastSignature> {
        let known = self.reader.get().fast()?.known_class(class)?;
        let words = self.words.clone()?;
        Some(FastSignature::new(
            known,
            words,
            self.layout.own,
            requires_grad,
        ))
    }

    /// Return who reads the tensors that it is compared with.
    pub(crate) fn reader(&self) -> &Py<TensorReader> {
        &self.reader
    }

    /// As [`Self::matches`] by torch's other functions, whether or not it requires a gradient.
    #[cold]
    fn matches_any(&self, value: &Bound<'_, PyAny>) -> PyResult<Option<Match>> {
        let reader = self.reader.get();
        if !reader.is_tensor(value) {
            return Ok(None);
        }
        let compare = |view: &View<'_>| (self.layout.compare(view), view.lazy);
        let (found, lazy) = match reader.with(value, compare) {
            Err(error) if error.is_instance_of::<PyException>(value.py()) => return Ok(None),
            read => read?,
        };
        let is_plain = lazy != Lazy::Unknown || found.is_none() || !is_lazy(value)?;
        Ok(found.filter(|_| is_plain))
    }

    /// Return the fastest way.
    #[inline]
    fn see(&self, tensor: &Bound<'_, PyAny>) -> Comparison {
        let see = |words| {
            let fast = self.reader.get().fast()?;
            Some(fast.field_reader()?.see(fast.known_tensor(tensor)?, words))
        };
        let seen = self.words.as_ref().and_then(see);
        seen.unwrap_or(Comparison::Unknown)
    }

    /// Return the next fastest one.
    fn look(&self, tensor: &Bound<'_, PyAny>) -> Comparison {
        match (&self.form, self.reader.get().fast()) {
            (Some(form), Some(fast)) => fast.look(tensor, form, &self.layout.extents),
            _ => Comparison::Unknown,
        }
    }

    #[cold]
    fn misfit(&self, py: Python<'_>, given: &str, index: usize) -> PyErr {
        let (dtype, device) = (self.dtype.bind(py), self.device.bind(py));
        let expected = in_words(dtype, self.layout.shape(), device);
        argument(&format!("argument {index}"), given, &expected)
    }

    #[cold]
    fn unreadable(&self, tensor: &Bound<'_, PyAny>, index: usize, error: PyErr) -> PyErr {
        let py = tensor.py();
        let class = tensor.get_type();
        let class = class
            .name()
            .map_or_else(|_| "?".into(), |name| name.to_string());
        let misfit = self.misfit(py, &format!("a {class} that cannot be read"), index);
        misfit.set_cause(py, Some(error));
        misfit
    }
}

#[cfg(test)]
mod tests {
    use super::is_dense;

    #[test]
    fn elements_side_by_side_are_dense_in_any_order_of_dimensions() {
        for (shape, strides) in [
            (&[][..], &[][..]),
            (&[1], &[77]),
            (&[5], &[1]),
            (&[2, 3], &[3, 1]),
            (&[2, 3], &[1, 2]),
            (&[4, 1, 2, 3], &[6, 0, 1, 2]),
            (&[3, 0, 2], &[9, 9, 9]),
        ] {
            assert!(is_dense(shape, strides), "{shape:?} {strides:?}");
        }
        for (shape, strides) in [
            (&[5][..], &[2][..]),
            (&[5], &[0]),
            (&[2, 3], &[4, 1]),
            (&[2, 3], &[1, 1]),
            (&[2, 2], &[1, 4]),
        ] {
            assert!(!is_dense(shape, strides), "{shape:?} {strides:?}");
        }
    }
}
