//! `Pattern`: the arguments that an entry takes, matched without flattening them first.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyFloat, PyList, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit};

use super::matched::{Argument, MatchedArguments, MatchedTensor};
use super::tensor_row::TensorRow;
use crate::error::argument;
use crate::tensors::{FastMatch, FastSignature, Match, Signature, TensorReader};

/// An expected argument.
pub(crate) enum Pattern {
    /// A tensor that is copied.
    Tensor(Slot),
    /// A tensor that lies where it lay at the capture.
    Fixed(Slot),
    /// An equal value.
    Constant(Py<PyAny>),
    /// The very same value.
    Same(Py<PyAny>),
    Tuple(Elements),
    List(Elements),
    /// These keys in this order, which a function may go through.
    Dict(Vec<(Py<PyAny>, Self)>),
    /// A tuple of a class with names for its items.
    Named(Py<PyType>, Elements),
    /// An object of a class that has these attributes and no others.
    Record(Py<PyType>, Vec<(Py<PyAny>, Self)>),
    /// An object of just this class, which guards look into.
    Object(Py<PyType>),
}

/// The expected elements of a tuple or list.
pub(crate) struct Elements {
    each: Vec<Pattern>,
    leading: TensorRow,
}

/// An expected tensor.
pub(crate) struct Slot {
    /// Without gradients as well: a function may ask a leaf for it, or record some itself.
    requires_grad: bool,
    /// True if it has no history, where that matters.
    is_leaf: Option<bool>,
    /// Enough in most calls.
    fast: Option<FastSignature>,
    signature: Py<Signature>,
    class: Py<PyType>,
}

impl Pattern {
    /// Read what Python has put together: `("tensor", signature, requires_grad, is_leaf,
    /// class)`, `("fixed", signature, requires_grad, is_leaf, class)`, `("constant", value)`,
    /// `("same", value)`, `("tuple", patterns)`, `("list", patterns)`, `("dict", [(key, pattern)])`,
    /// `("named", patterns, class)`, `("record", [(name, pattern)], class)` or `("object", class)`.
    pub(crate) fn parse(from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1)?;
        let all = |value: &Bound<'_, PyAny>| -> PyResult<Elements> {
            let patterns = value.try_iter()?;
            let each = patterns.map(|pattern| Self::parse(&pattern?));
            Ok(Elements::new(value.py(), each.collect::<PyResult<_>>()?))
        };
        let pairs = |value: &Bound<'_, PyAny>| -> PyResult<Vec<(Py<PyAny>, Self)>> {
            let items = value.try_iter()?.map(|item| {
                let item = item?;
                Ok((item.get_item(0)?.unbind(), Self::parse(&item.get_item(1)?)?))
            });
            items.collect()
        };
        let class = |place: usize| -> PyResult<Bound<'_, PyType>> {
            Ok(from.get_item(place)?.cast_into::<PyType>()?)
        };
        let slot = || -> PyResult<Slot> {
            let signature = value.cast::<Signature>()?;
            let class = class(4)?;
            let requires_grad = from.get_item(2)?.extract()?;
            Ok(Slot {
                requires_grad,
                is_leaf: from.get_item(3)?.extract()?,
                fast: signature.get().fast(&class, requires_grad),
                signature: signature.clone().unbind(),
                class: class.unbind(),
            })
        };
        Ok(match kind.as_str() {
            "tensor" => Self::Tensor(slot()?),
            "fixed" => Self::Fixed(slot()?),
            "constant" => Self::Constant(value.unbind()),
            "same" => Self::Same(value.unbind()),
            "tuple" => Self::Tuple(all(&value)?),
            "list" => Self::List(all(&value)?),
            "dict" => Self::Dict(pairs(&value)?),
            "named" => Self::Named(class(2)?.unbind(), all(&value)?),
            "record" => Self::Record(class(2)?.unbind(), pairs(&value)?),
            "object" => Self::Object(class(1)?.unbind()),
            _ => {
                let expected =
                    "tensor, fixed, constant, same, tuple, list, dict, named, record or object";
                return Err(argument("the kind of a pattern", &kind, expected));
            }
        })
    }

    /// Return whether a value fits. Tensors that are copied are added to `matched`, and objects, in order.
    #[inline]
    pub(crate) fn fits<'a, 'py>(
        &self,
        value: Argument<'a, 'py>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> PyResult<bool> {
        let told = match self {
            Self::Tensor(slot) => match slot.tell(&value) {
                FastMatch::Fits(fit) if slot.is_leaf.is_none() => {
                    matched.push(MatchedTensor { tensor: value, fit });
                    return Ok(true);
                }
                told => told,
            },
            Self::Fixed(slot) => slot.tell(&value),
            _ => FastMatch::Unknown,
        };
        self.fits_after(told, value, matched)
    }

    /// The same after [`Slot::tell`]: apart, as it calls itself, and calls of tensors end before it.
    #[inline(never)]
    fn fits_after<'a, 'py>(
        &self,
        told: FastMatch,
        value: Argument<'a, 'py>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> PyResult<bool> {
        match self {
            Self::Tensor(slot) => {
                let Some(fit) = slot.fits_after(told, &value)? else {
                    return Ok(false);
                };
                matched.push(MatchedTensor { tensor: value, fit });
                Ok(true)
            }
            Self::Fixed(slot) => Ok(slot.fits_after(told, &value)? == Some(Match::Same)),
            Self::Constant(constant) => Ok(equals(&value, constant.bind(value.py()))),
            Self::Same(same) => Ok(value.is(same)),
            Self::Tuple(elements) => match value.cast_exact::<PyTuple>() {
                Ok(tuple) => elements.fit(tuple.len(), || tuple.iter(), matched),
                Err(_) => Ok(false),
            },
            Self::List(elements) => match value.cast_exact::<PyList>() {
                Ok(list) => elements.fit(list.len(), || list.iter(), matched),
                Err(_) => Ok(false),
            },
            Self::Dict(patterns) => match value.cast_exact::<PyDict>() {
                Ok(dict) if has_order(patterns, dict) => fits_dict(patterns, dict, matched),
                _ => Ok(false),
            },
            Self::Named(class, elements) if value.get_type().is(class) => {
                match value.cast::<PyTuple>() {
                    Ok(tuple) => elements.fit(tuple.len(), || tuple.iter(), matched),
                    Err(_) => Ok(false),
                }
            }
            Self::Record(class, patterns) if value.get_type().is(class) => {
                let attributes = value.getattr(intern!(value.py(), "__dict__"))?;
                match attributes.cast_exact::<PyDict>() {
                    Ok(dict) if has_order(patterns, dict) => fits_dict(patterns, dict, matched),
                    _ => Ok(false),
                }
            }
            Self::Object(class) => {
                let fits = value.get_type_ptr().cast() == class.as_ptr();
                if fits {
                    matched.push_object((*value).clone());
                }
                Ok(fits)
            }
            Self::Named(..) | Self::Record(..) => Ok(false),
        }
    }

    /// Return the fastest way, if that is enough for each tensor that it can tell of, and who reads them.
    pub(crate) fn fast_signature(&self) -> Option<(&FastSignature, &Py<TensorReader>)> {
        match self {
            Self::Tensor(slot) if slot.is_leaf.is_none() => {
                Some((slot.fast.as_ref()?, slot.signature.get().reader()))
            }
            _ => None,
        }
    }

    /// Add the bytes of each tensor that is copied, in the order in which [`Self::fits`] finds them.
    pub(crate) fn add_bytes(&self, bytes: &mut Vec<u64>) {
        match self {
            Self::Tensor(slot) => bytes.push(slot.signature.get().nbytes()),
            Self::Fixed(_) | Self::Constant(_) | Self::Same(_) | Self::Object(_) => {}
            Self::Tuple(elements) | Self::List(elements) | Self::Named(_, elements) => {
                for pattern in &elements.each {
                    pattern.add_bytes(bytes);
                }
            }
            Self::Dict(patterns) | Self::Record(_, patterns) => {
                for (_, pattern) in patterns {
                    pattern.add_bytes(bytes);
                }
            }
        }
    }

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self {
            Self::Tensor(slot) | Self::Fixed(slot) => visit.call(&slot.class),
            Self::Constant(value) | Self::Same(value) => visit.call(value),
            Self::Object(class) => visit.call(class),
            Self::Tuple(elements) | Self::List(elements) => elements.traverse(visit),
            Self::Dict(patterns) => traverse_pairs(patterns, visit),
            Self::Named(class, elements) => {
                visit.call(class)?;
                elements.traverse(visit)
            }
            Self::Record(class, patterns) => {
                visit.call(class)?;
                traverse_pairs(patterns, visit)
            }
        }
    }
}

impl Elements {
    fn new(py: Python<'_>, each: Vec<Pattern>) -> Self {
        Self {
            leading: TensorRow::new(py, each.iter().map_while(Pattern::fast_signature)),
            each,
        }
    }

    /// Return whether so many values fit. `values` goes through them, once for each time it is called.
    fn fit<'py, I: Iterator<Item = Bound<'py, PyAny>>>(
        &self,
        count: usize,
        values: impl Fn() -> I,
        matched: &mut MatchedArguments<'_, 'py>,
    ) -> PyResult<bool> {
        if count != self.each.len() {
            return Ok(false);
        }
        let Some(first) = self.leading.fit(values().map(Argument::Held), matched) else {
            return Ok(false);
        };
        if first == count {
            return Ok(true);
        }
        let others = values().skip(first).map(Argument::Held);
        all_fit(&self.each[first..], count - first, others, matched)
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.each.iter().try_for_each(|one| one.traverse(visit))
    }
}

fn traverse_pairs(
    patterns: &[(Py<PyAny>, Pattern)],
    visit: &PyVisit<'_>,
) -> Result<(), PyTraverseError> {
    patterns.iter().try_for_each(|(key, pattern)| {
        visit.call(key)?;
        pattern.traverse(visit)
    })
}

/// Return whether positional arguments or elements fit.
#[inline]
pub(crate) fn all_fit<'a, 'py>(
    patterns: &[Pattern],
    count: usize,
    mut values: impl Iterator<Item = Argument<'a, 'py>>,
    matched: &mut MatchedArguments<'a, 'py>,
) -> PyResult<bool> {
    if count != patterns.len() {
        return Ok(false);
    }
    for pattern in patterns {
        // A comparison may run code that shortens a list.
        let Some(value) = values.next() else {
            return Ok(false);
        };
        if !pattern.fits(value, matched)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Return whether a dictionary has its keys in the order of the patterns.
pub(crate) fn has_order(patterns: &[(Py<PyAny>, Pattern)], dict: &Bound<'_, PyDict>) -> bool {
    let mut keys = dict.iter();
    patterns.iter().all(|(key, _)| {
        // A comparison may run code that adds keys, which ends in a panic of the iterator.
        let next = (dict.len() == patterns.len())
            .then(|| keys.next())
            .flatten();
        next.is_some_and(|(other, _)| equals(&other, key.bind(other.py())))
    })
}

/// Return whether keyword arguments or the items of a dictionary fit.
pub(crate) fn fits_dict<'py>(
    patterns: &[(Py<PyAny>, Pattern)],
    dict: &Bound<'py, PyDict>,
    matched: &mut MatchedArguments<'_, 'py>,
) -> PyResult<bool> {
    if dict.len() != patterns.len() {
        return Ok(false);
    }
    for (key, pattern) in patterns {
        let Some(value) = dict.get_item(key)? else {
            return Ok(false);
        };
        if !pattern.fits(Argument::Held(value), matched)? {
            return Ok(false);
        }
    }
    Ok(true)
}

impl Slot {
    /// Return what the fastest way tells of a value.
    #[inline]
    fn tell(&self, value: &Bound<'_, PyAny>) -> FastMatch {
        if let Some(fast) = &self.fast
            && let Some(reader) = self.signature.get().reader().get().fast()
            && let Some(fields) = reader.field_reader()
        {
            return fast.tell(&fields, value);
        }
        // A function may do something else with one of a derived class.
        if value.get_type_ptr().cast() == self.class.as_ptr() {
            FastMatch::Unknown
        } else {
            FastMatch::Other
        }
    }

    /// Return how it gets into the static one; none where it does not fit.
    fn fits_after(&self, told: FastMatch, value: &Bound<'_, PyAny>) -> PyResult<Option<Match>> {
        let signature = self.signature.get();
        let fit = signature.matches_after(told, value, self.requires_grad)?;
        if let (Some(_), Some(is_leaf)) = (fit, self.is_leaf) {
            let is_same = is_leaf == self::is_leaf(value)?;
            return Ok(fit.filter(|_| is_same));
        }
        Ok(fit)
    }
}

#[cold]
fn is_leaf(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "is_leaf"))?.is_truthy()
}

/// Return whether two non-tensor arguments are the same: `1`, `1.0` and `True` are not, nor are `0.0`
/// and `-0.0`.
fn equals(value: &Bound<'_, PyAny>, constant: &Bound<'_, PyAny>) -> bool {
    if value.is(constant) {
        return true;
    }
    if let (Ok(value), Ok(constant)) = (
        value.cast_exact::<PyFloat>(),
        constant.cast_exact::<PyFloat>(),
    ) {
        return value.value().to_bits() == constant.value().to_bits();
    }
    // What cannot be compared is equal to itself alone.
    value.get_type().is(constant.get_type()) && value.eq(constant).unwrap_or(false)
}
