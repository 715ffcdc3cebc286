//! Operations of simulated streams and nodes, with their handles resolved.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Weak};

use super::{KernelFn, State, refuse};
use crate::code::{Call, Code};
use crate::driver::handle::{Address, FunctionHandle};
use crate::driver::spec::{Dim3, HostFunction, NodeDetail, WorkSpec};
use crate::error::Result;

/// Kernels that a module's text declares.
pub(super) struct Module {
    entries: Vec<(String, Vec<usize>)>,
    /// What it was loaded from, if that is recorded.
    image: Option<Arc<[u8]>>,
    loaded: Arc<AtomicBool>,
    /// The kernels that were asked for, by name.
    pub(super) functions: HashMap<String, FunctionHandle>,
}

impl Module {
    pub(super) fn new(entries: Vec<(String, Vec<usize>)>, image: Option<Arc<[u8]>>) -> Self {
        Self {
            entries,
            image,
            loaded: Arc::new(AtomicBool::new(true)),
            functions: HashMap::new(),
        }
    }

    pub(super) fn unload(&self) {
        self.loaded.store(false, Ordering::Relaxed);
    }

    pub(super) fn parameters(&self, name: &str) -> Option<Vec<usize>> {
        let (_, parameters) = self.entries.iter().find(|(entry, _)| entry == name)?;
        Some(parameters.clone())
    }

    pub(super) fn function(
        &self,
        handle: FunctionHandle,
        name: &str,
        kernel: Arc<KernelFn>,
        parameters: Vec<usize>,
    ) -> Function {
        Function {
            handle: Some(handle),
            name: name.to_owned(),
            kernel,
            parameters: Some(parameters),
            image: self.image.clone(),
            loaded: Arc::clone(&self.loaded),
            max_shared_bytes: AtomicI32::new(SHARED_BYTES),
        }
    }
}

pub(super) struct Function {
    /// None for a closure, which is of no module.
    handle: Option<FunctionHandle>,
    pub(super) name: String,
    pub(super) kernel: Arc<KernelFn>,
    /// Bytes of each parameter; none for a closure, which takes no arguments.
    parameters: Option<Vec<usize>>,
    /// What its module was loaded from, if that is recorded.
    pub(super) image: Option<Arc<[u8]>>,
    loaded: Arc<AtomicBool>,
    /// The most dynamic shared memory that a launch may ask for.
    max_shared_bytes: AtomicI32,
}

/// Dynamic shared memory that every kernel may ask for.
const SHARED_BYTES: i32 = 48 << 10;
/// The most that there is.
const MOST_SHARED_BYTES: i32 = 99 << 10;

impl Function {
    pub(super) fn max_shared_bytes(&self) -> i32 {
        self.max_shared_bytes.load(Ordering::Relaxed)
    }

    /// Return whether a kernel may have so much.
    pub(super) fn set_max_shared_bytes(&self, bytes: i32) -> bool {
        let is_possible = (0..=MOST_SHARED_BYTES).contains(&bytes);
        if is_possible {
            self.max_shared_bytes.store(bytes, Ordering::Relaxed);
        }
        is_possible
    }

    fn allows(&self, shared_bytes: u32) -> bool {
        let most = self.max_shared_bytes().max(SHARED_BYTES);
        i32::try_from(shared_bytes).is_ok_and(|bytes| bytes <= most)
    }
}

/// An operation with its handles resolved.
#[derive(Clone)]
pub(super) enum Work {
    Kernel {
        function: Arc<Function>,
        grid: Dim3,
        block: Dim3,
        shared_bytes: u32,
        args: Arc<[Box<[u8]>]>,
    },
    Memcpy {
        dst: Address,
        src: Address,
        bytes: u64,
    },
    Memset {
        dst: Address,
        value: u32,
        element_bytes: u8,
        count: u64,
    },
    /// As on a GPU, the graph does not keep the function alive.
    Host(Weak<HostFunction>),
}

impl Work {
    /// Return a closure as a kernel of one thread.
    pub(super) fn closure(name: &str, kernel: Arc<KernelFn>) -> Self {
        Self::Kernel {
            function: Arc::new(Function {
                handle: None,
                name: name.to_owned(),
                kernel,
                parameters: None,
                image: None,
                loaded: Arc::new(AtomicBool::new(true)),
                max_shared_bytes: AtomicI32::new(SHARED_BYTES),
            }),
            grid: 1.into(),
            block: 1.into(),
            shared_bytes: 0,
            args: Arc::new([]),
        }
    }

    pub(super) fn resolve(state: &State, spec: &WorkSpec, call: Call) -> Result<Self> {
        Ok(match spec {
            WorkSpec::Kernel {
                function,
                grid,
                block,
                shared_bytes,
                args,
            } => {
                let Some(found) = state.functions.get(&function.0) else {
                    panic!("{function:?} is no function")
                };
                let given: Vec<usize> = args.iter().map(|arg| arg.len()).collect();
                assert!(
                    found.parameters.as_ref().is_none_or(|p| *p == given),
                    "kernel {} takes parameters of {:?} bytes, given {given:?}",
                    found.name,
                    found.parameters
                );
                let threads = u64::from(block.x) * u64::from(block.y) * u64::from(block.z);
                let blocks = [grid.x, grid.y, grid.z];
                let is_shaped = threads > 0 && threads <= 1024 && !blocks.contains(&0);
                if !is_shaped || !found.allows(*shared_bytes) {
                    return Err(refuse(call, Code::INVALID_VALUE));
                }
                Self::Kernel {
                    function: Arc::clone(found),
                    grid: *grid,
                    block: *block,
                    shared_bytes: *shared_bytes,
                    args: Arc::clone(args),
                }
            }
            WorkSpec::Memcpy { dst, src, bytes } => Self::Memcpy {
                dst: *dst,
                src: *src,
                bytes: *bytes,
            },
            WorkSpec::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => {
                if ![1, 2, 4].contains(element_bytes) {
                    return Err(refuse(call, Code::INVALID_VALUE));
                }
                Self::Memset {
                    dst: *dst,
                    value: *value,
                    element_bytes: *element_bytes,
                    count: *count,
                }
            }
            WorkSpec::Host(function) => Self::Host(Arc::downgrade(function)),
        })
    }

    /// Return it as it may be added again; none for a closure, and for a host function, which somebody else keeps.
    pub(super) fn spec(&self) -> Option<WorkSpec> {
        Some(match self {
            Self::Kernel {
                function,
                grid,
                block,
                shared_bytes,
                args,
            } => WorkSpec::Kernel {
                function: function.handle?,
                grid: *grid,
                block: *block,
                shared_bytes: *shared_bytes,
                args: Arc::clone(args),
            },
            Self::Memcpy { dst, src, bytes } => WorkSpec::Memcpy {
                dst: *dst,
                src: *src,
                bytes: *bytes,
            },
            Self::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => WorkSpec::Memset {
                dst: *dst,
                value: *value,
                element_bytes: *element_bytes,
                count: *count,
            },
            Self::Host(_) => return None,
        })
    }

    /// Return the memory that is known to be touched: start and bytes.
    pub(super) fn ranges(&self) -> Vec<(u64, u64)> {
        match self {
            Self::Memcpy { dst, src, bytes } => vec![(dst.0, *bytes), (src.0, *bytes)],
            Self::Memset {
                dst,
                element_bytes,
                count,
                ..
            } => vec![(dst.0, count * u64::from(*element_bytes))],
            Self::Kernel { .. } | Self::Host(_) => Vec::new(),
        }
    }

    /// Return the 8-byte words of a kernel's arguments.
    pub(super) fn words(&self) -> Vec<u64> {
        let Self::Kernel { args, .. } = self else {
            return Vec::new();
        };
        let words = args.iter().flat_map(|arg| arg.as_chunks().0);
        words.map(|word| u64::from_le_bytes(*word)).collect()
    }

    pub(super) fn check_loaded(&self) {
        if let Self::Kernel { function, .. } = self {
            assert!(
                function.loaded.load(Ordering::Relaxed),
                "kernel {} runs after its module was unloaded",
                function.name
            );
        }
    }

    pub(super) fn detail(&self) -> NodeDetail {
        match self {
            Self::Kernel {
                function,
                grid,
                block,
                shared_bytes,
                ..
            } => NodeDetail::Kernel {
                name: Some(function.name.clone()),
                grid: *grid,
                block: *block,
                shared_bytes: *shared_bytes,
            },
            Self::Memcpy { dst, src, bytes } => NodeDetail::Memcpy {
                dst: *dst,
                src: *src,
                bytes: *bytes,
            },
            Self::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => NodeDetail::Memset {
                dst: *dst,
                value: *value,
                element_bytes: *element_bytes,
                count: *count,
            },
            Self::Host(function) => NodeDetail::Host {
                function: call_host as *const () as u64,
                data: function.as_ptr() as u64,
            },
        }
    }
}

/// The call of a host node; its address stands for that of the driver's callback.
pub(super) fn call_host(function: &HostFunction) {
    (function.0)();
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kernel { function, .. } => write!(f, "kernel {}", function.name),
            Self::Memcpy { dst, src, bytes } => {
                write!(
                    f,
                    "memcpy of {bytes} bytes from {:#x} to {:#x}",
                    src.0, dst.0
                )
            }
            Self::Memset { dst, .. } => write!(f, "memset at {:#x}", dst.0),
            Self::Host(_) => f.write_str("host function"),
        }
    }
}
