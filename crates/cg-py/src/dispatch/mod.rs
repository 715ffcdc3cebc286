//! `Dispatcher`: finds the entry that a call fits, and replays it, in one native call.

mod contents;
mod entry;
mod fixed;
mod flags;
mod held;
mod lane;
mod modes;
mod neighbours;
mod outputs;
mod pattern;
mod turn;
mod written;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

pub(crate) use contents::Contents;
pub(crate) use entry::Entry;
pub(crate) use fixed::Fixed;
pub(crate) use flags::Flags;
pub(crate) use held::Storage;
pub(crate) use lane::{Lane, enter_busy, is_any_busy, leave_busy};
pub(crate) use modes::set_driver;
use modes::{Mode, Modes};
pub(crate) use neighbours::Neighbours;
pub(crate) use pattern::Found;
pub(crate) use turn::Turn;

/// A function's entries. A call that fits one is a replay of it; a derived class has a method `_miss`
/// for any other.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Dispatcher {
    is_capturing: Py<PyAny>,
    is_transformed: Py<PyAny>,
    /// The variables of `torch.autograd.forward_ad`.
    forward_ad: Py<PyDict>,
    modes: Modes,
    /// The one that was used last comes first. Replaced as a whole: a call goes through what it
    /// found, whatever other threads do.
    entries: Mutex<Arc<[Py<Entry>]>>,
}

#[pymethods]
impl Dispatcher {
    /// Functions that tell whether the current stream captures, whether a transform of `torch.func`
    /// is under way, and torch's modes; `autocast` is called only while `is_autocast` is true.
    /// `forward_ad` has the variables of `torch.autograd.forward_ad`. `functions` are the addresses of
    /// torch's own functions for the modes, by the names of the arguments.
    #[new]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "given once for each function"
    )]
    fn new(
        is_capturing: Py<PyAny>,
        is_transformed: Py<PyAny>,
        forward_ad: Py<PyDict>,
        is_grad_enabled: Py<PyAny>,
        is_inference: Py<PyAny>,
        is_autocast: Py<PyAny>,
        autocast: Py<PyAny>,
        functions: HashMap<String, usize>,
    ) -> Self {
        let by_python = [is_grad_enabled, is_inference, is_autocast, autocast];
        Self {
            is_capturing,
            is_transformed,
            forward_ad,
            modes: Modes::new(&functions, by_python),
            entries: Mutex::new(Arc::new([])),
        }
    }

    /// Replays the entry that the arguments fit; else `_miss` gets them, as a tuple and a
    /// dictionary.
    #[pyo3(signature = (*args, **kwargs))]
    fn __call__(
        slf: &Bound<'_, Self>,
        args: &Bound<'_, PyTuple>,
        kwargs: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Py<PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        let mode = this.modes.now(py)?;
        let mut found: Vec<Found<'_>> = Vec::with_capacity(args.len());
        let is_followed = this.is_followed(py)?;
        while !is_followed
            && let Some((place, entry)) = this.fitting(&mode, args, kwargs, &mut found)?
        {
            let entry = entry.bind(py);
            match entry.get().try_take() {
                // Another thread may have taken it out in the meantime.
                Ok(_) if !this.has(entry) => {}
                Ok(_turn) => {
                    if place > 0 {
                        this.put_first(entry);
                    }
                    return Entry::run(entry, args, kwargs, &found);
                }
                // The thread that has it may take the entry out.
                Err(turn) => turn.wait(py)?,
            }
        }
        let kwargs = kwargs.map_or_else(|| PyDict::new(py), Clone::clone);
        let missed = slf.call_method1(intern!(py, "_miss"), (args, kwargs))?;
        Ok(missed.unbind())
    }

    /// Whether somebody has to see the operators: a transform of `torch.func`, whose tensors have no
    /// memory of their own, or forward-mode differentiation.
    #[getter(_is_followed)]
    fn is_followed(&self, py: Python<'_>) -> PyResult<bool> {
        if self.is_transformed.bind(py).call0()?.is_truthy()? {
            return Ok(true);
        }
        let level = self
            .forward_ad
            .bind(py)
            .get_item(intern!(py, "_current_level"))?;
        level.map_or(Ok(false), |level| Ok(level.extract::<i64>()? >= 0))
    }

    /// Adds an entry, as the one that was used last.
    fn add(&self, entry: &Bound<'_, Entry>) {
        self.put_first(entry);
    }

    /// Takes an entry out; whether it was there.
    fn remove(&self, entry: &Bound<'_, Entry>) -> bool {
        let before = self.entries();
        let kept: Vec<Py<Entry>> = others(&before, entry).collect();
        let removed = kept.len() < before.len();
        self.replace(kept);
        removed
    }

    /// The entries, the one that was used last first.
    #[getter]
    fn entries_by_use(&self, py: Python<'_>) -> Vec<Py<Entry>> {
        self.entries().iter().map(|one| one.clone_ref(py)).collect()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.is_capturing)?;
        visit.call(&self.is_transformed)?;
        visit.call(&self.forward_ad)?;
        self.modes.traverse(&visit)?;
        match self.entries.try_lock() {
            Ok(entries) => entries.iter().try_for_each(|entry| visit.call(entry)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        self.replace(Vec::new());
    }
}

impl Dispatcher {
    /// The entry that a call is a replay of, and its place; its tensors are put into `found`.
    #[inline]
    fn fitting<'py>(
        &self,
        mode: &Mode,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        found: &mut Vec<Found<'py>>,
    ) -> PyResult<Option<(usize, Py<Entry>)>> {
        let py = args.py();
        for (place, entry) in self.entries().iter().enumerate() {
            found.clear();
            if entry.get().fits(mode, args, kwargs, found)? {
                let is_blocked = entry.get().is_blocked(py, &self.is_capturing)?;
                return Ok((!is_blocked).then(|| (place, entry.clone_ref(py))));
            }
        }
        Ok(None)
    }

    #[inline]
    fn has(&self, entry: &Bound<'_, Entry>) -> bool {
        self.lock().iter().any(|one| one.is(entry))
    }

    fn put_first(&self, entry: &Bound<'_, Entry>) {
        let before = self.entries();
        let first = std::iter::once(entry.clone().unbind());
        self.replace(first.chain(others(&before, entry)).collect());
    }

    fn entries(&self) -> Arc<[Py<Entry>]> {
        Arc::clone(&self.lock())
    }

    /// Dropping may run any code, also some that comes back here: the lock is open then.
    fn replace(&self, entries: Vec<Py<Entry>>) {
        let before = std::mem::replace(&mut *self.lock(), entries.into());
        drop(before);
    }

    fn lock(&self) -> MutexGuard<'_, Arc<[Py<Entry>]>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The entries but for one.
fn others<'a>(
    entries: &'a [Py<Entry>],
    but: &'a Bound<'_, Entry>,
) -> impl Iterator<Item = Py<Entry>> + 'a {
    let kept = entries.iter().filter(move |other| !other.is(but));
    kept.map(move |other| other.clone_ref(but.py()))
}
