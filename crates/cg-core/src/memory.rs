//! [`Memory`]: a range of device memory, with what keeps it alive.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::device::Device;
use crate::driver::Driver;
use crate::driver::handle::Address;
use crate::driver::owned::{self, OwnedMemory};
use crate::error::{Error, Result};
use crate::gate;
use crate::retain::Retained;

/// A range of device memory. Clones and slices share it; it is freed when the last one, and the
/// last work that names it, is gone.
#[derive(Clone)]
pub struct Memory {
    driver: Arc<dyn Driver>,
    address: Address,
    bytes: u64,
    owner: Option<Retained>,
}

impl Memory {
    /// Allocate from the device. For memory that captures share, see [`crate::Pool`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`]; [`Error::Invalid`] for zero bytes.
    #[doc(alias = "cuMemAlloc")]
    pub fn new(device: &Device, bytes: u64) -> Result<Self> {
        if bytes == 0 {
            return Err(Error::invalid("bytes", &0, "at least 1"));
        }
        let owner = OwnedMemory::new(Arc::clone(device.driver()), bytes)?;
        Ok(Self {
            driver: Arc::clone(device.driver()),
            address: owner.address(),
            bytes,
            owner: Some(Arc::new(owner)),
        })
    }

    /// Memory of somebody else.
    ///
    /// # Safety
    /// `bytes` bytes from `address` are mapped on the device, and stay so as long as the result,
    /// its clones, and any work, template or exec that was given one of them.
    #[must_use]
    #[expect(
        unsafe_code,
        reason = "the caller vouches for an address that nobody here owns"
    )]
    pub unsafe fn from_raw(device: &Device, address: Address, bytes: u64) -> Self {
        Self {
            driver: Arc::clone(device.driver()),
            address,
            bytes,
            owner: None,
        }
    }

    /// Return where it starts.
    #[must_use]
    pub fn address(&self) -> Address {
        self.address
    }

    /// Return how many bytes it has.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Return a part of it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the range does not lie inside.
    pub fn slice(&self, range: Range<u64>) -> Result<Self> {
        if range.start > range.end || range.end > self.bytes {
            let given = format!("{range:?}");
            let expected = format!("a range inside 0..{}", self.bytes);
            return Err(Error::invalid("slice of memory", &given, expected));
        }
        Ok(Self {
            address: self.address.offset(range.start),
            bytes: range.end - range.start,
            ..self.clone()
        })
    }

    /// Copy `data` to its start and wait for the copy. Wait for work that touches the memory
    /// first: what that work sees is unspecified.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `data` is longer; [`Error::Paused`] for memory of a paused pool.
    pub fn write(&self, data: &[u8]) -> Result<()> {
        if data.len() as u64 > self.bytes {
            let expected = format!("at most {} bytes", self.bytes);
            return Err(Error::invalid(
                "data",
                &format!("{} bytes", data.len()),
                expected,
            ));
        }
        let _open = gate::pass(self.owner.as_ref())?;
        owned::write(&*self.driver, self.address, data)
    }

    /// Return its bytes. Wait for work that touches the memory first.
    ///
    /// # Errors
    /// [`Error::Paused`] for memory of a paused pool.
    pub fn read(&self) -> Result<Vec<u8>> {
        let bytes = usize::try_from(self.bytes)
            .map_err(|_| Error::invalid("bytes", &self.bytes, "what fits the host's memory"))?;
        let _open = gate::pass(self.owner.as_ref())?;
        let mut data = vec![0; bytes];
        owned::read(&*self.driver, &mut data, self.address)?;
        Ok(data)
    }

    /// Return its addresses.
    pub(crate) fn range(&self) -> Range<u64> {
        self.address().0..self.address().0 + self.bytes()
    }

    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        &self.driver
    }

    pub(crate) fn owner(&self) -> Option<&Retained> {
        self.owner.as_ref()
    }

    /// Return a range that its owner keeps alive.
    pub(crate) fn owned_by(
        driver: &Arc<dyn Driver>,
        address: Address,
        bytes: u64,
        owner: Retained,
    ) -> Self {
        Self {
            driver: Arc::clone(driver),
            address,
            bytes,
            owner: Some(owner),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({:#x}, {} bytes)", self.address.0, self.bytes)
    }
}
