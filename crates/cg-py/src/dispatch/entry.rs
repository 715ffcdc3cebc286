//! `Entry`: what answers the calls of a function that fit it, as one captured graph.

use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::function_lock::{FunctionLock, Locked};
use super::last_stream::LastStream;
use super::modes::Mode;
use crate::arguments::{
    Argument, LeadingTensors, MatchedArguments, MatchedTensor, Pattern, WrittenMemory, all_fit,
    fits_dict, has_order,
};
use crate::graph::{LentResults, Recording, ReplayTensors, Returned};
use crate::guards::Guards;
use crate::raw;
use crate::tensors::{Match, Signature};

/// A graph, or what calls are handed on to, with the arguments that it takes and what it returns.
#[pyclass(frozen, weakref, module = "cgraph._core")]
pub(crate) struct Entry {
    args: Vec<Pattern>,
    /// Compares the tensors that they begin with.
    leading: LeadingTensors,
    kwargs: Vec<(Py<PyAny>, Pattern)>,
    /// True if keyword arguments must come in this order.
    is_in_order: bool,
    mode: Mode,
    /// Objects outside of the arguments, and inside of them, that must be as they were.
    guards: Option<Py<Guards>>,
    /// Of the tensors at guarded places that are copied behind those of the arguments.
    placed: Vec<Py<Signature>>,
    /// Gets what a replay returns, the objects among the arguments, and these; and returns the result.
    assigns: Option<Py<PyAny>>,
    /// Memory where no argument must lie.
    written: Option<WrittenMemory>,
    /// Tells whether what its last call left is still waited for. No call fits as long as it is.
    is_open: Option<Py<PyAny>>,
    work: Work,
    last_stream: Py<LastStream>,
    /// The static results of its pool.
    lent: Option<Py<LentResults>>,
    /// None where calls are handed on that several threads may make at a time.
    lock: Option<Py<FunctionLock>>,
    replays: AtomicU64,
    /// Calls that its feed has made without a replay.
    eager_calls: AtomicU64,
    /// When it was made or used last; the later, the larger.
    last_use: AtomicU64,
}

/// Counts what happens to the entries of all functions.
static CLOCK: AtomicU64 = AtomicU64::new(1);

/// The work of a call.
enum Work {
    /// Replays, with the tensors of the patterns as static inputs.
    Replay(Recording),
    /// Calls what takes the arguments as they are, and returns the result.
    Call(Py<PyAny>),
}

#[pymethods]
impl Entry {
    /// `args` and `kwargs` are patterns, see [`Pattern::parse`]. `modes` is `(grad, inference,
    /// autocast)`. `work` is a graph, a callable that replays one with a tuple of tensors, or where
    /// `outputs` is `None` what is called with the arguments instead. `outputs` is `(leaves, build,
    /// warn)`, see [`Recording::new`]. `guards` look into what the function finds outside of
    /// the arguments, and into objects among them. `written` are start and end of each piece of memory
    /// that it writes and that is not its own: no call fits whose tensors lie there. Without `lock`
    /// several threads may make a call at a time. `is_open` tells whether a backward pass may still read what its last call left,
    /// which the next one would overwrite. `lent` gets to know the static results. `placed` are the signatures of
    /// tensors at guarded places, which are copied behind those of the arguments. `assigns` is called with what a
    /// replay returns, the objects among the arguments, the positional arguments and those by name, and returns the
    /// result. `settings` are those that torch must have; any, if none are given.
    #[new]
    #[pyo3(signature = (args, kwargs, *, is_in_order, modes, work, outputs, last_stream, lock, lent=None, guards=None, written=Vec::new(), is_open=None, placed=Vec::new(), assigns=None, settings=None))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keywords, given once for each capture"
    )]
    fn new(
        py: Python<'_>,
        args: &Bound<'_, PyList>,
        kwargs: &Bound<'_, PyList>,
        is_in_order: bool,
        modes: (bool, bool, Option<Py<PyAny>>),
        work: Bound<'_, PyAny>,
        outputs: Option<Returned<'_>>,
        last_stream: Py<LastStream>,
        lock: Option<Py<FunctionLock>>,
        lent: Option<Py<LentResults>>,
        guards: Option<Py<Guards>>,
        written: Vec<(u64, u64)>,
        is_open: Option<Py<PyAny>>,
        placed: Vec<Py<Signature>>,
        assigns: Option<Py<PyAny>>,
        settings: Option<u64>,
    ) -> PyResult<Self> {
        let args = args.iter().map(|pattern| Pattern::parse(&pattern));
        let kwargs = kwargs.iter().map(|item| {
            let pattern = Pattern::parse(&item.get_item(1)?)?;
            Ok((item.get_item(0)?.unbind(), pattern))
        });
        let work = match outputs {
            None => Work::Call(work.unbind()),
            Some(returned) => Work::Replay(Recording::new(&work, returned)?),
        };
        let args: Vec<Pattern> = args.collect::<PyResult<_>>()?;
        let kwargs: Vec<(Py<PyAny>, Pattern)> = kwargs.collect::<PyResult<_>>()?;
        let mut bytes = Vec::new();
        for pattern in args.iter().chain(kwargs.iter().map(|(_, pattern)| pattern)) {
            pattern.add_bytes(&mut bytes);
        }
        let count = bytes.len() + placed.len();
        bytes.extend(placed.iter().map(|signature| signature.get().nbytes()));
        Ok(Self {
            leading: LeadingTensors::of(py, &args, count),
            args,
            kwargs,
            is_in_order,
            mode: Mode::new(modes, settings),
            guards,
            placed,
            assigns,
            written: WrittenMemory::new(written, &bytes),
            is_open,
            work,
            last_stream,
            lent,
            lock,
            replays: AtomicU64::new(0),
            eager_calls: AtomicU64::new(0),
            last_use: AtomicU64::new(raw::count(&CLOCK)),
        })
    }

    /// Serve a call whose arguments were taken apart: `tensors` are those of the patterns, in their
    /// order, however they are laid out, and `objects` those among them. The caller holds the lock.
    #[pyo3(signature = (args, kwargs, tensors, objects=Vec::new()))]
    fn call(
        slf: &Bound<'_, Self>,
        args: &Bound<'_, PyTuple>,
        kwargs: &Bound<'_, PyDict>,
        tensors: Vec<Bound<'_, PyAny>>,
        objects: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<Py<PyAny>> {
        let fit = Match::Torch;
        let mut matched: MatchedArguments<'_, '_> = tensors
            .into_iter()
            .map(Argument::Held)
            .map(|tensor| MatchedTensor { tensor, fit })
            .collect();
        for object in objects {
            matched.push_object(object);
        }
        Self::run(slf, args, Some(kwargs), &mut matched)
    }

    /// Return how many calls it has answered.
    #[getter]
    fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    /// Return how many others it has answered without a replay.
    #[getter]
    fn eager_calls(&self) -> u64 {
        self.eager_calls.load(Ordering::Relaxed)
    }

    /// When it was made or used last: the entry with the largest number was so after all others.
    #[getter]
    fn last_use(&self) -> u64 {
        self.last_use.load(Ordering::Relaxed)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.args.iter().try_for_each(|one| one.traverse(&visit))?;
        for (_, pattern) in &self.kwargs {
            pattern.traverse(&visit)?;
        }
        visit.call(&self.guards)?;
        match &self.work {
            Work::Replay(recording) => recording.traverse(&visit)?,
            Work::Call(call) => visit.call(call)?,
        }
        visit.call(&self.is_open)?;
        visit.call(&self.assigns)?;
        visit.call(&self.lent)?;
        visit.call(&self.last_stream)
    }
}

impl Entry {
    /// Return whether a call is a replay of this one. Tensors that are to be copied are added to `matched`.
    #[inline]
    pub(super) fn fits<'a, 'py>(
        &self,
        mode: &Mode,
        args: &'a Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        matched: &mut MatchedArguments<'a, 'py>,
    ) -> PyResult<bool> {
        let py = args.py();
        if args.len() != self.args.len() || !self.mode.equals(mode, py)? {
            return Ok(false);
        }
        let Some(place) = self.leading.fit(args, matched) else {
            return Ok(false);
        };
        if place < args.len() {
            let others = args.iter_borrowed().skip(place).map(Argument::Positional);
            let patterns = &self.args[place..];
            if !all_fit(patterns, args.len() - place, others, matched)? {
                return Ok(false);
            }
        }
        let kwargs_fit = match kwargs {
            Some(kwargs) if self.is_in_order && !has_order(&self.kwargs, kwargs) => false,
            Some(kwargs) => fits_dict(&self.kwargs, kwargs, matched)?,
            None => self.kwargs.is_empty(),
        };
        if !kwargs_fit {
            return Ok(false);
        }
        let written = self.written.as_ref();
        if written.is_some_and(|written| written.meets(matched.tensors(args)))
            || self.is_open(py)?
        {
            return Ok(false);
        }
        self.leading.note(py, matched);
        let Some(guards) = &self.guards else {
            return Ok(true);
        };
        if self.placed.is_empty() {
            return Ok(guards.get().fits(py, matched.objects(), |_| {}));
        }
        let mut found = Vec::with_capacity(self.placed.len());
        if !guards
            .get()
            .fits(py, matched.objects(), |tensor| found.push(tensor))
        {
            return Ok(false);
        }
        for (signature, tensor) in self.placed.iter().zip(found) {
            let fit = signature.get().fit(&tensor, 0)?;
            let tensor = Argument::Held(tensor);
            matched.push(MatchedTensor { tensor, fit });
        }
        Ok(written.is_none_or(|written| !written.meets(matched.tensors(args))))
    }

    /// Give back what it has put into `matched`, for calls to come.
    #[inline]
    pub(super) fn give_back(&self, py: Python<'_>, matched: &mut MatchedArguments<'_, '_>) {
        self.leading.give_back(py, matched);
    }

    /// Return whether a backward pass may still read what the last call left.
    #[inline]
    pub(super) fn is_open(&self, py: Python<'_>) -> PyResult<bool> {
        let is_open = self.is_open.as_ref();
        is_open.map_or(Ok(false), |is_open| is_open.bind(py).call0()?.is_truthy())
    }

    /// Return whether it cannot be replayed, as the current stream captures.
    #[inline]
    pub(super) fn is_blocked(&self, py: Python<'_>, is_capturing: &Py<PyAny>) -> PyResult<bool> {
        let may_capture = self.last_stream.get().may_capture();
        Ok(may_capture && is_capturing.bind(py).call0()?.is_truthy()?)
    }

    /// Take the lock to run it, where it needs one; as an error the lock that another thread holds.
    #[inline]
    pub(super) fn try_take(&self) -> Result<Option<Locked<'_>>, &FunctionLock> {
        let Some(lock) = &self.lock else {
            return Ok(None);
        };
        let lock = lock.get();
        lock.try_take().map(Some).ok_or(lock)
    }

    /// Return whether a break or a hook of the same function has made the call. The caller holds the lock.
    #[inline]
    pub(super) fn is_replaying(&self) -> bool {
        let lock = self.lock.as_ref();
        lock.is_some_and(|lock| lock.get().is_replaying())
    }

    /// Replay, and returns what the function would. The caller holds the lock.
    #[inline]
    pub(super) fn run<'py>(
        slf: &Bound<'py, Self>,
        args: &Bound<'py, PyTuple>,
        kwargs: Option<&Bound<'py, PyDict>>,
        matched: &mut MatchedArguments<'_, 'py>,
    ) -> PyResult<Py<PyAny>> {
        let (py, entry) = (slf.py(), slf.get());
        let tensors = matched.tensors(args);
        let lock = entry.lock.as_ref();
        let _replaying = lock.map(|lock| lock.get().replays());
        let stream = entry.last_stream.get().follow(py)?;
        let mut is_eager = false;
        let result = match &entry.work {
            Work::Replay(recording) => {
                let (given, lent) = (ReplayTensors::Matched(tensors), entry.lent.as_ref());
                let served = recording.serve(py, given, Some(stream), lent.map(Py::get))?;
                is_eager = served.is_eager;
                served.result
            }
            Work::Call(call) => call.call(py, args, kwargs)?,
        };
        let result = match &entry.assigns {
            Some(assigns) => {
                let objects = PyTuple::new(py, matched.objects())?;
                let kwargs = kwargs.cloned().unwrap_or_else(|| PyDict::new(py));
                assigns.call1(py, (result, objects, args, kwargs))?
            }
            None => result,
        };
        entry.give_back(py, matched);
        raw::count(if is_eager {
            &entry.eager_calls
        } else {
            &entry.replays
        });
        entry.note_use();
        Ok(result)
    }

    /// Note that nothing was used later.
    #[inline]
    pub(super) fn note_use(&self) {
        self.last_use.store(raw::count(&CLOCK), Ordering::Relaxed);
    }
}
