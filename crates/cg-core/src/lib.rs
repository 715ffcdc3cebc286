#![doc = include_str!("../README.md")]
//!
#![doc = include_str!("../vocabulary.md")]

mod address;
mod base_addresses;
mod body;
mod capture;
mod code;
mod data;
mod device;
pub mod driver;
mod error;
mod exec;
mod free_list;
mod gate;
pub mod hook;
mod inputs;
mod memory;
mod outputs;
mod pool;
mod ranges;
mod retain;
pub mod saved;
mod stream;
mod template;
mod tracker;
mod transfer;
pub mod tree;
mod work;

pub use address::NodeAddress;
pub use body::Body;
pub use capture::Capture;
pub use code::{Call, Code};
pub use data::{EdgeData, NodeData, TemplateData};
pub use device::{CaptureMark, Device, MemoryInfo};
pub use driver::handle::{Address, GraphHandle, NodeHandle, StreamHandle};
pub use driver::sim::{HostMemory, KernelCall, Live, Sim, SimBuilder, SimMemory};
pub use driver::spec::{Condition, Dim3, EdgeKind, NodeDetail, NodeIds};
pub use driver::{CaptureMode, InstantiateFlags, begin_exit, begin_forked, is_forked};
pub use error::{Error, FileFault, Result};
pub use exec::{Exec, LastReplay, Transfer};
pub use free_list::FreeList;
pub use inputs::{Feed, Inputs};
pub use memory::Memory;
pub use outputs::{Delivery, Outputs};
pub use pool::{Checkpoint, Keep, Pool, PoolBuilder, PoolStats, SegmentStats};
pub use ranges::Ranges;
pub use retain::Retained;
pub use stream::{Event, Stream};
pub use template::{Edge, Node, Template};
pub use tracker::Tracker;
pub use transfer::{Destination, Fill, Padding};
pub use work::{Args, Function, Module, Work};
