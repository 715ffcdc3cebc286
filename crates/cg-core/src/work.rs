//! [`Work`]: one operation, for a stream, a node or an exec, with all that it names.

use std::sync::Arc;

use crate::device::Device;
use crate::driver::Driver;
use crate::driver::handle::FunctionHandle;
use crate::driver::image::is_whole_binary;
use crate::driver::owned::{OwnedModule, same_driver};
use crate::driver::spec::{Dim3, FunctionAttribute, HostFunction, WorkSpec};
use crate::error::{Error, Result};
use crate::gate::Gates;
use crate::memory::Memory;
use crate::retain::Retained;

/// Kernels loaded from PTX text.
#[derive(Debug, Clone)]
pub struct Module {
    owned: Arc<OwnedModule>,
    image: Arc<[u8]>,
}

impl Module {
    /// Compile PTX text for the device.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless it is text without a zero byte; what the driver reports.
    #[doc(alias = "cuModuleLoadData")]
    pub fn load(device: &Device, image: &[u8]) -> Result<Self> {
        // The driver is told no length: a text ends at its zero byte, a cut-off binary nowhere.
        if std::str::from_utf8(image).is_err() || image.contains(&0) {
            let given = format!("{} bytes that are no text", image.len());
            return Err(Error::invalid("module image", &given, "PTX text"));
        }
        Self::of_image(device, image.into())
    }

    /// Load an image that was saved: a text, or a whole binary.
    pub(crate) fn of_saved(device: &Device, image: &Arc<[u8]>) -> Result<Self> {
        if is_whole_binary(image) {
            return Self::of_image(device, Arc::clone(image));
        }
        Self::load(device, image)
    }

    fn of_image(device: &Device, image: Arc<[u8]>) -> Result<Self> {
        let owned = OwnedModule::new(Arc::clone(device.driver()), &image)?;
        Ok(Self {
            owned: Arc::new(owned),
            image,
        })
    }

    /// Return a kernel by its (mangled) name.
    #[doc(alias = "cuModuleGetFunction")]
    pub fn function(&self, name: &str) -> Result<Function> {
        Ok(Function {
            handle: self.owned.function(name)?,
            name: name.to_owned(),
            module: Arc::clone(&self.owned),
        })
    }

    /// Return what it was loaded from.
    pub(crate) fn image(&self) -> &Arc<[u8]> {
        &self.image
    }

    /// Return its device's driver.
    pub(crate) fn driver(&self) -> &Arc<dyn Driver> {
        self.owned.driver()
    }
}

/// A kernel; keeps its module loaded.
#[derive(Debug, Clone)]
pub struct Function {
    handle: FunctionHandle,
    name: String,
    module: Arc<OwnedModule>,
}

impl Function {
    /// Return its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Let launches ask for so much dynamic shared memory; by default for 48 KiB.
    ///
    /// # Errors
    /// What the driver reports, for more than the device has.
    #[doc(alias = "cuFuncSetAttribute")]
    pub fn set_max_shared_bytes(&self, bytes: u32) -> Result<()> {
        let most = i32::try_from(bytes);
        let most = most.map_err(|_| Error::invalid("bytes", &bytes, "what an i32 holds"))?;
        self.set_attribute(FunctionAttribute {
            id: FunctionAttribute::MAX_SHARED_BYTES,
            value: most,
        })
    }

    /// Return the raw kernel. It dies with the function and its clones.
    pub(crate) fn handle(&self) -> FunctionHandle {
        self.handle
    }

    /// Return what keeps it loaded.
    pub(crate) fn retained(&self) -> Retained {
        Arc::clone(&self.module) as Retained
    }

    /// Return the attributes that may be set.
    pub(crate) fn attributes(&self) -> Result<Vec<FunctionAttribute>> {
        self.module.attributes(self.handle)
    }

    pub(crate) fn set_attribute(&self, attribute: FunctionAttribute) -> Result<()> {
        self.module.set_attribute(self.handle, attribute)
    }
}

/// The arguments of a kernel, in order, with the memory that they point at.
#[derive(Debug, Clone, Default)]
pub struct Args {
    bytes: Vec<Box<[u8]>>,
    memory: Vec<Memory>,
}

impl Args {
    /// No arguments yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Add a pointer to the start of `memory`.
    #[must_use]
    pub fn memory(mut self, memory: &Memory) -> Self {
        self.memory.push(memory.clone());
        self.bytes(&memory.address().0.to_le_bytes())
    }

    /// Return a 32-bit number.
    #[must_use]
    pub fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Return a 64-bit number.
    #[must_use]
    pub fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Return a 32-bit float.
    #[must_use]
    pub fn f32(self, value: f32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Any other argument, as the bytes that the kernel expects.
    #[must_use]
    pub fn bytes(mut self, bytes: &[u8]) -> Self {
        self.bytes.push(bytes.into());
        self
    }
}

/// One operation: what a stream enqueues, a node does, or an exec's node is changed to.
///
/// It keeps alive all that it names, and whoever takes it goes on doing so as long as the operation
/// may run.
#[derive(Debug, Clone)]
pub struct Work {
    spec: WorkSpec,
    driver: Option<Arc<dyn Driver>>,
    retained: Vec<Retained>,
    /// Of the pools that its memory is from.
    gates: Gates,
}

impl Work {
    /// Return a launch of a kernel with `grid` blocks of `block` threads and no dynamic shared memory.
    ///
    /// # Errors
    /// [`Error::Foreign`] if an argument points at memory of another device.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, in number and size, and with them it touches
    /// no memory but what [`Args::memory`] was given and what lives as long as the work.
    #[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
    pub unsafe fn kernel(
        function: &Function,
        grid: impl Into<Dim3>,
        block: impl Into<Dim3>,
        args: Args,
    ) -> Result<Self> {
        let driver = function.module.driver();
        let mut retained: Vec<Retained> = vec![Arc::clone(&function.module) as Retained];
        for memory in &args.memory {
            let object = format!("{memory:?}, argument of kernel {}", function.name);
            same_driver(&**driver, &**memory.driver(), &object)?;
            retained.extend(memory.owner().cloned());
        }
        Ok(Self {
            spec: WorkSpec::Kernel {
                function: function.handle,
                grid: grid.into(),
                block: block.into(),
                shared_bytes: 0,
                args: args.bytes.into(),
            },
            driver: Some(Arc::clone(driver)),
            gates: Gates::of(&retained),
            retained,
        })
    }

    /// The same launch with dynamic shared memory; other work is returned as it is.
    #[must_use]
    pub fn with_shared_bytes(mut self, bytes: u32) -> Self {
        if let WorkSpec::Kernel { shared_bytes, .. } = &mut self.spec {
            *shared_bytes = bytes;
        }
        self
    }

    /// Return a copy of all of `src` to `dst`.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless they have the same size; [`Error::Foreign`] if they are of
    /// different devices.
    #[doc(alias = "cuMemcpyAsync")]
    pub fn memcpy(dst: &Memory, src: &Memory) -> Result<Self> {
        if dst.bytes() != src.bytes() {
            let given = format!("{} bytes", src.bytes());
            let expected = format!("the {} bytes of the destination", dst.bytes());
            return Err(Error::invalid("source of memcpy", &given, expected));
        }
        same_driver(&**dst.driver(), &**src.driver(), "source of memcpy")?;
        let owners = dst.owner().into_iter().chain(src.owner());
        let retained: Vec<Retained> = owners.cloned().collect();
        Ok(Self {
            spec: WorkSpec::Memcpy {
                dst: dst.address(),
                src: src.address(),
                bytes: dst.bytes(),
            },
            driver: Some(Arc::clone(dst.driver())),
            gates: Gates::of(&retained),
            retained,
        })
    }

    /// Return all of `dst` set to the 32-bit `value`.
    ///
    /// # Errors
    /// [`Error::Invalid`] unless its size is a multiple of four bytes.
    #[doc(alias = "cuMemsetD32Async")]
    pub fn memset(dst: &Memory, value: u32) -> Result<Self> {
        if !dst.bytes().is_multiple_of(4) {
            let given = format!("{} bytes", dst.bytes());
            return Err(Error::invalid(
                "destination of memset",
                &given,
                "a multiple of 4 bytes",
            ));
        }
        let retained: Vec<Retained> = dst.owner().into_iter().cloned().collect();
        Ok(Self {
            spec: WorkSpec::Memset {
                dst: dst.address(),
                value,
                element_bytes: 4,
                count: dst.bytes() / 4,
            },
            driver: Some(Arc::clone(dst.driver())),
            gates: Gates::of(&retained),
            retained,
        })
    }

    /// Return a call of a host function. It must make no driver call and must not panic: a panic ends the
    /// process.
    #[doc(alias = "cuLaunchHostFunc")]
    pub fn host(function: impl Fn() + Send + Sync + 'static) -> Self {
        let function = Arc::new(HostFunction(Box::new(function)));
        Self {
            spec: WorkSpec::Host(Arc::clone(&function)),
            driver: None,
            gates: Gates::default(),
            retained: vec![function as Retained],
        }
    }

    pub(crate) fn spec(&self) -> &WorkSpec {
        &self.spec
    }

    pub(crate) fn gates(&self) -> &Gates {
        &self.gates
    }

    pub(crate) fn retained(&self) -> &[Retained] {
        &self.retained
    }

    /// Fail unless the work is of this device.
    pub(crate) fn check(&self, device: &Device) -> Result<()> {
        match &self.driver {
            Some(driver) => same_driver(&**device.driver(), &**driver, "work"),
            None => Ok(()),
        }
    }
}
