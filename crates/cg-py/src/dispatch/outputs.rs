//! `Outputs`: what an entry returns, and whether a caller still holds what it returned before.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::neighbours::{Loan, Neighbours};
use super::pattern::{Found, requires_grad};
use crate::error::argument;
use crate::raw;
use crate::signature::{Match, Signature};

/// The result of a replay.
pub(crate) struct Outputs {
    leaves: Vec<Leaf>,
    build: Build,
    held: Option<Arc<Held>>,
    /// The graphs of the same pool, and the number of this one among them.
    neighbours: Py<Neighbours>,
    number: u64,
    /// Whether the neighbours know of what was returned.
    is_noted: Arc<AtomicBool>,
}

/// Who is told of results that a caller still holds.
pub(super) struct Held {
    /// Called before the replay that overwrites a result: with its place, the tensor that was
    /// returned (`None` if only views of it are held), code and instruction of the call, how many
    /// references the caller has, and whether it is the replay of the same graph.
    callback: Py<PyAny>,
    /// `sys._getframe`: the caller, where a native entry was called.
    frame: Py<PyAny>,
    /// The same where Python of cgraph's stands in between.
    outer_frame: Py<PyAny>,
    /// Views, and what autograd has saved, are looked for in the first calls, and then in one of so
    /// many: it costs more than all else here. A result that is held as it was returned is seen at
    /// once.
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
    lent: Arc<Lent>,
    storage: Py<Storage>,
    /// To its storage, of the two tensors here.
    references: i64,
}

/// What the last call returned, and where that was.
#[derive(Default)]
pub(super) struct Lent {
    /// Returned again if the caller has let it go as it was: a new tensor costs more.
    tensor: Mutex<Option<Py<PyAny>>>,
    site: Mutex<Option<Site>>,
}

/// A storage of torch's that outputs lie in, and how many references it has while no caller has one.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Storage {
    address: u64,
    /// torch's count of the references to a storage, by its address.
    use_count: Py<PyAny>,
    at_rest: AtomicI64,
    /// Those of all outputs that lie in it, also of other entries: their rows overlap.
    lents: Mutex<Vec<Arc<Lent>>>,
}

/// Whose Python called an entry.
#[derive(Clone, Copy)]
pub(crate) enum Caller {
    User,
    Cgraph,
}

/// What Python gives for the outputs: leaves, build, who is told of held ones, and the neighbours with
/// the graph's number among them.
pub(crate) type Returned<'py> = (
    Bound<'py, PyList>,
    Bound<'py, PyAny>,
    Option<Callbacks>,
    (Py<Neighbours>, u64),
);

/// What Python gives for [`Held`]: callback, `sys._getframe`, what finds the user's frame, stride.
type Callbacks = (Py<PyAny>, Py<PyAny>, Py<PyAny>, u64);

/// Tensors that an [`Output`] has: `own` and `lent`.
const TENSORS: i64 = 2;

#[pymethods]
impl Storage {
    /// The references that it has now stay as long as this object.
    #[new]
    fn new(py: Python<'_>, address: u64, use_count: Py<PyAny>) -> PyResult<Self> {
        let storage = Self {
            address,
            use_count,
            at_rest: AtomicI64::new(0),
            lents: Mutex::default(),
        };
        let now = storage.references(py)?;
        storage.at_rest.store(now, Ordering::Relaxed);
        Ok(storage)
    }

    /// Whether somebody has a reference that is not ours.
    #[getter]
    pub(super) fn is_held(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.references(py)? > self.at_rest.load(Ordering::Relaxed))
    }
}

impl Storage {
    #[inline]
    fn references(&self, py: Python<'_>) -> PyResult<i64> {
        self.use_count.call1(py, (self.address,))?.extract(py)
    }

    /// What other outputs have lent. Most storages have one.
    #[inline]
    fn others(&self, own: &Arc<Lent>) -> Vec<Arc<Lent>> {
        let lents = self.lents();
        let others = lents.iter().filter(|lent| !Arc::ptr_eq(lent, own));
        others.map(Arc::clone).collect()
    }

    fn lents(&self) -> MutexGuard<'_, Vec<Arc<Lent>>> {
        self.lents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lent {
    fn tensor(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.tensor.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn site(&self) -> MutexGuard<'_, Option<Site>> {
        self.site.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what was lent, if it is still used, with the number of references that others have.
    /// Those of torch's own are looked for only `closely`.
    #[inline]
    fn take_used(
        &self,
        py: Python<'_>,
        found: &[Found<'_>],
        closely: bool,
    ) -> PyResult<Option<(Py<PyAny>, i64)>> {
        let Some(lent) = self.tensor().take() else {
            return Ok(None);
        };
        let others = raw::references(lent.bind(py)) - 1;
        if others == 0 {
            if closely && is_used_in_torch(lent.bind(py))? {
                return Ok(Some((lent, MANY)));
            }
            *self.tensor() = Some(lent);
            return Ok(None);
        }
        // An argument of the call is copied before anything is overwritten. It has one reference
        // among the arguments and one among those that were found.
        let as_argument = found.iter().filter(|one| one.tensor.is(&lent)).count();
        Ok(Some((lent, others - 2 * i64::try_from(as_argument)?)))
    }
}

/// As many references as nobody looks for.
const MANY: i64 = 1 << 30;

impl Outputs {
    /// Reads leaves: `("static", tensor, signature, storage)`, `("copied", tensor)`, `("argument",
    /// place)` or `("constant", value)`, each tensor an object of its own. `build` is `"single"`,
    /// `"tuple"` or a callable that takes a list of leaves.
    pub(crate) fn new(
        leaves: &Bound<'_, PyList>,
        build: &Bound<'_, PyAny>,
        held: Option<Callbacks>,
        (neighbours, number): (Py<Neighbours>, u64),
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
            held: held.map(|(callback, frame, outer_frame, stride)| {
                Arc::new(Held {
                    callback,
                    frame,
                    outer_frame,
                    stride,
                    calls: AtomicU64::new(0),
                })
            }),
            neighbours,
            number,
            is_noted: Arc::default(),
        })
    }

    /// Tells Python of each result that is still held, which the next replay overwrites.
    #[inline]
    pub(crate) fn release(
        &self,
        py: Python<'_>,
        caller: Caller,
        found: &[Found<'_>],
    ) -> PyResult<()> {
        let call = self.held.as_ref().map(|held| {
            let call = held.calls.fetch_add(1, Ordering::Relaxed);
            (held, call, held.is_close(call))
        });
        let neighbours = self.neighbours.get();
        if !neighbours.is_last(self.number) {
            let closely = call.is_none_or(|(_, _, closely)| closely);
            neighbours.release(py, self.number, found, closely)?;
        }
        let Some((held, call, closely)) = call else {
            return Ok(());
        };
        for (place, leaf) in self.leaves.iter().enumerate() {
            let Leaf::Static(output) = leaf else {
                continue;
            };
            let storage = output.storage.get();
            let others = storage.others(&output.lent);
            let mut is_told = false;
            for lent in others.iter().chain([&output.lent]) {
                is_told |= held.look(py, place, lent, found, closely, true)?;
            }
            if closely && !is_told && storage.is_held(py)? {
                held.tell(py, place, &output.lent, None, true)?;
            }
        }
        if held.is_close(call + 1) {
            let site = held.site(py, caller)?;
            for leaf in &self.leaves {
                if let Leaf::Static(output) = leaf {
                    let (code, instruction) = &site;
                    let copy = (code.clone_ref(py), instruction.clone_ref(py));
                    *output.lent.site() = Some(copy);
                }
            }
        } else if closely {
            for leaf in &self.leaves {
                if let Leaf::Static(output) = leaf {
                    *output.lent.site() = None;
                }
            }
        }
        Ok(())
    }

    /// What the call returns.
    #[inline]
    pub(crate) fn result(&self, py: Python<'_>, found: &[Found<'_>]) -> PyResult<Py<PyAny>> {
        if let Some(held) = &self.held
            && !self.is_noted.load(Ordering::Relaxed)
        {
            self.is_noted.store(true, Ordering::Relaxed);
            self.neighbours.get().note(self.loans(py, held));
        }
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

    fn loans<'a>(&'a self, py: Python<'a>, held: &'a Arc<Held>) -> impl Iterator<Item = Loan> + 'a {
        let leaves = self.leaves.iter().enumerate();
        leaves.filter_map(move |(place, leaf)| match leaf {
            Leaf::Static(output) => Some(Loan {
                number: self.number,
                place,
                lent: Arc::downgrade(&output.lent),
                storage: output.storage.clone_ref(py),
                held: Arc::downgrade(held),
                is_noted: Arc::clone(&self.is_noted),
            }),
            Leaf::Copied(_) | Leaf::Argument(_) | Leaf::Constant(_) => None,
        })
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

    /// Tells of a result if it is held; whether it is.
    #[inline]
    pub(super) fn look(
        &self,
        py: Python<'_>,
        place: usize,
        lent: &Lent,
        found: &[Found<'_>],
        closely: bool,
        is_own: bool,
    ) -> PyResult<bool> {
        match lent.take_used(py, found, closely)? {
            // As a rule the variable that the result of this call is assigned to.
            Some((_, ..=1)) if !closely => Ok(false),
            Some(used) => self
                .tell(py, place, lent, Some(used), is_own)
                .map(|()| true),
            None => Ok(false),
        }
    }

    /// Tells of a result that is held, with how many references; none if only views of it are. What
    /// was lent is lent again if that raises.
    #[cold]
    pub(super) fn tell(
        &self,
        py: Python<'_>,
        place: usize,
        lent: &Lent,
        used: Option<(Py<PyAny>, i64)>,
        is_own: bool,
    ) -> PyResult<()> {
        let site = lent.site().take();
        let (used, count) = used.map_or((None, MANY), |(used, count)| (Some(used), count));
        let told = self
            .callback
            .call1(py, (place, &used, &site, count, is_own));
        if told.is_err() {
            *lent.site() = site;
            if used.is_some() {
                *lent.tensor() = used;
            }
        }
        told.map(drop)
    }

    /// Where the call is that is under way.
    #[inline]
    fn site(&self, py: Python<'_>, caller: Caller) -> PyResult<Site> {
        let frame = match caller {
            Caller::User => self.frame.bind(py).call0()?,
            Caller::Cgraph => self.outer_frame.bind(py).call0()?,
        };
        let code = frame.getattr(intern!(py, "f_code"))?;
        let instruction = frame.getattr(intern!(py, "f_lasti"))?;
        Ok((code.unbind(), instruction.unbind()))
    }
}

impl Leaf {
    fn parse(from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1)?;
        Ok(match kind.as_str() {
            "static" => {
                let storage: Py<Storage> = from.get_item(3)?.extract()?;
                let (py, shared) = (from.py(), storage.get());
                let before = shared.references(py)?;
                let lent = Arc::new(Lent::default());
                *lent.tensor() = Some(value.call_method0("detach")?.unbind());
                // A tensor of a class derived from torch's has a second one inside it, which `own`
                // was made with as well. Python code of the class may have let others go meanwhile.
                let references = TENSORS * (shared.references(py)? - before).max(1);
                shared.lents().push(Arc::clone(&lent));
                shared.at_rest.fetch_add(references, Ordering::Relaxed);
                Self::Static(Output {
                    lent,
                    references,
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
        let lent = self.lent.tensor().take();
        if let Some(lent) = lent.map(|lent| lent.into_bound(py)) {
            let is_as_made = self.signature.get().matches(&lent)? == Some(Match::Same);
            if is_as_made && raw::references(&lent) == 1 && !requires_grad(&lent)? {
                *self.lent.tensor() = Some(lent.clone().unbind());
                return Ok(lent.unbind());
            }
        }
        let new = self.own.call_method0(py, intern!(py, "detach"))?;
        *self.lent.tensor() = Some(new.clone_ref(py));
        Ok(new)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        let storage = self.storage.get();
        storage
            .at_rest
            .fetch_sub(self.references, Ordering::Relaxed);
        storage
            .lents()
            .retain(|lent| !Arc::ptr_eq(lent, &self.lent));
    }
}

/// Whether torch has a tensor that nobody has in Python, as autograd's graph may.
#[inline]
fn is_used_in_torch(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let uses: i64 = tensor.call_method0(intern!(py, "_use_count"))?.extract()?;
    Ok(uses > 1)
}
