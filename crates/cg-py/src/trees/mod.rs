//! `Tree` and `TreeFunction`: graphs that share memory, found and replayed in one native call.

mod blank;
mod deliveries;
mod function;
mod held_inputs;
mod new_node;
mod node;
mod steps;

use std::collections::HashMap;

use cg_core::tree::{Ended, Function, Input, Mode, NodeId, Open, OutputId};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;

pub(crate) use function::TreeFunction;
use held_inputs::HeldInputs;
pub(crate) use new_node::NewNode;
use new_node::{EndedPath, HeldOutput};
pub(crate) use node::TreeNode;
pub(crate) use steps::StepSource;

use crate::dispatch::{FunctionLock, LastStream, Observers};
use crate::error::{argument, state};
use crate::raw::{self, Attached, NewTensor, Tells};
use crate::tensors::TensorReader;

/// Let two living storages of one device exchange their memory, with what frees it; by the addresses of their
/// objects.
#[pyfunction]
pub(crate) fn exchange_memory(one: u64, other: u64) {
    if one != other {
        raw::exchange_memory(one, other);
    }
}

/// Call native functions with nothing, one after another, until one raises: an interrupt finds all of them called or
/// none.
#[pyfunction]
#[expect(
    clippy::needless_pass_by_value,
    reason = "pyo3 takes a vector out of any sequence"
)]
pub(crate) fn call_in_a_row(functions: Vec<Bound<'_, PyAny>>) -> PyResult<()> {
    functions.iter().try_for_each(|one| one.call0().map(drop))
}

/// The graphs of one pool, and the path that calls have taken. A derived class has `_record`, which makes new
/// nodes, `_end`, which takes outputs away from those who hold them, and `_eager`, which is told of calls
/// that run without the tree.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct Tree {
    /// None while a call uses it.
    inner: Attached<Option<Box<Inner>>>,
    lock: FunctionLock,
    reader: Py<TensorReader>,
    steps: Py<StepSource>,
    last_stream: Py<LastStream>,
    is_capturing: Py<PyAny>,
    observers: Observers,
    /// Makes prototypes anew without Python; none where it cannot.
    renewal: Option<Renewal>,
}

/// What outputs are taken away with.
pub(super) struct Renewal {
    new_tensor: NewTensor,
    is_inference: Tells,
    /// Lets each access to a storage, by the address of the object, raise an error with a text.
    set_error: Py<PyAny>,
    /// Two storages can exchange their memory here.
    exchanges: bool,
}

/// What becomes of an output that somebody holds when its path ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// It gets memory of its own.
    Kept,
    /// Each access raises an error.
    Stale,
}

#[derive(Default)]
struct Inner {
    core: cg_core::tree::Tree,
    nodes: Nodes,
    /// A node is being recorded.
    is_recording: bool,
}

/// The nodes by their numbers.
#[derive(Default)]
struct Nodes(Vec<Py<TreeNode>>);

#[pymethods]
impl Tree {
    /// `reader` reads inputs, `steps` tells the step of a call, and `last_stream` orders replays on
    /// different streams; `set_error` lets each access to a storage raise a text, and `exchanges` says that
    /// [`exchange_memory`] is right in this torch. `functions` are addresses of
    /// torch's functions for modes and for new tensors; the rest is as for
    /// [`crate::dispatch::Dispatcher`].
    #[new]
    #[expect(
        clippy::too_many_arguments,
        clippy::needless_pass_by_value,
        reason = "given once for each tree"
    )]
    fn new(
        reader: Py<TensorReader>,
        steps: Py<StepSource>,
        last_stream: Py<LastStream>,
        set_error: Py<PyAny>,
        exchanges: bool,
        is_capturing: Py<PyAny>,
        is_intercepted: Py<PyAny>,
        forward_ad: Py<PyDict>,
        functions: HashMap<String, usize>,
        keys: Vec<u16>,
    ) -> Self {
        Self {
            inner: Attached::new(Some(Box::default())),
            lock: FunctionLock::default(),
            reader,
            steps,
            last_stream,
            is_capturing,
            renewal: NewTensor::find(&functions)
                .zip(raw::address(&functions, "is_inference"))
                .map(|(new_tensor, is_inference)| Renewal {
                    new_tensor,
                    is_inference: raw::tells(is_inference),
                    set_error,
                    exchanges,
                }),
            observers: Observers::new(&functions, keys, is_intercepted, forward_ad),
        }
    }

    /// Add a function that is for `"inference"`, `"forward"` or `"backward"`; its number. A forward pass and its
    /// backward pass have the number `pair`, and each pass has parts.
    #[pyo3(signature = (mode, statics, mutated, limit=None, pair=None, part=0))]
    #[expect(clippy::too_many_arguments, reason = "given once for each function")]
    fn add(
        &self,
        py: Python<'_>,
        mode: &str,
        statics: Vec<u32>,
        mutated: Vec<u32>,
        limit: Option<u32>,
        pair: Option<u32>,
        part: u32,
    ) -> PyResult<u32> {
        let mode = match mode {
            "inference" => Mode::Inference,
            "forward" => Mode::Forward,
            "backward" => Mode::Backward,
            _ => {
                let expected = "inference, forward or backward";
                return Err(argument("the mode of a function", mode, expected));
            }
        };
        let function = Function {
            mode,
            pair,
            part,
            statics,
            mutated,
            limit,
        };
        let id = self.with(py, |inner| inner.core.add(function));
        id.map(|id| id.0)
            .ok_or_else(|| state("a call of the tree is under way"))
    }

    /// Return whether a call is under way, as seen from inside of it.
    #[getter]
    fn is_busy(&self, py: Python<'_>) -> bool {
        self.with(py, |inner| inner.is_recording).unwrap_or(true)
    }

    /// Note that a backward pass runs without the tree.
    #[pyo3(signature = (pair=None))]
    fn set_running_backward(&self, py: Python<'_>, pair: Option<u32>) {
        self.with(py, |inner| inner.core.set_running_backward(pair));
    }

    /// Whether a forward pass waits for its backward pass.
    #[getter]
    fn has_pending_backward(&self, py: Python<'_>) -> bool {
        self.with(py, |inner| inner.core.has_pending_backward())
            .unwrap_or_default()
    }

    /// The number of outputs of the path that somebody holds.
    #[getter]
    fn held_outputs(&self, py: Python<'_>) -> usize {
        self.with(py, |inner| {
            let holders = HeldInputs::new(py, &inner.nodes.0, SmallVec::new());
            inner.core.count_held(&holders)
        })
        .unwrap_or_default()
    }

    /// End the path, unless one has ended whose outputs nobody has taken away yet; its outputs that somebody holds,
    /// and whether they own their blocks.
    fn end_path(&self, py: Python<'_>) -> Option<EndedPath> {
        self.with(py, |inner| {
            if inner.core.ended().is_none() {
                let holders = HeldInputs::new(py, &inner.nodes.0, SmallVec::new());
                inner.core.end_path(&holders);
            }
            inner.ended(py)
        })
        .flatten()
    }

    /// Note that the outputs of the path that has ended are taken away.
    fn forget_ended(&self, py: Python<'_>) {
        self.with(py, |inner| inner.core.forget_ended());
    }

    /// Drop all nodes. The path has been ended.
    fn clear(&self, py: Python<'_>) {
        let nodes = self.with(py, |inner| {
            inner.core.clear();
            inner.is_recording = false;
            std::mem::take(&mut inner.nodes)
        });
        drop(nodes);
    }

    /// The nodes: number, that of the parent, that of the function, and the node.
    #[getter]
    fn nodes(&self, py: Python<'_>) -> Vec<(u32, Option<u32>, u32, Py<TreeNode>)> {
        let found = self.with(py, |inner| {
            let nodes = inner.core.nodes();
            let described = nodes.map(|(id, node)| {
                let parent = node.parent().map(|parent| parent.0);
                (id.0, parent, node.function().0, inner.nodes.get(py, id))
            });
            described.collect()
        });
        found.unwrap_or_default()
    }

    /// The numbers of the nodes of the path, the root first.
    #[getter]
    fn path(&self, py: Python<'_>) -> Vec<u32> {
        let path = |inner: &mut Inner| inner.core.path().iter().map(|id| id.0).collect();
        self.with(py, path).unwrap_or_default()
    }

    /// The lock that one thread at a time holds while it calls a function of the tree.
    fn __enter__(&self, py: Python<'_>) -> PyResult<()> {
        self.lock.__enter__(py)
    }

    #[pyo3(signature = (*_error))]
    fn __exit__(&self, _error: &Bound<'_, pyo3::types::PyTuple>) {
        self.lock.release();
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.inner.traverse(&visit, |inner, visit| {
            let mut nodes = inner.iter().flat_map(|inner| &inner.nodes.0);
            nodes.try_for_each(|node| visit.call(node))
        })?;
        visit.call(&self.reader)?;
        visit.call(&self.steps)?;
        visit.call(&self.last_stream)?;
        visit.call(&self.is_capturing)?;
        if let Some(renewal) = &self.renewal {
            visit.call(&renewal.set_error)?;
        }
        self.observers.traverse(&visit)
    }

    fn __clear__(&self, py: Python<'_>) {
        drop(self.inner.replace(py, None));
    }
}

impl Tree {
    /// Return whether the current stream captures, so that nothing can be replayed.
    #[inline]
    fn may_be_capturing(&self, py: Python<'_>) -> PyResult<bool> {
        let may_capture = self.last_stream.get().may_capture();
        Ok(may_capture && self.is_capturing.bind(py).call0()?.is_truthy()?)
    }

    /// Take outputs of a path that has ended away from those who hold them; return those that only Python can.
    /// The inputs of the call are kept.
    #[inline]
    fn take_away(
        &self,
        py: Python<'_>,
        ended: EndedPath,
        inputs: &[Input],
        message: &Py<PyAny>,
    ) -> PyResult<Option<EndedPath>> {
        let (live, owns) = ended;
        let renewal = self
            .renewal
            .as_ref()
            .filter(|one| !owns && !(one.is_inference)());
        let Some(renewal) = renewal else {
            return Ok(Some((live, owns)));
        };
        let mut left = Vec::new();
        for (node, index, address) in live {
            let is_input = inputs.iter().any(|input| input.memory == address);
            let end = if is_input || node.get().keeps_held() {
                End::Kept
            } else {
                End::Stale
            };
            if !node.get().take_away(py, index, end, renewal, message)? {
                left.push((node, index, address));
            }
        }
        Ok((!left.is_empty()).then_some((left, owns)))
    }

    /// Use what is inside; none where a call of this thread, which is under way, uses it.
    fn with<T>(&self, py: Python<'_>, using: impl FnOnce(&mut Inner) -> T) -> Option<T> {
        let mut inner = self.inner.take(py)?;
        let found = using(&mut inner);
        drop(self.inner.replace(py, Some(inner)));
        Some(found)
    }

    fn close(&self, open: Open, node: Bound<'_, TreeNode>, addresses: Vec<u64>) {
        let py = node.py();
        self.with(py, |inner| {
            let holders = HeldInputs::new(py, &inner.nodes.0, SmallVec::new());
            inner.core.close(open, addresses, &holders);
            inner.nodes.0.push(node.unbind());
        });
    }
}

impl Inner {
    /// Return the path that has ended, if anything is to be done about it; else forget it.
    #[inline]
    fn ended(&mut self, py: Python<'_>) -> Option<EndedPath> {
        let ended = self.core.ended()?;
        let live = self.nodes.ended(py, ended);
        if ended.owns || !live.is_empty() {
            return Some((live, ended.owns));
        }
        self.core.forget_ended();
        None
    }
}

impl Nodes {
    fn get(&self, py: Python<'_>, id: NodeId) -> Py<TreeNode> {
        self.0[id.0 as usize].clone_ref(py)
    }

    /// Outputs as Python has them.
    fn held(
        &self,
        py: Python<'_>,
        core: &cg_core::tree::Tree,
        outputs: impl Iterator<Item = OutputId>,
    ) -> Vec<HeldOutput> {
        let of = |one: OutputId| (self.get(py, one.node), one.index as usize, core.memory(one));
        outputs.map(of).collect()
    }

    /// The outputs of a path that has ended that somebody holds still.
    fn ended(&self, py: Python<'_>, ended: &Ended) -> Vec<HeldOutput> {
        let live = ended.live.iter().filter(|(one, _)| {
            let node = self.0[one.node.0 as usize].get();
            node.is_alive(py, one.index as usize)
        });
        let of =
            |(one, memory): &(OutputId, u64)| (self.get(py, one.node), one.index as usize, *memory);
        live.map(of).collect()
    }
}
