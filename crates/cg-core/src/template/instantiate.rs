//! Execs of templates: one, or many at the same time.

use std::num::NonZeroUsize;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::Template;
use crate::driver::InstantiateFlags;
use crate::driver::handle::NodeHandle;
use crate::driver::owned::{OwnedExec, OwnedGraph, relaxed, same_driver};
use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::inputs::Shared;
use crate::retain::Retained;

/// What an exec is made of.
struct Made {
    owned: OwnedExec,
    retained: Vec<Retained>,
    inputs: Vec<Arc<Shared>>,
}

impl Template {
    /// Makes an exec. The template stays and may be changed and instantiated again; execs made
    /// before do not see the change.
    ///
    /// # Errors
    /// [`Error::Instantiate`] with the node at fault, where the driver names one; for a template that
    /// [allocates](Self::allocates), also while it has an exec.
    #[doc(alias = "cuGraphInstantiateWithParams")]
    pub fn instantiate(&self, flags: InstantiateFlags) -> Result<Exec> {
        self.device.collect();
        // CUDA counts it among the calls that break a capture of another thread.
        let (made, bytes) = self.device.measure(|| self.make(flags))?;
        Ok(self.exec(made?, bytes))
    }

    /// Makes an exec of each template, as [`Self::instantiate`] does, in so many threads, of which
    /// this is one. All templates are of one device. The results are in the order of the templates;
    /// one that cannot be instantiated does not keep the others from it.
    ///
    /// CUDA does this side by side: 51 graphs of 390 nodes took 85 ms in one thread, 50 in two, 32 in
    /// four and 36 in eight (H200, CUDA 13.0). [`Exec::device_bytes`] is an equal share for each.
    ///
    /// `meanwhile` is called on this thread as the others have begun, unless an error comes before:
    /// `|| ()` for nothing. The thread's capture mode is relaxed then, and what it takes of the
    /// device's memory counts as the execs'.
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
    /// let execs = Template::instantiate_all(&templates, InstantiateFlags::default(), threads, || ())?;
    /// assert!(execs.iter().all(Result::is_ok));
    /// # Ok::<(), cg_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Foreign`] for a template of another device; what the driver reports of its memory.
    pub fn instantiate_all(
        templates: &[Arc<Self>],
        flags: InstantiateFlags,
        threads: NonZeroUsize,
        meanwhile: impl FnOnce(),
    ) -> Result<Vec<Result<Exec>>> {
        let Some(first) = templates.first() else {
            meanwhile();
            return Ok(Vec::new());
        };
        let device = &first.device;
        for other in templates {
            let object = format!("{other:?}, one of many to be instantiated");
            same_driver(&**device.driver(), &**other.device.driver(), &object)?;
        }
        device.collect();
        let (made, bytes) = device.measure(|| make_all(templates, flags, threads, meanwhile))?;
        let count = made.iter().filter(|one| one.is_ok()).count().max(1) as u64;
        let mut rest = bytes % count;
        let execs = templates.iter().zip(made).map(|(template, made)| {
            let made = made?;
            let share = bytes / count + std::mem::take(&mut rest);
            Ok(template.exec(made, share))
        });
        Ok(execs.collect())
    }

    fn make(&self, flags: InstantiateFlags) -> Result<Made> {
        let state = self.state();
        let owned = state.graph.instantiate(flags).map_err(|failure| {
            let node = failure.node.map(|node| describe(&state.graph, node));
            Error::Instantiate {
                code: failure.code,
                node,
            }
        })?;
        Ok(Made {
            owned,
            retained: state.all_retained(),
            inputs: state.inputs.clone(),
        })
    }

    fn exec(&self, made: Made, bytes: u64) -> Exec {
        let (retained, inputs) = (made.retained, made.inputs);
        Exec::new(&self.device, self.id, made.owned, bytes, retained, inputs)
    }
}

/// What the execs are made of, in the order of the templates.
fn make_all(
    templates: &[Arc<Template>],
    flags: InstantiateFlags,
    threads: NonZeroUsize,
    meanwhile: impl FnOnce(),
) -> Vec<Result<Made>> {
    let next = AtomicUsize::new(0);
    let work = || {
        let mut done = Vec::new();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(template) = templates.get(place) else {
                return done;
            };
            // Each thread has a capture mode of its own.
            let made = relaxed(&**template.device.driver(), || template.make(flags));
            done.push((place, made));
        }
    };
    let mut done = thread::scope(|scope| {
        let others = threads.get().min(templates.len()) - 1;
        // A system that has no more threads leaves the work to this one.
        let others: Vec<_> = (0..others)
            .filter_map(|_| thread::Builder::new().spawn_scoped(scope, work).ok())
            .collect();
        meanwhile();
        let mut done = work();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| resume_unwind(panic)));
        }
        done
    });
    done.sort_by_key(|(place, _)| *place);
    done.into_iter().map(|(_, made)| made).collect()
}

/// A node of a graph in words.
fn describe(graph: &OwnedGraph, node: NodeHandle) -> String {
    match graph.detail(node) {
        Ok(detail) => format!("{:#x}: {detail:?}", node.0),
        Err(_) => format!("{:#x}", node.0),
    }
}
