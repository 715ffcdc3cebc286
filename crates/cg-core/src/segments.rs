//! [`Segments`]: execs, and what the caller runs between them.

use std::fmt;
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::exec::Exec;
use crate::stream::Stream;

/// Execs, and what the caller runs between them, in order: for work that is captured except for
/// some parts.
///
/// `E` is what a callable may fail with.
///
/// ```
/// # use cg_core::{Device, InstantiateFlags, Memory, Result, Segments, Sim, Stream, Template, Work};
/// # let device = Device::sim(&Sim::default());
/// let (a, b) = (Memory::new(&device, 64)?, Memory::new(&device, 64)?);
/// let fill = |to: &Memory, word| -> Result<_> {
///     let template = Template::new(&device)?;
///     template.add(&Work::memset(to, word)?, &[])?;
///     template.instantiate(InstantiateFlags::default())
/// };
/// let mut segments: Segments = Segments::new();
/// segments.push_exec(fill(&a, 7)?);
/// let (from, to) = (a.clone(), b.clone());
/// segments.push_call(move |stream| {
///     stream.synchronize()?; // no capture could do this
///     to.write(&from.read()?)
/// });
/// segments.push_exec(fill(&a, 0)?);
///
/// let stream = Stream::new(&device)?;
/// segments.replay(&stream)?;
/// stream.synchronize()?;
/// assert_eq!((a.read()?, b.read()?), (vec![0; 64], 7_u32.to_le_bytes().repeat(16)));
/// # Ok::<(), cg_core::Error>(())
/// ```
pub struct Segments<E = Error> {
    steps: Vec<Step<E>>,
}

enum Step<E> {
    Exec(Arc<Exec>),
    Call(Box<Callable<E>>),
}

type Callable<E> = dyn Fn(&Stream) -> Result<(), E> + Send + Sync;

impl<E> Segments<E> {
    /// Without a step.
    #[must_use]
    pub fn new() -> Self {
        Self { steps: Vec::new() }
    }

    /// Add an exec, which others may hold as well.
    pub fn push_exec(&mut self, exec: impl Into<Arc<Exec>>) {
        self.steps.push(Step::Exec(exec.into()));
    }

    /// Add a callable. It is given the stream of the replay, on which what came before is enqueued
    /// and need not have finished.
    pub fn push_call(&mut self, call: impl Fn(&Stream) -> Result<(), E> + Send + Sync + 'static) {
        self.steps.push(Step::Call(Box::new(call)));
    }

    /// Return how many steps there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.steps.len()
    }

    /// Return whether there is no step; a replay does nothing then.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }
}

impl<E: From<Error>> Segments<E> {
    /// Replay the execs on a stream and run the callables, each in its turn, and return when the
    /// last one is enqueued. Nothing is locked meanwhile: replays by two threads mix their steps.
    ///
    /// # Errors
    /// That of the first step that fails; the later ones do not run, and the earlier ones stay done.
    /// Each replay begins with the first step.
    #[doc(alias = "cuGraphLaunch")]
    pub fn replay(&self, stream: &Stream) -> Result<(), E> {
        for step in &self.steps {
            match step {
                Step::Exec(exec) => exec.replay(stream)?,
                Step::Call(call) => call(stream)?,
            }
        }
        Ok(())
    }
}

impl<E> Default for Segments<E> {
    fn default() -> Self {
        Self::new()
    }
}

impl<E> fmt::Debug for Segments<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps.iter().map(|step| match step {
            Step::Exec(exec) => exec as &dyn fmt::Debug,
            Step::Call(_) => &"a callable",
        });
        f.debug_list().entries(steps).finish()
    }
}
