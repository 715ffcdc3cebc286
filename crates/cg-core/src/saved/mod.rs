//! [`Saved`]: graphs in a file, for another process of the same GPU, driver and program.
//!
//! A file has the nodes and edges of templates and the images of their kernels. It has contents of memory only where
//! they were added, and no addresses: each that a node names is a place in memory with a name, and is bound to other
//! memory of that name when the graph is loaded.
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
//! saved.add("step", &[&module], (&template, &[("x", &x)]), None)?;
//! saved.write(&path)?;
//!
//! let saved = Saved::open(&path)?;
//! let loaded = saved.load(&device)?;
//! let x = Memory::new(&device, 1024)?;
//! // SAFETY: the file is this program's own, and the kernel touches `x` alone.
//! let (template, _) = unsafe { loaded.template("step", &[("x", &x)]) }?;
//! let exec = template.instantiate(InstantiateFlags::default())?;
//! exec.replay(&Stream::new(&device)?)?;
//! # device.synchronize()?;
//! # std::fs::remove_file(path).ok();
//! # Ok::<(), cg_core::Error>(())
//! ```

mod file;
mod graph;
mod load;
mod named;
mod places;
mod read;

use std::path::Path;
use std::sync::Arc;

use graph::{Index, SavedContents, SavedFunction, SavedGraph};
use places::Places;
use read::ReadGraphs;

use crate::code::Code;
use crate::device::Device;
use crate::driver::handle::{FunctionHandle, NodeHandle};
use crate::driver::owned::{OwnedGraph, relaxed, same_driver};
use crate::error::{Error, FileFault, Result};
use crate::gate::Gates;
use crate::memory::Memory;
use crate::node::Node;
use crate::retain::Retained;
use crate::template::Template;
use crate::work::{Function, Module};

/// The sections of a file.
const INDEX: u32 = 1;
const IMAGE: u32 = 2;
const CONTENTS: u32 = 3;

/// Memory with the names by which a file knows it.
pub type Names<'a> = [(&'a str, &'a Memory)];

/// Graphs as data, with the images of their kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Saved {
    index: Index,
    images: Vec<Arc<[u8]>>,
    contents: Vec<Arc<[u8]>>,
}

/// How [`Saved::add`] has found the addresses that nodes name.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Taken {
    /// Words that moved with their memory from the first template to the second.
    pub proven: usize,
    /// Words that lie in memory with a name, and may be numbers.
    pub assumed: usize,
    /// Words that differ between the two templates and are no addresses, as between the fields of a struct. They stay
    /// as they are in the first one.
    pub left: usize,
}

/// The graphs of a file, with their kernels loaded.
#[derive(Debug, Clone)]
pub struct Loaded {
    index: Index,
    device: Device,
    functions: Vec<Function>,
    contents: Vec<Arc<[u8]>>,
}

impl Saved {
    /// Begin with no graph. What is saved is for devices like this one.
    #[must_use]
    pub fn new(device: &Device) -> Self {
        Self {
            index: Index {
                key: key_of(device),
                functions: Vec::new(),
                graphs: Vec::new(),
                contents: Vec::new(),
                notes: String::new(),
            },
            images: Vec::new(),
            contents: Vec::new(),
        }
    }

    /// Add a graph by a name: a template whose kernels are of these modules, or of others that were loaded since
    /// [`Device::record_images`], and the memory that its nodes name.
    ///
    /// The nodes of [`crate::Inputs`] and [`crate::Outputs`] are left out: they are added to the loaded template anew.
    ///
    /// An address is a word among a kernel's arguments that lies in memory with a name. A number may look like one:
    /// with `moved`, a second template of the same work with other memory of the same names, only words that moved
    /// with the memory are addresses.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a node that cannot be saved or names other memory, a kernel of no module, a name that is
    /// there already, memory that overlaps, and a second template of other work; [`Error::Paused`] where memory is away.
    pub fn add(
        &mut self,
        name: &str,
        modules: &[&Module],
        (template, memory): (&Template, &Names<'_>),
        moved: Option<(&Template, &Names<'_>)>,
    ) -> Result<Taken> {
        if self.graph(name).is_some() {
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
            functions: self.index.functions.clone(),
        };
        let places = Places::new(device, memory, moved.map(|(_, memory)| memory))?;
        // Addresses of memory that is away lead nowhere.
        let gates = Gates::of(&retained_by(template, moved.map(|(other, _)| other)));
        let _open = gates.pass()?;
        // One after the other: two templates that are locked at once might be locked in the other order elsewhere.
        let first = read(template, &mut images)?;
        let second = moved.map(|(other, _)| read(other, &mut images));
        let (bodies, memory, taken) = places.bodies(&first, second.transpose()?.as_ref())?;
        self.images = images.known;
        self.index.functions = images.functions;
        self.index.graphs.push(SavedGraph {
            name: name.to_owned(),
            memory,
            bodies,
        });
        Ok(taken)
    }

    /// Add the bytes that memory has now, as a part of memory that the graphs know by a name. [`Loaded::restore`]
    /// writes them.
    ///
    /// # Errors
    /// [`Error::Paused`] where the memory is away.
    pub fn add_contents(&mut self, name: &str, offset: u64, memory: &Memory) -> Result<()> {
        let bytes = memory.read()?;
        self.contents.push(bytes.into());
        self.index.contents.push(SavedContents {
            memory: name.to_owned(),
            offset,
        });
        Ok(())
    }

    /// Set a text to be kept with the graphs, for the program that loads them.
    pub fn set_notes(&mut self, notes: &str) {
        notes.clone_into(&mut self.index.notes);
    }

    /// Return the text of [`Self::set_notes`].
    #[must_use]
    pub fn notes(&self) -> &str {
        &self.index.notes
    }

    /// Return the names of the graphs.
    #[must_use]
    pub fn names(&self) -> Vec<&str> {
        self.index.graphs.iter().map(|graph| &*graph.name).collect()
    }

    /// Return the names and bytes of the memory that the nodes of a graph name; none for a graph that is not there.
    #[must_use]
    pub fn memory(&self, name: &str) -> Option<Vec<(&str, u64)>> {
        let memory = self.graph(name)?.memory.iter();
        Some(memory.map(|one| (&*one.name, one.bytes)).collect())
    }

    /// Write a file, which only its owner may read.
    ///
    /// # Errors
    /// [`Error::Saved`]; a file that was there is as before then.
    pub fn write(&self, path: &Path) -> Result<()> {
        let index = postcard::to_stdvec(&self.index);
        let index =
            index.map_err(|error| refused(path, FileFault::Unwritten(error.to_string())))?;
        let images = self.images.iter().map(|image| (IMAGE, &**image));
        let contents = self.contents.iter().map(|bytes| (CONTENTS, &**bytes));
        let index = [(INDEX, &*index)].into_iter();
        let sections: Vec<(u32, &[u8])> = index.chain(images).chain(contents).collect();
        file::write(path, &sections)
    }

    /// Read a file.
    ///
    /// # Errors
    /// [`Error::Saved`] for one that is damaged, that another version has written, or that somebody else may have
    /// changed.
    pub fn open(path: &Path) -> Result<Self> {
        let damaged = |reason: String| refused(path, FileFault::Damaged(reason));
        let contents = file::Contents::read(path)?;
        let index = contents.of_kind(INDEX).next();
        let index = index.ok_or_else(|| damaged("it has no index".to_owned()))?;
        Ok(Self {
            index: postcard::from_bytes(index).map_err(|error| damaged(error.to_string()))?,
            images: contents.of_kind(IMAGE).map(Arc::from).collect(),
            contents: contents.of_kind(CONTENTS).map(Arc::from).collect(),
        })
    }

    /// Load the kernels, which takes longest. It needs no memory of the graphs.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a device that is not as the one that the graphs were saved on.
    pub fn load(&self, device: &Device) -> Result<Loaded> {
        self.require_alike(device)?;
        // CUDA counts it among the calls that break a capture of another thread.
        relaxed(&**device.driver(), || self.loaded(device))
    }

    fn loaded(&self, device: &Device) -> Result<Loaded> {
        let modules = self
            .images
            .iter()
            .map(|image| Module::of_saved(device, image));
        let modules: Vec<Module> = modules.collect::<Result<_>>()?;
        Ok(Loaded {
            index: self.index.clone(),
            device: device.clone(),
            functions: load::functions(&self.index, &modules)?,
            contents: self.contents.clone(),
        })
    }

    /// Refuse a device that is not as the one that the file is for.
    fn require_alike(&self, device: &Device) -> Result<()> {
        let now = key_of(device);
        let pairs = self.index.key.iter().zip(&now);
        for ((name, saved), (_, now)) in pairs {
            if saved != now {
                let expected = format!("{saved}, as it was saved");
                return Err(Error::invalid(name, now, expected));
            }
        }
        if self.index.key.len() != now.len() {
            let given = format!("of {} parts", self.index.key.len());
            let expected = format!("{} parts", now.len());
            return Err(Error::invalid("the key of the file", &given, expected));
        }
        Ok(())
    }

    fn graph(&self, name: &str) -> Option<&SavedGraph> {
        graph(&self.index, name)
    }
}

impl Loaded {
    /// Build a template of a graph, with memory of the names that it was saved with. Return it with its nodes, in the
    /// order that [`Template::nodes`] had when it was saved.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an unknown name, and for memory that is missing or has another size or alignment.
    ///
    /// # Safety
    /// Whoever wrote the file may run code here. The kernels touch no memory but what they were given by name, and
    /// what lives as long as the work.
    #[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
    pub unsafe fn template(&self, name: &str, memory: &Names<'_>) -> Result<(Template, Vec<Node>)> {
        let Some(graph) = graph(&self.index, name) else {
            let names = self.index.graphs.iter().map(|graph| &*graph.name);
            let names: Vec<&str> = names.collect();
            let expected = format!("one of {}", names.join(", "));
            return Err(Error::invalid("the name of a graph", &name, expected));
        };
        load::build(&self.device, graph, &self.functions, memory)
    }

    /// Write the contents that were saved to memory of the same names. Wait for work that touches it first.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is missing, and for memory that is smaller; [`Error::Paused`].
    pub fn restore(&self, memory: &Names<'_>) -> Result<()> {
        for (place, bytes) in self.index.contents.iter().zip(&self.contents) {
            let Some((_, found)) = memory.iter().find(|(name, _)| *name == place.memory) else {
                let names: Vec<&str> = memory.iter().map(|(name, _)| *name).collect();
                let expected = format!("{:?} among them", place.memory);
                return Err(Error::invalid(
                    "the names of memory",
                    &names.join(", "),
                    expected,
                ));
            };
            same_driver(&**self.device.driver(), &**found.driver(), &place.memory)?;
            let end = place.offset.saturating_add(bytes.len() as u64);
            found.slice(place.offset..end)?.write(bytes)?;
        }
        Ok(())
    }
}

/// The images of a file, and the modules that more may come from.
struct Images<'a> {
    modules: &'a [&'a Module],
    known: Vec<Arc<[u8]>>,
    functions: Vec<SavedFunction>,
}

impl Images<'_> {
    /// Return the number of the kernel of a node among those of the file.
    fn find(
        &mut self,
        (graph, node): (&OwnedGraph, NodeHandle),
        name: &str,
        handle: FunctionHandle,
    ) -> Result<u32> {
        let given = self.module_of(name, handle)?;
        let recorded = || graph.image(node).transpose();
        let image = given.map(|module| Ok(Arc::clone(module.image())));
        let Some(image) = image.or_else(recorded).transpose()? else {
            let given = format!("kernel {name}, which is of no module that is known");
            let expected =
                "a kernel of a module that was given, or that was loaded since images are recorded";
            return Err(Error::invalid("a node", &given, expected));
        };
        let is_same = |known: &Arc<[u8]>| Arc::ptr_eq(known, &image) || *known == image;
        let known = self.known.iter().position(is_same);
        let image = small(known.unwrap_or_else(|| {
            self.known.push(image);
            self.known.len() - 1
        }))?;
        let attributes = graph.function_attributes(handle)?.into_iter();
        let saved = SavedFunction {
            image,
            name: name.to_owned(),
            attributes: attributes.map(|one| (one.id, one.value)).collect(),
        };
        let known = self.functions.iter().position(|known| *known == saved);
        small(known.unwrap_or_else(|| {
            self.functions.push(saved);
            self.functions.len() - 1
        }))
    }

    /// Return the module that was given and has a kernel.
    fn module_of(&self, name: &str, handle: FunctionHandle) -> Result<Option<&Module>> {
        for module in self.modules {
            match module.function(name) {
                Ok(function) if function.handle() == handle => return Ok(Some(module)),
                Err(error) if error.code() != Some(Code::NOT_FOUND) => return Err(error),
                _ => {}
            }
        }
        Ok(None)
    }
}

fn retained_by(template: &Template, other: Option<&Template>) -> Vec<Retained> {
    let templates = [Some(template), other].into_iter().flatten();
    templates
        .flat_map(|one| one.with(|_, retained, _| retained))
        .collect()
}

fn read(template: &Template, images: &mut Images<'_>) -> Result<ReadGraphs> {
    template.with(|graph, _, transfers| {
        let is_transfer = |node| transfers.iter().any(|one| one.has(node));
        ReadGraphs::read(graph, &is_transfer, images)
    })
}

fn graph<'a>(index: &'a Index, name: &str) -> Option<&'a SavedGraph> {
    index.graphs.iter().find(|graph| graph.name == name)
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

fn small(number: usize) -> Result<u32> {
    u32::try_from(number)
        .map_err(|_| Error::invalid("a graph", &"too large", "fewer than 2^32 parts"))
}

fn refused(path: &Path, fault: FileFault) -> Error {
    Error::Saved {
        path: path.to_path_buf(),
        fault,
    }
}
