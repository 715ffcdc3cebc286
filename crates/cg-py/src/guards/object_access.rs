//! Objects, classes, cells and containers, read so that no code of the user's runs.

use pyo3::exceptions::PyTypeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyFrozenSet, PyList, PyMappingProxy, PySet, PyString, PyTuple, PyType};

use crate::raw::{self, ClassReader};

/// The attributes that an object has itself.
pub(super) struct Attributes<'py> {
    pub(super) dict: Bound<'py, PyDict>,
    /// True if they are the same for each thread.
    pub(super) are_of_all: bool,
}

/// None for a class, whose dictionary nobody may have, and for what has no attributes.
pub(super) fn attributes_of<'py>(object: &Bound<'py, PyAny>) -> Option<Attributes<'py>> {
    static LOCAL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = object.py();
    if object.is_instance_of::<PyType>() {
        return None;
    }
    if let Ok(dict) = raw::attributes(object) {
        let are_of_all = true;
        return Some(Attributes { dict, are_of_all });
    }
    let local = LOCAL.import(py, "_thread", "_local").ok()?;
    if !object.get_type().is(local) {
        return None;
    }
    let dict = object.getattr(intern!(py, "__dict__")).ok()?;
    Some(Attributes {
        dict: dict.cast_into().ok()?,
        are_of_all: false,
    })
}

/// Return what the class of an object, or a class that it is itself, has under a name.
pub(super) fn of_class<'py>(
    object: &Bound<'py, PyAny>,
    name: &Bound<'py, PyString>,
) -> Option<Bound<'py, PyAny>> {
    static READER: PyOnceLock<Option<ClassReader>> = PyOnceLock::new();
    let py = object.py();
    let class = match object.cast::<PyType>() {
        Ok(class) => class.clone(),
        Err(_) => object.get_type(),
    };
    let find = || address_of(py, "_PyType_Lookup").ok().map(ClassReader::new);
    match READER.get_or_init(py, find) {
        Some(reader) => reader.get(&class, name),
        None => of_bases(&class, name).ok().flatten(),
    }
}

/// The same by what Python shows, for a Python that has another function.
#[cold]
fn of_bases<'py>(
    class: &Bound<'py, PyType>,
    name: &Bound<'py, PyString>,
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = class.py();
    // A metaclass may have attributes of its own by these names.
    let own = py.get_type::<PyType>().getattr(intern!(py, "__dict__"))?;
    let read = |of: &Bound<'py, PyAny>, name: &str| {
        let descriptor = own.get_item(name)?;
        descriptor.call_method1(intern!(py, "__get__"), (of,))
    };
    for base in read(class, "__mro__")?.cast_into::<PyTuple>()?.iter() {
        let dict = read(&base, "__dict__")?.cast_into::<PyMappingProxy>()?;
        if dict.contains(name)? {
            return dict.get_item(name).map(Some);
        }
    }
    Ok(None)
}

/// Return the address of one of Python's own functions.
pub(super) fn address_of(py: Python<'_>, name: &str) -> PyResult<usize> {
    let ctypes = py.import(intern!(py, "ctypes"))?;
    let function = ctypes.getattr(intern!(py, "pythonapi"))?.getattr(name)?;
    let pointer = ctypes.getattr(intern!(py, "c_void_p"))?;
    let address = ctypes.call_method1(intern!(py, "cast"), (function, pointer))?;
    address.getattr(intern!(py, "value"))?.extract()
}

/// Return what is in a cell; none of an empty one.
pub(super) fn content_of<'py>(cell: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    static CELL: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let class = CELL.import(cell.py(), "types", "CellType").ok()?;
    let is_cell = cell.get_type().is(class);
    let content = is_cell.then(|| cell.getattr(intern!(cell.py(), "cell_contents")));
    content?.ok()
}

/// A deque, or an object of a class that is derived from it.
pub(super) struct Deque<'a, 'py>(&'a Bound<'py, PyAny>, &'py Bound<'py, PyType>);

impl<'a, 'py> Deque<'a, 'py> {
    pub(super) fn of(value: &'a Bound<'py, PyAny>) -> Option<Self> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let class = CLASS.import(value.py(), "collections", "deque").ok()?;
        raw::is_instance(value, class.as_unbound()).then_some(Self(value, class))
    }

    /// Return how many items it has, by its own class: a derived one may have another way.
    fn length(&self) -> PyResult<usize> {
        let name = intern!(self.0.py(), "__len__");
        self.1.call_method1(name, (self.0,))?.extract()
    }

    pub(super) fn item(&self, place: usize) -> Option<Bound<'py, PyAny>> {
        let name = intern!(self.0.py(), "__getitem__");
        self.1.call_method1(name, (self.0, place)).ok()
    }
}

/// Return how much there is in a container of one of Python's own classes, or of one derived from these.
#[inline]
pub(super) fn length_of(value: &Bound<'_, PyAny>) -> PyResult<usize> {
    if let Ok(list) = value.cast::<PyList>() {
        Ok(list.len())
    } else if let Ok(tuple) = value.cast::<PyTuple>() {
        Ok(tuple.len())
    } else if let Ok(dict) = value.cast::<PyDict>() {
        Ok(dict.len())
    } else if let Ok(set) = value.cast::<PySet>() {
        Ok(set.len())
    } else if let Ok(set) = value.cast::<PyFrozenSet>() {
        Ok(set.len())
    } else {
        let none = || PyTypeError::new_err("no container");
        Deque::of(value).ok_or_else(none)?.length()
    }
}
