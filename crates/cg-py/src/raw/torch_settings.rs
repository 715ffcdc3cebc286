//! torch's global settings, as its own functions tell them.

use std::ffi::c_void;
use std::mem::transmute;

/// A method of `at::Context` that reads a field of one byte.
type Flag = unsafe extern "C" fn(*const c_void) -> u8;
/// `at::Context::float32Precision`.
type Precision = unsafe extern "C" fn(*const c_void, u32, u32) -> u32;
/// `at::globalContext`, and `c10::get_default_dtype_as_scalartype`.
type Global = unsafe extern "C" fn() -> *const c_void;
type DefaultDtype = unsafe extern "C" fn() -> i8;

/// `Float32Backend::CUDA` with `Float32Op::CONV`, `RNN` and `MATMUL`.
const PRECISIONS: [(u32, u32); 3] = [(1, 1), (1, 2), (1, 3)];

/// Room for flags. The compiler unrolls a loop of constant length, so that the processor predicts the target of each
/// call: fourteen calls take 5 ns instead of 140.
const MOST_FLAGS: usize = 17;

/// Reads what all threads have in common.
pub(crate) struct GlobalSettings {
    context: *const c_void,
    flags: [Flag; MOST_FLAGS],
    precision: Option<Precision>,
    dtype: DefaultDtype,
}

// SAFETY: torch never ends its context, and any thread may read it.
unsafe impl Send for GlobalSettings {}
// SAFETY: as above.
unsafe impl Sync for GlobalSettings {}

impl GlobalSettings {
    /// By the addresses of torch's functions: that of the context, of its flags, of the precisions, 0 for none,
    /// and of the default dtype. None if one is missing.
    pub(crate) fn new(
        context: usize,
        flags: &[usize],
        precision: usize,
        dtype: usize,
    ) -> Option<Self> {
        if context == 0 || dtype == 0 || flags.contains(&0) || flags.len() > MOST_FLAGS {
            return None;
        }
        let pointer = |address: usize| address as *const c_void;
        // SAFETY: the caller of `cgraph._core.TorchSettings` gives torch's functions under the names above, which
        // have these types in each torch that has these names.
        let context = unsafe { transmute::<*const c_void, Global>(pointer(context)) };
        // SAFETY: it takes nothing, and returns a reference to what lives as long as the process.
        let context = unsafe { context() };
        // SAFETY: as above.
        let flag = |address: &usize| unsafe { transmute::<*const c_void, Flag>(pointer(*address)) };
        let mut all = [off as Flag; MOST_FLAGS];
        for (one, address) in all.iter_mut().zip(flags) {
            *one = flag(address);
        }
        // SAFETY: as above.
        let of = |address| unsafe { transmute::<*const c_void, Precision>(pointer(address)) };
        Some(Self {
            context,
            flags: all,
            precision: (precision != 0).then(|| of(precision)),
            // SAFETY: as above.
            dtype: unsafe { transmute::<*const c_void, DefaultDtype>(pointer(dtype)) },
        })
    }

    /// Return all of them as one number.
    #[inline]
    pub(crate) fn read(&self) -> u64 {
        // SAFETY: takes nothing, and returns a number of the thread.
        let mut all = u64::from(unsafe { (self.dtype)() }.unsigned_abs());
        for flag in &self.flags {
            // SAFETY: the context is torch's own. The methods read a field of it, and throw nothing.
            all = all << 2 | u64::from(unsafe { flag(self.context) } & 3);
        }
        for (backend, operation) in PRECISIONS {
            if let Some(of) = self.precision {
                // SAFETY: as above; torch knows these pairs.
                all = all << 3 | u64::from(unsafe { of(self.context, backend, operation) } & 7);
            }
        }
        all
    }
}

/// Stands for a flag that this torch does not have.
unsafe extern "C" fn off(_: *const c_void) -> u8 {
    0
}
