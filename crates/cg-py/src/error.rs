//! From [`cg_core::Error`] to the exception classes that `cgraph.errors` defines.

use cg_core::Error;
use pyo3::prelude::*;

mod class {
    pyo3::import_exception!(cgraph.errors, ArgumentError);
    pyo3::import_exception!(cgraph.errors, CaptureError);
    pyo3::import_exception!(cgraph.errors, CgraphError);
    pyo3::import_exception!(cgraph.errors, DriverError);
    pyo3::import_exception!(cgraph.errors, ForeignError);
    pyo3::import_exception!(cgraph.errors, InstantiateError);
    pyo3::import_exception!(cgraph.errors, NoDriverError);
    pyo3::import_exception!(cgraph.errors, OutOfMemoryError);
    pyo3::import_exception!(cgraph.errors, StateError);
    pyo3::import_exception!(cgraph.errors, UpdateError);
}

/// Return the exception of an error, with the driver's call and code as attributes where there are some.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let text = error.to_string();
    let exception = match error {
        Error::Driver { .. } => class::DriverError::new_err(text),
        Error::OutOfMemory { .. } => class::OutOfMemoryError::new_err(text),
        Error::Paused { .. } => class::StateError::new_err(text),
        Error::Capture { .. } => class::CaptureError::new_err(text),
        Error::Instantiate { .. } => class::InstantiateError::new_err(text),
        Error::Update { .. } => class::UpdateError::new_err(text),
        Error::Foreign { .. } => class::ForeignError::new_err(text),
        Error::Invalid { .. } => class::ArgumentError::new_err(text),
        Error::NoDriver { .. } => class::NoDriverError::new_err(text),
        _ => class::CgraphError::new_err(text),
    };
    if let Some(code) = error.code() {
        // An exception object of ours always takes attributes.
        let _ = exception.value(py).setattr("code", code.0);
    }
    if let Error::Driver { call, .. } = error {
        let _ = exception.value(py).setattr("call", call.symbol());
    }
    exception
}

/// Make the error of a panic in the core.
#[cold]
pub(crate) fn panicked(text: &str) -> PyErr {
    class::CgraphError::new_err(format!("cgraph has stopped this call: {text}"))
}

/// Make the error of an object that is not in a state for the call: what was found, what was expected, what to do.
pub(crate) fn state(text: impl Into<String>) -> PyErr {
    class::StateError::new_err(text.into())
}

/// Make the error of an object of another device or driver.
pub(crate) fn foreign(text: String) -> PyErr {
    class::ForeignError::new_err(text)
}

/// Make the error of an argument that is not acceptable.
pub(crate) fn argument(argument: &str, given: &str, expected: &str) -> PyErr {
    class::ArgumentError::new_err(format!("{argument} is {given}, expected {expected}"))
}
