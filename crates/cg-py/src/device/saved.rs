//! `SavedGraphs`: templates in a file, for another process.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use cg_core::Memory;
use cg_core::saved::{Loaded, Saved};
use pyo3::prelude::*;

use super::{Device, Template};
use crate::detach::detached;
use crate::raw;

/// Memory by its name: its address and bytes. The caller keeps it alive.
type Named = (String, u64, u64);

/// Graphs as data, with the images of their kernels.
#[pyclass(module = "cgraph._core")]
pub(crate) struct SavedGraphs {
    core: Saved,
}

#[pymethods]
impl SavedGraphs {
    /// Begin with no graph.
    #[new]
    fn new(device: &Device) -> Self {
        Self {
            core: Saved::new(&device.core),
        }
    }

    /// Read a file.
    #[staticmethod]
    fn open(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let core = detached(py, move || Saved::open(&path))?;
        Ok(Self { core })
    }

    /// Add a graph, which was maybe captured `again` with other memory; return how many addresses are proven by that,
    /// and how many are assumed.
    #[pyo3(signature = (name, template, memory, again=None))]
    fn add(
        &mut self,
        py: Python<'_>,
        name: &str,
        template: &Template,
        memory: Vec<Named>,
        again: Option<(PyRef<'_, Template>, Vec<Named>)>,
    ) -> PyResult<(usize, usize)> {
        let memory = in_core(template.core.device(), memory);
        let again = again.map(|(other, memory)| {
            let memory = in_core(other.core.device(), memory);
            (Arc::clone(&other.core), memory)
        });
        let taken = detached(py, || {
            let moved = again
                .as_ref()
                .map(|(other, memory)| (&**other, borrowed(memory)));
            let moved = moved.as_ref().map(|(other, memory)| (*other, &**memory));
            let memory = borrowed(&memory);
            self.core.add(name, &[], (&template.core, &memory), moved)
        })?;
        Ok((taken.proven, taken.assumed))
    }

    /// Add what lies in a block: a part, from an offset on, of memory that has a name.
    fn add_contents(
        &mut self,
        py: Python<'_>,
        device: &Device,
        place: (String, u64),
        block: (u64, u64),
    ) -> PyResult<()> {
        let memory = raw::memory(&device.core, block.0, block.1);
        let (name, offset) = place;
        detached(py, || self.core.add_contents(&name, offset, &memory))
    }

    /// A text that is kept with the graphs.
    #[getter]
    fn notes(&self) -> &str {
        self.core.notes()
    }

    #[setter]
    fn set_notes(&mut self, notes: &str) {
        self.core.set_notes(notes);
    }

    /// Write a file, which only its owner may read.
    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        detached(py, move || self.core.write(&path))
    }

    /// Load the kernels.
    fn load(&self, py: Python<'_>, device: &Device) -> PyResult<SavedKernels> {
        let core = detached(py, || self.core.load(&device.core))?;
        Ok(SavedKernels {
            core,
            device: device.core.clone(),
        })
    }
}

/// The graphs of a file, with their kernels loaded.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct SavedKernels {
    core: Loaded,
    device: cg_core::Device,
}

#[pymethods]
impl SavedKernels {
    /// Build a graph that works on memory of the names that it was saved with. It keeps `owner` alive.
    fn template(
        &self,
        py: Python<'_>,
        name: &str,
        memory: Vec<Named>,
        owner: Py<PyAny>,
    ) -> PyResult<Template> {
        let memory = in_core(&self.device, memory);
        let template = detached(py, || {
            raw::loaded_template(&self.core, name, &borrowed(&memory))
        })?;
        template.retain(Arc::new(owner));
        Ok(Template::new(template))
    }

    /// Write the contents that were saved to memory of the same names.
    fn restore(&self, py: Python<'_>, memory: Vec<Named>) -> PyResult<()> {
        let memory = in_core(&self.device, memory);
        detached(py, || self.core.restore(&borrowed(&memory)))
    }
}

/// From now on, keep what kernels are loaded from; `cupti` is the file of CUPTI.
#[pyfunction]
pub(crate) fn record_images(py: Python<'_>, cupti: PathBuf) -> PyResult<()> {
    detached(py, move || start(&cupti))
}

#[cfg(feature = "cuda")]
fn start(cupti: &Path) -> cg_core::Result<()> {
    cg_core::driver::cuda::record_images(cupti)
}

#[cfg(not(feature = "cuda"))]
fn start(_: &Path) -> cg_core::Result<()> {
    Err(cg_core::Error::Images {
        reason: "cgraph was built without CUDA".to_owned(),
    })
}

fn in_core(device: &cg_core::Device, memory: Vec<Named>) -> Vec<(String, Memory)> {
    let memory = memory.into_iter();
    let of_raw = |(name, address, bytes)| (name, raw::memory(device, address, bytes));
    memory.map(of_raw).collect()
}

fn borrowed(memory: &[(String, Memory)]) -> Vec<(&str, &Memory)> {
    memory.iter().map(|(name, one)| (&**name, one)).collect()
}
