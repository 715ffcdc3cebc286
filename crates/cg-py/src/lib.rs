//! `cgraph._core`: cg-core for Python. Each class converts and calls; decisions are made in cg-core
//! or in the Python package.

mod allocator;
mod capture;
mod cycle;
mod device;
mod dispatch;
mod enter;
mod error;
mod fed;
mod fresh;
mod graph;
mod hook;
mod inputs;
mod outputs;
mod padded;
mod pool;
mod quick;
mod raw;
mod replay;
mod segments;
mod signature;
mod sim;
mod stream;
mod template;
mod tensor;

use pyo3::prelude::*;

/// The native half of cgraph.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::allocator::{settle_pools, take_refusal};
    #[pymodule_export]
    use super::capture::{Capture, Tracker, begin_and_hand_over, end_broken};
    #[pymodule_export]
    use super::device::{CaptureMark, Device, begin_exit, version};
    #[pymodule_export]
    use super::dispatch::{
        Dispatcher, Entry, Guards, Lane, Turn, enter_busy, is_any_busy, leave_busy, set_driver,
        watches_dictionaries,
    };
    #[pymodule_export]
    use super::fresh::Fresh;
    #[pymodule_export]
    use super::graph::Graph;
    #[pymodule_export]
    use super::hook::{HookHandle, register_for_all};
    #[pymodule_export]
    use super::inputs::Inputs;
    #[pymodule_export]
    use super::outputs::Outputs;
    #[pymodule_export]
    use super::padded::PaddedGraph;
    #[pymodule_export]
    use super::pool::{Block, Pool};
    #[pymodule_export]
    use super::segments::Segments;
    #[pymodule_export]
    use super::signature::Signature;
    #[pymodule_export]
    use super::sim::Sim;
    #[pymodule_export]
    use super::stream::{Event, Stream};
    #[pymodule_export]
    use super::template::Template;
    #[pymodule_export]
    use super::tensor::TensorReader;
}
