//! `Step`: what leads on from one object to the next, by no code of the user's.

use pyo3::exceptions::PyLookupError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyDict, PyFrozenSet, PyInt, PyList, PySet, PyTuple, PyType, PyWeakrefReference,
};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw;

/// What leads on from one object to the next.
pub(super) enum Step {
    /// A key of a dictionary, the name of an attribute, or the place that this is in a list, a tuple
    /// or a deque.
    Item(Py<PyAny>, Option<usize>),
    /// The descriptor of a slot, whose reading runs no code of the user's.
    Slot(Py<PyAny>),
    Aspect(Aspect),
}

/// What a container or an object is known by as a whole, or what is behind it: `Aspect` of
/// `_state/holders.py`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Aspect {
    Kind,
    Length,
    Empty,
    Content,
    Held,
}

/// As `_MOST_ITEMS` of `_state/holders.py`.
const MOST_ITEMS: usize = 64;

impl Step {
    pub(super) fn new(py: Python<'_>, key: Py<PyAny>) -> Self {
        if let Some(aspect) = Aspect::of(key.bind(py)) {
            return Self::Aspect(aspect);
        }
        let kind = key.bind(py).get_type().name();
        if kind.is_ok_and(|name| name == "member_descriptor") {
            return Self::Slot(key);
        }
        let place = key.extract(py).ok();
        Self::Item(key, place)
    }

    /// What is there in a container or an object. What cannot be looked up is another one.
    #[inline]
    pub(super) fn of<'py>(&self, container: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        let py = container.py();
        match self {
            Self::Item(key, place) => item_of(container, key.bind(py), *place),
            Self::Slot(slot) => {
                let get = intern!(py, "__get__");
                slot.bind(py).call_method1(get, (container,)).ok()
            }
            Self::Aspect(aspect) => aspect.at(container),
        }
    }

    /// Whether another one is the same key, or the same aspect.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Item(one, _), Self::Item(other, _)) | (Self::Slot(one), Self::Slot(other)) => {
                one.is(other)
            }
            (Self::Aspect(one), Self::Aspect(other)) => one == other,
            _ => false,
        }
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Item(key, _) | Self::Slot(key) => visit.call(key),
            Self::Aspect(_) => Ok(()),
        }
    }
}

impl Aspect {
    /// The one that a step asks for.
    fn of(key: &Bound<'_, PyAny>) -> Option<Self> {
        let is_aspect = key.get_type().name().is_ok_and(|name| name == "Aspect");
        let value = is_aspect
            .then(|| key.getattr("value"))
            .and_then(Result::ok)?;
        match value.extract::<String>().as_deref() {
            Ok("kind") => Some(Self::Kind),
            Ok("length") => Some(Self::Length),
            Ok("empty") => Some(Self::Empty),
            Ok("content") => Some(Self::Content),
            Ok("held") => Some(Self::Held),
            _ => None,
        }
    }

    /// That of what is there, of Python's own classes: others may run code of the user's.
    fn at<'py>(self, value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        let py = value.py();
        match self {
            Self::Kind => Some(value.get_type().into_any()),
            Self::Length => Some(PyInt::new(py, length_of(value)?).into_any()),
            Self::Empty => {
                let is_empty = PyBool::new(py, length_of(value)? == 0);
                Some(is_empty.to_owned().into_any())
            }
            Self::Content => {
                if let Ok(set) = value.cast_exact::<PySet>() {
                    return Some(PyFrozenSet::new(py, set.iter()).ok()?.into_any());
                }
                let kind = value.get_type().fully_qualified_name();
                let is_array = kind.is_ok_and(|name| name == "numpy.ndarray");
                is_array.then(|| contents_of(value).ok().flatten())?
            }
            Self::Held => held_by(value).ok().flatten(),
        }
    }
}

/// How much there is in a container.
fn length_of(value: &Bound<'_, PyAny>) -> Option<usize> {
    if let Ok(list) = value.cast::<PyList>() {
        Some(list.len())
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        Some(tuple.len())
    } else if let Ok(dict) = value.cast::<PyDict>() {
        Some(dict.len())
    } else {
        is_deque(value).then(|| value.len().ok()).flatten()
    }
}

/// What a context variable or a weak reference holds; nothing of a variable that has no value here, and
/// none of other objects.
fn held_by<'py>(value: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    static VARIABLE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = value.py();
    if value.is_exact_instance_of::<PyWeakrefReference>() {
        return value.call0().map(Some);
    }
    let variable = VARIABLE.import(py, "contextvars", "ContextVar")?;
    if !value.get_type().is(variable) {
        return Ok(None);
    }
    match value.call_method0(intern!(py, "get")) {
        Err(error) if error.is_instance_of::<PyLookupError>(py) => {
            Ok(Some(py.None().into_bound(py)))
        }
        held => held.map(Some),
    }
}

/// The dtype, shape and bytes of an array of `NumPy`'s; none of a large one, or one of objects.
fn contents_of<'py>(array: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = array.py();
    let size: usize = array.getattr(intern!(py, "size"))?.extract()?;
    let dtype = array.getattr(intern!(py, "dtype"))?;
    if size > MOST_ITEMS || dtype.getattr(intern!(py, "hasobject"))?.is_truthy()? {
        return Ok(None);
    }
    let dtype = dtype.getattr(intern!(py, "str"))?;
    let shape = array.getattr(intern!(py, "shape"))?;
    let bytes = array.call_method0(intern!(py, "tobytes"))?;
    let contents = (dtype, shape, bytes).into_pyobject(py)?;
    Ok(Some(contents.into_any()))
}

/// Whether something is a deque of Python's own, for which Rust has no type.
fn is_deque(value: &Bound<'_, PyAny>) -> bool {
    static DEQUE: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let deque = DEQUE.import(value.py(), "collections", "deque");
    deque.is_ok_and(|deque| value.get_type().is(deque))
}

/// An item of a container, or an attribute that an object has itself.
#[inline]
fn item_of<'py>(
    container: &Bound<'py, PyAny>,
    key: &Bound<'py, PyAny>,
    place: Option<usize>,
) -> Option<Bound<'py, PyAny>> {
    let py = container.py();
    if let Ok(list) = container.cast::<PyList>() {
        return list.get_item(place?).ok();
    }
    if let Ok(tuple) = container.cast::<PyTuple>() {
        return tuple.get_item(place?).ok();
    }
    if let Ok(dict) = container.cast::<PyDict>() {
        return dict.get_item(key).ok().flatten();
    }
    // A class of the user's may have its own way.
    if let Some(place) = place {
        let item = is_deque(container).then(|| container.get_item(place).ok());
        return item.flatten();
    }
    // Not by the attribute, which may be a property that runs code of the user's.
    if let Ok(attributes) = raw::attributes(container) {
        return attributes.get_item(key).ok()?;
    }
    // Those of a thread have a way of their own.
    let local = py.import(intern!(py, "_thread")).ok()?;
    let local = local.getattr(intern!(py, "_local")).ok()?;
    if !container.is_instance(&local).ok()? {
        return None;
    }
    let attributes = container.getattr(intern!(py, "__dict__")).ok()?;
    attributes.cast::<PyDict>().ok()?.get_item(key).ok()?
}
