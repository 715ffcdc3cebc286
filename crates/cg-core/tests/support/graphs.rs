//! Graphs to be saved, and files for them.

use std::fs;
use std::path::PathBuf;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use cg_core::saved::Saved;
use cg_core::{Args, Device, InstantiateFlags, Memory, Module, Result, Stream, Template, Work};

use super::kernels::PTX;
use super::{WORDS, axpy, memory, poisoned, random, words};

pub(crate) const BLOCK: u32 = 128;

/// A graph of each kind of node that can be saved: `z = 3 * x + y`, `copy = z`, `set = value`.
pub(crate) struct Job {
    pub(crate) x: Memory,
    pub(crate) y: Memory,
    pub(crate) copy: Memory,
    pub(crate) set: Memory,
}

impl Job {
    pub(crate) fn new(device: &Device, seed: u64) -> Self {
        Self {
            x: memory(device, &random(seed)),
            y: memory(device, &random(seed + 1)),
            copy: poisoned(device),
            set: poisoned(device),
        }
    }

    pub(crate) fn names(&self) -> [(&str, &Memory); 4] {
        [
            ("x", &self.x),
            ("y", &self.y),
            ("copy", &self.copy),
            ("set", &self.set),
        ]
    }

    pub(crate) fn template(&self, device: &Device, module: &Module) -> Template {
        let template = Template::new(device).unwrap();
        let add = |work: &Work, after: &[_]| template.add(work, after).unwrap();
        let first = add(&launch_axpy(module, 3, &self.x, &self.y), &[]);
        let meet = template.add_empty(&[first]).unwrap();
        add(&Work::memcpy(&self.copy, &self.y).unwrap(), &[meet]);
        let child = Template::new(device).unwrap();
        let set = child
            .add(&Work::memset(&self.set, 7).unwrap(), &[])
            .unwrap();
        child
            .add(&launch_axpy(module, 2, &self.x, &self.set), &[set])
            .unwrap();
        template.add_child(&child, &[meet]).unwrap();
        template
    }

    pub(crate) fn check(&self, seed: u64) {
        let (x, y) = (random(seed), random(seed + 1));
        let sum = axpy(3, &x, &y);
        assert_eq!(words(&self.y), sum);
        assert_eq!(words(&self.copy), sum);
        assert_eq!(words(&self.set), axpy(2, &x, &[7; WORDS]));
    }
}

pub(crate) fn kernels(device: &Device) -> Module {
    Module::load(device, PTX.as_bytes()).unwrap()
}

#[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
pub(crate) fn launch_axpy(module: &Module, a: u32, x: &Memory, y: &Memory) -> Work {
    let n = u32::try_from(y.bytes() / 4).unwrap();
    let args = Args::new().u32(a).memory(x).memory(y).u32(n);
    let function = module.function("axpy").unwrap();
    // SAFETY: these are the arguments that kernels.cu declares, and the size of each memory.
    unsafe { Work::kernel(&function, n.div_ceil(BLOCK), BLOCK, args) }.unwrap()
}

/// A file of its own, which goes with it.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("cgraph-saved-{}-{number}", process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        fs::remove_file(&self.0).ok();
    }
}

#[expect(unsafe_code, reason = "the tests' own kernels")]
pub(crate) fn load(
    saved: &Saved,
    device: &Device,
    name: &str,
    memory: &[(&str, &Memory)],
) -> Result<Template> {
    let loaded = saved.load(device)?;
    // SAFETY: the kernels touch the memory that they are given, which the template keeps.
    let (template, nodes) = unsafe { loaded.template(name, memory) }?;
    assert_eq!(nodes.len(), template.node_count()?);
    Ok(template)
}

pub(crate) fn replay(device: &Device, template: &Template) {
    let exec = template.instantiate(InstantiateFlags::default()).unwrap();
    let stream = Stream::new(device).unwrap();
    exec.replay(&stream).unwrap();
    stream.synchronize().unwrap();
}

/// Return a saved graph of one kernel: `y = a * x + y`.
pub(crate) fn saved_axpy(device: &Device, module: &Module, x: &Memory, y: &Memory) -> Saved {
    let template = Template::new(device).unwrap();
    template.add(&launch_axpy(module, 3, x, y), &[]).unwrap();
    let mut saved = Saved::new(device);
    let names = [("x", x), ("y", y)];
    saved
        .add("axpy", &[module], (&template, &names), None)
        .unwrap();
    saved
}
