//! `PlainValue`: a value without parts that others could change, and what is equal to it.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBytes, PyComplex, PyComplexMethods, PyDict, PyFloat, PyInt, PyString, PyTuple, PyType,
};
use pyo3::{PyTraverseError, PyVisit};

/// A value, and how others are compared with it.
pub(super) struct PlainValue {
    value: Py<PyAny>,
    how: Equality,
}

enum Equality {
    /// It is equal to itself alone: a member of an enumeration, a dtype, or what has a class of its own.
    Same,
    /// By a comparison that is not the user's, with values of just this class.
    Equal,
    Float(u64),
    Complex([u64; 2]),
    /// A number of `NumPy`'s: its dtype and its bytes.
    Number(Py<PyAny>, Py<PyAny>),
    /// Items one by one.
    Tuple(Box<[PlainValue]>),
}

impl PlainValue {
    pub(super) fn new(value: &Bound<'_, PyAny>) -> Self {
        Self {
            how: Equality::of(value).unwrap_or(Equality::Same),
            value: value.clone().unbind(),
        }
    }

    pub(super) fn value<'py>(&self, py: Python<'py>) -> &Bound<'py, PyAny> {
        self.value.bind(py)
    }

    /// Return whether a value is of the same class and equal.
    pub(super) fn fits(&self, now: &Bound<'_, PyAny>) -> bool {
        let then = self.value.bind(now.py());
        now.is(then) || (now.get_type_ptr() == then.get_type_ptr() && self.is_equal(now))
    }

    /// The same of another object of the same class.
    fn is_equal(&self, now: &Bound<'_, PyAny>) -> bool {
        match &self.how {
            Equality::Same => false,
            Equality::Equal => now.eq(&self.value).unwrap_or(false),
            Equality::Float(bits) => now
                .cast::<PyFloat>()
                .is_ok_and(|now| now.value().to_bits() == *bits),
            Equality::Complex(bits) => now
                .cast::<PyComplex>()
                .is_ok_and(|now| bits_of(now) == *bits),
            Equality::Number(dtype, bytes) => number(now).is_ok_and(|(of_now, now)| {
                of_now.eq(dtype).unwrap_or(false) && now.eq(bytes).unwrap_or(false)
            }),
            Equality::Tuple(items) => now.cast::<PyTuple>().is_ok_and(|now| {
                let mut pairs = items.iter().zip(now.iter());
                items.len() == now.len() && pairs.all(|(then, now)| then.fits(&now))
            }),
        }
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.value)?;
        match &self.how {
            Equality::Tuple(items) => items.iter().try_for_each(|one| one.traverse(visit)),
            _ => Ok(()),
        }
    }
}

impl Equality {
    /// As a value is compared; none if only the same object is equal.
    fn of(value: &Bound<'_, PyAny>) -> Option<Self> {
        let (py, class) = (value.py(), value.get_type());
        if value.is_exact_instance_of::<PyInt>()
            || value.is_exact_instance_of::<PyString>()
            || value.is_exact_instance_of::<PyBytes>()
        {
            return Some(Self::Equal);
        }
        if let Ok(value) = value.cast_exact::<PyFloat>() {
            return Some(Self::Float(value.value().to_bits()));
        }
        if let Ok(value) = value.cast_exact::<PyComplex>() {
            return Some(Self::Complex(bits_of(value)));
        }
        if let Ok(value) = value.cast::<PyTuple>() {
            let items = value.iter().map(|item| PlainValue::new(&item)).collect();
            return has_items_alone(&class).then_some(Self::Tuple(items));
        }
        let device = imported(py, "torch", intern!(py, "device"));
        if device.is_some_and(|device| device.is(&class)) {
            return Some(Self::Equal);
        }
        let numbers = imported(py, "numpy", intern!(py, "generic"))?;
        if class.is_subclass(&numbers).unwrap_or(false) && is_of_numpy(&class)? {
            let (dtype, bytes) = number(value).ok()?;
            return Some(Self::Number(dtype.unbind(), bytes.unbind()));
        }
        None
    }
}

fn bits_of(value: &Bound<'_, PyComplex>) -> [u64; 2] {
    [value.real().to_bits(), value.imag().to_bits()]
}

/// Return whether tuples of a class have nothing but their items, as those with names for them.
fn has_items_alone(class: &Bound<'_, PyType>) -> bool {
    let attributes = class.getattr(intern!(class.py(), "__dictoffset__"));
    attributes.is_ok_and(|offset| offset.extract::<isize>().is_ok_and(|offset| offset == 0))
}

/// True for the class of a dtype, which no derived class is.
fn is_of_numpy(number: &Bound<'_, PyType>) -> Option<bool> {
    let py = number.py();
    let dtype = imported(py, "numpy", intern!(py, "dtype"))?;
    let dtype = dtype.call1((number,)).ok()?;
    let class = dtype.getattr(intern!(py, "type")).ok()?;
    Some(class.is(number))
}

/// Return what a module has under a name; none if the module was never imported.
fn imported<'py>(
    py: Python<'py>,
    module: &str,
    name: &Bound<'py, PyString>,
) -> Option<Bound<'py, PyAny>> {
    let modules = py.import(intern!(py, "sys")).ok()?;
    let modules = modules.getattr(intern!(py, "modules")).ok()?;
    let module = modules.cast_into::<PyDict>().ok()?.get_item(module);
    module.ok()??.getattr(name).ok()
}

/// Return the dtype and the bytes of a number of `NumPy`'s.
fn number<'py>(value: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    let py = value.py();
    let dtype = value.getattr(intern!(py, "dtype"))?;
    let dtype = dtype.getattr(intern!(py, "str"))?;
    let bytes = value.call_method0(intern!(py, "tobytes"))?;
    Ok((dtype, bytes))
}
