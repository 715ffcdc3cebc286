//! `Step`: from one place to the next, by no code of the user's.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit};

use super::key::Key;
use super::last_value::LastValue;
use super::object_access::{attributes_of, content_of, of_class};
use crate::error::argument;
use crate::raw;

/// A step from one place to the next.
pub(super) enum Step {
    /// An object that is known.
    Root(Py<PyAny>),
    /// One of those that the caller names.
    Object(usize),
    /// An attribute of the object itself.
    Attribute(Key),
    /// An attribute of its class, or of a class that it is itself.
    Class(Py<PyString>),
    /// The descriptor of a slot.
    Slot(Py<PyAny>),
    Item(Key),
    /// The content of a cell.
    Cell,
    /// The gradient of a leaf.
    Gradient,
    /// The value of a context variable for this thread.
    Context,
}

impl Step {
    /// Read `("root", object)`, `("object", k)`, `("attr", name)`, `("class", name)`, `("slot",
    /// descriptor)`, `("item", key)`, `("cell",)`, `("grad",)` or `("context",)`.
    pub(super) fn parse(from: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1);
        let name = || -> PyResult<Bound<'_, PyString>> {
            let name = from.get_item(1)?.cast_into::<PyString>()?;
            Ok(PyString::intern(from.py(), name.to_str()?))
        };
        Ok(match kind.as_str() {
            "root" => Self::Root(value?.unbind()),
            "object" => Self::Object(value?.extract()?),
            "attr" => Self::Attribute(Key::new(name()?.as_any())),
            "class" => Self::Class(name()?.unbind()),
            "slot" => {
                static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
                let class = CLASS.import(from.py(), "types", "MemberDescriptorType")?;
                let slot = value?;
                if !slot.get_type().is(class) {
                    return Err(argument("a slot", "something else", "a member descriptor"));
                }
                Self::Slot(slot.unbind())
            }
            "item" => Self::Item(Key::new(&value?)),
            "cell" => Self::Cell,
            "grad" => Self::Gradient,
            "context" => Self::Context,
            _ => {
                let expected = "root, object, attr, class, slot, item, cell, grad or context";
                return Err(argument("the step to a place", &kind, expected));
            }
        })
    }

    /// Return whether nobody tells of a change of what is there, in a container of this class.
    pub(super) fn is_untracked(&self, container: Option<&Bound<'_, PyType>>) -> bool {
        match self {
            Self::Root(_) | Self::Object(_) | Self::Attribute(_) => false,
            // Of a class that is a root its versions tell: see `Places::parse`.
            Self::Class(_) | Self::Slot(_) | Self::Cell | Self::Gradient | Self::Context => true,
            Self::Item(_) => !container.is_some_and(|class| {
                class.is_subclass_of::<PyDict>().unwrap_or(false)
                    || class.is_subclass_of::<PyTuple>().unwrap_or(false)
            }),
        }
    }

    /// Return whether what is there is the very same object as before, or still nothing.
    #[inline]
    pub(super) fn is_unmoved(
        &self,
        py: Python<'_>,
        container: Option<&LastValue>,
        now: &mut LastValue,
        objects: &[Bound<'_, PyAny>],
    ) -> bool {
        let before = address(now.value.as_ref().map(Py::as_ptr));
        match (self, container) {
            (Self::Root(object), _) => object.as_ptr().addr() == before,
            (Self::Object(number), _) => address(objects.get(*number).map(Bound::as_ptr)) == before,
            (Self::Attribute(key), Some(container)) => match &container.attributes {
                Some(attributes) => key.is_at(attributes.bind(py), &mut now.position, before),
                None => before == 0,
            },
            (_, Some(container)) => {
                let container = container.value.as_ref().map(|value| value.bind(py));
                if let (Self::Item(key), Some(container)) = (self, container)
                    && let Ok(dict) = container.cast::<PyDict>()
                {
                    return key.is_at(dict, &mut now.position, before);
                }
                let found = self.find(py, container, objects);
                address(found.as_ref().map(Bound::as_ptr)) == before
            }
            (_, None) => false,
        }
    }

    /// Return what is there in a container or an object. What cannot be looked up is not there.
    pub(super) fn find<'py>(
        &self,
        py: Python<'py>,
        container: Option<&Bound<'py, PyAny>>,
        objects: &[Bound<'py, PyAny>],
    ) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::Root(object) => Some(object.bind(py).clone()),
            Self::Object(number) => objects.get(*number).cloned(),
            Self::Attribute(key) => key.find(&attributes_of(container?)?.dict),
            Self::Class(name) => of_class(container?, name.bind(py)),
            Self::Slot(slot) => raw::slot(slot.bind(py), container?),
            Self::Item(key) => key.item_of(container?),
            Self::Cell => content_of(container?),
            Self::Gradient => container?.getattr(intern!(py, "grad")).ok(),
            Self::Context => container?.call_method0(intern!(py, "get")).ok(),
        }
    }

    /// Return the class that it starts at, if it does.
    pub(super) fn class_root<'py>(&self, py: Python<'py>) -> Option<&Bound<'py, PyType>> {
        match self {
            Self::Root(object) => object.bind(py).cast().ok(),
            _ => None,
        }
    }

    /// Return where what was found is in its container, if that is a dictionary: see [`LastValue::position`].
    pub(super) fn position(&self, py: Python<'_>, container: Option<&LastValue>) -> isize {
        let found = match (self, container) {
            (Self::Attribute(key), Some(container)) => {
                let attributes = container.attributes.as_ref();
                attributes.map(|attributes| key.position(attributes.bind(py)))
            }
            (Self::Item(key), Some(container)) => {
                let container = container.value.as_ref();
                let dict = container.and_then(|container| container.bind(py).cast::<PyDict>().ok());
                dict.map(|dict| key.position(dict))
            }
            _ => None,
        };
        found.unwrap_or(-1)
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Root(object) | Self::Slot(object) => visit.call(object),
            Self::Attribute(key) | Self::Item(key) => key.traverse(visit),
            Self::Object(_) | Self::Class(_) | Self::Cell | Self::Gradient | Self::Context => {
                Ok(())
            }
        }
    }
}

/// 0 for nothing.
#[inline]
fn address(object: Option<*mut pyo3::ffi::PyObject>) -> usize {
    object.map_or(0, <*mut pyo3::ffi::PyObject>::addr)
}
