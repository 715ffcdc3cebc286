//! [`PoolBuilder`]: the options of a pool.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use super::addresses::Addresses;
use super::{Pool, Shared};
use crate::device::Device;
use crate::driver::handle::Address;
use crate::gate::{Gate, PoolId};

/// Addresses that a pool reserves at once. They cost no memory.
const RANGE_BYTES: u64 = 64 << 30;

/// Builds a [`Pool`].
#[derive(Debug, Clone)]
pub struct PoolBuilder {
    device: Device,
    limit: Option<u64>,
    base: Option<Address>,
    range_bytes: u64,
}

impl PoolBuilder {
    pub(super) fn new(device: &Device) -> Self {
        Self {
            device: device.clone(),
            limit: None,
            base: None,
            range_bytes: RANGE_BYTES,
        }
    }

    /// Set the most bytes that its segments may have together. Default: what the device has.
    #[must_use]
    pub fn limit(mut self, bytes: u64) -> Self {
        self.limit = Some(bytes);
        self
    }

    /// Set where its addresses are to start; if they are not free there, the driver chooses. Default: a
    /// base of its own, the same in every process whose pools get their first segments in the same
    /// order. Each device has 1 TiB for that; pools beyond it lie where the driver likes.
    #[must_use]
    pub fn base(mut self, address: Address) -> Self {
        self.base = Some(address);
        self
    }

    /// Set how many addresses it reserves at once; they cost no memory. Default 64 GiB. When they are
    /// used up, another range follows.
    #[must_use]
    pub fn range_bytes(mut self, bytes: u64) -> Self {
        self.range_bytes = bytes.max(1);
        self
    }

    /// Return the pool, which is empty. Addresses are reserved with its first segment.
    #[must_use]
    pub fn build(self) -> Pool {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = PoolId {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            device: self.device.name(),
        };
        let (driver, bases) = (self.device.driver(), self.device.bases());
        let addresses = Addresses::new(driver, bases, self.base, self.range_bytes);
        Pool {
            shared: Arc::new(Shared {
                gate: Arc::new(Gate::new(id)),
                addresses: Arc::new(addresses),
                limit: self.limit,
                book: Mutex::default(),
                turn: Mutex::default(),
                holds: AtomicUsize::new(0),
            }),
            device: self.device,
        }
    }
}
