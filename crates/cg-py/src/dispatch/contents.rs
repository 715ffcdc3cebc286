//! `Contents`: what dictionaries held at one moment.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBytes, PyComplex, PyComplexMethods, PyDict, PyFloat, PyFrozenSet, PyInt, PyList, PyString,
    PyTuple,
};
use pyo3::{PyTraverseError, PyVisit};

use crate::raw;

/// Dictionaries, and what they held.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Contents {
    of: Vec<Content>,
}

struct Content {
    dict: Py<PyDict>,
    items: Items,
}

/// Keys and values, in their order.
pub(super) type Items = Vec<(Py<PyAny>, Py<PyAny>)>;

/// What a dictionary holds.
pub(super) fn items_of(dict: &Bound<'_, PyDict>) -> Items {
    let items = dict.iter();
    items
        .map(|(key, value)| (key.unbind(), value.unbind()))
        .collect()
}

#[pymethods]
impl Contents {
    /// What they hold now.
    #[new]
    pub(crate) fn new(dictionaries: Vec<Bound<'_, PyDict>>) -> Self {
        let of = dictionaries.into_iter().map(|dict| Content {
            items: items_of(&dict),
            dict: dict.unbind(),
        });
        Self { of: of.collect() }
    }

    /// Those that do not hold the very same objects by the same keys in the same order, each with a
    /// dictionary of what it held.
    fn changed<'py>(
        &self,
        py: Python<'py>,
    ) -> PyResult<Vec<(Bound<'py, PyDict>, Bound<'py, PyDict>)>> {
        let changed = self.of.iter().filter(|content| !content.is_same(py));
        let with_before = changed.map(|content| {
            let before = PyDict::new(py);
            for (key, value) in &content.items {
                before.set_item(key, value)?;
            }
            Ok((content.dict.bind(py).clone(), before))
        });
        with_before.collect()
    }

    pub(crate) fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for content in &self.of {
            visit.call(&content.dict)?;
            for (key, value) in &content.items {
                visit.call(key)?;
                visit.call(value)?;
            }
        }
        Ok(())
    }
}

impl Contents {
    /// Whether all hold what they held.
    #[inline]
    pub(crate) fn is_same(&self, py: Python<'_>) -> bool {
        self.of.iter().all(|content| content.is_same(py))
    }

    /// Whether all still hold what they held, maybe with more.
    pub(crate) fn still_have(&self, py: Python<'_>) -> bool {
        let mut all = self.of.iter();
        all.all(|content| content.is_same(py) || content.still_has(py))
    }
}

impl Content {
    /// Whether what it held is still there, maybe with more.
    fn still_has(&self, py: Python<'_>) -> bool {
        let dict = self.dict.bind(py);
        self.items.iter().all(|(key, value)| {
            let now = dict.get_item(key).ok().flatten();
            now.is_some_and(|now| is_same(&now, value.bind(dict.py())))
        })
    }

    #[inline]
    fn is_same(&self, py: Python<'_>) -> bool {
        let dict = self.dict.bind(py);
        raw::has_just(dict, &self.items) || self.is_equal(dict)
    }

    /// The same where a name is another string that is equal, as hardly any is, or a value another
    /// object that is equal, as the learning rate of a scheduler that has come to the same one.
    #[cold]
    fn is_equal(&self, dict: &Bound<'_, PyDict>) -> bool {
        let py = dict.py();
        let mut pairs = dict.iter().zip(&self.items);
        dict.len() == self.items.len()
            && pairs.all(|((key, now), (name, then))| {
                is_same(&now, then.bind(py))
                    && (key.is(name) || are_equal_strings(&key, name.bind(py)))
            })
    }
}

/// Whether a value is the very same object, or one that is equal: a number, a text, a tuple of these, a
/// frozen set of some, or a list of the same objects. None of them runs Python code when it is compared.
#[inline]
pub(super) fn is_same(now: &Bound<'_, PyAny>, then: &Bound<'_, PyAny>) -> bool {
    now.is(then) || is_equal(now, then)
}

/// The same of two objects.
#[cold]
fn is_equal(now: &Bound<'_, PyAny>, then: &Bound<'_, PyAny>) -> bool {
    if !now.get_type().is(then.get_type()) {
        return false;
    }
    if let (Ok(now), Ok(then)) = (now.cast::<PyFloat>(), then.cast::<PyFloat>()) {
        return now.value().to_bits() == then.value().to_bits();
    }
    if let (Ok(now), Ok(then)) = (now.cast_exact::<PyList>(), then.cast_exact::<PyList>()) {
        // A list may have itself in it.
        let mut pairs = now.iter().zip(then.iter());
        return now.len() == then.len() && pairs.all(|(now, then)| now.is(&then));
    }
    if let (Ok(now), Ok(then)) = (now.cast::<PyTuple>(), then.cast::<PyTuple>()) {
        let mut pairs = now.iter().zip(then.iter());
        return is_compared_as_tuple(now)
            && now.len() == then.len()
            && pairs.all(|(now, then)| is_same(&now, &then));
    }
    if let (Ok(now), Ok(then)) = (
        now.cast_exact::<PyFrozenSet>(),
        then.cast_exact::<PyFrozenSet>(),
    ) {
        return are_equal_sets(now, then);
    }
    if let (Ok(now), Ok(then)) = (
        now.cast_exact::<PyComplex>(),
        then.cast_exact::<PyComplex>(),
    ) {
        let bits = |one: &Bound<'_, PyComplex>| (one.real().to_bits(), one.imag().to_bits());
        return bits(now) == bits(then);
    }
    if is_of(now, "numpy.") && is_of(then, "numpy.") {
        return are_same_bytes(now, then).unwrap_or(false);
    }
    let is_plain = now.is_exact_instance_of::<PyInt>()
        || now.is_exact_instance_of::<PyString>()
        || now.is_exact_instance_of::<PyBytes>()
        || is_of(now, "torch.device");
    is_plain && now.eq(then).unwrap_or(false)
}

/// Whether two sets have equal members, of one class of texts or whole numbers: 1 and True are two.
fn are_equal_sets(now: &Bound<'_, PyFrozenSet>, then: &Bound<'_, PyFrozenSet>) -> bool {
    let are = |is: fn(&Bound<'_, PyAny>) -> bool| {
        now.iter().all(|one| is(&one)) && then.iter().all(|one| is(&one))
    };
    let are_of_one = are(|one| one.is_exact_instance_of::<PyInt>())
        || are(|one| one.is_exact_instance_of::<PyString>());
    are_of_one && now.eq(then).unwrap_or(false)
}

/// Whether a tuple is one of Python's, or of a derived class that compares nothing in its own way, as
/// `torch.Size` and named ones.
fn is_compared_as_tuple(value: &Bound<'_, PyTuple>) -> bool {
    let name = intern!(value.py(), "__eq__");
    if value.is_exact_instance_of::<PyTuple>() {
        return true;
    }
    let base = value.py().get_type::<PyTuple>().getattr(name);
    let own = value.get_type().getattr(name);
    own.ok()
        .zip(base.ok())
        .is_some_and(|(own, base)| own.is(&base))
}

/// Whether the name of something's class begins so.
fn is_of(value: &Bound<'_, PyAny>, name: &str) -> bool {
    let own = value.get_type().fully_qualified_name();
    own.is_ok_and(|own| own.to_string_lossy().starts_with(name))
}

/// Whether two of `NumPy`'s numbers have the same bytes; arrays are never alike.
fn are_same_bytes(now: &Bound<'_, PyAny>, then: &Bound<'_, PyAny>) -> PyResult<bool> {
    let name = intern!(now.py(), "tobytes");
    let generic = now.py().import(intern!(now.py(), "numpy"))?;
    if !now.is_instance(&generic.getattr(intern!(now.py(), "generic"))?)? {
        return Ok(false);
    }
    now.call_method0(name)?.eq(then.call_method0(name)?)
}

/// Whether two names are equal strings. Others might run Python code that changes the dictionary.
fn are_equal_strings(one: &Bound<'_, PyAny>, other: &Bound<'_, PyAny>) -> bool {
    let are_strings =
        one.is_exact_instance_of::<PyString>() && other.is_exact_instance_of::<PyString>();
    are_strings && one.eq(other).unwrap_or(false)
}
