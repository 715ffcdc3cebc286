//! [`Cuda`]: the driver on a real device, over its primary context.
//!
//! `cudarc` lends us its `sys` declarations and its list of library names, and nothing else. What
//! it would do to the rest of the crate stops here:
//! - Its wrappers panic where libcuda or a symbol is missing. `probe` looks for both before the first
//!   call, and returns an error.
//! - Its C enums are Rust enums, and a newer driver may give a number that they lack. So every output
//!   of a call is received as a plain number, and so is the result code: `call!` calls the C function
//!   itself.
//! - Its safe layer keeps an error for the next call and joins template and exec, so it is not used.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

mod call;
mod conditional;
mod exec;
mod graph;
mod images;
mod memory;
mod newer;
mod node;
mod pages;
mod params;
mod probe;
mod rebuild;
mod stream;
mod work;

use std::ffi::{CStr, c_int};
use std::path::Path;
use std::ptr;

use cudarc::driver::sys;

use self::call::call;
use super::{Driver, failed, next_driver_id};
use crate::code::{Call, Code};
use crate::error::{Error, Result};

#[cfg(not(target_pointer_width = "64"))]
compile_error!("handles and sizes are 64 bits wide, as in every CUDA driver since 12.0");

/// From now on, keep what kernels are loaded from, as [`crate::Device::record_images`] does. No device is needed yet.
///
/// # Errors
/// [`Error::Images`].
pub fn record_images(cupti: &Path) -> Result<()> {
    images::record(cupti)
}

/// One CUDA device, by its primary context.
#[derive(Debug)]
pub struct Cuda {
    id: u64,
    ordinal: u32,
    version: u32,
    model: String,
    /// A `CUcontext`. It is retained and never released: other libraries of the process work in
    /// the same one, and a release while the process exits would come too late.
    context: u64,
}

impl Cuda {
    /// Return the device of this number, counted as `CUDA_VISIBLE_DEVICES` has it.
    pub fn new(ordinal: u32) -> Result<Self> {
        let version = probe::version()?;
        // SAFETY: the driver is initialised; the call writes one int, to `count`.
        let count = out(Call::DeviceGet, 0, |count| unsafe {
            call!(cuDeviceGetCount(count))
        })?;
        let number = i32::try_from(ordinal)
            .ok()
            .filter(|number| *number < count)
            .ok_or_else(|| {
                let expected = format!("less than {count}, the number of devices");
                Error::invalid("device ordinal", &ordinal, expected)
            })?;
        // SAFETY: the driver is initialised; the call writes one int, to `device`.
        let device = out(Call::DeviceGet, 0, |device| unsafe {
            call!(cuDeviceGet(device, number))
        })?;
        // SAFETY: `device` comes from cuDeviceGet; the call writes one pointer, to `context`.
        let context = out(
            Call::PrimaryContextRetain,
            ptr::null_mut(),
            |context| unsafe { call!(cuDevicePrimaryCtxRetain(context, device)) },
        )?;
        Ok(Self {
            id: next_driver_id(),
            ordinal,
            version,
            model: model_of(device)?,
            context: context as u64,
        })
    }

    /// Make the context current until the result is dropped.
    ///
    /// A thread that had none keeps ours, which makes its next call cheap; should it come to use
    /// CUDA's runtime without choosing a device, it starts on this one.
    #[inline]
    fn enter(&self) -> Result<Entered> {
        // SAFETY: a `Cuda` exists only once cuInit has succeeded; the call writes one pointer, to
        // `before`.
        let before = out(Call::ContextGetCurrent, ptr::null_mut(), |before| unsafe {
            call!(cuCtxGetCurrent(before))
        })?;
        if before == self.context() {
            return Ok(Entered {
                before: ptr::null_mut(),
            });
        }
        // SAFETY: the context is retained for the life of the process.
        let result = unsafe { call!(cuCtxSetCurrent(self.context())) };
        check(Call::ContextSetCurrent, result)?;
        Ok(Entered { before })
    }

    fn context(&self) -> sys::CUcontext {
        self.context as sys::CUcontext
    }
}

impl Driver for Cuda {
    fn id(&self) -> u64 {
        self.id
    }

    fn name(&self) -> String {
        format!("cuda:{}", self.ordinal)
    }

    fn version(&self) -> u32 {
        self.version
    }

    fn model(&self) -> String {
        self.model.clone()
    }
}

/// Return the name of a device, and the compute capability that kernels are compiled for.
fn model_of(device: sys::CUdevice) -> Result<String> {
    let mut name = [0_u8; 256];
    let length = c_int::try_from(name.len()).unwrap_or(c_int::MAX);
    // SAFETY: the device is one of the driver's; the call writes at most `length` bytes with a zero at the end.
    let result = unsafe { call!(cuDeviceGetName(name.as_mut_ptr().cast(), length, device)) };
    check(Call::DeviceGet, result)?;
    let name = CStr::from_bytes_until_nul(&name).unwrap_or_default();
    let attribute = |which| {
        // SAFETY: the device is one of the driver's; the call writes one int.
        out(Call::DeviceGet, 0, |value| unsafe {
            call!(cuDeviceGetAttribute(value, which, device))
        })
    };
    let major = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = attribute(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(format!("{}, sm_{major}{minor}", name.to_string_lossy()))
}

/// Our context is current on this thread, which the raw pointer ties it to.
struct Entered {
    /// The context to go back to; null where there is nothing to do.
    before: sys::CUcontext,
}

impl Drop for Entered {
    #[inline]
    fn drop(&mut self) {
        if !self.before.is_null() {
            // SAFETY: `before` was current on this thread when we came; a context that was
            // destroyed meanwhile is reported by a code, which nobody here could act on.
            unsafe { call!(cuCtxSetCurrent(self.before)) };
        }
    }
}

/// Return what a call returned, as ours.
#[inline]
fn check(call: Call, result: u32) -> Result<()> {
    match result {
        0 => Ok(()),
        code => Err(failed(call, Code(code))),
    }
}

/// Return what a call writes through the pointer that it is given, to `initial` at first.
#[inline]
fn out<T>(call: Call, initial: T, run: impl FnOnce(*mut T) -> u32) -> Result<T> {
    let mut value = initial;
    check(call, run(&raw mut value))?;
    Ok(value)
}

/// Return the answer of a query: whether earlier work has finished.
fn finished(call: Call, result: u32) -> Result<bool> {
    match Code(result) {
        Code::NOT_READY => Ok(false),
        _ => check(call, result).map(|()| true),
    }
}

/// Return a size as C has it.
#[expect(clippy::cast_possible_truncation, reason = "usize has 64 bits here")]
fn size(bytes: u64) -> usize {
    bytes as usize
}
