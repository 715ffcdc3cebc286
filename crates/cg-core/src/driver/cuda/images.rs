//! The images that modules and libraries of kernels are loaded from.
//!
//! The driver tells of no module what it was loaded from. CUPTI, which comes with CUDA, calls us back at each load.

#![expect(unsafe_code, reason = "opens a library, and is called back by it")]

use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_void};
use std::fs;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use libloading::Library;

use super::{out, params, probe};
use crate::code::Call;
use crate::driver::handle::NodeHandle;
use crate::driver::image::binary_length;
use crate::error::{Error, Result};

/// From now on, keep what is loaded; `cupti` is the file of the library.
pub(super) fn record(cupti: &Path) -> Result<()> {
    static SUBSCRIBED: Mutex<Option<Library>> = Mutex::new(None);
    let mut subscribed = SUBSCRIBED.lock().unwrap_or_else(PoisonError::into_inner);
    if subscribed.is_none() {
        *subscribed = Some(subscribe(cupti).map_err(|reason| Error::Images { reason })?);
    }
    Ok(())
}

/// Return the image that the kernel of a kernel node comes from, if that was kept; the context is current.
///
/// # Safety
/// `node` is a kernel node of a live graph.
pub(super) unsafe fn of_node(node: NodeHandle) -> Result<Option<Arc<[u8]>>> {
    type Get = unsafe extern "C" fn(*mut *mut c_void, *mut c_void) -> u32;
    // SAFETY: `node` is a live kernel node by the contract.
    let params = unsafe { params::of_kernel(node.0 as sys::CUgraphNode) }?;
    let (call, of) = if params.kern.is_null() {
        (Call::FuncGetModule, params.func.cast::<c_void>())
    } else {
        (Call::KernelGetLibrary, params.kern.cast::<c_void>())
    };
    // SAFETY: both take where to write one handle, and a handle.
    let Some(get) = (unsafe { probe::symbol::<Get>(call.symbol()) }) else {
        return Ok(None);
    };
    // SAFETY: the kernel or function of a live node is live; the call writes one handle, through `owner`.
    let owner = out(call, ptr::null_mut(), |owner| unsafe { get(owner, of) })?;
    let refused = |given: &str, expected: &str| Err(Error::invalid("a node", &given, expected));
    match loaded().image(owner as u64) {
        Some(Image::Whole(image)) => Ok(Some(Arc::clone(image))),
        Some(Image::Changed) => refused(
            "a kernel of a module of which the program has taken a variable's address",
            "one whose variables are surely as they were loaded",
        ),
        Some(Image::Unkept) => refused(
            "a kernel of a module that was linked when it was loaded, or whose file is gone",
            "one that was loaded as a whole",
        ),
        None => Ok(None),
    }
}

/// What a module or library was loaded from.
enum Image {
    /// It is as its image says.
    Whole(Arc<[u8]>),
    /// Its variables may have other values than those of its image.
    Changed,
    /// Nothing that is loaded as it is.
    Unkept,
}

/// What is loaded, by its handle.
struct Loaded {
    images: BTreeMap<u64, Image>,
    /// The libraries that modules are of.
    libraries: BTreeMap<u64, u64>,
}

impl Loaded {
    fn image(&mut self, handle: u64) -> Option<&mut Image> {
        let library = self.libraries.get(&handle).copied();
        self.images.get_mut(&library.unwrap_or(handle))
    }
}

fn loaded() -> MutexGuard<'static, Loaded> {
    static LOADED: Mutex<Loaded> = Mutex::new(Loaded {
        images: BTreeMap::new(),
        libraries: BTreeMap::new(),
    });
    LOADED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// CUPTI's domain of the driver's calls, and the places of a call where it calls back.
const DRIVER_CALLS: u32 = 1;
const ENTER: u32 = 0;
const EXIT: u32 = 1;

/// CUPTI's numbers of the calls that load and unload.
const FROM_FILE: [u32; 2] = [18, 679]; // cuModuleLoad, cuLibraryLoadFromFile
const FROM_MEMORY: [u32; 4] = [19, 20, 21, 678]; // cuModuleLoadData[Ex], cuModuleLoadFatBinary, cuLibraryLoadData
const UNLOAD: [u32; 2] = [22, 680]; // cuModuleUnload, cuLibraryUnload
/// Those that tell where a variable is: `cuModuleGetGlobal_v2`, `cuLibraryGetGlobal`, `cuLibraryGetManaged`.
const GET_VARIABLE: [u32; 3] = [241, 684, 685];

/// CUPTI's code for a second subscriber.
const TAKEN: u32 = 39;

/// The begin of `CUpti_CallbackData`.
#[repr(C)]
struct CallbackData {
    site: u32,
    _function_name: *const c_char,
    /// The arguments: of a load the place of the handle, then the image or its file; of an unload the handle.
    arguments: *const [*const c_void; 2],
    result: *const u32,
}

/// The call that tells of which library a module is: `cuLibraryGetModule`.
const GET_MODULE: u32 = 682;

type Callback = unsafe extern "C" fn(*mut c_void, u32, u32, *const CallbackData);
type Subscribe = unsafe extern "C" fn(*mut *mut c_void, Callback, *mut c_void) -> u32;
type Unsubscribe = unsafe extern "C" fn(*mut c_void) -> u32;
type EnableCallback = unsafe extern "C" fn(u32, *mut c_void, u32, u32) -> u32;
type ResultString = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// Let CUPTI call back for as long as the process lives; return the library, which must stay open.
fn subscribe(cupti: &Path) -> Result<Library, String> {
    // SAFETY: a library of CUDA, whose initialisers any thread may run.
    let library = unsafe { Library::new(cupti) };
    let library = library.map_err(|error| format!("CUPTI cannot be opened: {error}"))?;
    let missing = |error: libloading::Error| format!("CUPTI lacks a call: {error}");
    // SAFETY: CUPTI declares it so in every version that is known.
    let subscribe = unsafe { library.get::<Subscribe>("cuptiSubscribe") }.map_err(missing)?;
    // SAFETY: as above.
    let unsubscribe = unsafe { library.get::<Unsubscribe>("cuptiUnsubscribe") }.map_err(missing)?;
    // SAFETY: as above.
    let enable =
        unsafe { library.get::<EnableCallback>("cuptiEnableCallback") }.map_err(missing)?;
    // SAFETY: as above.
    let explain =
        unsafe { library.get::<ResultString>("cuptiGetResultString") }.map_err(missing)?;
    let check = |call: &str, code: u32| {
        if code == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: the call writes one pointer, to a text that stays.
        let known = unsafe { explain(code, &raw mut text) } == 0 && !text.is_null();
        // SAFETY: CUPTI's text of a code it knows ends with a zero.
        let text = known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy());
        let text = text.unwrap_or_default();
        let cause = if code == TAKEN {
            ": a profiler uses CUPTI, which serves one user at a time"
        } else {
            ""
        };
        Err(format!("{call} failed: {text} ({code}){cause}"))
    };
    let mut subscriber = ptr::null_mut();
    // SAFETY: the callback keeps CUPTI's contract and stays as long as the process.
    let code = unsafe { subscribe(&raw mut subscriber, called, ptr::null_mut()) };
    check("cuptiSubscribe", code)?;
    let loads = FROM_FILE.into_iter().chain(FROM_MEMORY);
    let all = loads.chain(UNLOAD).chain(GET_VARIABLE).chain([GET_MODULE]);
    // SAFETY: the subscriber is live.
    let mut codes = all.map(|number| unsafe { enable(1, subscriber, DRIVER_CALLS, number) });
    if let Some(code) = codes.find(|code| *code != 0) {
        // SAFETY: the subscriber is live, and nobody uses it any more.
        unsafe { unsubscribe(subscriber) };
        check("cuptiEnableCallback", code)?;
    }
    Ok(library)
}

/// Keep the image of a load that has succeeded, forget that of an unload that begins, and note whose variables are
/// asked for.
///
/// # Safety
/// CUPTI calls it, in one of the calls above.
unsafe extern "C" fn called(_: *mut c_void, _: u32, call: u32, data: *const CallbackData) {
    // SAFETY: CUPTI describes a call that is under way.
    let CallbackData {
        site,
        arguments,
        result,
        ..
    } = unsafe { data.read() };
    if UNLOAD.contains(&call) {
        if site == ENTER {
            // SAFETY: an unload has a handle as its only argument.
            let handle = unsafe { arguments.cast::<u64>().read() };
            loaded().images.remove(&handle);
        }
        return;
    }
    // SAFETY: at the end of a call its result is there.
    if site != EXIT || unsafe { result.read() } != 0 {
        return;
    }
    if GET_VARIABLE.contains(&call) {
        // SAFETY: the handle is the third argument.
        let [_, _, handle] = unsafe { arguments.cast::<[u64; 3]>().read() };
        if let Some(known) = loaded().image(handle) {
            *known = Image::Changed;
        }
        return;
    }
    if call == GET_MODULE {
        // SAFETY: the call has two arguments.
        let [module, library] = unsafe { arguments.read() };
        // SAFETY: the call has succeeded and has written a handle.
        let module = unsafe { module.cast::<u64>().read() };
        loaded().libraries.insert(module, library.addr() as u64);
        return;
    }
    // SAFETY: a load has two pointers as its first arguments.
    let [handle, source] = unsafe { arguments.read() };
    // SAFETY: a load that has succeeded has written a handle.
    let handle = unsafe { handle.cast::<u64>().read() };
    let image = if FROM_FILE.contains(&call) {
        // SAFETY: the driver was given a path that ends with a zero, and has read the file.
        let path = unsafe { CStr::from_ptr(source.cast()) };
        path.to_str().ok().and_then(|path| fs::read(path).ok())
    } else {
        // SAFETY: the driver was given a whole image, and has just read it.
        unsafe { copied(source.cast()) }
    };
    let image = image.map_or(Image::Unkept, |image| Image::Whole(image.into()));
    let mut loaded = loaded();
    loaded.libraries.remove(&handle);
    loaded.images.insert(handle, image);
}

/// How compilers wrap a fatbin that they put into a library: this number, a version, and where it is.
const WRAPPED: [u8; 4] = 0x4662_43b1_u32.to_le_bytes();
/// The version of a wrapper of one fatbin.
const OF_ONE: u32 = 1;

/// Return a copy of an image; none of several that are linked when they are loaded.
///
/// # Safety
/// A whole image that the driver takes is at `image`.
unsafe fn copied(image: *const u8) -> Option<Vec<u8>> {
    // SAFETY: the shortest text that the driver takes is longer.
    let head = unsafe { image.cast::<[u8; 4]>().read_unaligned() };
    if head == WRAPPED {
        // SAFETY: a wrapper has a version behind its number.
        let version = unsafe { image.wrapping_add(4).cast::<u32>().read_unaligned() };
        if version != OF_ONE {
            return None;
        }
        // SAFETY: behind the version stands where the fatbin is, which is no wrapper again.
        let inner = unsafe { image.wrapping_add(8).cast::<*const u8>().read_unaligned() };
        // SAFETY: the driver has loaded the fatbin that is there.
        return unsafe { copied(inner) };
    }
    let read = |at: usize, into: &mut [u8]| {
        // SAFETY: headers name what the image has.
        unsafe { ptr::copy_nonoverlapping(image.wrapping_add(at), into.as_mut_ptr(), into.len()) };
        Some(())
    };
    if let Some(bytes) = binary_length(&read) {
        // SAFETY: the image has so many bytes, by its header.
        return Some(unsafe { std::slice::from_raw_parts(image, bytes) }.to_vec());
    }
    // SAFETY: what is no binary is a text that ends with a zero.
    let text = unsafe { CStr::from_ptr(image.cast()) }.to_bytes();
    let begins = text
        .first()
        .is_some_and(|byte| !byte.is_ascii_control() || byte.is_ascii_whitespace());
    (begins && std::str::from_utf8(text).is_ok()).then(|| text.to_vec())
}
