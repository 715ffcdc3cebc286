//! Raw driver values as `Copy` newtypes. They own nothing; `super::owned` does.

use std::fmt;

macro_rules! handles {
    ($($(#[$meta:meta])* $name:ident,)*) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub struct $name(pub u64);

            impl fmt::Debug for $name {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    write!(f, concat!(stringify!($name), "({:#x})"), self.0)
                }
            }
        )*
    };
}

handles! {
    /// `CUstream`. Zero is the legacy default stream.
    StreamHandle,
    /// `CUevent`.
    EventHandle,
    /// `CUgraph`.
    GraphHandle,
    /// `CUgraphExec`.
    ExecHandle,
    /// `CUgraphNode`; valid as long as its graph holds it.
    NodeHandle,
    /// `CUgraphConditionalHandle`: what kernels set, and conditional nodes go by.
    ConditionHandle,
    /// `CUmodule`.
    ModuleHandle,
    /// `CUfunction`; valid as long as its module is loaded.
    FunctionHandle,
    /// `CUmemGenericAllocationHandle`: physical memory, to be mapped at addresses.
    PageHandle,
    /// `CUdeviceptr`: a device address.
    Address,
}

impl Address {
    /// Return the address `bytes` further on.
    #[must_use]
    pub fn offset(self, bytes: u64) -> Self {
        Self(self.0 + bytes)
    }
}

impl StreamHandle {
    /// The legacy default stream, which cannot capture.
    pub const LEGACY: Self = Self(0);
}
