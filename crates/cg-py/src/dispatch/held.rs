//! `Held`: whether a caller still has a result that a replay overwrites, and who is told.

use std::sync::atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::found::Tensors;
use crate::raw::{self, Attached};

/// Who is told of results that a caller still holds.
pub(super) struct Held {
    /// Called before the replay that overwrites a result: with `storages` (`None` once the graph is
    /// gone), its place, the tensor that was returned (`None` if only views of it are held), code and
    /// instruction of the call, how many references the caller has (with those of the call, if it is
    /// among its arguments), whether it is the replay of the same graph, the call's arguments,
    /// whether somebody else has their tuple, and whether the call returns this one of them.
    callback: Py<PyAny>,
    /// What the outputs lie in, by their places.
    storages: Py<PyAny>,
    /// Returns the user's frame.
    frame: Py<PyAny>,
    /// Views, and what autograd has saved, are looked for in the first calls, and then in those whose
    /// number has none of these bits: it costs more than all else here, and a result that is assigned
    /// to a variable is then told of as well. One that is held as it was returned is seen at once.
    between: u64,
    calls: AtomicU64,
}

/// So many first calls are looked at closely.
const FIRST_CALLS: u64 = 32;

/// A call in the code of a caller: `f_code` and `f_lasti` of its frame. The line is looked up only
/// if somebody asks.
pub(super) type Site = (Py<PyAny>, Py<PyAny>);

/// What the last call returned, and where that was.
#[derive(Default)]
pub(super) struct Lent {
    /// Returned again if the caller has let it go as it was: a new tensor costs more.
    tensor: Attached<Option<Py<PyAny>>>,
    site: Attached<Option<Site>>,
}

/// A storage of torch's that outputs lie in, and how many references it has while no caller has one.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct Storage {
    address: u64,
    /// torch's count of the references to a storage, by its address.
    use_count: Py<PyAny>,
    /// Keeps what lies at the address, of which the count is part; not the memory.
    _weak: Py<PyAny>,
    at_rest: AtomicI64,
    /// Those of all outputs that lie in it, also of other entries: their rows overlap.
    lents: Mutex<Vec<Arc<Lent>>>,
    /// How many these are: calls of most graphs need no lock to know that there are no others.
    count: AtomicUsize,
}

/// What an entry is called with.
#[derive(Clone, Copy)]
pub(crate) struct Arguments<'a, 'py> {
    pub(crate) args: &'a Bound<'py, PyTuple>,
    pub(crate) kwargs: Option<&'a Bound<'py, PyDict>>,
    /// The tensors among them.
    pub(crate) tensors: Tensors<'a, 'py>,
    /// The places of those that the call returns as they are.
    pub(crate) returned: &'a [usize],
}

impl Arguments<'_, '_> {
    /// Whether somebody else has the tuple of the arguments, as after `f(*args)`.
    fn are_kept(&self) -> bool {
        // One is that of the call.
        raw::references(self.args) > 1
    }

    /// How many of the tensors this is.
    #[inline]
    pub(super) fn count(&self, tensor: &Bound<'_, PyAny>) -> i64 {
        self.tensors.count(tensor)
    }

    /// Whether the call returns this one of its tensors, whatever becomes of its memory.
    #[inline]
    fn return_it(&self, tensor: &Bound<'_, PyAny>) -> bool {
        let mut returned = self.returned.iter();
        returned.any(|place| self.tensors.get(*place).is(tensor))
    }

    /// How many references to a tensor are ours.
    pub(super) fn own(&self, tensor: &Bound<'_, PyAny>) -> i64 {
        self.tensors.references(tensor)
    }
}

/// What Python gives for [`Held`]: callback, storages, what finds the user's frame, and of how many
/// calls one is looked at closely, a power of two.
pub(crate) type Callbacks = (Py<PyAny>, Py<PyAny>, Py<PyAny>, u64);

#[pymethods]
impl Storage {
    /// The references that it has now are not the caller's. `weak` is a weak one.
    #[new]
    fn new(py: Python<'_>, address: u64, use_count: Py<PyAny>, weak: Py<PyAny>) -> PyResult<Self> {
        let storage = Self {
            address,
            use_count,
            _weak: weak,
            at_rest: AtomicI64::new(0),
            lents: Mutex::default(),
            count: AtomicUsize::new(0),
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

    /// The same where what was lent has got memory of its own.
    #[getter]
    fn is_held_still(&self, py: Python<'_>) -> PyResult<bool> {
        Ok(self.references(py)? >= self.at_rest.load(Ordering::Relaxed))
    }
}

impl Storage {
    /// Whether torch has it at this address.
    #[inline]
    pub(super) fn is(&self, address: u64) -> bool {
        self.address == address
    }

    #[inline]
    pub(super) fn references(&self, py: Python<'_>) -> PyResult<i64> {
        self.use_count.call1(py, (self.address,))?.extract(py)
    }

    /// Counts an output that has so many references to it.
    pub(super) fn add(&self, lent: &Arc<Lent>, references: i64) {
        let mut lents = self.lents();
        lents.push(Arc::clone(lent));
        self.count.store(lents.len(), Ordering::Relaxed);
        self.at_rest.fetch_add(references, Ordering::Relaxed);
    }

    /// Counts it no more.
    pub(super) fn remove(&self, lent: &Arc<Lent>, references: i64) {
        self.at_rest.fetch_sub(references, Ordering::Relaxed);
        let mut lents = self.lents();
        lents.retain(|one| !Arc::ptr_eq(one, lent));
        self.count.store(lents.len(), Ordering::Relaxed);
    }

    /// What other outputs have lent. Most storages have one.
    #[inline]
    pub(super) fn others(&self, own: &Arc<Lent>) -> Vec<Arc<Lent>> {
        if self.count.load(Ordering::Relaxed) <= 1 {
            return Vec::new();
        }
        let lents = self.lents();
        let others = lents.iter().filter(|lent| !Arc::ptr_eq(lent, own));
        others.map(Arc::clone).collect()
    }

    fn lents(&self) -> MutexGuard<'_, Vec<Arc<Lent>>> {
        self.lents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lent {
    /// Keeps what is lent.
    #[inline]
    pub(super) fn put(&self, py: Python<'_>, tensor: Py<PyAny>) {
        drop(self.tensor.replace(py, Some(tensor)));
    }

    /// What is lent, which is not kept any more.
    #[inline]
    pub(super) fn take_tensor(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.tensor.take(py)
    }

    /// Keeps where the call is.
    pub(super) fn put_site(&self, py: Python<'_>, site: Option<Site>) {
        drop(self.site.replace(py, site));
    }

    /// Shows the garbage collector what this owns: a tensor may have attributes of the user's.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.tensor
            .traverse(visit, |tensor, visit| visit.call(tensor))?;
        self.site.traverse(visit, |site, visit| {
            site.iter().try_for_each(|(code, instruction)| {
                visit.call(code)?;
                visit.call(instruction)
            })
        })
    }

    /// Takes all.
    pub(super) fn take(&self, py: Python<'_>) -> (Option<Py<PyAny>>, Option<Site>) {
        (self.tensor.take(py), self.site.take(py))
    }

    /// Takes what was lent, if it is still used, with the number of references that the caller has,
    /// and how often it is among the arguments. References of torch's own are looked for only
    /// `closely`.
    #[inline]
    fn take_used(
        &self,
        py: Python<'_>,
        given: Arguments<'_, '_>,
        closely: bool,
    ) -> PyResult<Option<(Py<PyAny>, i64, i64)>> {
        let Some(lent) = self.tensor.take(py) else {
            return Ok(None);
        };
        let others = raw::references(lent.bind(py)) - 1;
        if others == 0 {
            if closely && is_used_in_torch(lent.bind(py))? {
                return Ok(Some((lent, MANY, 0)));
            }
            self.put(py, lent);
            return Ok(None);
        }
        let times = given.count(lent.bind(py));
        let own = given.own(lent.bind(py));
        Ok(Some((lent, others - own, times)))
    }
}

/// The references that a plain call has to an argument: on the stack and among the arguments.
const CALLS: i64 = 2;

/// As many references as nobody looks for.
const MANY: i64 = 1 << 30;

impl Held {
    pub(super) fn new((callback, storages, frame, stride): Callbacks) -> Self {
        Self {
            callback,
            storages,
            frame,
            between: stride.next_power_of_two() - 1,
            calls: AtomicU64::new(0),
        }
    }

    /// Counts a call; how many there were before.
    #[inline]
    pub(super) fn next_call(&self) -> u64 {
        raw::count(&self.calls)
    }

    /// Shows the garbage collector what this owns.
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.callback)?;
        visit.call(&self.frame)?;
        visit.call(&self.storages)
    }

    /// Whether a call is one of those that are looked at closely.
    #[inline]
    pub(super) fn is_close(&self, call: u64) -> bool {
        call < FIRST_CALLS || call & self.between == 0
    }

    /// Tells of a result if it is held; whether it is.
    #[inline]
    pub(super) fn look(
        &self,
        py: Python<'_>,
        place: usize,
        lent: &Lent,
        given: Arguments<'_, '_>,
        closely: bool,
        is_own: bool,
    ) -> PyResult<bool> {
        let Some((used, count, times)) = lent.take_used(py, given, closely)? else {
            return Ok(false);
        };
        // As a rule the variable that the result of this call is assigned to.
        if !closely && count - CALLS * times <= 1 && !given.return_it(used.bind(py)) {
            return Ok(false);
        }
        self.tell(py, place, lent, Some((used, count)), given, is_own)?;
        Ok(true)
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
        given: Arguments<'_, '_>,
        is_own: bool,
    ) -> PyResult<()> {
        let site = lent.site.take(py);
        let (used, count) = used.map_or((None, MANY), |(used, count)| (Some(used), count));
        let is_returned = used
            .as_ref()
            .is_some_and(|used| given.return_it(used.bind(py)));
        let (of, Arguments { args, kwargs, .. }) = (&self.storages, given);
        let what = (
            of,
            place,
            &used,
            &site,
            count,
            is_own,
            args,
            kwargs,
            given.are_kept(),
            is_returned,
        );
        let told = self.callback.call1(py, what);
        if told.is_err() {
            lent.put_site(py, site);
            if let Some(used) = used {
                lent.put(py, used);
            }
        }
        told.map(drop)
    }

    /// Tells of a result whose memory is looked for no more, as its graph is gone or it is returned.
    #[cold]
    pub(super) fn tell_late(
        &self,
        py: Python<'_>,
        place: usize,
        tensor: &Bound<'_, PyAny>,
        site: Option<&Site>,
        count: i64,
        given: Arguments<'_, '_>,
    ) -> PyResult<()> {
        let Arguments { args, kwargs, .. } = given;
        let kept = given.are_kept();
        let what = (
            py.None(),
            place,
            tensor,
            site,
            count,
            false,
            args,
            kwargs,
            kept,
            given.return_it(tensor),
        );
        self.callback.call1(py, what).map(drop)
    }

    /// Where the call is that is under way.
    #[inline]
    pub(super) fn site(&self, py: Python<'_>) -> PyResult<Site> {
        let frame = self.frame.bind(py).call0()?;
        let code = frame.getattr(intern!(py, "f_code"))?;
        let instruction = frame.getattr(intern!(py, "f_lasti"))?;
        Ok((code.unbind(), instruction.unbind()))
    }
}

/// Whether torch has a tensor that nobody has in Python, as autograd's graph may.
#[inline]
fn is_used_in_torch(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = tensor.py();
    let uses: i64 = tensor.call_method0(intern!(py, "_use_count"))?.extract()?;
    Ok(uses > 1)
}
