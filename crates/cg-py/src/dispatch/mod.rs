//! `Dispatcher`: finds the entry that a call fits, and replays it, in one native call.

mod entry;
mod function_lock;
mod last_stream;
mod modes;
mod observers;
mod torch_settings;

use std::collections::HashMap;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

pub(crate) use entry::Entry;
pub(crate) use function_lock::FunctionLock;
pub(crate) use last_stream::{LastStream, enter_busy, is_any_busy, leave_busy};
pub(crate) use modes::set_driver;
use modes::{Mode, Modes};
pub(crate) use observers::Observers;
pub(crate) use torch_settings::TorchSettings;

use crate::arguments::MatchedArguments;
use crate::detach::require_unforked;
use crate::raw::Attached;

/// A function's entries. A call that fits one is a replay of it; a derived class has a method `_miss`
/// for any other.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Dispatcher {
    is_capturing: Py<PyAny>,
    observers: Observers,
    modes: Modes,
    /// The one that was used last comes first. Replaced as a whole: a call goes through what it
    /// found, whatever other threads do.
    entries: Attached<Py<PyTuple>>,
}

#[pymethods]
impl Dispatcher {
    /// Functions that tell whether the current stream captures, whether a transform, a mode or a tracer
    /// has to see each operator, and torch's modes; `autocast` is called only while `is_autocast` is true.
    /// `forward_ad` has the variables of `torch.autograd.forward_ad`. `functions` are the addresses of
    /// torch's own functions for the modes, by the names of the arguments, and of `is_included`, which
    /// tells of a dispatch key: `keys` are those that transforms, modes and tracers include. `settings` tells those
    /// of torch that all threads have in common.
    #[new]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "given once for each function"
    )]
    fn new(
        py: Python<'_>,
        is_capturing: Py<PyAny>,
        is_intercepted: Py<PyAny>,
        forward_ad: Py<PyDict>,
        is_grad_enabled: Py<PyAny>,
        is_inference: Py<PyAny>,
        is_autocast: Py<PyAny>,
        autocast: Py<PyAny>,
        functions: HashMap<String, usize>,
        keys: Vec<u16>,
        settings: Py<TorchSettings>,
    ) -> Self {
        let by_python = [is_grad_enabled, is_inference, is_autocast, autocast];
        Self {
            is_capturing,
            observers: Observers::new(&functions, keys, is_intercepted, forward_ad),
            modes: Modes::new(&functions, by_python, settings),
            entries: Attached::new(PyTuple::empty(py).unbind()),
        }
    }

    /// Replay the entry that the arguments fit; else `_miss` gets them, as a tuple and a
    /// dictionary.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__(
        slf: &Bound<'_, Self>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        require_unforked()?;
        let (py, this) = (slf.py(), slf.get());
        let mode = this.modes.now(py)?;
        let mut matched = MatchedArguments::default();
        let is_intercepted = this.observers.are_there(py)?;
        while !is_intercepted
            && let Some((place, entry)) = this.fitting(&mode, args, kwargs, &mut matched)?
        {
            match entry.get().try_take() {
                // Another thread may have taken it out in the meantime, or called it.
                Ok(_) if !this.has(&entry) || entry.get().is_open(py)? => {}
                // Its own replay is under way, whose memory another one would overwrite.
                Ok(_) if entry.get().is_replaying() => break,
                Ok(_lock) => {
                    if place > 0 {
                        this.put_first(&entry)?;
                    }
                    return Entry::run(&entry, args, kwargs, &mut matched);
                }
                // The thread that has it may take the entry out.
                Err(lock) => lock.wait(py)?,
            }
        }
        let kwargs = kwargs.map_or_else(|| PyDict::new(py), Clone::clone);
        let missed = slf.call_method1(intern!(py, "_miss"), (args, kwargs))?;
        Ok(missed.unbind())
    }

    /// Return the entry that a call with these arguments would replay now, and note that it is used; none where
    /// `_miss` would get them.
    #[pyo3(signature = (*args))]
    fn entry_for<'py>(
        &self,
        py: Python<'py>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Option<Bound<'py, Entry>>> {
        if self.observers.are_there(py)? {
            return Ok(None);
        }
        let (mode, mut matched) = (self.modes.now(py)?, MatchedArguments::default());
        let found = self.fitting(&mode, args, None, &mut matched)?;
        Ok(found.map(|(_, entry)| {
            entry.get().give_back(py, &mut matched);
            entry.get().note_use();
            entry
        }))
    }

    /// Return whether somebody has to see the operators.
    #[getter(_is_intercepted)]
    fn is_intercepted(&self, py: Python<'_>) -> PyResult<bool> {
        self.observers.are_there(py)
    }

    /// Add an entry, as the one that was used last.
    fn add(&self, entry: &Bound<'_, Entry>) -> PyResult<()> {
        self.change(entry.py(), |before| first(entry, before))
    }

    /// Take an entry out; whether it was there.
    fn remove(&self, entry: &Bound<'_, Entry>) -> PyResult<bool> {
        let mut removed = false;
        self.change(entry.py(), |before| {
            let kept: Vec<_> = others(before, entry).collect();
            removed = kept.len() < before.len();
            kept
        })?;
        Ok(removed)
    }

    /// Return the entries, the one that was used last first.
    #[getter]
    fn entries_by_use(&self, py: Python<'_>) -> Py<PyTuple> {
        self.entries.get(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.is_capturing)?;
        self.observers.traverse(&visit)?;
        self.modes.traverse(&visit)?;
        self.entries
            .traverse(&visit, |entries, visit| visit.call(entries))
    }

    fn __clear__(&self) {
        Python::attach(|py| drop(self.entries.replace(py, PyTuple::empty(py).unbind())));
    }
}

impl Dispatcher {
    /// Return the entry that a call is a replay of, and its place; its tensors are put into `matched`.
    #[inline]
    fn fitting<'a, 'py>(
        &self,
        mode: &Mode,
        args: &'a Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> PyResult<Option<(usize, Bound<'py, Entry>)>> {
        let py = args.py();
        for (place, entry) in self.entries.get(py).bind(py).iter_borrowed().enumerate() {
            let entry = entry.cast::<Entry>()?;
            matched.clear();
            if entry.get().fits(mode, args, kwargs, matched)? {
                let is_blocked = entry.get().is_blocked(py, &self.is_capturing)?;
                return Ok((!is_blocked).then(|| (place, entry.to_owned())));
            }
            entry.get().give_back(py, matched);
        }
        Ok(None)
    }

    #[inline]
    fn has(&self, entry: &Bound<'_, Entry>) -> bool {
        let py = entry.py();
        let entries = self.entries.get(py);
        entries.bind(py).iter_borrowed().any(|one| one.is(entry))
    }

    /// Put an entry before all others, where it is still among them.
    fn put_first(&self, entry: &Bound<'_, Entry>) -> PyResult<()> {
        self.change(entry.py(), |before| {
            let is_there = before.iter_borrowed().any(|one| one.is(entry));
            if is_there {
                first(entry, before)
            } else {
                before.iter().collect()
            }
        })
    }

    /// Put what `with` makes of the entries in their place.
    fn change<'py>(
        &self,
        py: Python<'py>,
        mut with: impl FnMut(&Bound<'py, PyTuple>) -> Vec<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        loop {
            let before = self.entries.get(py).into_bound(py);
            // To make a tuple may collect garbage, whose end may come back here, and so may to drop one.
            let after = PyTuple::new(py, with(&before))?;
            if self.entries.get(py).is(&before) {
                drop(self.entries.replace(py, after.unbind()));
                return Ok(());
            }
        }
    }
}

/// Return an entry, and then the others.
fn first<'py>(entry: &Bound<'py, Entry>, before: &Bound<'py, PyTuple>) -> Vec<Bound<'py, PyAny>> {
    let entry_first = std::iter::once(entry.clone().into_any());
    entry_first.chain(others(before, entry)).collect()
}

/// Return the entries but for one.
fn others<'a, 'py>(
    entries: &'a Bound<'py, PyTuple>,
    but: &'a Bound<'_, Entry>,
) -> impl Iterator<Item = Bound<'py, PyAny>> + 'a {
    entries.iter().filter(move |other| !other.is(but))
}
