//! `cgraph._core`: cg-core for Python. Each class converts and calls; decisions are made in cg-core
//! or in the Python package.

mod arguments;
mod detach;
mod device;
mod dispatch;
mod error;
mod graph;
mod guards;
mod operators;
mod raw;
mod tensors;
mod trees;

use pyo3::prelude::*;

/// The native half of cgraph.
#[pymodule(gil_used = true)]
mod _core {
    #[pymodule_export]
    use super::device::{
        Block, Capture, CaptureMark, Checkpoint, Device, Event, NodeAddress, Pool, SavedGraphs,
        SavedKernels, Sim, Stream, Template, Tracker, begin_and_hand_over, begin_exit,
        begin_forked, end_broken, is_forked, lent_memory, record_images, require_unforked,
        settle_pools, take_refusal, version,
    };
    #[pymodule_export]
    use super::dispatch::{
        Dispatcher, Entry, FunctionLock, LastStream, TorchSettings, enter_busy, is_any_busy,
        leave_busy, set_driver,
    };
    #[pymodule_export]
    use super::graph::{
        FreshResults, Graph, HookHandle, Inputs, Ladder, LentResults, Outputs, PaddedGraph, Rung,
        Segments, register_for_all,
    };
    #[pymodule_export]
    use super::guards::{Guards, watches_dictionaries};
    #[pymodule_export]
    use super::operators::{OperatorNotes, OperatorReader};
    #[pymodule_export]
    use super::tensors::{SamePlaces, Signature, TensorReader};
    #[pymodule_export]
    use super::trees::{
        NewNode, StepSource, Tree, TreeFunction, TreeNode, call_in_a_row, exchange_memory,
    };
}
