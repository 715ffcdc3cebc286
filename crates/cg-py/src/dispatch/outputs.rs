//! `Outputs`: what an entry returns, and whether a caller still holds what it returned before.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::pattern::{Found, requires_grad};
use crate::error::argument;
use crate::raw;
use crate::signature::{Match, Signature};

/// The result of a replay.
pub(crate) struct Outputs {
    leaves: Vec<Leaf>,
    build: Build,
    held: Option<Held>,
}

/// Who is told of results that a caller still holds.
struct Held {
    /// Called before the replay that overwrites a result: with its place, the tensor that was
    /// returned (`None` if only views of it are held), and code and instruction of the call.
    callback: Py<PyAny>,
    /// `sys._getframe`: the caller, where a native entry was called.
    frame: Py<PyAny>,
    /// The same where Python of cgraph's stands in between.
    outer_frame: Py<PyAny>,
    last_call: Mutex<Option<Site>>,
    /// Views are looked for in the first calls, and then in one of so many: it costs more than all
    /// else here. A result that is held as it was returned is seen at once.
    stride: u64,
    calls: AtomicU64,
}

/// So many first calls are looked at closely.
const FIRST_CALLS: u64 = 32;

/// A call in the code of a caller: `f_code` and `f_lasti` of its frame. The line is looked up only
/// if somebody asks.
type Site = (Py<PyAny>, Py<PyAny>);

enum Leaf {
    /// A tensor of the graph.
    Static(Output),
    /// A tensor of the graph, returned as a copy.
    Copied(Py<PyAny>),
    /// The tensor that the caller gave at this place.
    Argument(usize),
    Constant(Py<PyAny>),
}

/// How the leaves are put together.
enum Build {
    Single,
    Tuple,
    /// By a callable that takes a list of them.
    Other(Py<PyAny>),
}

/// A static tensor that is returned as an alias of its memory.
struct Output {
    own: Py<PyAny>,
    signature: Py<Signature>,
    /// What the last call returned. It is returned again if the caller has let it go as it was: a
    /// new tensor costs more.
    lent: Mutex<Option<Py<PyAny>>>,
    storage: Py<Storage>,
}

/// A storage of torch's that outputs lie in, and how many references it has while no caller has one.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Storage {
    address: u64,
    /// torch's count of the references to a storage, by its address.
    use_count: Py<PyAny>,
    at_rest: AtomicI64,
}

/// Whose Python called an entry.
#[derive(Clone, Copy)]
pub(crate) enum Caller {
    User,
    Cgraph,
}

/// What Python gives for the outputs: leaves, build, and who is told of held ones.
pub(crate) type Returned<'py> = (Bound<'py, PyList>, Bound<'py, PyAny>, Option<Callbacks>);

/// What Python gives for [`Held`]: callback, `sys._getframe`, what finds the user's frame, stride.
type Callbacks = (Py<PyAny>, Py<PyAny>, Py<PyAny>, u64);

/// References to its storage that an [`Output`] has: `own` and `lent`.
const REFERENCES: i64 = 2;

#[pymethods]
impl Storage {
    /// The references that it has now stay as long as this object.
    #[new]
    fn new(py: Python<'_>, address: u64, use_count: Py<PyAny>) -> PyResult<Self> {
        let now: i64 = use_count.call1(py, (address,))?.extract(py)?;
        Ok(Self {
            address,
            use_count,
            at_rest: AtomicI64::new(now),
        })
    }

    /// Whether somebody has a reference that is not ours.
    #[getter]
    fn is_held(&self, py: Python<'_>) -> PyResult<bool> {
        let now: i64 = self.use_count.call1(py, (self.address,))?.extract(py)?;
        Ok(now > self.at_rest.load(Ordering::Relaxed))
    }
}

impl Outputs {
    /// Reads leaves: `("static", tensor, signature, storage)`, `("copied", tensor)`, `("argument",
    /// place)` or `("constant", value)`, each tensor an object of its own. `build` is `"single"`,
    /// `"tuple"` or a callable that takes a list of leaves.
    pub(crate) fn new(
        leaves: &Bound<'_, PyList>,
        build: &Bound<'_, PyAny>,
        held: Option<Callbacks>,
    ) -> PyResult<Self> {
        let leaves: PyResult<Vec<Leaf>> = leaves.iter().map(|leaf| Leaf::parse(&leaf)).collect();
        let leaves = leaves?;
        let build = match build.extract::<String>().as_deref() {
            Ok("single") if leaves.len() == 1 => Build::Single,
            Ok("tuple") => Build::Tuple,
            _ => Build::Other(build.clone().unbind()),
        };
        Ok(Self {
            leaves,
            build,
            held: held.map(|(callback, frame, outer_frame, stride)| Held {
                callback,
                frame,
                outer_frame,
                last_call: Mutex::default(),
                stride,
                calls: AtomicU64::new(0),
            }),
        })
    }

    /// Tells Python of each result that is still held, which the next replay overwrites.
    #[inline]
    pub(crate) fn release(&self, py: Python<'_>, caller: Caller) -> PyResult<()> {
        let Some(held) = &self.held else {
            return Ok(());
        };
        let call = held.calls.fetch_add(1, Ordering::Relaxed);
        let closely = held.is_close(call);
        for (place, leaf) in self.leaves.iter().enumerate() {
            let Leaf::Static(output) = leaf else {
                continue;
            };
            let lent = output.lent().take();
            let (lent, free) = match lent {
                Some(lent) if is_used(lent.bind(py))? => (Some(lent), None),
                free => (None, free),
            };
            *output.lent() = free;
            if lent.is_some() || (closely && output.storage.get().is_held(py)?) {
                let site = held.last_call().take();
                let told = held.callback.call1(py, (place, &lent, &site));
                *held.last_call() = site;
                if told.is_err() {
                    *output.lent() = lent;
                }
                told?;
            }
        }
        if held.is_close(call + 1) {
            held.note(py, caller)?;
        } else if closely {
            *held.last_call() = None;
        }
        Ok(())
    }

    /// What the call returns.
    #[inline]
    pub(crate) fn result(&self, py: Python<'_>, found: &[Found<'_>]) -> PyResult<Py<PyAny>> {
        let all = || self.leaves.iter().map(|leaf| leaf.lend(py, found));
        match &self.build {
            Build::Single => self.leaves[0].lend(py, found),
            Build::Tuple => {
                let leaves: Vec<_> = all().collect::<PyResult<_>>()?;
                Ok(PyTuple::new(py, leaves)?.into_any().unbind())
            }
            Build::Other(build) => {
                let leaves: Vec<_> = all().collect::<PyResult<_>>()?;
                build.call1(py, (PyList::new(py, leaves)?,))
            }
        }
    }

    /// Shows the garbage collector what this owns. Tensors refer to nothing of ours.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Build::Other(build) = &self.build {
            visit.call(build)?;
        }
        if let Some(held) = &self.held {
            visit.call(&held.callback)?;
        }
        self.leaves.iter().try_for_each(|leaf| match leaf {
            Leaf::Constant(constant) => visit.call(constant),
            Leaf::Static(_) | Leaf::Copied(_) | Leaf::Argument(_) => Ok(()),
        })
    }
}

impl Held {
    /// Whether a call is one of those that are looked at closely.
    #[inline]
    fn is_close(&self, call: u64) -> bool {
        call < FIRST_CALLS || call.is_multiple_of(self.stride)
    }

    /// Notes where the call is that is under way.
    #[inline]
    fn note(&self, py: Python<'_>, caller: Caller) -> PyResult<()> {
        let frame = match caller {
            Caller::User => self.frame.bind(py).call0()?,
            Caller::Cgraph => self.outer_frame.bind(py).call0()?,
        };
        let code = frame.getattr(intern!(py, "f_code"))?;
        let instruction = frame.getattr(intern!(py, "f_lasti"))?;
        *self.last_call() = Some((code.unbind(), instruction.unbind()));
        Ok(())
    }

    fn last_call(&self) -> MutexGuard<'_, Option<Site>> {
        self.last_call
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Leaf {
    fn parse(from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1)?;
        Ok(match kind.as_str() {
            "static" => {
                let storage: Py<Storage> = from.get_item(3)?.extract()?;
                storage
                    .get()
                    .at_rest
                    .fetch_add(REFERENCES, Ordering::Relaxed);
                Self::Static(Output {
                    lent: Mutex::new(Some(value.call_method0("detach")?.unbind())),
                    own: value.unbind(),
                    signature: from.get_item(2)?.extract()?,
                    storage,
                })
            }
            "copied" => Self::Copied(value.unbind()),
            "argument" => Self::Argument(value.extract()?),
            "constant" => Self::Constant(value.unbind()),
            _ => {
                let expected = "static, copied, argument or constant";
                return Err(argument("the kind of an output", &kind, expected));
            }
        })
    }

    #[inline]
    fn lend(&self, py: Python<'_>, found: &[Found<'_>]) -> PyResult<Py<PyAny>> {
        match self {
            Self::Static(output) => output.lend(py),
            Self::Copied(own) => own.call_method0(py, intern!(py, "clone")),
            Self::Argument(place) => Ok(found[*place].tensor.clone().unbind()),
            Self::Constant(value) => Ok(value.clone_ref(py)),
        }
    }
}

impl Output {
    /// An alias that no caller has and that is as it was made.
    #[inline]
    fn lend(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let lent = self.lent().take();
        if let Some(lent) = lent.map(|lent| lent.into_bound(py)) {
            let is_as_made = self.signature.get().matches(&lent)? == Some(Match::Same);
            if is_as_made && !raw::is_shared(&lent) && !requires_grad(&lent)? {
                *self.lent() = Some(lent.clone().unbind());
                return Ok(lent.unbind());
            }
        }
        let new = self.own.call_method0(py, intern!(py, "detach"))?;
        *self.lent() = Some(new.clone_ref(py));
        Ok(new)
    }

    fn lent(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.lent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        self.storage
            .get()
            .at_rest
            .fetch_sub(REFERENCES, Ordering::Relaxed);
    }
}

/// Whether a tensor has an owner besides the one that asks: in Python, or in autograd's graph.
#[inline]
fn is_used(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    if raw::is_shared(tensor) {
        return Ok(true);
    }
    let uses: i64 = tensor.call_method0(intern!(py, "_use_count"))?.extract()?;
    Ok(uses > 1)
}
