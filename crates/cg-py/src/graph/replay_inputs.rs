//! `ReplayInputs`: the copies and the stores of a replay before its own work.

use cg_core::{Address, Padding, Transfer};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use pyo3::{PyTraverseError, PyVisit};

use super::inputs::Inputs;
use super::outputs::Sent;
use crate::arguments::MatchedTensors;
use crate::detach::detached;
use crate::error::state;
use crate::raw::{self, Attached};

/// The tensors of a replay.
#[derive(Clone, Copy)]
pub(crate) enum ReplayTensors<'a, 'py> {
    /// None: the static ones keep what they hold.
    Nothing,
    /// One for each static input.
    Unchecked(&'a Bound<'py, PyTuple>),
    /// The same, known to fit.
    Matched(MatchedTensors<'a, 'py>),
    /// The same with the first rows of some, and what becomes of the others.
    Padded(MatchedTensors<'a, 'py>, &'a Padding),
}

impl<'a, 'py> ReplayTensors<'a, 'py> {
    /// Take a tuple with one for each static input; an empty one for none.
    pub(crate) fn of(tensors: &'a Bound<'py, PyTuple>) -> Self {
        if tensors.is_empty() {
            Self::Nothing
        } else {
            Self::Unchecked(tensors)
        }
    }

    /// Return whether there are none.
    pub(crate) fn is_nothing(self) -> bool {
        match self {
            Self::Nothing | Self::Matched(MatchedTensors::Each([])) => true,
            Self::Unchecked(tensors) => tensors.is_empty(),
            Self::Matched(_) | Self::Padded(..) => false,
        }
    }

    /// Return tensors that are known to fit as they are.
    pub(crate) fn matched(self) -> Option<MatchedTensors<'a, 'py>> {
        match self {
            Self::Matched(found) => Some(found),
            Self::Nothing | Self::Unchecked(_) | Self::Padded(..) => None,
        }
    }
}

/// The root nodes of a graph, and the random state that they hand to its kernels.
pub(crate) struct ReplayInputs {
    inputs: Py<Inputs>,
    random: Vec<Random>,
    /// Vectors to use again. A second replay at the same time makes its own.
    scratch: Attached<Option<Scratch>>,
}

/// A generator that the graph draws from. Its seed and its offset are two stores.
struct Random {
    generator: Py<PyAny>,
    /// Distance by which a replay moves the offset.
    step: u64,
}

#[derive(Default)]
struct Scratch {
    sources: Vec<Address>,
    values: Vec<u64>,
}

impl ReplayInputs {
    /// Inputs whose stores are seed and offset of each generator in turn.
    pub(crate) fn new(inputs: Py<Inputs>, random: Vec<(Py<PyAny>, u64)>) -> PyResult<Self> {
        if inputs.get().stores() != 2 * random.len() {
            return Err(state("inputs must have two stores for each generator"));
        }
        let random = random.into_iter();
        Ok(Self {
            inputs,
            random: random
                .map(|(generator, step)| Random { generator, step })
                .collect(),
            scratch: Attached::default(),
        })
    }

    /// Show the garbage collector what this owns.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.inputs)?;
        let mut random = self.random.iter();
        random.try_for_each(|random| visit.call(&random.generator))
    }

    /// Raise unless each static tensor has the memory that the graph copies to.
    pub(crate) fn require_memory(&self, py: Python<'_>) -> PyResult<()> {
        self.inputs.get().require_memory(py)
    }

    /// Let `launch` enqueue one replay, with these tensors or with what the static ones hold, and with
    /// results sent where the caller says. The random state is touched only once the tensors are found to fit.
    #[inline]
    pub(crate) fn replay(
        &self,
        py: Python<'_>,
        given: ReplayTensors<'_, '_>,
        sent: Sent<'_>,
        random_step: Option<&Py<PyAny>>,
        launch: impl FnOnce(Transfer<'_>) -> cg_core::Result<()> + Send,
    ) -> PyResult<()> {
        let inputs = self.inputs.get();
        let mut scratch = self.scratch.take(py).unwrap_or_default();
        match given {
            ReplayTensors::Nothing => inputs.rest(&mut scratch.sources),
            ReplayTensors::Unchecked(tensors) => inputs.collect(tensors, &mut scratch.sources)?,
            ReplayTensors::Matched(found) | ReplayTensors::Padded(found, _) => {
                inputs.collect_found(found, &mut scratch.sources)?;
            }
        }
        if let Some(step) = random_step {
            step.call0(py)?;
        }
        if let Err(error) = self.advance(py, &mut scratch.values) {
            self.take_back(py, &scratch.values)?;
            return Err(error);
        }
        let (sources, values) = (&scratch.sources, &scratch.values);
        let padding = match given {
            ReplayTensors::Padded(_, padding) => Some(padding),
            ReplayTensors::Nothing | ReplayTensors::Unchecked(_) | ReplayTensors::Matched(_) => {
                None
            }
        };
        let launched = detached(py, || {
            let feed = raw::feed(inputs.core(), sources, values, padding)?;
            let delivery = sent
                .map(|(outputs, to)| raw::deliver(outputs, to))
                .transpose()?;
            launch(Transfer::new(Some(&feed), delivery.as_ref()))
        });
        if launched.is_err() {
            self.take_back(py, &scratch.values)?;
        }
        drop(self.scratch.replace(py, Some(scratch)));
        launched
    }

    /// Note seed and offset of each generator, and move the offset as the replay will.
    fn advance(&self, py: Python<'_>, values: &mut Vec<u64>) -> PyResult<()> {
        values.clear();
        for Random { generator, step } in &self.random {
            let generator = generator.bind(py);
            let seed = generator.call_method0(intern!(py, "initial_seed"))?;
            let offset: u64 = generator
                .call_method0(intern!(py, "get_offset"))?
                .extract()?;
            let seed = seed.extract()?;
            generator.call_method1(intern!(py, "set_offset"), (offset + step,))?;
            values.extend([seed, offset]);
        }
        Ok(())
    }

    /// Undo [`Self::advance`] where nobody has drawn since.
    #[cold]
    fn take_back(&self, py: Python<'_>, values: &[u64]) -> PyResult<()> {
        for (Random { generator, step }, drawn) in self.random.iter().zip(values.chunks(2)) {
            let generator = generator.bind(py);
            let now: u64 = generator.call_method0("get_offset")?.extract()?;
            if now == drawn[1] + step {
                generator.call_method1("set_offset", (drawn[1],))?;
            }
        }
        Ok(())
    }
}
