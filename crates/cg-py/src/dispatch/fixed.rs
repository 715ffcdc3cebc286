//! `Fixed`: the tensors of modules that a graph reads where they lie.

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString};
use pyo3::{PyTraverseError, PyVisit};

use super::contents::{Contents, Items, is_same, items_of};
use super::step::Step;
use crate::raw::{self, Spot};
use crate::tensor::TensorReader;

/// Modules as they were at the capture: where they were found, what their dictionaries held, and where
/// their tensors lay.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Fixed {
    holders: Vec<Holder>,
    owners: Contents,
    hooks: Hooks,
    /// Whether each tensor requires a gradient.
    requires_grad: Vec<bool>,
    /// The tensors, and where they lay; none where only Python can compare that.
    tensors: Vec<(Py<PyAny>, Option<Spot>)>,
    reader: Py<TensorReader>,
    /// The same once more, for torch's own comparison: that of all if the reader cannot tell of one,
    /// as of those of derived classes.
    lists: Lists,
}

/// The hooks of modules.
struct Hooks {
    /// torch's class of their handles, which counts all hooks ever added.
    handle: Py<PyAny>,
    /// The count that is known to stand for no others than at the capture.
    seen: AtomicI64,
    /// Of those that had some: no count tells when these go.
    some: Vec<HooksOfOne>,
    none: Vec<HooksOfOne>,
}

/// Hooks of one kind: the item of a module's dictionary that has them, and what it held.
struct HooksOfOne {
    owner: Py<PyDict>,
    name: Py<PyString>,
    items: Items,
}

/// torch's class of the handles of hooks; dictionaries, names of items, and what these held.
type KnownHooks<'py> = (
    Py<PyAny>,
    Vec<(Py<PyDict>, Py<PyString>, Bound<'py, PyDict>)>,
);

/// How long a count must stay: torch counts a hook before it is there, maybe in another thread.
const SETTLED: Duration = Duration::from_millis(100);

/// The count that was seen last, and since when. Once it has stayed so long, the hooks that it counts
/// are there: also for who looks for the first time, as torch has one count for all.
static COUNT: Mutex<Option<(i64, Instant)>> = Mutex::new(None);

/// What torch's own comparison takes: tensors, addresses, and the places of those to compare.
struct Lists {
    tensors: Py<PyList>,
    addresses: Py<PyList>,
    places: Py<PyList>,
    are_equal: Py<PyAny>,
}

/// Where a function finds something: by its name, in a cell of a closure or in a container.
struct Holder {
    owner: Py<PyAny>,
    name: Py<PyString>,
    value: Py<PyAny>,
    path: Vec<Step>,
    /// Whether it is in the container, at the end but one of the path, that the holder before is in.
    is_beside: bool,
    /// Whether it is the gradient of a leaf that had none, and that a replay gives one.
    gets_gradient: bool,
}

/// Owner, name, value and path of a holder.
type FoundAt = (Py<PyAny>, Py<PyString>, Py<PyAny>, Vec<Py<PyAny>>);

#[pymethods]
impl Fixed {
    /// What the dictionaries hold now; the tensors and their addresses, which `reader` compares, or
    /// else `are_equal`. A holder is a dictionary or an object, the name of an item or attribute, the
    /// value, and the keys, places and attributes that lead to it from there.
    #[new]
    fn new(
        holders: Vec<FoundAt>,
        owners: Vec<Bound<'_, PyDict>>,
        hooks: KnownHooks<'_>,
        tensors: Bound<'_, PyList>,
        addresses: Bound<'_, PyList>,
        reader: Py<TensorReader>,
        are_equal: Py<PyAny>,
    ) -> PyResult<Self> {
        let py = tensors.py();
        let mut known: Vec<Holder> = Vec::with_capacity(holders.len());
        for found in holders {
            known.push(Holder::new(py, found, known.last()));
        }
        let of_reader = reader.get();
        let flags = tensors.iter().map(|one| of_reader.requires_grad(&one));
        let flags = flags.collect::<PyResult<_>>()?;
        let with_spot = tensors.iter().zip(addresses.iter());
        let with_spot = with_spot.map(|(tensor, address)| {
            let spot = of_reader.spot(&tensor, address.extract()?);
            Ok((tensor.unbind(), spot))
        });
        let with_spot = with_spot.collect::<PyResult<_>>()?;
        Ok(Self {
            holders: known,
            requires_grad: flags,
            owners: Contents::new(owners),
            hooks: Hooks::new(hooks),
            tensors: with_spot,
            reader,
            lists: Lists {
                places: PyList::new(py, 0..tensors.len())?.unbind(),
                tensors: tensors.unbind(),
                addresses: addresses.unbind(),
                are_equal,
            },
        })
    }

    /// Whether all hold the same objects, `hooks` included, and the tensors lie where they lay; with
    /// `grad` also whether the same ones require gradients.
    #[pyo3(signature = (grad, hooks=true))]
    pub(crate) fn is_in_place(&self, py: Python<'_>, grad: bool, hooks: bool) -> PyResult<bool> {
        let mut container = None;
        if !self
            .holders
            .iter()
            .all(|one| one.is_same(py, &mut container))
        {
            return Ok(false);
        }
        if !self.owners.is_same(py) || (hooks && !self.hooks.are_same(py)?) {
            return Ok(false);
        }
        let reader = self.reader.get();
        if grad {
            for ((tensor, _), before) in self.tensors.iter().zip(&self.requires_grad) {
                if reader.requires_grad(tensor.bind(py))? != *before {
                    return Ok(false);
                }
            }
        }
        match reader.are_at(py, &self.tensors) {
            Some(are_there) => Ok(are_there),
            None => self.lists.are_equal(py),
        }
    }

    /// The places of those holders where something else is.
    fn moved_holders(&self, py: Python<'_>) -> Vec<usize> {
        let mut container = None;
        let holders = self.holders.iter().enumerate();
        let moved = holders.filter(|(_, holder)| !holder.is_same(py, &mut container));
        moved.map(|(place, _)| place).collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        for holder in &self.holders {
            visit.call(&holder.owner)?;
            visit.call(&holder.value)?;
            holder
                .path
                .iter()
                .try_for_each(|step| step.traverse(&visit))?;
        }
        self.owners.__traverse__(visit)?;
        self.hooks.traverse(&visit)?;
        for (tensor, _) in &self.tensors {
            visit.call(tensor)?;
        }
        visit.call(&self.reader)?;
        self.lists.traverse(&visit)
    }
}

impl Fixed {
    /// Whether tensors lie where they lay, and are found there, whatever else there is by now.
    pub(crate) fn are_found(&self, py: Python<'_>) -> PyResult<bool> {
        let mut container = None;
        let mut holders = self.holders.iter();
        if !holders.all(|one| one.is_same(py, &mut container) || one.gets_gradient) {
            return Ok(false);
        }
        if !self.owners.still_have(py) {
            return Ok(false);
        }
        let are_there = self.reader.get().are_at(py, &self.tensors);
        are_there.map_or_else(|| self.lists.are_equal(py), Ok)
    }
}

impl Hooks {
    fn new((handle, hooks): KnownHooks<'_>) -> Self {
        let all = hooks.into_iter().map(|(owner, name, known)| HooksOfOne {
            owner,
            name,
            items: items_of(&known),
        });
        let (none, some) = all.partition(|one| one.items.is_empty());
        Self {
            handle,
            // No count is below 0.
            seen: AtomicI64::new(-1),
            some,
            none,
        }
    }

    /// Whether there are no others. Hundreds of dictionaries are looked at only after somebody has
    /// added a hook anywhere.
    #[inline]
    fn are_same(&self, py: Python<'_>) -> PyResult<bool> {
        let are_same = |all: &[HooksOfOne]| all.iter().all(|one| one.is_same(py));
        let now = self.handle.bind(py).getattr(intern!(py, "next_id"))?;
        let now = now.extract()?;
        let is_seen = self.seen.load(Ordering::Relaxed) == now;
        if !are_same(&self.some) || !(is_seen || are_same(&self.none)) {
            return Ok(false);
        }
        if !is_seen {
            self.note(now);
        }
        Ok(true)
    }

    /// Notes a count at which there were no others.
    #[cold]
    fn note(&self, count: i64) {
        let mut last = COUNT.lock().unwrap_or_else(PoisonError::into_inner);
        match *last {
            Some((same, since)) if same == count => {
                if since.elapsed() > SETTLED {
                    self.seen.store(count, Ordering::Relaxed);
                }
            }
            _ => *last = Some((count, Instant::now())),
        }
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.handle)?;
        for one in self.some.iter().chain(&self.none) {
            visit.call(&one.owner)?;
            for (_, hook) in &one.items {
                visit.call(hook)?;
            }
        }
        Ok(())
    }
}

impl HooksOfOne {
    #[inline]
    fn is_same(&self, py: Python<'_>) -> bool {
        let now = self.owner.bind(py).get_item(&self.name);
        // What cannot be looked up is another one.
        let now = now.ok().flatten().map(Bound::cast_into::<PyDict>);
        now.is_some_and(|now| now.is_ok_and(|now| raw::has_just(&now, &self.items)))
    }
}

impl Lists {
    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let lists = [&self.tensors, &self.addresses, &self.places];
        lists.into_iter().try_for_each(|one| visit.call(one))?;
        visit.call(&self.are_equal)
    }

    #[cold]
    fn are_equal(&self, py: Python<'_>) -> PyResult<bool> {
        let lists = (&self.tensors, &self.addresses, &self.places);
        self.are_equal.bind(py).call1(lists)?.is_truthy()
    }
}

impl Holder {
    /// What comes behind another one.
    fn new(py: Python<'_>, (owner, name, value, path): FoundAt, before: Option<&Self>) -> Self {
        let path: Vec<_> = path.into_iter().map(|key| Step::new(py, key)).collect();
        let is_gradient = name.bind(py).to_cow().is_ok_and(|name| name == "grad");
        let is_beside = before.is_some_and(|before| {
            before.owner.is(&owner) && before.name.is(&name) && lead_to_one(&before.path, &path)
        });
        Self {
            gets_gradient: is_gradient && path.is_empty() && value.is_none(py),
            owner,
            name,
            value,
            path,
            is_beside,
        }
    }

    /// Whether the value is there. `container` is what the holder before is in, if it has a path, and
    /// then what this one is in.
    #[inline]
    fn is_same<'py>(&self, py: Python<'py>, container: &mut Option<Bound<'py, PyAny>>) -> bool {
        let Some((last, path)) = self.path.split_last() else {
            if let Ok(dict) = self.owner.bind(py).cast::<PyDict>()
                && raw::is_item_or_none(dict, self.name.bind(py), self.value.bind(py))
            {
                return true;
            }
            return self.is_equal(py, at(self.owner.bind(py), self.name.bind(py)).as_ref());
        };
        if !self.is_beside {
            *container = self.lead(py, path);
        }
        let container = container.as_ref();
        container.is_some_and(|container| self.is_equal(py, last.of(container).as_ref()))
    }

    /// What the first steps of the way lead to.
    #[inline(never)]
    fn lead<'py>(&self, py: Python<'py>, path: &[Step]) -> Option<Bound<'py, PyAny>> {
        let first = at(self.owner.bind(py), self.name.bind(py))?;
        path.iter().try_fold(first, |now, step| step.of(&now))
    }

    /// Whether what is there now is the value, or equal to it. What is not there is nothing, as a group
    /// that an optimizer may get.
    #[inline]
    fn is_equal(&self, py: Python<'_>, now: Option<&Bound<'_, PyAny>>) -> bool {
        match now {
            Some(now) => is_same(now, self.value.bind(py)),
            None => self.value.is_none(py),
        }
    }
}

/// Whether two ways are alike but for their last steps.
fn lead_to_one(one: &[Step], other: &[Step]) -> bool {
    let (Some((_, one)), Some((_, other))) = (one.split_last(), other.split_last()) else {
        return false;
    };
    one.len() == other.len() && one.iter().zip(other).all(|(one, other)| one.is_same(other))
}

/// An item of a dictionary or an attribute. A cell that is empty by now has none, nor has what raises.
#[inline]
fn at<'py>(owner: &Bound<'py, PyAny>, name: &Bound<'py, PyString>) -> Option<Bound<'py, PyAny>> {
    let found = match owner.cast::<PyDict>() {
        Ok(dict) => dict.get_item(name),
        Err(_) => owner.getattr_opt(name),
    };
    found.ok().flatten()
}
