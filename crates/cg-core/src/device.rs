//! [`Device`]: one GPU, real or simulated, and the one place where a driver is chosen.

use std::any::Any;
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::base_addresses::BaseAddresses;
use crate::code::Code;
use crate::driver::Driver;
use crate::driver::handle::Address;
use crate::driver::owned::{pages, relaxed};
use crate::error::{Error, Result};
use crate::retain::{Limbo, Retained};

/// One GPU and all that is made on it. Clones are the same device.
#[derive(Clone)]
pub struct Device {
    inner: Arc<Inner>,
}

struct Inner {
    driver: Arc<dyn Driver>,
    limbo: Limbo,
    /// The captures that have a guard or retain something, by id.
    captured: Mutex<HashMap<u64, Captured>>,
    /// Number of open captures: those that have a guard, and those that others have begun
    /// ([`Device::mark_capture`]).
    open: AtomicUsize,
    /// Results of [`Device::load_once`], by name.
    loaded: Mutex<HashMap<&'static str, Weak<dyn Any + Send + Sync>>>,
    /// Addresses for pools.
    bases: Arc<BaseAddresses>,
}

#[derive(Default)]
struct Captured {
    guarded: bool,
    /// Things that the work recorded so far names.
    retained: Vec<Retained>,
}

/// A capture that others have begun; see [`Device::mark_capture`].
#[derive(Debug)]
pub struct CaptureMark {
    device: Device,
}

impl Drop for CaptureMark {
    fn drop(&mut self) {
        self.device.inner.open.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Memory of a device, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Not in use by anybody.
    pub free: u64,
    /// All there is.
    pub total: u64,
}

impl Device {
    /// Return the GPU with this number. The same number gives the same device for the whole process.
    ///
    /// # Errors
    /// [`crate::Error::NoDriver`] without a usable CUDA driver: the simulator is never chosen in
    /// its place.
    #[cfg(feature = "cuda")]
    pub fn cuda(ordinal: u32) -> Result<Self> {
        static DEVICES: Mutex<Vec<(u32, Device)>> = Mutex::new(Vec::new());
        let mut devices = DEVICES.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, device)) = devices.iter().find(|(number, _)| *number == ordinal) {
            return Ok(device.clone());
        }
        let device = Self::new(Arc::new(crate::driver::cuda::Cuda::new(ordinal)?));
        devices.push((ordinal, device.clone()));
        Ok(device)
    }

    /// Return the driver behind it.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.inner.driver
    }

    /// Return its name, as in `cuda:0`.
    #[must_use]
    pub fn name(&self) -> String {
        self.inner.driver.name()
    }

    /// Free and total memory.
    #[doc(alias = "cuMemGetInfo")]
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        let (free, total) = self.inner.driver.mem_info()?;
        Ok(MemoryInfo { free, total })
    }

    /// Start and size of the allocation that an address lies in; none if nothing is there.
    #[doc(alias = "cuMemGetAddressRange")]
    pub fn memory_range(&self, address: Address) -> Result<Option<(Address, u64)>> {
        self.inner.driver.memory_range(address)
    }

    /// From now on, keep what kernels are loaded from, whoever loads them, in the whole process, so that graphs can
    /// be [saved](crate::saved::Saved). `cupti` is the file of CUPTI, a library of CUDA; a simulator needs none.
    ///
    /// # Errors
    /// [`Error::Images`] where CUPTI is not there, or serves a profiler already.
    #[doc(alias = "cuptiSubscribe")]
    pub fn record_images(&self, cupti: &Path) -> Result<()> {
        self.driver().record_images(cupti)
    }

    /// Wait until all work on the device has finished, whosever it is.
    ///
    /// # Errors
    /// [`Error::Capture`] while a stream of the device captures. A capture that this crate does not
    /// know of may be broken by the attempt ([`Self::mark_capture`]).
    #[doc(alias = "cuCtxSynchronize")]
    pub fn synchronize(&self) -> Result<()> {
        self.check_captures()?;
        let waited = pages::synchronize(&**self.driver());
        self.collect();
        waited.map_err(|error| match error.code() {
            Some(Code::STREAM_CAPTURE_UNSUPPORTED) => self.captures(error.code()),
            _ => error,
        })
    }

    /// Return whether a guard or a mark of any open capture exists.
    #[must_use]
    pub fn has_captures(&self) -> bool {
        self.inner.open.load(Ordering::Acquire) > 0
    }

    /// Say that others have begun a capture on the device, as long as the result is held: nothing of
    /// this crate then tries to wait for the device, which would break it.
    #[must_use]
    pub fn mark_capture(&self) -> CaptureMark {
        self.inner.open.fetch_add(1, Ordering::AcqRel);
        CaptureMark {
            device: self.clone(),
        }
    }

    /// Drop what was kept alive only for work that has finished by now; return how many things
    /// still wait. Happens by itself whenever execs and captures come and go.
    #[expect(clippy::must_use_candidate, reason = "called for what it drops")]
    pub fn collect(&self) -> usize {
        self.inner.limbo.collect()
    }

    pub(crate) fn new(driver: Arc<dyn Driver>) -> Self {
        Self {
            inner: Arc::new(Inner {
                bases: Arc::new(BaseAddresses::new(driver.ordinal())),
                driver,
                limbo: Limbo::default(),
                captured: Mutex::new(HashMap::new()),
                open: AtomicUsize::new(0),
                loaded: Mutex::default(),
            }),
        }
    }

    /// Return what `work` returns, and by how many bytes the free memory fell meanwhile. It runs with the
    /// thread's capture mode relaxed.
    pub(crate) fn measure<T>(&self, work: impl FnOnce() -> T) -> Result<(T, u64)> {
        let driver = &**self.driver();
        relaxed(driver, || {
            let (before, _) = driver.mem_info()?;
            let done = work();
            let (after, _) = driver.mem_info()?;
            Ok((done, before.saturating_sub(after)))
        })
    }

    /// Refuse to wait for the device while a guard or a mark of any open capture exists.
    pub(crate) fn check_captures(&self) -> Result<()> {
        if self.has_captures() {
            return Err(self.captures(None));
        }
        Ok(())
    }

    fn captures(&self, code: Option<Code>) -> Error {
        let reason = "nobody can wait for the device while a stream captures; finish the capture \
                      first";
        Error::Capture {
            stream: format!("a stream of {}", self.name()),
            reason: reason.to_owned(),
            code,
        }
    }

    pub(crate) fn limbo(&self) -> &Limbo {
        &self.inner.limbo
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner) || self.inner.driver.id() == other.inner.driver.id()
    }

    /// Return what `load` has made under this name, as long as somebody holds it, or else make it.
    pub(crate) fn load_once<T: Any + Send + Sync>(
        &self,
        name: &'static str,
        load: impl FnOnce() -> Result<T>,
    ) -> Result<Arc<T>> {
        let loaded = self.inner.loaded.lock();
        let mut loaded = loaded.unwrap_or_else(PoisonError::into_inner);
        let known = loaded.get(name).and_then(Weak::upgrade);
        if let Some(Ok(known)) = known.map(Arc::downcast) {
            return Ok(known);
        }
        let new = Arc::new(load()?);
        let weak = Arc::downgrade(&new);
        loaded.insert(name, weak);
        Ok(new)
    }

    pub(crate) fn capture_opened(&self, id: u64) {
        let mut captured = self.captured();
        let entry = captured.entry(id).or_default();
        if !std::mem::replace(&mut entry.guarded, true) {
            self.inner.open.fetch_add(1, Ordering::AcqRel);
        }
    }

    /// Go on with the bookkeeping of a capture only if its work names something.
    pub(crate) fn capture_handed_over(&self, id: u64) {
        let mut captured = self.captured();
        if let Some(entry) = captured.get_mut(&id) {
            self.guard_goes(entry);
            if entry.retained.is_empty() {
                captured.remove(&id);
            }
        }
    }

    /// End the bookkeeping of a capture; what its work names.
    pub(crate) fn capture_closed(&self, id: u64) -> Vec<Retained> {
        let closed = self.captured().remove(&id);
        closed.map_or_else(Vec::new, |mut entry| {
            self.guard_goes(&mut entry);
            entry.retained
        })
    }

    fn guard_goes(&self, entry: &mut Captured) {
        if std::mem::take(&mut entry.guarded) {
            self.inner.open.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Keep `retained` for the template that the capture will make.
    pub(crate) fn retain_captured(&self, id: u64, retained: &[Retained]) {
        let mut captured = self.captured();
        let entry = captured.entry(id).or_default();
        entry.retained.extend_from_slice(retained);
    }

    /// Return whether a guard of an open capture exists.
    pub(crate) fn is_guarded(&self, id: u64) -> bool {
        self.captured().get(&id).is_some_and(|entry| entry.guarded)
    }

    pub(crate) fn bases(&self) -> &Arc<BaseAddresses> {
        &self.inner.bases
    }

    fn captured(&self) -> MutexGuard<'_, HashMap<u64, Captured>> {
        self.inner
            .captured
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Device").field(&self.name()).finish()
    }
}
