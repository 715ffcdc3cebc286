//! [`Saved`]: graphs in a file, for another process of the same GPU, driver and program.
//!
//! A file has the nodes and edges of templates and the images of their kernels. It has no contents of memory, and no
//! addresses: each that a node names is a place in memory with a name, and is bound to other memory of that name when
//! the graph is loaded.
//!
//! ```
//! # #![expect(unsafe_code, reason = "a kernel's arguments are the caller's to vouch for")]
//! # use cg_core::{Args, Device, InstantiateFlags, Memory, Module, Sim, Stream, Template, Work, saved::Saved};
//! # let sim = Sim::default();
//! # sim.kernel("noop", |_| Ok(()));
//! # let device = Device::sim(&sim);
//! # let path = std::env::temp_dir().join(format!("doc-{}.cgraph", std::process::id()));
//! let module = Module::load(&device, b".visible .entry noop(.param .u64 x) {}")?;
//! let x = Memory::new(&device, 1024)?;
//! let template = Template::new(&device)?;
//! // SAFETY: the kernel takes one address.
//! let work = unsafe { Work::kernel(&module.function("noop")?, 1, 1, Args::new().memory(&x)) }?;
//! template.add(&work, &[])?;
//! let mut saved = Saved::new(&device);
//! saved.add("step", &template, &[("x", &x)], None, &[&module])?;
//! saved.write(&path)?;
//!
//! let saved = Saved::open(&path)?;
//! let images = saved.load_images(&device)?;
//! let x = Memory::new(&device, 1024)?;
//! // SAFETY: the file is this program's own, and `x` lives as long as the work.
//! let template = unsafe { saved.template("step", &images, &[("x", &x)]) }?;
//! let exec = template.instantiate(InstantiateFlags::default())?;
//! exec.replay(&Stream::new(&device)?)?;
//! # device.synchronize()?;
//! # std::fs::remove_file(path).ok();
//! # Ok::<(), cg_core::Error>(())
//! ```

mod file;
mod graph;
mod load;
mod take;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use graph::{Index, SavedGraph};

use crate::code::Code;
use crate::device::Device;
use crate::driver::handle::FunctionHandle;
use crate::driver::owned::same_driver;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::template::Template;
use crate::work::Module;

/// The sections of a file.
const INDEX: u32 = 1;
const IMAGE: u32 = 2;

/// Graphs as data, with the images of their kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    index: Index,
    images: Vec<Arc<[u8]>>,
}

/// How [`Saved::add`] has found the addresses that nodes name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// Words that moved with their memory from the first template to the second.
    pub proven: usize,
    /// Words that lie in memory with a name, and may be numbers.
    pub assumed: usize,
}

/// The kernels of a file, loaded.
#[derive(Debug, Clone)]
pub struct LoadedImages {
    device: Device,
    modules: Vec<Module>,
}

impl Saved {
    /// Begin with no graph. What is saved is for devices like this one.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            index: Index {
                key: key_of(device),
                graphs: Vec::new(),
            },
            images: Vec::new(),
        }
    }

    /// Add a template by a name.
    ///
    /// An address is a word among a kernel's arguments that lies in memory with a name. A number may look like one:
    /// with `moved`, a second template of the same work with other memory of the same names, only words that moved
    /// with the memory are addresses.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a node that cannot be saved or names other memory, a kernel of no module, a name that is
    /// there already, and a second template of other work.
    pub fn add(
        &mut self,
        name: &str,
        template: &Template,
        memory: &[(&str, &Memory)],
        moved: Option<(&Template, &[(&str, &Memory)])>,
        modules: &[&Module],
    ) -> Result<Taken> {
        if self.graph(name).is_ok() {
            let expected = "one that no graph has yet";
            return Err(Error::invalid("the name of a graph", &name, expected));
        }
        let device = template.device();
        self.require_alike(device)?;
        let driver = &**device.driver();
        let others = moved.map_or(&[][..], |(_, memory)| memory);
        for (name, memory) in memory.iter().chain(others) {
            same_driver(driver, &**memory.driver(), &format!("memory {name:?}"))?;
        }
        for module in modules {
            same_driver(driver, &**module.driver(), "a module")?;
        }
        if let Some((other, _)) = moved {
            same_driver(driver, &**other.device().driver(), "the second template")?;
        }
        let mut images = Images {
            modules,
            known: self.images.clone(),
        };
        let (graph, taken) = take::take(name, template, memory, moved, &mut images)?;
        self.images = images.known;
        self.index.graphs.push(graph);
        Ok(taken)
    }

    /// Return the names of the graphs.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.index.graphs.iter().map(|graph| &*graph.name).collect()
    }

    /// Return the names and bytes of the memory that a graph works on.
    pub fn memory(&self, name: &str) -> Result<Vec<(&str, u64)>> {
        let memory = self.graph(name)?.memory.iter();
        Ok(memory.map(|one| (&*one.name, one.bytes)).collect())
    }

    /// Write a file, which only its owner may read.
    ///
    /// # Errors
    /// [`Error::Saved`]; a file that was there is as before then.
    pub fn write(&self, path: &Path) -> Result<()> {
        let index = postcard::to_stdvec(&self.index).map_err(|error| refused(path, &error))?;
        let images = self.images.iter().map(|image| (IMAGE, &**image));
        let sections: Vec<(u32, &[u8])> = [(INDEX, &*index)].into_iter().chain(images).collect();
        file::write(path, &sections)
    }

    /// Read a file.
    ///
    /// # Errors
    /// [`Error::Saved`] for one that is damaged, that another version has written, or that somebody else may have
    /// changed.
    pub fn open(path: &Path) -> Result<Self> {
        let contents = file::Contents::read(path)?;
        let index = contents.of_kind(INDEX).next();
        let index = index.ok_or_else(|| refused(path, &"it has no index"))?;
        Ok(Self {
            index: postcard::from_bytes(index).map_err(|error| refused(path, &error))?,
            images: contents.of_kind(IMAGE).map(Arc::from).collect(),
        })
    }

    /// Load the kernels, which takes longest. It needs no memory of the graphs.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a device that is not as the one that the graphs were saved on.
    pub fn load_images(&self, device: &Device) -> Result<LoadedImages> {
        self.require_alike(device)?;
        let modules = self.images.iter().map(|image| Module::load(device, image));
        Ok(LoadedImages {
            device: device.clone(),
            modules: modules.collect::<Result<_>>()?,
        })
    }

    /// Build a template of a graph, with memory of the names that it was saved with.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown name, and for memory that is missing or has another size.
    ///
    /// # Safety
    /// Whoever wrote the file may run code here. The kernels touch no memory but what they were given by name, and
    /// what lives as long as the work.
    #[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
    pub unsafe fn template(
        &self,
        name: &str,
        images: &LoadedImages,
        memory: &[(&str, &Memory)],
    ) -> Result<Template> {
        let graph = self.graph(name)?;
        let memory: HashMap<&str, &Memory> = memory.iter().copied().collect();
        load::build(&images.device, graph, &images.modules, &memory)
    }

    /// Refuse a device that is not as the one that the file is for.
    fn require_alike(&self, device: &Device) -> Result<()> {
        let pairs = self.index.key.iter().zip(key_of(device));
        for ((name, saved), (_, now)) in pairs {
            if *saved != now {
                let expected = format!("{saved}, as it was saved");
                return Err(Error::invalid(name, &now, expected));
            }
        }
        Ok(())
    }

    fn graph(&self, name: &str) -> Result<&SavedGraph> {
        let found = self.index.graphs.iter().find(|graph| graph.name == name);
        found.ok_or_else(|| {
            let expected = format!("one of {}", self.names().join(", "));
            Error::invalid("the name of a graph", &name, expected)
        })
    }
}

/// The images of a file, and the modules that more may come from.
struct Images<'a> {
    modules: &'a [&'a Module],
    known: Vec<Arc<[u8]>>,
}

impl Images<'_> {
    /// Return the image that a function is of, and its attributes that were set.
    fn find(&mut self, name: &str, handle: FunctionHandle) -> Result<(u32, Vec<(u32, i32)>)> {
        let mut found = None;
        for module in self.modules {
            match module.function(name) {
                Ok(function) if function.handle() == handle => found = Some((module, function)),
                Err(error) if error.code() != Some(Code::NOT_FOUND) => return Err(error),
                _ => {}
            }
        }
        let Some((module, function)) = found else {
            let given = format!("kernel {name}, which is of none of the modules");
            let expected = "a kernel of a module that was given";
            return Err(Error::invalid("a node", &given, expected));
        };
        let image = module.image();
        let known = self.known.iter().position(|known| known == image);
        let number = known.unwrap_or_else(|| {
            self.known.push(Arc::clone(image));
            self.known.len() - 1
        });
        let attributes = function.attributes()?.into_iter();
        let number = u32::try_from(number);
        let number = number.map_err(|_| Error::invalid("images", &"too many", "fewer"))?;
        Ok((number, attributes.map(|one| (one.id, one.value)).collect()))
    }
}

/// What must be as it was.
fn key_of(device: &Device) -> Vec<(String, String)> {
    let key = [
        ("the device", device.driver().model()),
        (
            "the driver's version",
            device.driver().version().to_string(),
        ),
        ("cgraph's version", env!("CARGO_PKG_VERSION").to_owned()),
    ];
    key.map(|(name, value)| (name.to_owned(), value)).into()
}

fn refused(path: &Path, reason: &impl ToString) -> Error {
    Error::Saved {
        path: path.to_path_buf(),
        reason: reason.to_string(),
    }
}
