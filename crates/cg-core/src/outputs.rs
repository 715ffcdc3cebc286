//! [`Outputs`]: last nodes that copy a template's memory to where each replay says, set and launched by
//! one call.

use std::fmt;
use std::sync::Arc;

use crate::driver::owned::same_driver;
use crate::error::{Error, Result};
use crate::memory::Memory;
use crate::ranges::Ranges;
use crate::retain::Retained;
use crate::template::Template;
use crate::transfer::{self, Destination, Direction, Nodes, Shared};

/// Nodes at the end of a template that copy its memory to where each replay says.
///
/// [`Outputs::deliver`] and [`crate::Exec::replay_with`] say where a replay copies to. Any other replay
/// copies nothing. It keeps its template alive, since an exec's node is changed through the template's;
/// so does an exec that has delivered once.
///
/// ```
/// # use cg_core::{Destination, Device, InstantiateFlags, Memory, Outputs, Sim, Stream, Template, Work};
/// # use std::sync::Arc;
/// # let device = Device::sim(&Sim::default());
/// let result = Memory::new(&device, 64)?;
/// let template = Arc::new(Template::new(&device)?);
/// template.add(&Work::memset(&result, 7)?, &[])?;
/// let outputs = Outputs::add(&template, &[result])?;
/// let exec = template.instantiate(InstantiateFlags::default())?;
///
/// let (stream, new) = (Stream::new(&device)?, Memory::new(&device, 64)?);
/// let to = [Destination { address: new.address(), bytes: 64 }];
/// // SAFETY: `new` lives until the stream has passed the replay.
/// let delivery = unsafe { outputs.deliver(&to) }?;
/// exec.replay_with(&delivery, &stream)?;
/// stream.synchronize()?;
/// assert_eq!(new.read()?, 7_u32.to_le_bytes().repeat(16));
/// # Ok::<(), cg_core::Error>(())
/// ```
#[derive(Clone)]
pub struct Outputs {
    template: Arc<Template>,
    shared: Arc<Shared>,
}

/// The destinations of one replay; made by [`Outputs::deliver`].
#[derive(Debug, Clone, Copy)]
pub struct Delivery<'a> {
    pub(crate) outputs: &'a Outputs,
    pub(crate) to: &'a [Destination],
}

impl Outputs {
    /// Add nodes that copy any number of pieces of memory, which come after all nodes that the template
    /// has now.
    ///
    /// Execs that were made before do not have them.
    ///
    /// # Errors
    /// [`Error::Foreign`] for memory of another device; what the driver reports.
    pub fn add(template: &Arc<Template>, results: &[Memory]) -> Result<Self> {
        let device = template.device();
        let driver = &**device.driver();
        for memory in results {
            let object = format!("{memory:?}, source of outputs");
            same_driver(driver, &**memory.driver(), &object)?;
        }
        let kernels = transfer::kernels(device, Direction::Out)?;
        let owners = results.iter().filter_map(Memory::owner);
        let mut named: Vec<Retained> = owners.cloned().collect();
        named.push(Arc::clone(&kernels) as Retained);
        let own: Vec<_> = results.iter().map(|m| (m.address(), m.bytes())).collect();
        let nodes = Nodes::new(&kernels, &own, &[]);
        let sources = Ranges::merged(results.iter().map(Memory::range));
        let shared = template.add_leaves(&nodes.specs(), &named, |handles| {
            Arc::new(nodes.shared(handles, own, sources, named.clone()))
        })?;
        Ok(Self {
            template: Arc::clone(template),
            shared,
        })
    }

    /// Return the template that they were added to.
    #[must_use]
    pub fn template(&self) -> &Arc<Template> {
        &self.template
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Return how many pieces of memory there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shared.own().len()
    }

    /// Return whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return where a piece of memory is, and how many bytes it has.
    ///
    /// # Panics
    /// If there is no such piece.
    #[must_use]
    pub fn source(&self, place: usize) -> Destination {
        let (address, bytes) = self.shared.own()[place];
        Destination { address, bytes }
    }

    /// Return where a replay is to copy to, a destination for each piece of memory. A destination that overlaps
    /// a piece is refused by the replay.
    ///
    /// # Errors
    /// [`Error::Invalid`] if there are more or fewer than the outputs have, and for more bytes than the
    /// memory has.
    ///
    /// # Safety
    /// Each destination is mapped for its bytes, and no other one overlaps it, until the streams have
    /// passed the replays that were given the result.
    #[expect(unsafe_code, reason = "nobody here owns the destinations")]
    #[inline]
    pub unsafe fn deliver<'a>(&'a self, to: &'a [Destination]) -> Result<Delivery<'a>> {
        let own = self.shared.own();
        if to.len() != own.len() {
            let expected = format!("{}, one for each piece of memory", own.len());
            let argument = "number of destinations";
            return Err(Error::invalid(argument, &to.len(), expected));
        }
        let mut pairs = to.iter().zip(own);
        if let Some((to, (_, most))) = pairs.find(|(to, (_, most))| to.bytes > *most) {
            let expected = format!("at most {most}, those of the memory");
            return Err(Error::invalid(
                "bytes of a destination",
                &to.bytes,
                expected,
            ));
        }
        Ok(Delivery { outputs: self, to })
    }
}

impl fmt::Debug for Outputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Outputs({} of {:?})", self.len(), self.template)
    }
}
