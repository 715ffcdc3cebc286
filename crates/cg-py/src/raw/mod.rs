//! Raw values from torch: all `unsafe` blocks of this crate are here and below.
#![expect(
    unsafe_code,
    reason = "torch and Python hand over pointers; each file says what it relies on"
)]

mod attached;
mod class_tags;
mod dict_versions;
mod dict_watchers;
mod dlpack;
mod fast_reader;
mod field_reader;
mod fields;
mod function_watcher;
mod host_memory;
mod lasting_streams;
mod lent_memory;
mod lookup;
mod new_tensor;
mod stable_functions;
mod still_tensors;
mod storages;
mod torch_settings;
mod view;

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::transmute;
use std::ptr::null_mut;
use std::sync::Arc;

use cg_core::saved::{Loaded, Names};
use cg_core::{
    Address, Delivery, Destination, Device, Error, Feed, GraphHandle, LoopPlan, Memory, Outputs,
    Padding, Result, Stage, Stream, StreamHandle, Template, Tracker,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};

pub(crate) use attached::{Attached, count};
pub(crate) use class_tags::ClassTags;
pub(crate) use dict_versions::DictVersions;
pub(crate) use dict_watchers::{Change, DictWatchers};
pub(crate) use dlpack::{CurrentWorkStream, DlpackReader};
pub(crate) use fast_reader::{FastReader, TensorPlace};
pub(crate) use field_reader::{FieldReader, KnownClass};
pub(crate) use fields::{LayoutWords, PLACES};
pub(crate) use function_watcher::{FunctionReader, function_changes, watch_functions};
pub(crate) use host_memory::OF_PROCESS;
pub(crate) use lasting_streams::{is_lasting, note_lasting};
pub(crate) use lent_memory::{Elements, lend};
pub(crate) use lookup::{ClassReader, entry_at, item_address, position_of, slot, value_at};
pub(crate) use new_tensor::NewTensor;
pub(crate) use stable_functions::Form;
pub(crate) use still_tensors::StillTensors;
pub(crate) use storages::{exchange_memory, storage_uses};
pub(crate) use torch_settings::GlobalSettings;
pub(crate) use view::{Comparison, Dtype, Lazy, Place, View};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// Return a stream of torch's or of somebody else, by its raw handle.
///
/// # Errors
/// For CUDA's name of "the stream of this thread", which is another stream in each thread.
pub(crate) fn stream(device: &Device, handle: u64) -> Result<Stream> {
    if handle == PER_THREAD {
        return Err(Error::Invalid {
            argument: "stream".to_owned(),
            given: "CU_STREAM_PER_THREAD".to_owned(),
            expected: "a stream that is the same in all threads".to_owned(),
        });
    }
    if is_lasting(handle) {
        // SAFETY: it is the default stream, which each device has, or torch has said that it is of its pool,
        // which it never destroys.
        return Ok(unsafe { Stream::from_raw(device, StreamHandle(handle)) });
    }
    // SAFETY: the handle comes from torch's current stream, which is live during the call that asks for
    // it, or from the caller of `cgraph._core.Stream`, who keeps the stream alive as long as that object.
    Ok(unsafe { Stream::from_foreign(device, StreamHandle(handle)) })
}

/// Return the graph of a `torch._C._CUDAGraph`, by its raw handle. `owner` has that object.
pub(crate) fn template(device: &Device, handle: u64, owner: Py<PyAny>) -> Template {
    // SAFETY: the handle comes from `raw_cuda_graph()` of an object that `owner` keeps, and nobody resets that
    // object while the pool's token exists, which `owner` keeps as well. The memory that the nodes name is in
    // that pool, which `CUDAGraph` keeps as long as the exec.
    unsafe { Template::from_raw(device, GraphHandle(handle), Some(Arc::new(owner))) }
}

/// Build a graph of a file, with memory of the names that it was saved with.
pub(crate) fn loaded_template(loaded: &Loaded, name: &str, memory: &Names<'_>) -> Result<Template> {
    // SAFETY: the file belongs to this user or root and nobody else may write it, which opening it has checked; its kernels
    // touch what the saved graph touched, and `cgraph.saved` lets the template keep the memory of all names.
    let (template, _) = unsafe { loaded.template(name, memory) }?;
    Ok(template)
}

/// Return a loop of a step. `owner` has the memory of the host that the plan names.
pub(crate) fn looped_template(
    step: &[Stage<'_>],
    plan: &LoopPlan,
    owner: Py<PyAny>,
) -> Result<Template> {
    let Some(first) = step.first() else {
        return Err(Error::Invalid {
            argument: "step".to_owned(),
            given: "without a stage".to_owned(),
            expected: "at least one".to_owned(),
        });
    };
    let device = first.template.device();
    // SAFETY: `cgraph._loops` gives addresses of tensors, with the bytes that they have. `Launched` keeps those of the
    // device until the replay has ended, and `owner`, which the template retains, is words and a ring for all steps.
    unsafe { Template::looped(device, step, plan, Arc::new(owner)) }
}

/// Return the nodes of an open capture that no earlier look has returned.
///
/// The interpreter is held: the calls are short, and they come after each operator.
pub(crate) fn new_nodes(
    _py: Python<'_>,
    tracker: &mut Tracker,
    current: &Stream,
) -> Result<Vec<u64>> {
    // SAFETY: `cgraph._captures.labels` looks only between the beginning and the end of its own
    // capture: it stops before the capture is ended, and as the interpreter is held here, no look is
    // under way then.
    let nodes = unsafe { tracker.new_nodes(current) }?;
    Ok(nodes.into_iter().map(|node| node.0).collect())
}

/// Return how many nodes the capture that is open on a stream has; none if it is unusable, or there is none.
pub(crate) fn captured_nodes(_py: Python<'_>, stream: &Stream) -> Result<Option<usize>> {
    // SAFETY: `cgraph._captures.cuda_capture` asks on the thread that is about to end its own capture, and
    // the interpreter is held.
    unsafe { stream.captured_nodes() }
}

/// Memory of a tensor that replays copy to or from, or words of device memory.
pub(crate) fn memory(device: &Device, address: u64, bytes: u64) -> Memory {
    // SAFETY: the range is one of these. A tensor's, which the template and its execs retain. Words or results that
    // the caller of `cgraph._core.Inputs` or `Outputs` keeps as long as them. One that the driver has just found to be
    // mapped and that the caller of `cgraph._core.Device.word` keeps so. A storage or a pool's segment that
    // `cgraph.saved` keeps as long as the call, and `SavedKernels.template` as long as the template.
    unsafe { Memory::from_raw(device, Address(address), bytes) }
}

/// Return what a replay copies and stores. The sources do not conflict: `Inputs::source` has asked.
#[inline]
pub(crate) fn feed<'a>(
    inputs: &'a cg_core::Inputs,
    sources: &'a [Address],
    values: &'a [u64],
    padding: Option<&'a Padding>,
) -> Result<Feed<'a>> {
    // SAFETY: the sources are the memory of tensors that the caller holds during the call, each of the
    // slot's bytes, or with padding of the rows that `Entry` has compared it with. As for any work that
    // torch enqueues, whoever frees the memory of a tensor does so in the order of the stream that used
    // it. Each is the slot's own address, or one that `crate::graph::Inputs` has found not to conflict,
    // and the destinations of inputs never change.
    unsafe { inputs.feed_checked(sources, values, padding) }
}

/// Return where a replay copies results to.
#[inline]
pub(crate) fn deliver<'a>(outputs: &'a Outputs, to: &'a [Destination]) -> Result<Delivery<'a>> {
    // SAFETY: each destination is memory of its own that `crate::graph::FreshResults` has allocated for the call,
    // or that the caller of `_replay_into` has. As for any work that torch enqueues, whoever frees it does
    // so in the order of the stream that it was allocated on, which is that of the replay.
    unsafe { outputs.deliver(to) }
}

/// Return the address of one of torch's functions, by its name; none if it is missing.
pub(crate) fn address(functions: &HashMap<String, usize>, name: &str) -> Option<usize> {
    functions.get(name).copied().filter(|address| *address != 0)
}

/// A function of torch's that tells a mode of the thread. It may be called at any time.
pub(crate) type Tells = extern "C" fn() -> bool;
/// The same for a type of device, and for a dispatch key.
pub(crate) type TellsOf = extern "C" fn(i8) -> bool;
pub(crate) type TellsOfKey = extern "C" fn(u16) -> bool;

pub(crate) fn tells(address: usize) -> Tells {
    // SAFETY: the caller of `cgraph._core.Dispatcher` gives a function that takes nothing and returns a
    // `bool`: `aoti_torch_grad_mode_is_enabled`, `c10::InferenceMode::is_enabled` or
    // `at::impl::torch_function_mode_enabled`.
    unsafe { transmute::<*const c_void, Tells>(address as *const c_void) }
}

pub(crate) fn tells_of(address: usize) -> TellsOf {
    // SAFETY: as for `tells`; this one takes a `c10::DeviceType`, which has a byte:
    // `at::autocast::is_autocast_enabled`.
    unsafe { transmute::<*const c_void, TellsOf>(address as *const c_void) }
}

pub(crate) fn tells_of_key(address: usize) -> TellsOfKey {
    // SAFETY: as for `tells`; this one takes a `c10::DispatchKey`, which has two bytes:
    // `c10::impl::tls_is_dispatch_key_included`.
    unsafe { transmute::<*const c_void, TellsOfKey>(address as *const c_void) }
}

/// So many numbers at an address, which may be null if there are none.
///
/// # Safety
/// They are there for `'a`, and nothing changes them.
unsafe fn numbers<'a>(first: *const i64, count: usize) -> &'a [i64] {
    if count == 0 || first.is_null() {
        return &[];
    }
    // SAFETY: the caller keeps the same contract.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// Return the items of a tuple, side by side; none in a Python that has them elsewhere than all have so far.
/// Python's function for each of them takes as long as a third of what is done with it.
#[inline]
pub(crate) fn items<'a, 'py>(tuple: &'a Bound<'py, PyTuple>) -> Option<&'a [Bound<'py, PyAny>]> {
    static PLACE: PyOnceLock<Option<usize>> = PyOnceLock::new();
    let place = (*PLACE.get_or_init(tuple.py(), || place_of_items(tuple.py())))?;
    // SAFETY: a tuple has its items behind what its class says is the size of an empty one, and
    // `place_of_items` has found one there.
    let first = unsafe { tuple.as_ptr().byte_add(place) }.cast::<Bound<'py, PyAny>>();
    // SAFETY: there are so many, each a reference to an object, which is all that a `Bound` has. Nothing
    // changes the items of a tuple that others have, and this one is held for `'a`.
    Some(unsafe { std::slice::from_raw_parts(first, tuple.len()) })
}

/// Return how many bytes behind the begin of a tuple its items are.
#[cold]
fn place_of_items(py: Python<'_>) -> Option<usize> {
    let sample = PyTuple::new(py, [py.None()]).ok()?;
    let place = sample.get_type().getattr(intern!(py, "__basicsize__"));
    let place: usize = place.ok()?.extract().ok()?;
    // SAFETY: a tuple of one item has a word more than an empty one, and is at a multiple of a word.
    let word = unsafe { sample.as_ptr().byte_add(place) }.cast::<*mut pyo3::ffi::PyObject>();
    // SAFETY: as above.
    let found = unsafe { word.read() };
    (found == py.None().as_ptr()).then_some(place)
}

/// Return whether an object is of a class or of one derived from it. `isinstance` would ask the metaclass,
/// too.
#[inline]
pub(crate) fn is_instance(object: &Bound<'_, PyAny>, class: &Py<PyType>) -> bool {
    // SAFETY: both are objects, and the second is a class.
    unsafe { pyo3::ffi::PyObject_TypeCheck(object.as_ptr(), class.as_ptr().cast()) != 0 }
}

/// Return an object's attributes, for those whose class has the usual `__dict__`: to ask for that takes three
/// times as long.
#[inline]
pub(crate) fn attributes<'py>(object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyDict>> {
    // SAFETY: the object is alive and the interpreter is held; what is returned is a new reference, or
    // null with an error set.
    let dict = unsafe { pyo3::ffi::PyObject_GenericGetDict(object.as_ptr(), null_mut()) };
    // SAFETY: as above.
    let dict = unsafe { Bound::from_owned_ptr_or_err(object.py(), dict) }?;
    Ok(dict.cast_into::<PyDict>()?)
}

/// Return whether the attributes of an object, which is no class, are this dictionary.
#[inline]
pub(crate) fn has_attributes(object: &Bound<'_, PyAny>, attributes: &Bound<'_, PyDict>) -> bool {
    // SAFETY: as in `attributes`.
    let dict = unsafe { pyo3::ffi::PyObject_GenericGetDict(object.as_ptr(), null_mut()) };
    // SAFETY: as in `attributes`.
    let dict = unsafe { Bound::from_owned_ptr_or_err(object.py(), dict) };
    dict.is_ok_and(|dict| dict.is(attributes))
}

/// Return whether an item of a dictionary is this very object.
#[inline]
pub(crate) fn is_item(
    dict: &Bound<'_, PyDict>,
    name: &Bound<'_, PyString>,
    value: &Bound<'_, PyAny>,
) -> bool {
    item_address(dict, name) == Some(value.as_ptr().addr())
}

/// Return how many references an object has.
#[inline]
pub(crate) fn references(object: &Bound<'_, PyAny>) -> i64 {
    // SAFETY: the object is alive and the interpreter is held, as `object` shows.
    let count = unsafe { pyo3::ffi::Py_REFCNT(object.as_ptr()) };
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// The place of weak references in the objects of a class.
pub(crate) struct WeakReferences {
    class: Py<PyType>,
    /// In bytes from an object, maybe before it; 0 where there can be none.
    offset: isize,
}

impl WeakReferences {
    /// Of objects of this class.
    pub(crate) fn of(class: &Bound<'_, PyType>) -> PyResult<Self> {
        let offset = class.getattr(intern!(class.py(), "__weakrefoffset__"))?;
        Ok(Self {
            class: class.clone().unbind(),
            offset: offset.extract()?,
        })
    }

    /// Return whether somebody has one to an object, or may have, as it is of another class.
    #[inline]
    pub(crate) fn may_be_there(&self, object: &Bound<'_, PyAny>) -> bool {
        if object.get_type_ptr().cast() != self.class.as_ptr() {
            return true;
        }
        if self.offset == 0 {
            return false;
        }
        // SAFETY: the object is alive and of just this class, by which Python has a pointer at this offset
        // from each of its objects.
        let first = unsafe { object.as_ptr().byte_offset(self.offset) };
        // SAFETY: as above; the pointer is a word that is aligned as such, and the interpreter is held,
        // without which nobody writes to it.
        let first = unsafe { first.cast::<*const c_void>().read() };
        !first.is_null()
    }
}
