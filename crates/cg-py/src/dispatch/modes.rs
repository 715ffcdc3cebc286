//! `Modes`: torch's modes and cgraph's driver, which a capture depends on.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::torch_settings::TorchSettings;
use crate::device::{Sim, put_in_force};
use crate::raw::{self, Tells, TellsOf};

/// Finds the modes.
pub(super) struct Modes {
    native: Option<Native>,
    is_grad_enabled: Py<PyAny>,
    is_inference: Py<PyAny>,
    is_autocast: Py<PyAny>,
    /// Returns what can be compared, while autocast is on.
    autocast: Py<PyAny>,
    settings: Py<TorchSettings>,
}

/// torch's own functions, which take a tenth of the time of calls by Python.
struct Native {
    grad: Tells,
    inference: Tells,
    autocast: TellsOf,
}

/// The modes of a call.
pub(crate) struct Mode {
    pub(super) grad: bool,
    inference: bool,
    autocast: Option<Py<PyAny>>,
    driver: u64,
    /// torch's settings, as a number; none for any.
    settings: Option<u64>,
}

/// The number of the driver in force.
static DRIVER: AtomicU64 = AtomicU64::new(0);

/// Say which driver is in force, by a number that no other one has, and which simulator it is, if it is one. At
/// first it is 0.
#[pyfunction]
#[pyo3(signature = (number, sim=None))]
pub(crate) fn set_driver(number: u64, sim: Option<&Bound<'_, Sim>>) {
    DRIVER.store(number, Ordering::Relaxed);
    put_in_force(number != 0, sim.map(Bound::get));
}

/// `c10::DeviceType`, of the devices that are captured.
const DEVICES: [i8; 2] = [0, 1];

impl Modes {
    /// `is_grad_enabled`, `is_inference`, `is_autocast` and `autocast`; the first three by the addresses
    /// of torch's own functions, if all are known.
    pub(super) fn new(
        functions: &HashMap<String, usize>,
        [is_grad_enabled, is_inference, is_autocast, autocast]: [Py<PyAny>; 4],
        settings: Py<TorchSettings>,
    ) -> Self {
        Self {
            native: Native::find(functions),
            is_grad_enabled,
            is_inference,
            is_autocast,
            autocast,
            settings,
        }
    }

    #[inline]
    pub(super) fn now(&self, py: Python<'_>) -> PyResult<Mode> {
        let (grad, inference, is_autocast) = match &self.native {
            Some(native) => native.now(),
            None => self.by_python(py)?,
        };
        let autocast = is_autocast.then(|| self.autocast.call0(py));
        Ok(Mode {
            grad,
            // Without gradients only: inference mode has none.
            inference: !grad && inference,
            autocast: autocast.transpose()?,
            driver: DRIVER.load(Ordering::Relaxed),
            settings: Some(self.settings.get().now(py)?),
        })
    }

    #[cold]
    fn by_python(&self, py: Python<'_>) -> PyResult<(bool, bool, bool)> {
        let is = |function: &Py<PyAny>| function.bind(py).call0()?.is_truthy();
        Ok((
            is(&self.is_grad_enabled)?,
            is(&self.is_inference)?,
            is(&self.is_autocast)?,
        ))
    }

    /// Show the garbage collector what this owns.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        let all = [
            &self.is_grad_enabled,
            &self.is_inference,
            &self.is_autocast,
            &self.autocast,
        ];
        all.into_iter().try_for_each(|one| visit.call(one))?;
        visit.call(&self.settings)
    }
}

impl Native {
    fn find(functions: &HashMap<String, usize>) -> Option<Self> {
        Some(Self {
            grad: raw::tells(raw::address(functions, "is_grad_enabled")?),
            inference: raw::tells(raw::address(functions, "is_inference")?),
            autocast: raw::tells_of(raw::address(functions, "is_autocast")?),
        })
    }

    #[inline]
    fn now(&self) -> (bool, bool, bool) {
        let is_autocast = DEVICES.iter().any(|kind| (self.autocast)(*kind));
        ((self.grad)(), (self.inference)(), is_autocast)
    }
}

impl Mode {
    /// Modes under the driver in force.
    pub(super) fn new(
        (grad, inference, autocast): (bool, bool, Option<Py<PyAny>>),
        settings: Option<u64>,
    ) -> Self {
        Self {
            settings,
            grad,
            inference,
            autocast,
            driver: DRIVER.load(Ordering::Relaxed),
        }
    }

    #[inline]
    pub(super) fn equals(&self, other: &Self, py: Python<'_>) -> PyResult<bool> {
        let is_same = self.grad == other.grad
            && self.inference == other.inference
            && self.driver == other.driver
            && (self.settings.is_none() || self.settings == other.settings);
        if !is_same {
            return Ok(false);
        }
        match (&self.autocast, &other.autocast) {
            (None, None) => Ok(true),
            (Some(one), Some(other)) => one.bind(py).eq(other),
            _ => Ok(false),
        }
    }
}
