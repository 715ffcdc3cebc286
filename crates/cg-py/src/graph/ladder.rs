//! `Ladder`: graphs by key.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use pyo3::{PyTraverseError, PyVisit, intern};

use super::recording::Recording;
use super::replay_inputs::ReplayTensors;
use super::results::Returned;
use crate::error::argument;

/// Graphs by key, each with the result that its replays write.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Ladder {
    /// [`Rung`]s by key.
    rungs: Py<PyDict>,
}

/// The graph of one key.
#[pyclass(frozen, subclass, module = "cgraph._core")]
pub(crate) struct Rung {
    recording: Recording,
    /// The number of tensors that a call may give, each for the static input of its place; none where Python
    /// has to look at them first.
    takes: Option<usize>,
}

#[pymethods]
impl Ladder {
    /// A ladder without graphs; subclasses may take arguments.
    #[new]
    #[pyo3(signature = (*_args, **_kwargs))]
    fn new(
        py: Python<'_>,
        _args: &Bound<'_, PyTuple>,
        _kwargs: Option<&Bound<'_, PyDict>>,
    ) -> Self {
        Self {
            rungs: PyDict::new(py).unbind(),
        }
    }

    /// Let the rung of a key serve a call: natively, or by what a subclass does when it is called with a tuple
    /// of the arguments. `_rung` finds one for other keys, or raises.
    #[pyo3(signature = (key, /, *args))]
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        key: &Bound<'py, PyAny>,
        args: &Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let rung = match slf.get().rungs.bind(py).get_item(key)? {
            Some(rung) => rung,
            None => slf.call_method1(intern!(py, "_rung"), (key,))?,
        };
        let native = rung.cast::<Rung>()?.get();
        if native.fits(args)? {
            return Ok(native.serve(py, args)?.into_bound(py));
        }
        rung.call1((args,))
    }

    /// All [`Rung`]s by key.
    #[getter]
    fn _rungs<'py>(&self, py: Python<'py>) -> Bound<'py, PyDict> {
        self.rungs.bind(py).clone()
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.rungs)
    }
}

#[pymethods]
impl Rung {
    /// `replayed` and `returned` are as for [`Recording::new`]. `takes` is the number of tensors that a call may
    /// give instead of the static ones, or `None`.
    #[new]
    fn new(
        replayed: &Bound<'_, PyAny>,
        returned: Returned<'_>,
        takes: Option<usize>,
    ) -> PyResult<Self> {
        let recording = Recording::new(replayed, returned)?;
        if !recording.is_of_graphs() {
            let given = replayed.repr()?.to_string();
            return Err(argument("replayed", &given, "a graph or segments"));
        }
        Ok(Self { recording, takes })
    }

    /// Replay with these tensors, or with what lies in the static ones, and return the result.
    fn serve(&self, py: Python<'_>, tensors: &Bound<'_, PyTuple>) -> PyResult<Py<PyAny>> {
        let given = ReplayTensors::of(tensors);
        Ok(self.recording.serve(py, given, None, None)?.result)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.recording.traverse(&visit)
    }
}

impl Rung {
    /// Return whether these are none, or as many tensors as a call may give.
    fn fits(&self, given: &Bound<'_, PyTuple>) -> PyResult<bool> {
        static TENSOR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        if given.is_empty() || self.takes != Some(given.len()) {
            return Ok(given.is_empty());
        }
        let class = TENSOR.import(given.py(), "torch", "Tensor")?;
        for one in given.iter_borrowed() {
            if !one.is_instance(class)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}
