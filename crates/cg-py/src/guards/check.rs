//! `Check`: the object that must be at a place.

use std::collections::HashMap;
use std::sync::Arc;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyDict, PyFrozenSet, PyInt, PyString, PyTuple, PyType, PyWeakrefMethods, PyWeakrefReference,
};
use pyo3::{PyTraverseError, PyVisit};

use super::class_versions::ClassVersions;
use super::function_parts::FunctionParts;
use super::guarded_tensor::GuardedTensor;
use super::key;
use super::object_access::{attributes_of, length_of, of_class};
use super::plain_value::PlainValue;
use crate::error::argument;
use crate::raw;
use crate::tensors::TensorReader;

/// The object that must be at a place.
pub(super) enum Check {
    /// A value of the same class that is equal.
    PlainValue(Box<PlainValue>),
    /// The very same object.
    Is(Py<PyAny>),
    Missing,
    /// An object of just this class.
    Kind(Py<PyType>),
    /// A container of just this class with so many items.
    Length(Py<PyType>, usize),
    /// A dictionary with just these keys, in this order, or without some.
    Dict(Py<PyType>, Option<Keys>, Absent),
    /// An object without some attributes of its own.
    Object(Py<PyType>, Absent),
    Set(Py<PyType>, Box<Members>),
    /// A tensor that lies where one lay.
    Tensor(Box<GuardedTensor>),
    /// A tensor that is laid out as one was, wherever it lies.
    Form(Box<GuardedTensor>),
    /// The same, which a replay copies.
    Input(Box<GuardedTensor>),
    /// The same function with the same code and defaults.
    Function(Box<Function>),
    /// The same weak reference, to an object that lives or does not.
    Weak(Py<PyAny>, bool),
    /// A class that has none of some names, and those that it is derived from neither.
    Class(Py<PyAny>, Absent),
}

/// A function and its parts.
pub(super) struct Function {
    function: Py<PyAny>,
    parts: FunctionParts,
}

/// Names, or other keys of dictionaries, under which there must be nothing.
#[derive(Clone)]
pub(super) struct Absent(Arc<Names>);

struct Names {
    all: Box<[Py<PyAny>]>,
    /// Of those that are strings: of a key that is none Python tells only that something has changed.
    hashes: Box<[isize]>,
}

/// The sets of such names that were read, by the addresses of Python's: hundreds of objects share one of
/// hundreds of names.
#[derive(Default)]
pub(super) struct AbsentSets(HashMap<usize, Absent>);

/// The keys of a dictionary, in their order; the places of its items say what is there.
pub(super) struct Keys(Box<[Py<PyAny>]>);

/// The members of a set.
pub(super) struct Members {
    of: Py<PyFrozenSet>,
    /// True if they are all texts, or all whole numbers, so that others can be equal to them.
    are_plain: bool,
}

impl Check {
    /// Read `("plain", value)`, `("is", object)`, `("missing",)`, `("kind", class)`, `("list", class,
    /// length)`, `("dict", class, keys or None, absent)`, `("object", class, absent)`, `("set", class,
    /// members)`, `("tensor", tensor)`, `("form", tensor)`, `("input", tensor)`, `("function", function)`,
    /// `("weak", reference)` or `("class", class, absent)`.
    pub(super) fn parse(
        from: &Bound<'_, PyTuple>,
        reader: Option<&Py<TensorReader>>,
        sets: &mut AbsentSets,
    ) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1);
        let class =
            || -> PyResult<Py<PyType>> { Ok(from.get_item(1)?.cast_into::<PyType>()?.unbind()) };
        Ok(match kind.as_str() {
            "plain" => Self::PlainValue(Box::new(PlainValue::new(&value?))),
            "is" => Self::Is(value?.unbind()),
            "missing" => Self::Missing,
            "kind" => Self::Kind(class()?),
            "list" => Self::Length(class()?, from.get_item(2)?.extract()?),
            "dict" => {
                let keys: Option<Vec<Py<PyAny>>> = from.get_item(2)?.extract()?;
                let keys = keys.map(|keys| Keys(keys.into()));
                Self::Dict(class()?, keys, sets.read(&from.get_item(3)?)?)
            }
            "object" => Self::Object(class()?, sets.read(&from.get_item(2)?)?),
            "set" => {
                let members = from.get_item(2)?.cast_into::<PyFrozenSet>()?;
                Self::Set(class()?, Box::new(Members::new(members)))
            }
            "tensor" | "form" | "input" => {
                let none = || argument("the reader of a tensor", "None", "a TensorReader");
                let reader = reader.ok_or_else(none)?;
                let tensor = GuardedTensor::new(&value?, reader, kind == "tensor")?;
                match kind.as_str() {
                    "tensor" => Self::Tensor(Box::new(tensor)),
                    "form" => Self::Form(Box::new(tensor)),
                    _ => Self::Input(Box::new(tensor)),
                }
            }
            "function" => Self::Function(Box::new(Function::new(value?)?)),
            "weak" => {
                let reference = value?.cast_into::<PyWeakrefReference>()?;
                let is_alive = reference.upgrade().is_some();
                Self::Weak(reference.into_any().unbind(), is_alive)
            }
            "class" => {
                let class = value?.cast_into::<PyType>()?;
                let absent = sets.read(&from.get_item(2)?)?;
                Self::Class(class.into_any().unbind(), absent)
            }
            _ => {
                let expected = "plain, is, missing, kind, list, dict, object, set, tensor, form, input, function, weak or class";
                return Err(argument("the check of a place", &kind, expected));
            }
        })
    }

    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Self::Missing)
    }

    /// Return the class that is there, if something must be there.
    pub(super) fn class<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyType>> {
        match self {
            Self::Missing => None,
            Self::Is(object) | Self::Weak(object, _) | Self::Class(object, _) => {
                Some(object.bind(py).get_type())
            }
            Self::PlainValue(plain) => Some(plain.value(py).get_type()),
            Self::Function(function) => Some(function.function.bind(py).get_type()),
            Self::Tensor(tensor) | Self::Form(tensor) | Self::Input(tensor) => {
                Some(tensor.class().bind(py).clone())
            }
            Self::Kind(class)
            | Self::Length(class, _)
            | Self::Dict(class, ..)
            | Self::Object(class, _)
            | Self::Set(class, _) => Some(class.bind(py).clone()),
        }
    }

    /// Return whether the same object may be another one inside, of which nobody tells.
    pub(super) fn is_untracked(&self, py: Python<'_>) -> bool {
        match self {
            Self::Tensor(_) | Self::Form(_) | Self::Input(_) | Self::Weak(..) => true,
            Self::Function(_) => !FunctionParts::are_watched(py),
            Self::Class(..) => !ClassVersions::are_known(py),
            Self::Length(class, _) => !class.bind(py).is_subclass_of::<PyTuple>().unwrap_or(false),
            Self::Set(class, _) => !class.bind(py).is(py.get_type::<PyFrozenSet>()),
            // Their order is not that of the dictionary.
            Self::Dict(class, Some(keys), _) => {
                keys.0.len() > 1 && ordered_keys(class.bind(py)).is_some()
            }
            _ => false,
        }
    }

    /// Return whether what is there fits.
    pub(super) fn fits(&self, now: Option<&Bound<'_, PyAny>>) -> bool {
        let Some(now) = now else {
            return self.is_missing();
        };
        match self {
            Self::PlainValue(plain) => plain.fits(now),
            Self::Is(object) => now.is(object),
            Self::Weak(object, _) | Self::Class(object, _) => {
                now.is(object) && self.still_fits(now)
            }
            Self::Function(function) => now.is(&function.function) && self.still_fits(now),
            Self::Missing => false,
            Self::Dict(.., absent) => {
                self.still_fits(now) && now.cast().is_ok_and(|dict| absent.are_absent(dict))
            }
            Self::Object(_, absent) => {
                self.still_fits(now)
                    && (absent.is_empty()
                        || attributes_of(now).is_none_or(|all| absent.are_absent(&all.dict)))
            }
            _ => self.still_fits(now),
        }
    }

    /// The same of an object that has fitted, but for names that must be absent.
    #[inline]
    pub(super) fn still_fits(&self, now: &Bound<'_, PyAny>) -> bool {
        let is_of = |class: &Py<PyType>| now.get_type_ptr().cast() == class.as_ptr();
        match self {
            Self::PlainValue(_) | Self::Is(_) => true,
            Self::Missing => false,
            Self::Kind(class) | Self::Object(class, _) | Self::Dict(class, None, _) => is_of(class),
            Self::Length(class, count) => {
                is_of(class) && length_of(now).is_ok_and(|length| length == *count)
            }
            Self::Dict(class, Some(keys), _) => {
                is_of(class) && now.cast::<PyDict>().is_ok_and(|now| keys.are_of(now))
            }
            Self::Set(class, members) => is_of(class) && members.are_in(now),
            Self::Tensor(tensor) | Self::Form(tensor) | Self::Input(tensor) => tensor.fits(now),
            Self::Function(function) => function.parts.are_of(now),
            Self::Weak(_, is_alive) => now
                .cast::<PyWeakrefReference>()
                .is_ok_and(|now| now.upgrade().is_some() == *is_alive),
            Self::Class(_, absent) => {
                let mut names = absent.0.all.iter();
                let is_absent = |name: &Py<PyAny>| {
                    let name = name.bind(now.py()).cast::<PyString>();
                    name.is_ok_and(|name| of_class(now, name).is_none())
                };
                names.all(is_absent)
            }
        }
    }

    /// Return whether it is a tensor's.
    pub(super) fn is_of_tensor(&self) -> bool {
        matches!(self, Self::Tensor(_) | Self::Form(_) | Self::Input(_))
    }

    /// Return the names that must not be in the dictionary that is there, or among the attributes.
    pub(super) fn absent(&self) -> Option<&Absent> {
        match self {
            Self::Dict(.., absent) | Self::Object(_, absent) => {
                Some(absent).filter(|absent| !absent.is_empty())
            }
            _ => None,
        }
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::PlainValue(plain) => plain.traverse(visit),
            Self::Is(object) | Self::Weak(object, _) | Self::Class(object, _) => visit.call(object),
            Self::Function(function) => {
                visit.call(&function.function)?;
                function.parts.traverse(visit)
            }
            Self::Missing => Ok(()),
            Self::Dict(class, keys, _) => {
                visit.call(class)?;
                let mut keys = keys.iter().flat_map(|keys| &keys.0);
                keys.try_for_each(|key| visit.call(key))
            }
            Self::Kind(class) | Self::Length(class, _) | Self::Object(class, _) => {
                visit.call(class)
            }
            Self::Set(class, members) => {
                visit.call(class)?;
                visit.call(&members.of)
            }
            Self::Tensor(tensor) | Self::Form(tensor) | Self::Input(tensor) => {
                tensor.traverse(visit)
            }
        }
    }
}

impl AbsentSets {
    /// Read a set, which the caller keeps as long as this.
    fn read(&mut self, names: &Bound<'_, PyAny>) -> PyResult<Absent> {
        let address = names.as_ptr().addr();
        if let Some(known) = self.0.get(&address) {
            return Ok(known.clone());
        }
        let read = Absent::new(names.cast::<PyFrozenSet>()?)?;
        self.0.insert(address, read.clone());
        Ok(read)
    }
}

impl Absent {
    fn new(names: &Bound<'_, PyFrozenSet>) -> PyResult<Self> {
        let (mut all, mut hashes) = (Vec::new(), Vec::new());
        for name in names {
            let Ok(text) = name.cast::<PyString>() else {
                all.push(name.unbind());
                continue;
            };
            if text.is_exact_instance_of::<PyString>() {
                hashes.push(text.hash()?);
            }
            let interned = PyString::intern(text.py(), text.to_str()?);
            all.push(interned.into_any().unbind());
        }
        Ok(Self(Arc::new(Names {
            all: all.into(),
            hashes: hashes.into(),
        })))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.all.is_empty()
    }

    pub(super) fn hashes(&self) -> &[isize] {
        &self.0.hashes
    }

    /// Return whether a dictionary has none of them.
    pub(super) fn are_absent(&self, dict: &Bound<'_, PyDict>) -> bool {
        let mut names = self.0.all.iter();
        names.all(|name| raw::item_address(dict, name.bind(dict.py())) == Some(0))
    }
}

impl Function {
    fn new(function: Bound<'_, PyAny>) -> PyResult<Self> {
        let parts = FunctionParts::of(&function);
        let wrong = || argument("a function", "something else", "a function of Python's");
        Ok(Self {
            parts: parts.ok_or_else(wrong)?,
            function: function.unbind(),
        })
    }
}

impl Keys {
    /// Return whether a dictionary has so many, in this order.
    fn are_of(&self, dict: &Bound<'_, PyDict>) -> bool {
        if dict.len() != self.0.len() || self.0.len() < 2 {
            return dict.len() == self.0.len();
        }
        let now: PyResult<Vec<_>> = match ordered_keys(&dict.get_type()) {
            Some(keys) => keys
                .call1((dict,))
                .and_then(|keys| keys.try_iter()?.collect()),
            None => Ok(dict.keys().iter().collect()),
        };
        let Ok(now) = now else {
            return false;
        };
        let mut pairs = now.iter().zip(&self.0);
        pairs.all(|(now, before)| {
            let before = before.bind(now.py());
            // Others may have a comparison of the user's.
            let may_compare = || key::is_plain(now) && key::is_plain(before);
            now.is(before) || (may_compare() && now.eq(before).unwrap_or(false))
        })
    }
}

/// Return what lists the keys of dictionaries that have an order of their own; none for others.
fn ordered_keys<'py>(class: &Bound<'py, PyType>) -> Option<Bound<'py, PyAny>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let ordered = CLASS
        .import(class.py(), "collections", "OrderedDict")
        .ok()?;
    let is_ordered = class.is_subclass(ordered).unwrap_or(false);
    is_ordered.then(|| ordered.getattr(intern!(class.py(), "keys")).ok())?
}

impl Members {
    fn new(of: Bound<'_, PyFrozenSet>) -> Self {
        Self {
            are_plain: are_plain(&of),
            of: of.unbind(),
        }
    }

    /// Return whether a set has just these.
    fn are_in(&self, set: &Bound<'_, PyAny>) -> bool {
        let then = self.of.bind(set.py());
        if length_of(set).ok() != Some(then.len()) {
            return false;
        }
        // Python copies sets in its own way, whatever a derived class has for others.
        let copied = set.py().get_type::<PyFrozenSet>().call1((set,));
        let Ok(Ok(now)) = copied.map(Bound::cast_into::<PyFrozenSet>) else {
            return false;
        };
        if self.are_plain && are_plain(&now) {
            return now.eq(then).unwrap_or(false);
        }
        addresses(&now) == addresses(then)
    }
}

/// Return whether the members of a set are all texts, or all whole numbers: 1 and True are two.
fn are_plain(set: &Bound<'_, PyFrozenSet>) -> bool {
    set.iter().all(|one| one.is_exact_instance_of::<PyInt>())
        || set.iter().all(|one| one.is_exact_instance_of::<PyString>())
}

fn addresses(set: &Bound<'_, PyFrozenSet>) -> Vec<usize> {
    let mut all: Vec<usize> = set.iter().map(|one| one.as_ptr().addr()).collect();
    all.sort_unstable();
    all
}
