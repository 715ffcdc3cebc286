//! Execs of templates: one, or many at the same time.

use std::iter;
use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use super::Exec;
use crate::device::Device;
use crate::driver::InstantiateFlags;
use crate::driver::handle::NodeHandle;
use crate::driver::owned::{OwnedExec, OwnedGraph, relaxed, same_driver};
use crate::error::{Error, Result};
use crate::retain::Retained;
use crate::template::Template;
use crate::transfer::Shared;

/// The parts of an exec.
struct Made {
    owned: OwnedExec,
    retained: Vec<Retained>,
    transfers: Vec<Arc<Shared>>,
}

impl Template {
    /// Make an exec. The template stays and may be changed and instantiated again; execs made
    /// before do not see the change.
    ///
    /// # Errors
    /// [`Error::Instantiate`] with the node at fault, where the driver names one; for a template that
    /// [allocates](Self::allocates), also while it has an exec.
    #[doc(alias = "cuGraphInstantiateWithParams")]
    pub fn instantiate(&self, flags: InstantiateFlags) -> Result<Exec> {
        self.device().collect();
        // CUDA counts it among the calls that break a capture of another thread.
        let (made, bytes) = self.device().measure(|| self.make(flags))?;
        Ok(self.exec(made?, bytes))
    }

    /// Make an exec of each template, as [`Self::instantiate`] does, in so many threads, of which
    /// this is one. All templates are of one device. The results are in the order of the templates;
    /// one that cannot be instantiated does not keep the others from it.
    ///
    /// CUDA does this side by side: 51 graphs of 390 nodes took 85 ms in one thread, 50 in two, 32 in
    /// four and 36 in eight (H200, CUDA 13.0). [`Exec::device_bytes`] is an equal share for each.
    ///
    /// Templates may be made one by one while others are instantiated: the iterator is asked for them
    /// on this thread. But for the first one the thread's capture mode is relaxed then, and what that
    /// takes of the device's memory counts as the execs'.
    ///
    /// ```
    /// # use cg_core::{Device, InstantiateFlags, Memory, Sim, Template, Work};
    /// # use std::num::NonZeroUsize;
    /// # use std::sync::Arc;
    /// # let device = Device::sim(&Sim::default());
    /// let memory = Memory::new(&device, 64)?;
    /// let template = |value| {
    ///     let template = Template::new(&device)?;
    ///     template.add(&Work::memset(&memory, value)?, &[])?;
    ///     Ok::<_, cg_core::Error>(Arc::new(template))
    /// };
    /// let templates = [template(1)?, template(2)?];
    /// let threads = NonZeroUsize::new(4).expect("four is not zero");
    /// let execs = Template::instantiate_all(templates, InstantiateFlags::default(), threads)?;
    /// assert!(execs.iter().all(Result::is_ok));
    /// # Ok::<(), cg_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of the driver about its memory. A template of another device than the first one is
    /// [`Error::Foreign`] in its place.
    pub fn instantiate_all(
        templates: impl IntoIterator<Item = Arc<Self>>,
        flags: InstantiateFlags,
        threads: NonZeroUsize,
    ) -> Result<Vec<Result<Exec>>> {
        let mut templates = templates.into_iter();
        let Some(first) = templates.next() else {
            return Ok(Vec::new());
        };
        let device = first.device().clone();
        device.collect();
        let all = iter::once(first).chain(templates);
        let (made, bytes) = device.measure(|| make_all(&device, all, flags, threads))?;
        let count = made.iter().filter(|(_, one)| one.is_ok()).count().max(1) as u64;
        let mut rest = bytes % count;
        let execs = made.into_iter().map(|(template, made)| {
            let made = made?;
            let share = bytes / count + std::mem::take(&mut rest);
            Ok(template.exec(made, share))
        });
        Ok(execs.collect())
    }

    fn make(&self, flags: InstantiateFlags) -> Result<Made> {
        self.with(|graph, retained, transfers| {
            let owned = graph.instantiate(flags).map_err(|failure| {
                let node = failure.node.map(|node| describe(graph, node));
                Error::Instantiate {
                    code: failure.code,
                    node,
                }
            })?;
            Ok(Made {
                owned,
                retained,
                transfers: transfers.to_vec(),
            })
        })
    }

    fn exec(&self, made: Made, bytes: u64) -> Exec {
        let (retained, transfers) = (made.retained, made.transfers);
        Exec::new(
            self.device(),
            self.id(),
            made.owned,
            bytes,
            retained,
            transfers,
        )
    }
}

/// Return the templates, and what their execs are made of.
fn make_all(
    device: &Device,
    templates: impl Iterator<Item = Arc<Template>>,
    flags: InstantiateFlags,
    threads: NonZeroUsize,
) -> Vec<(Arc<Template>, Result<Made>)> {
    let (sender, waiting) = mpsc::channel::<(usize, Arc<Template>)>();
    let waiting = Mutex::new(waiting);
    let work = || {
        let mut done = Vec::new();
        loop {
            let next = lock(&waiting).recv();
            let Ok((place, template)) = next else {
                return done;
            };
            let object = format!("{template:?}, one of many to be instantiated");
            let is_of_device =
                same_driver(&**device.driver(), &**template.device().driver(), &object);
            // Each thread has a capture mode of its own.
            let instantiate = |()| relaxed(&**device.driver(), || template.make(flags));
            let made = is_of_device.and_then(instantiate);
            done.push((place, template, made));
        }
    };
    let mut done = thread::scope(|scope| {
        // Whatever ends the block, the threads do not wait for more.
        let sender = sender;
        let mut others = Vec::new();
        for (place, template) in templates.enumerate() {
            // One alone needs no thread. A system that has no more leaves the work to this one.
            if place > 0 && others.len() + 1 < threads.get() {
                others.extend(thread::Builder::new().spawn_scoped(scope, work));
            }
            // The other end lives as long as the block.
            let _ = sender.send((place, template));
        }
        drop(sender);
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(place, ..)| *place);
    let found = done.into_iter().map(|(_, template, made)| (template, made));
    found.collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Return a node of a graph in words.
fn describe(graph: &OwnedGraph, node: NodeHandle) -> String {
    match graph.detail(node) {
        Ok(detail) => format!("{:#x}: {detail:?}", node.0),
        Err(_) => format!("{:#x}", node.0),
    }
}
