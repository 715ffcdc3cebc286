//! Raw values from torch: the only file of this crate with `unsafe` blocks.
#![expect(
    unsafe_code,
    reason = "torch hands over pointers; this file says what it relies on"
)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::{MaybeUninit, transmute};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use cg_core::{
    Address, Device, Error, Feed, GraphHandle, Memory, Result, Stream, StreamHandle, Template,
    Tracker,
};
use dlpack_ffi::{DLDeviceType, DLPackExchangeAPI, DLTensor};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyString, PyType};

use crate::error::argument;
use crate::tensor::{Dtype, Lazy, Place, Plain, View};

/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: u64 = 2;

/// DLPack versions whose table has its functions where `dlpack_ffi` declares them.
const MAJOR: u32 = 1;

/// A stream of torch's, by its raw handle.
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
    // SAFETY: the handle comes from torch's current stream or from a `torch.cuda.Stream` that the
    // caller holds; torch takes its streams from a pool that it never destroys, and the
    // documentation of `cgraph.graph` asks the same of external streams.
    Ok(unsafe { Stream::from_raw(device, StreamHandle(handle)) })
}

/// The graph of a `torch._C._CUDAGraph`, by its raw handle.
pub(crate) fn template(device: &Device, handle: u64) -> Template {
    // SAFETY: the handle comes from `raw_cuda_graph()` of the object that captured it; `CUDAGraph`
    // drops the template before it lets that object go, or has given the object to the template to
    // retain, and it holds the pool that the captured memory came from as long as the exec.
    unsafe { Template::from_raw(device, GraphHandle(handle)) }
}

/// The nodes of an open capture that no earlier look has returned.
///
/// The interpreter is held: the calls are short, and they come after each operator.
pub(crate) fn new_nodes(
    _py: Python<'_>,
    tracker: &mut Tracker,
    current: &Stream,
) -> Result<Vec<u64>> {
    // SAFETY: `cgraph._labels` looks only between the beginning and the end of its own capture: it
    // stops before the capture is ended, and as the interpreter is held here, no look is under way
    // then.
    let nodes = unsafe { tracker.new_nodes(current) }?;
    Ok(nodes.into_iter().map(|node| node.0).collect())
}

/// Memory of a tensor that replays copy to, or words of device memory.
pub(crate) fn memory(device: &Device, address: u64, bytes: u64) -> Memory {
    // SAFETY: the range is a tensor's, which the template and its execs retain, or that of words
    // that the caller of `cgraph._core.Inputs` keeps as long as them, or of one that the driver has
    // just found to be mapped and that the caller of `cgraph._core.Device.word` keeps so.
    unsafe { Memory::from_raw(device, Address(address), bytes) }
}

/// What a replay copies and stores. The sources do not conflict: `Inputs::source` has asked.
#[inline]
pub(crate) fn feed<'a>(
    inputs: &'a cg_core::Inputs,
    sources: &'a [Address],
    values: &'a [u64],
) -> Result<Feed<'a>> {
    // SAFETY: the sources are the memory of tensors that the caller holds during the call. As for
    // any work that torch enqueues, whoever frees the memory of a tensor does so in the order of the
    // stream that used it. Each is the slot's own address, or one that `crate::inputs::Inputs` has
    // found not to conflict, and the destinations of inputs never change.
    unsafe { inputs.feed_checked(sources, values) }
}

/// A function of torch's that tells a mode of the thread. It may be called at any time.
pub(crate) type Tells = extern "C" fn() -> bool;
/// The same for a type of device.
pub(crate) type TellsOf = extern "C" fn(i8) -> bool;

pub(crate) fn tells(address: usize) -> Tells {
    // SAFETY: the caller of `cgraph._core.Dispatcher` gives a function that takes nothing and returns a
    // `bool`: `aoti_torch_grad_mode_is_enabled` or `c10::InferenceMode::is_enabled`.
    unsafe { transmute::<*const c_void, Tells>(address as *const c_void) }
}

pub(crate) fn tells_of(address: usize) -> TellsOf {
    // SAFETY: as for `tells`; this one takes a `c10::DeviceType`, which has a byte:
    // `at::autocast::is_autocast_enabled`.
    unsafe { transmute::<*const c_void, TellsOf>(address as *const c_void) }
}

/// The table of functions behind `torch.Tensor.__dlpack_c_exchange_api__` (torch 2.10 and newer).
fn exchange_api(capsule: &Bound<'_, PyCapsule>) -> PyResult<DLPackExchangeAPI> {
    let table = capsule
        .pointer_checked(Some(c"dlpack_exchange_api"))?
        .cast::<DLPackExchangeAPI>()
        .as_ptr();
    // SAFETY: a capsule of this name points at a table that lives as long as the process, and its
    // header has the same layout in all versions.
    let version = unsafe { (*table).header.version };
    if version.major != MAJOR {
        let given = format!("DLPack {}.{}", version.major, version.minor);
        return Err(argument("the exchange API", &given, "DLPack 1.x"));
    }
    // SAFETY: version 1 of the table has these fields, and the table is never changed.
    Ok(unsafe { *table })
}

/// torch's "what is this tensor" as a C function: no Python call and no allocation.
pub(crate) struct ReadTensor {
    function: unsafe extern "C" fn(*mut c_void, *mut DLTensor) -> i32,
    class: Py<PyType>,
}

impl ReadTensor {
    /// Takes the function from the table of `torch.Tensor`, which is `class`.
    pub(crate) fn new(capsule: &Bound<'_, PyCapsule>, class: &Bound<'_, PyType>) -> PyResult<Self> {
        let table = exchange_api(capsule)?;
        let name = "dltensor_from_py_object_no_sync of the exchange API";
        let function = table.dltensor_from_py_object_no_sync;
        let function = function.ok_or_else(|| argument(name, "NULL", "a function"))?;
        let class = class.clone().unbind();
        Ok(Self { function, class })
    }

    /// Runs `with` on what the tensor is; none if torch cannot say it in this way. `with` runs no
    /// Python code, which might change the tensor.
    #[inline]
    pub(crate) fn with<T>(
        &self,
        tensor: &Bound<'_, PyAny>,
        with: impl FnOnce(&View<'_>) -> T,
    ) -> Option<T> {
        // torch does not check what it is given.
        if !is_instance(tensor, &self.class) {
            return None;
        }
        let mut out = MaybeUninit::<DLTensor>::uninit();
        // SAFETY: `function` is the table's, the object is a `torch.Tensor`, `out` is valid for one
        // write, and the interpreter is held, as `tensor` shows.
        let status = unsafe { (self.function)(tensor.as_ptr().cast(), out.as_mut_ptr()) };
        if status != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        // SAFETY: the function says that it has written all of it.
        let out = unsafe { out.assume_init() };
        let ndim = usize::try_from(out.ndim).ok()?;
        // SAFETY: `shape` has `ndim` numbers that live as long as the tensor, which the caller holds
        // and nothing changes before `with` has returned.
        let shape = unsafe { numbers(out.shape, ndim) };
        // SAFETY: as for `shape`; torch always writes strides, as DLPack 1.2 asks for.
        let strides = unsafe { numbers(out.strides, ndim) };
        let (code, bits) = (u32::from(out.dtype.code), u64::from(out.dtype.bits));
        let is_complex = code == dlpack_ffi::DLDataTypeCode::kDLComplex.0;
        Some(with(&View {
            address: out.data as u64 + out.byte_offset,
            element_bytes: (bits * u64::from(out.dtype.lanes)).div_ceil(8),
            shape,
            strides,
            dtype: Dtype::Dlpack(out.dtype.code, out.dtype.bits, out.dtype.lanes),
            place: Place::of(out.device.device_type, out.device.device_id),
            lazy: Lazy::of(is_complex, shape),
        }))
    }
}

/// torch could not say it, as for nested tensors and for those without memory of their own.
struct Failed;

type Answer<T> = std::result::Result<T, Failed>;

/// Asks for one property of a tensor; what is not 0 says that there was an error.
type Get<T> = unsafe extern "C" fn(*mut c_void, *mut T) -> i32;

/// torch's stable C functions for what a tensor is. They take a third of the time of DLPack's, as they
/// count no reference. Source: torch's notes on its "`LibTorch` Stable ABI".
pub(crate) struct ReadPlain {
    data_ptr: Get<*mut c_void>,
    dim: Get<i64>,
    sizes: Get<*const i64>,
    strides: Get<*const i64>,
    dtype: Get<i32>,
    layout: Get<i32>,
    device_type: Get<i32>,
    device_index: Get<i32>,
    /// Private: not in every torch.
    pub(crate) requires_grad: Option<unsafe extern "C" fn(*const c_void) -> bool>,
    classes: Box<[Py<PyType>]>,
    /// Where in a tensor's object the functions' handle is, in bytes.
    offset: usize,
    /// torch writes a trace to stderr for each failure: after one there are no more.
    has_failed: AtomicBool,
}

impl ReadPlain {
    /// Takes the functions from where they are, by their names, for tensors of just the classes of
    /// the samples; none if some are missing, or if the samples' objects are built in another way.
    pub(crate) fn new(
        functions: &HashMap<String, usize>,
        samples: &[Bound<'_, PyAny>],
    ) -> PyResult<Option<Self>> {
        let mut offsets = samples.iter().map(handle_offset);
        let Some(offset) = offsets.next().transpose()?.flatten() else {
            return Ok(None);
        };
        for other in offsets {
            if other? != Some(offset) {
                return Ok(None);
            }
        }
        let classes = samples.iter().map(|one| one.get_type().unbind()).collect();
        Ok(Self::find(functions, classes, offset))
    }

    fn find(
        functions: &HashMap<String, usize>,
        classes: Box<[Py<PyType>]>,
        offset: usize,
    ) -> Option<Self> {
        Some(Self {
            data_ptr: function(functions, "aoti_torch_get_data_ptr")?,
            dim: function(functions, "aoti_torch_get_dim")?,
            sizes: function(functions, "aoti_torch_get_sizes")?,
            strides: function(functions, "aoti_torch_get_strides")?,
            dtype: function(functions, "aoti_torch_get_dtype")?,
            layout: function(functions, "aoti_torch_get_layout")?,
            device_type: function(functions, "aoti_torch_get_device_type")?,
            device_index: function(functions, "aoti_torch_get_device_index")?,
            requires_grad: functions
                .get("requires_grad")
                .filter(|one| **one != 0)
                .map(|one| {
                    // SAFETY: a method of `c10::TensorImpl` that takes nothing and returns a `bool`, by the
                    // caller of `cgraph._core.TensorReader`.
                    unsafe { transmute::<*const c_void, _>(*one as *const c_void) }
                }),
            classes,
            offset,
            has_failed: AtomicBool::new(false),
        })
    }

    /// Runs `with` on what a tensor with memory of its own is; none for all others, also those of
    /// classes that are derived from `torch.Tensor`. `with` runs no Python code, which might change
    /// the tensor.
    #[inline]
    pub(crate) fn with<T>(
        &self,
        tensor: &Bound<'_, PyAny>,
        with: impl FnOnce(&Plain<'_>) -> T,
    ) -> Option<T> {
        let handle = self.handle(tensor)?;
        // SAFETY: the handle is the tensor's. `with` runs no Python code, so that nothing changes
        // the tensor.
        let read = unsafe { self.plain(handle) };
        self.noted(read).flatten().map(|plain| with(&plain))
    }

    /// Where a tensor's memory is; none for classes that are derived from `torch.Tensor`.
    #[inline]
    pub(crate) fn address(&self, tensor: &Bound<'_, PyAny>) -> Option<u64> {
        let handle = self.handle(tensor)?;
        // SAFETY: the handle is the tensor's.
        let read = unsafe { ask(self.data_ptr, handle) };
        self.noted(read).map(|address| address as u64)
    }

    /// Whether a tensor requires a gradient; none if that is not known here.
    #[inline]
    pub(crate) fn requires_grad(&self, tensor: &Bound<'_, PyAny>) -> Option<bool> {
        let (function, handle) = (self.requires_grad?, self.handle(tensor)?);
        // SAFETY: an `at::Tensor`, which `handle` points at, is a pointer to a `c10::TensorImpl`.
        let object = unsafe { handle.cast::<*const c_void>().read() };
        // SAFETY: the tensor lives, so this is one. The method only reads it.
        Some(unsafe { function(object) })
    }

    /// What the functions take for a tensor of a known class.
    #[inline]
    fn handle(&self, tensor: &Bound<'_, PyAny>) -> Option<*mut c_void> {
        let class = tensor.get_type_ptr();
        let mut classes = self.classes.iter();
        let is_known = classes.any(|one| one.as_ptr().cast() == class);
        if !is_known || self.has_failed() {
            return None;
        }
        // SAFETY: the offset is within the objects of this class. `new` has found the handle of a
        // tensor of this class there; for these functions that is the address of an `at::Tensor`,
        // and all of torch's classes begin alike.
        Some(unsafe { tensor.as_ptr().byte_add(self.offset) }.cast())
    }

    #[inline]
    fn noted<T>(&self, read: Answer<T>) -> Option<T> {
        if read.is_err() {
            self.has_failed.store(true, Ordering::Relaxed);
        }
        read.ok()
    }

    /// Whether a tensor could not be read, so that none is any more.
    pub(crate) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    /// What a tensor is, or none if it has another layout or is elsewhere.
    ///
    /// # Safety
    /// The handle is a tensor's, and nothing changes the tensor for `'a`.
    #[inline]
    unsafe fn plain<'a>(&self, handle: *mut c_void) -> Answer<Option<Plain<'a>>> {
        // SAFETY: the handle is a tensor's, by the contract; so for all that is asked here.
        if unsafe { ask(self.layout, handle) }? != STRIDED {
            return Ok(None);
        }
        // SAFETY: as above.
        let place = match unsafe { ask(self.device_type, handle) }? {
            CPU => Place::Cpu,
            // SAFETY: as above.
            CUDA => Place::Cuda(unsafe { ask(self.device_index, handle) }?),
            _ => return Ok(None),
        };
        // SAFETY: as above.
        let ndim = usize::try_from(unsafe { ask(self.dim, handle) }?).map_err(|_| Failed)?;
        // SAFETY: as above.
        let sizes = unsafe { ask(self.sizes, handle) }?;
        // SAFETY: as above.
        let strides = unsafe { ask(self.strides, handle) }?;
        // SAFETY: as above.
        let scalar_type = unsafe { ask(self.dtype, handle) }?;
        Ok(Some(Plain {
            // SAFETY: as above.
            address: unsafe { ask(self.data_ptr, handle) }? as u64,
            // SAFETY: there are `ndim` numbers, which stay as they are for `'a`, by the contract.
            shape: unsafe { numbers(sizes, ndim) },
            // SAFETY: as for the shape.
            strides: unsafe { numbers(strides, ndim) },
            scalar_type: usize::try_from(scalar_type).map_err(|_| Failed)?,
            place,
        }))
    }
}

/// `c10::Layout::Strided`, `c10::DeviceType::CPU` and `CUDA`: part of torch's stable interface.
const STRIDED: i32 = 0;
const CPU: i32 = 0;
const CUDA: i32 = 1;

/// One of torch's stable functions, for a property of this type.
fn function<T>(functions: &HashMap<String, usize>, name: &str) -> Option<Get<T>> {
    let address = *functions.get(name).filter(|address| **address != 0)?;
    // SAFETY: `cgraph._torch` has looked the name up in torch's library, which is never unloaded;
    // all functions of these names take a tensor and where to write, and the fields say of which
    // type.
    Some(unsafe { transmute::<*const c_void, Get<T>>(address as *const c_void) })
}

/// # Safety
/// The handle is one of a tensor, and the function is for properties of this type.
#[inline]
unsafe fn ask<T>(function: Get<T>, handle: *mut c_void) -> Answer<T> {
    let mut out = MaybeUninit::uninit();
    // SAFETY: `out` is valid for one write; the rest is the contract of this function.
    if unsafe { function(handle, out.as_mut_ptr()) } != 0 {
        return Err(Failed);
    }
    // SAFETY: the function says that it has written.
    Ok(unsafe { out.assume_init() })
}

/// Where in a tensor's object the pointer is that torch calls its `_cdata`.
fn handle_offset(tensor: &Bound<'_, PyAny>) -> PyResult<Option<usize>> {
    let py = tensor.py();
    let size = |class: &Bound<'_, PyType>| class.getattr(intern!(py, "__basicsize__"))?.extract();
    let wanted: usize = tensor.getattr(intern!(py, "_cdata"))?.extract()?;
    let (begin, end): (usize, usize) = (size(&py.get_type::<PyAny>())?, size(&tensor.get_type())?);
    // Up to torch 2.9, a word before it says who owns it.
    let words = (begin..end).step_by(size_of::<usize>()).take(2);
    let mut offsets = words.filter(|offset| offset + size_of::<usize>() <= end);
    Ok(offsets.find(|offset| {
        // SAFETY: an object has as many bytes as its class says, and the word ends before them; what
        // begins at a multiple of a word is aligned for one.
        let word = unsafe { tensor.as_ptr().byte_add(*offset) }.cast::<usize>();
        // SAFETY: as above; nothing writes to it while the interpreter is held.
        wanted == unsafe { word.read() }
    }))
}

/// So many numbers at an address, which may be null if there are none.
///
/// # Safety
/// They are there for `'a`, and nothing changes them.
unsafe fn numbers<'a>(first: *const i64, count: usize) -> &'a [i64] {
    if count == 0 || first.is_null() {
        return &[];
    }
    // SAFETY: the contract is that of this function.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// Whether an object is of a class or of one derived from it. `isinstance` would ask the metaclass,
/// too.
#[inline]
pub(crate) fn is_instance(object: &Bound<'_, PyAny>, class: &Py<PyType>) -> bool {
    // SAFETY: both are objects, and the second is a class.
    unsafe { pyo3::ffi::PyObject_TypeCheck(object.as_ptr(), class.as_ptr().cast()) != 0 }
}

/// Whether a dictionary has just these items, the very same objects in the same order.
#[inline]
pub(crate) fn has_just(dict: &Bound<'_, PyDict>, items: &[(Py<PyAny>, Py<PyAny>)]) -> bool {
    let (mut place, mut key, mut value) = (0, null_mut(), null_mut());
    let mut next = || {
        // SAFETY: the dictionary is alive and the interpreter is held, as `dict` shows; the others
        // are valid for one write each. Between the calls no Python code runs that might change the
        // dictionary: its keys and values are compared as addresses.
        let is_there = unsafe {
            pyo3::ffi::PyDict_Next(dict.as_ptr(), &raw mut place, &raw mut key, &raw mut value)
        };
        (is_there != 0).then_some((key, value))
    };
    let mut known = items.iter();
    known.all(|(name, then)| next() == Some((name.as_ptr(), then.as_ptr()))) && next().is_none()
}

/// Whether an item of a dictionary is this very object.
#[inline]
pub(crate) fn is_item(
    dict: &Bound<'_, PyDict>,
    name: &Bound<'_, PyString>,
    value: &Bound<'_, PyAny>,
) -> bool {
    // SAFETY: all are alive and the interpreter is held. What is found is compared as an address.
    let found = unsafe { pyo3::ffi::PyDict_GetItemWithError(dict.as_ptr(), name.as_ptr()) };
    if found.is_null() {
        drop(PyErr::take(dict.py()));
    }
    found == value.as_ptr()
}

/// How many references an object has.
#[inline]
pub(crate) fn references(object: &Bound<'_, PyAny>) -> i64 {
    // SAFETY: the object is alive and the interpreter is held, as `object` shows.
    let count = unsafe { pyo3::ffi::Py_REFCNT(object.as_ptr()) };
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// torch's "current stream" as a C function: no Python call.
pub(crate) struct CurrentWorkStream {
    function: unsafe extern "C" fn(DLDeviceType, i32, *mut *mut c_void) -> i32,
    ordinal: i32,
}

impl CurrentWorkStream {
    /// Takes the function from `torch.Tensor.__dlpack_c_exchange_api__` (torch 2.10 and newer).
    pub(crate) fn new(capsule: &Bound<'_, PyCapsule>, ordinal: u32) -> PyResult<Self> {
        let function = exchange_api(capsule)?.current_work_stream;
        let name = "current_work_stream of the exchange API";
        let function = function.ok_or_else(|| argument(name, "NULL", "a function"))?;
        let ordinal = i32::try_from(ordinal)?;
        Ok(Self { function, ordinal })
    }

    /// The raw handle of the current stream.
    #[inline]
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<u64> {
        let mut stream = null_mut();
        // SAFETY: `function` is the table's, `stream` is valid for one write, and the interpreter is
        // held, which the function needs to report an error.
        let status =
            unsafe { (self.function)(DLDeviceType::kDLCUDA, self.ordinal, &raw mut stream) };
        if status == 0 {
            return Ok(stream as u64);
        }
        Err(PyErr::take(py).unwrap_or_else(|| argument("the current stream", "unknown", "known")))
    }
}
