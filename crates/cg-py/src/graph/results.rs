//! `Results`: the objects that a replay returns.

use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::fresh_results::{FreshResults, NewResults};
use super::lent_results::LentResults;
use crate::arguments::MatchedTensors;
use crate::error::argument;
use crate::raw::{self, Attached, WeakReferences};
use crate::tensors::{Match, Signature};

/// The result of a replay.
pub(crate) struct Results {
    leaves: Vec<Leaf>,
    /// The tensors of the static ones, if there are some.
    own: Option<Py<PyList>>,
    /// Makes the new tensors among them, if there are some.
    fresh: Option<Py<FreshResults>>,
    build: Build,
    /// Called once when a call overwrites what the call before last has returned, and a caller still
    /// has that.
    warn: Option<Py<PyAny>>,
    has_warned: AtomicBool,
}

enum Leaf {
    /// A tensor of the graph.
    Static(Output),
    /// A tensor of the graph, returned as a copy.
    Copied(Py<PyAny>),
    /// A new tensor: that of this number among the fresh ones.
    FreshResults(usize),
    /// The tensor that the caller gave at this place.
    Argument(usize),
    /// The result of a callable for that.
    View(usize, Py<PyAny>),
    Constant(Py<PyAny>),
}

/// The way in which the leaves are put together.
enum Build {
    Single,
    Tuple,
    /// By a callable that takes a list of them.
    Other(Py<PyAny>),
}

/// A static tensor that is returned as an alias of its memory.
struct Output {
    own: Py<PyAny>,
    signature: Py<Signature>,
    weak_references: WeakReferences,
    lent: Attached<Lent>,
}

/// The results of the last two calls. One is returned again that the caller has let go as it was: a
/// new tensor costs more.
#[derive(Default)]
struct Lent {
    last: Option<Py<PyAny>>,
    /// Of the call before the last one; none where that returned what the last one has returned again.
    before: Option<Py<PyAny>>,
}

/// The outputs as Python gives them: leaves, build, and who is told of one that is still held.
pub(crate) type Returned<'py> = (Bound<'py, PyList>, Bound<'py, PyAny>, Option<Py<PyAny>>);

impl Results {
    /// Read leaves: `("static", tensor, signature)`, `("copied", tensor)`, `("fresh", number, fresh)`
    /// with one object for all of these, `("argument", place)`, `("view", place, make)` or `("constant",
    /// value)`, each tensor an object of its own. `build` is `"single"`, `"tuple"` or a callable that takes
    /// a list of leaves. `warn` is called before the replay of the first call at which somebody has what
    /// the call before last has returned of a static one.
    pub(crate) fn new(
        given: &Bound<'_, PyList>,
        build: &Bound<'_, PyAny>,
        warn: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let leaves: PyResult<Vec<Leaf>> = given.iter().map(|leaf| Leaf::parse(&leaf)).collect();
        let leaves = leaves?;
        let build = match build.extract::<String>().as_deref() {
            Ok("single") if leaves.len() == 1 => Build::Single,
            Ok("tuple") => Build::Tuple,
            _ => Build::Other(build.clone().unbind()),
        };
        let own: Vec<_> = leaves.iter().filter_map(Leaf::own).collect();
        let has_static = !own.is_empty();
        let own = has_static
            .then(|| PyList::new(given.py(), own))
            .transpose()?;
        Ok(Self {
            fresh: fresh_of(given)?,
            own: own.map(Bound::unbind),
            leaves,
            build,
            warn: warn.filter(|_| has_static),
            has_warned: AtomicBool::new(false),
        })
    }

    /// Tell Python if somebody still has what the call before last has returned, which the next replay
    /// overwrites.
    #[inline]
    pub(crate) fn warn_if_held(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(warn) = &self.warn
            && !self.has_warned.load(Ordering::Relaxed)
            && self.leaves.iter().any(|leaf| leaf.is_held(py))
        {
            self.has_warned.store(true, Ordering::Relaxed);
            warn.call0(py)?;
        }
        Ok(())
    }

    /// Make new tensors for the results of the next replay, allocated on the current stream; none where there
    /// are no fresh ones.
    #[inline]
    pub(crate) fn new_results<'py>(&self, py: Python<'py>) -> PyResult<Option<NewResults<'py>>> {
        let fresh = self.fresh.as_ref();
        fresh.map(|fresh| fresh.get().make(py)).transpose()
    }

    /// Return what the call returns; `lent` gets to know the static ones.
    #[inline]
    pub(crate) fn result(
        &self,
        py: Python<'_>,
        tensors: MatchedTensors<'_, '_>,
        new: Option<&NewResults<'_>>,
        lent: Option<&LentResults>,
    ) -> PyResult<Py<PyAny>> {
        if let (Some(own), Some(lent)) = (&self.own, lent) {
            lent.lend(own.bind(py));
        }
        let all = || self.leaves.iter().map(|leaf| leaf.lend(py, tensors, new));
        match &self.build {
            Build::Single => self.leaves[0].lend(py, tensors, new),
            Build::Tuple => {
                let leaves: Vec<_> = all().collect::<PyResult<_>>()?;
                Ok(PyTuple::new(py, leaves)?.into_any().unbind())
            }
            Build::Other(build) => {
                let leaves: Vec<_> = all().collect::<PyResult<_>>()?;
                build.call1(py, (PyList::new(py, leaves)?,))
            }
        }
    }

    /// Show the garbage collector what this owns. Tensors that no caller gets refer to nothing.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Build::Other(build) = &self.build {
            visit.call(build)?;
        }
        visit.call(&self.warn)?;
        self.leaves.iter().try_for_each(|leaf| match leaf {
            Leaf::Constant(one) | Leaf::View(_, one) => visit.call(one),
            Leaf::Static(output) => output.lent.traverse(visit, |lent, visit| {
                visit.call(&lent.last)?;
                visit.call(&lent.before)
            }),
            Leaf::Copied(_) | Leaf::FreshResults(_) | Leaf::Argument(_) => Ok(()),
        })
    }
}

impl Leaf {
    fn parse(from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1)?;
        Ok(match kind.as_str() {
            "static" => Self::Static(Output {
                weak_references: WeakReferences::of(&value.get_type())?,
                own: value.unbind(),
                signature: from.get_item(2)?.extract()?,
                lent: Attached::default(),
            }),
            "copied" => Self::Copied(value.unbind()),
            "fresh" => Self::FreshResults(value.extract()?),
            "argument" => Self::Argument(value.extract()?),
            "view" => Self::View(value.extract()?, from.get_item(2)?.unbind()),
            "constant" => Self::Constant(value.unbind()),
            _ => {
                let expected = "static, copied, fresh, argument, view or constant";
                return Err(argument("the kind of an output", &kind, expected));
            }
        })
    }

    /// Return the tensor of a static one.
    fn own(&self) -> Option<&Py<PyAny>> {
        match self {
            Self::Static(output) => Some(&output.own),
            _ => None,
        }
    }

    /// Return whether somebody has what the call before last has returned of a static one.
    #[inline]
    fn is_held(&self, py: Python<'_>) -> bool {
        matches!(self, Self::Static(output) if output.is_held(py))
    }

    #[inline]
    fn lend(
        &self,
        py: Python<'_>,
        tensors: MatchedTensors<'_, '_>,
        new: Option<&NewResults<'_>>,
    ) -> PyResult<Py<PyAny>> {
        match self {
            Self::Static(output) => output.lend(py),
            Self::Copied(own) => own.call_method0(py, intern!(py, "clone")),
            Self::FreshResults(number) => {
                let new = new.expect("there are new tensors where a leaf is one");
                Ok(new.get(*number).unbind())
            }
            Self::Argument(place) => Ok(tensors.get(*place).to_owned().unbind()),
            Self::View(place, make) => make.call1(py, (tensors.get(*place),)),
            Self::Constant(value) => Ok(value.clone_ref(py)),
        }
    }
}

impl Output {
    #[inline]
    fn is_held(&self, py: Python<'_>) -> bool {
        let lent = self.lent.take(py);
        let is_held = is_held(py, lent.before.as_ref());
        // What was there is the default, whose end runs nothing.
        drop(self.lent.replace(py, lent));
        is_held
    }

    /// Return an alias that no caller has and that is as it was made.
    #[inline]
    fn lend(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let Lent { last, before } = self.lent.take(py);
        let (lent, before) = if let Some(free) = self.free(py, before)? {
            (free, last)
        } else if is_held(py, last.as_ref()) {
            (self.alias(py)?, last)
        } else {
            let free = self.free(py, last)?;
            (free.map_or_else(|| self.alias(py), Ok)?, None)
        };
        let last = Some(lent.clone_ref(py));
        drop(self.lent.replace(py, Lent { last, before }));
        Ok(lent)
    }

    fn alias(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.own.call_method0(py, intern!(py, "detach"))
    }

    /// One that was lent, if no caller has it and it is as it was made.
    #[inline]
    fn free(&self, py: Python<'_>, lent: Option<Py<PyAny>>) -> PyResult<Option<Py<PyAny>>> {
        let Some(lent) = lent.map(|lent| lent.into_bound(py)) else {
            return Ok(None);
        };
        let signature = self.signature.get();
        let is_free = raw::references(&lent) == 1
            && signature.matches(&lent, false)? == Some(Match::Same)
            && is_as_given(&lent, self.own.bind(py))?
            && !self.weak_references.may_be_there(&lent)
            && signature.reader().get().is_untouched(&lent)?;
        Ok(is_free.then(|| lent.unbind()))
    }
}

/// Return whether somebody else has an object as well.
#[inline]
fn is_held(py: Python<'_>, object: Option<&Py<PyAny>>) -> bool {
    object.is_some_and(|object| raw::references(object.bind(py)) > 1)
}

/// Return what makes the fresh ones of these leaves: the same for all.
fn fresh_of(leaves: &Bound<'_, PyList>) -> PyResult<Option<Py<FreshResults>>> {
    let mut found: Option<Bound<'_, FreshResults>> = None;
    for leaf in leaves.iter() {
        let kind: String = leaf.get_item(0)?.extract()?;
        if kind != "fresh" {
            continue;
        }
        let (number, fresh): (usize, Bound<'_, FreshResults>) =
            (leaf.get_item(1)?.extract()?, leaf.get_item(2)?.extract()?);
        let count = fresh.get().results();
        if number >= count || found.as_ref().is_some_and(|other| !other.is(&fresh)) {
            let given = format!("{number} of {count}");
            return Err(argument(
                "a fresh result",
                &given,
                "one of those of all leaves",
            ));
        }
        found = Some(fresh);
    }
    Ok(found.map(Bound::unbind))
}

/// Return whether a tensor has the class of another one, and no attributes that a caller has given it.
#[inline]
fn is_as_given(tensor: &Bound<'_, PyAny>, own: &Bound<'_, PyAny>) -> PyResult<bool> {
    if !tensor.get_type().is(own.get_type()) {
        return Ok(false);
    }
    let given = raw::attributes(tensor)?;
    if given.is_empty() {
        return Ok(true);
    }
    // Those of a class derived from torch's.
    Ok(have_same_items(&given, &raw::attributes(own)?))
}

/// Return whether two dictionaries have the very same objects, in the same order.
fn have_same_items(one: &Bound<'_, PyDict>, other: &Bound<'_, PyDict>) -> bool {
    let mut pairs = one.iter().zip(other.iter());
    let are_same = pairs.all(|((key, value), (its, other))| key.is(&its) && value.is(&other));
    are_same && one.len() == other.len()
}
