//! [`call!`]: a call of the driver whose result code is a plain number.
//!
//! A wrapper of cudarc's returns a Rust enum, and a newer driver may return a code that the enum
//! lacks. So no wrapper is called: each lends only the types of its arguments, and we call the C
//! function itself, whose enum has the size and the ABI of a `u32`.

#![expect(unsafe_code, reason = "turns addresses into functions")]

use std::ffi::c_void;
use std::mem;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

use cudarc::driver::sys;

use super::probe;

/// Call a function of the driver, and return its result code as a `u32`.
///
/// The call is as unsafe as the C function. [`probe::version`] has succeeded before it, as it has
/// where there is a [`Cuda`](super::Cuda), and has found the function.
macro_rules! call {
    (@any $argument:expr) => { _ };
    ($name:ident($($argument:expr),* $(,)?)) => {{
        static SYMBOL: $crate::driver::cuda::call::Symbol =
            $crate::driver::cuda::call::Symbol::new(stringify!($name));
        // One name gives the symbol and its type; the annotation turns the item into a pointer.
        let wrapper: unsafe fn($(call!(@any $argument)),*) -> _ = ::cudarc::driver::sys::$name;
        SYMBOL.function(wrapper)($($argument),*)
    }};
}
pub(super) use call;

/// A function of the driver by its name, and where it is once a call has asked.
pub(super) struct Symbol {
    name: &'static str,
    address: AtomicPtr<c_void>,
}

impl Symbol {
    pub(super) const fn new(name: &'static str) -> Self {
        Self {
            name,
            address: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Return the function, with the arguments of its wrapper.
    #[inline]
    pub(super) fn function<W: Wrapper>(&self, _wrapper: W) -> W::Function {
        // Relaxed is enough: a thread takes only the address from another, and the code that lies
        // there was loaded by `probe`, before any call.
        let address = NonNull::new(self.address.load(Ordering::Relaxed));
        W::function_at(address.unwrap_or_else(|| self.find()))
    }

    /// Look the function up; two threads that do so at once find the same.
    ///
    /// # Panics
    /// If libcuda lacks the symbol: `probe` refuses such a driver before any call.
    #[cold]
    fn find(&self) -> NonNull<c_void> {
        // SAFETY: every symbol has an address, and no more than that is taken here.
        let found = unsafe { probe::symbol::<*mut c_void>(self.name) };
        let Some(address) = found.and_then(NonNull::new) else {
            panic!("libcuda lacks {}", self.name);
        };
        self.address.store(address.as_ptr(), Ordering::Relaxed);
        address
    }
}

/// The type of a wrapper of cudarc's.
pub(super) trait Wrapper {
    /// The type of the C function that it calls, with a plain number for the result code.
    type Function;

    /// Return the function at an address; to call it is to know that it is one of this type.
    fn function_at(address: NonNull<c_void>) -> Self::Function;
}

/// Implement [`Wrapper`] for as many arguments as there are names, and for each smaller number.
macro_rules! wrappers {
    (@one $($argument:ident)*) => {
        impl<$($argument),*> Wrapper for unsafe fn($($argument),*) -> sys::CUresult {
            type Function = unsafe extern "C" fn($($argument),*) -> u32;

            #[inline]
            fn function_at(address: NonNull<c_void>) -> Self::Function {
                // SAFETY: both have the size of an address, and any address that is not null is a
                // value of a function pointer; whoever calls it vouches for its type.
                unsafe { mem::transmute::<NonNull<c_void>, Self::Function>(address) }
            }
        }
    };
    () => { wrappers!(@one); };
    ($first:ident $($rest:ident)*) => {
        wrappers!(@one $first $($rest)*);
        wrappers!($($rest)*);
    };
}
wrappers!(A B C D E F G H I J K);
