//! `TreeFunction`: a function whose calls are replays of a tree's nodes.

use cg_core::tree::{Answer, Call, FunctionId, Holders, Input, Reason};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;

use super::held_inputs::{HeldInputs, Items, locations};
use super::new_node::{EndedPath, NewNode};
use super::node::{FreshTensors, TreeNode};
use super::{Inner, Tree};
use crate::detach::require_unforked;
use crate::error::argument;

/// A function of a tree. It is called with a list of inputs, which it empties, and returns a list.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct TreeFunction {
    tree: Py<Tree>,
    id: FunctionId,
    /// The function as it was written, which takes and empties a list.
    model: Py<PyAny>,
    inputs: usize,
    /// The error of who accesses an output that a call of it has ended.
    message: Py<PyAny>,
    /// The inputs that were not on the device at first, as the state of random numbers outside of captures.
    elsewhere: Vec<usize>,
}

#[pymethods]
impl TreeFunction {
    /// The function of this number in a tree, with so many inputs. Who accesses an output that its call has
    /// overwritten gets `message`. A call runs as it was written while an input at one of the places `elsewhere` is
    /// on the host.
    #[new]
    fn new(
        tree: Py<Tree>,
        id: u32,
        model: Py<PyAny>,
        inputs: usize,
        message: Py<PyAny>,
        elsewhere: Vec<usize>,
    ) -> Self {
        Self {
            tree,
            id: FunctionId(id),
            model,
            inputs,
            message,
            elsewhere,
        }
    }

    /// Replay the node that the call fits, or let Python make one.
    fn __call__<'py>(
        slf: &Bound<'py, Self>,
        inputs: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        require_unforked()?;
        let Ok(inputs) = inputs.cast::<PyList>() else {
            let given = format!("a {}", inputs.get_type().name()?);
            return Err(argument(
                "the inputs",
                &given,
                "a list, which the call empties",
            ));
        };
        let (py, this) = (slf.py(), slf.get());
        if inputs.len() != this.inputs {
            let (given, expected) = (inputs.len().to_string(), this.inputs.to_string());
            return Err(argument("the number of inputs", &given, &expected));
        }
        let tree = this.tree.bind(py);
        if tree.get().observers.are_there(py)?
            || tree.get().may_be_capturing(py)?
            || this.is_on_host(inputs)?
        {
            let is_first = tree.get().with(py, |inner| inner.core.ran(this.id));
            // torch itself has a mode around first runs of compiled code.
            let name = if is_first == Some(true) {
                "first run"
            } else {
                "watched"
            };
            let told = (slf, inputs, name, 0, py.None());
            tree.call_method1(intern!(py, "_eager"), told)?;
            return this.call_model(inputs);
        }
        let lock = loop {
            match tree.get().lock.try_take() {
                Some(lock) => break lock,
                None => tree.get().lock.wait(py)?,
            }
        };
        let Some(mut inner) = tree.get().inner.take(py) else {
            return this.call_model(inputs);
        };
        if inner.is_recording {
            drop(tree.get().inner.replace(py, Some(inner)));
            return this.call_model(inputs);
        }
        let done = this.answer(slf, inputs, &mut inner);
        drop(tree.get().inner.replace(py, Some(inner)));
        match done? {
            Done::Run(node, items, fresh) => {
                Ok(node.get().result(py, &items, fresh.as_ref())?.into_any())
            }
            Done::Eager(reason, ended) => {
                let (name, detail) = described(reason);
                let told = (slf, inputs, name, detail, ended);
                tree.call_method1(intern!(py, "_eager"), told)?;
                // The function may wait for another thread that calls one of the tree.
                drop(lock);
                this.call_model(inputs)
            }
            Done::Record(new) => {
                let recorded = tree.call_method1(intern!(py, "_record"), (slf, inputs, new));
                tree.get().with(py, |inner| inner.is_recording = false);
                as_list(recorded?)
            }
        }
    }

    /// The number in the tree.
    #[getter]
    fn id(&self) -> u32 {
        self.id.0
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.tree)?;
        visit.call(&self.model)?;
        visit.call(&self.message)
    }
}

/// What has become of a call, or is to be done.
enum Done<'py> {
    /// The node that was replayed, the inputs, and new tensors of the replay if it has made some.
    Run(Py<TreeNode>, Items<'py>, Option<FreshTensors<'py>>),
    Eager(Reason, Option<EndedPath>),
    Record(Py<NewNode>),
}

impl TreeFunction {
    /// Take outputs of a path that has ended away from those who hold them; inputs of the call are kept. Where that
    /// fails, the next call goes on with it before anything uses the memory.
    #[inline]
    fn end_path(
        &self,
        function: &Bound<'_, Self>,
        inner: &mut Inner,
        inputs: &[Input],
    ) -> PyResult<()> {
        let py = function.py();
        let Some(ended) = inner.ended(py) else {
            return Ok(());
        };
        let tree = self.tree.bind(py);
        if let Some((live, owns)) = tree.get().take_away(py, ended, inputs, &self.message)? {
            let kept: Vec<u64> = inputs.iter().map(|input| input.memory).collect();
            tree.call_method1(intern!(py, "_end"), (function, live, owns, kept))?;
        }
        inner.core.forget_ended();
        Ok(())
    }

    /// Return whether an input is on the host that is on the device in captures.
    #[inline]
    fn is_on_host(&self, inputs: &Bound<'_, PyList>) -> PyResult<bool> {
        for place in &self.elsewhere {
            let is_cpu = inputs
                .get_item(*place)?
                .getattr_opt(intern!(inputs.py(), "is_cpu"))?;
            if let Some(is_cpu) = is_cpu
                && is_cpu.is_truthy()?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Run the function without the tree.
    #[cold]
    fn call_model<'py>(&self, inputs: &Bound<'py, PyList>) -> PyResult<Bound<'py, PyAny>> {
        as_list(self.model.bind(inputs.py()).call1((inputs,))?)
    }

    #[inline]
    fn answer<'py>(
        &self,
        function: &Bound<'py, Self>,
        list: &Bound<'py, PyList>,
        inner: &mut Inner,
    ) -> PyResult<Done<'py>> {
        let py = function.py();
        let tree = self.tree.get();
        let step = tree.steps.get().step(py)?;
        let items: Items<'py> = list.iter().map(Some).collect();
        let mut places = locations(tree.reader.get(), items.iter().flatten())?;
        if inner.core.ended().is_some() {
            // A call before was interrupted.
            tree.last_stream.get().follow(py)?;
            self.end_path(function, inner, &places)?;
            places = locations(tree.reader.get(), items.iter().flatten())?;
        }
        let mut held = HeldInputs::new(py, &inner.nodes.0, items);
        list.del_slice(0, list.len())?;
        let call = Call {
            function: self.id,
            inputs: &places,
            step,
        };
        let mut answer = inner.core.decide(&call, &mut held);
        let mut is_fresh = false;
        if let Answer::Run(id) = answer
            && inner.nodes.0[id.0 as usize].get().wants_fresh()
            && !inner.core.node(id).has_children()
        {
            held.take_back(id);
            (answer, is_fresh) = (Answer::Record(None), true);
        }
        if let Some(error) = held.failed {
            return Err(error);
        }
        let items = match answer {
            Answer::Run(id) => {
                let node = inner.nodes.get(py, id);
                let items = held.items;
                let stream = tree.last_stream.get().follow(py)?;
                self.end_path(function, inner, &places)?;
                let fresh = node.get().replay(py, &items, stream)?;
                inner.core.entered(id);
                return Ok(Done::Run(node, items, fresh));
            }
            Answer::Record(_) | Answer::Eager(_) => held.items,
        };
        for item in items.iter().flatten() {
            list.append(item)?;
        }
        drop(items);
        if let Answer::Eager(reason) = answer {
            return Ok(Done::Eager(reason, inner.ended(py)));
        }
        let holders = HeldInputs::new(py, &inner.nodes.0, SmallVec::new());
        let open = inner.core.open(&call, &holders);
        let ended = inner.ended(py);
        let tree = self.tree.clone_ref(py);
        let made = NewNode::new(py, tree, open, ended, is_fresh, (&inner.core, &inner.nodes));
        inner.is_recording = true;
        Ok(Done::Record(Py::new(py, made)?))
    }
}

/// Return what a function returns as a list.
fn as_list(returned: Bound<'_, PyAny>) -> PyResult<Bound<'_, PyAny>> {
    if returned.is_instance_of::<PyList>() {
        return Ok(returned);
    }
    let py = returned.py();
    Ok(match returned.cast_into::<PyTuple>() {
        Ok(tuple) => tuple.to_list(),
        Err(other) => PyList::new(py, [other.into_inner()])?,
    }
    .into_any())
}

/// The name that Python has for a reason, and the number that belongs to it.
fn described(reason: Reason) -> (&'static str, u32) {
    match reason {
        Reason::FirstRun => ("first run", 0),
        Reason::PutOff => ("put off", 0),
        Reason::Mutation(place) => ("mutation", place),
        Reason::Repeats(count) => ("repeats", count),
        Reason::Rerecords(count) => ("rerecords", count),
        Reason::Variants => ("variants", 0),
    }
}
