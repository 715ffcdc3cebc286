//! The one door out of the interpreter.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;

use crate::error::{panicked, state, to_py};

/// Run `work` without holding the interpreter, so that other threads go on and host functions
/// that need it cannot deadlock; maps the error. A panic, as of the simulator about what would end the
/// process on a GPU, is an error, too.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> cg_core::Result<T> + Send,
) -> PyResult<T> {
    require_unforked()?;
    // No lock stays held behind a panic, and none of ours minds that it was held in one.
    let done = py.detach(|| catch_unwind(AssertUnwindSafe(work)).map_err(message));
    match done {
        Ok(result) => result.map_err(|error| to_py(py, &error)),
        Err(text) => Err(panicked(&text)),
    }
}

/// Raise in a child of a process that has used a driver. Locks of the parent's other threads stay held here:
/// this comes before the first lock of each call.
#[inline]
pub(crate) fn require_unforked() -> PyResult<()> {
    if cg_core::is_forked() {
        return Err(state(
            "cgraph was used before this process was forked, and a fork has neither CUDA nor the \
             parent's graphs: start children by spawn \
             (multiprocessing.set_start_method(\"spawn\")), or fork before the first use",
        ));
    }
    Ok(())
}

fn message(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast::<String>().map(|text| *text);
    text.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>();
        text.map_or_else(|| "a panic without a text".to_owned(), ToString::to_string)
    })
}
