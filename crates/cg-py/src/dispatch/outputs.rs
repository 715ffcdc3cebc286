//! `Outputs`: what an entry returns.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};

use super::contents::items_of;
use super::found::Tensors;
use super::held::{Arguments, Callbacks, Held, Lent, Storage};
use super::neighbours::{Loan, Neighbours};
use crate::error::argument;
use crate::raw::{self, WeakReferences};
use crate::signature::{Match, Signature};

/// The result of a replay.
pub(crate) struct Outputs {
    leaves: Vec<Leaf>,
    /// The places of the arguments among them.
    returned: Box<[usize]>,
    build: Build,
    held: Option<Arc<Held>>,
    /// The graphs of the same pool, and the number of this one among them.
    neighbours: Py<Neighbours>,
    number: u64,
    /// Whether it may overwrite what they have returned.
    overwrites: bool,
    /// Whether the neighbours know of what was returned.
    is_noted: Arc<AtomicBool>,
}

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
    weak_references: WeakReferences,
    lent: Arc<Lent>,
    storage: Py<Storage>,
    /// To its storage, of the two tensors here.
    references: i64,
}

/// What Python gives for the outputs: leaves, build, who is told of held ones, and the neighbours with
/// the graph's number among them and whether it may overwrite what they have returned.
pub(crate) type Returned<'py> = (
    Bound<'py, PyList>,
    Bound<'py, PyAny>,
    Option<Callbacks>,
    (Py<Neighbours>, u64, bool),
);

/// Tensors that an [`Output`] has: `own` and `lent`.
const TENSORS: i64 = 2;

impl Outputs {
    /// Reads leaves: `("static", tensor, signature, storage)`, `("copied", tensor)`, `("argument",
    /// place)` or `("constant", value)`, each tensor an object of its own. `build` is `"single"`,
    /// `"tuple"` or a callable that takes a list of leaves.
    pub(crate) fn new(
        given: &Bound<'_, PyList>,
        build: &Bound<'_, PyAny>,
        held: Option<Callbacks>,
        (neighbours, number, overwrites): (Py<Neighbours>, u64, bool),
    ) -> PyResult<Self> {
        let leaves: PyResult<Vec<Leaf>> = given.iter().map(|leaf| Leaf::parse(&leaf)).collect();
        let leaves = leaves?;
        let build = match build.extract::<String>().as_deref() {
            Ok("single") if leaves.len() == 1 => Build::Single,
            Ok("tuple") => Build::Tuple,
            _ => Build::Other(build.clone().unbind()),
        };
        if let Some((somebody, ..)) = &held {
            neighbours.get().know(somebody.bind(given.py()));
        }
        let returned = leaves.iter().filter_map(|leaf| match leaf {
            Leaf::Argument(place) => Some(*place),
            Leaf::Static(_) | Leaf::Copied(_) | Leaf::Constant(_) => None,
        });
        Ok(Self {
            returned: returned.collect(),
            leaves,
            build,
            held: held.map(|callbacks| Arc::new(Held::new(callbacks))),
            neighbours,
            number,
            overwrites,
            is_noted: Arc::default(),
        })
    }

    /// Tells Python of each result that is still held, which the next replay overwrites.
    #[inline]
    pub(crate) fn release(&self, py: Python<'_>, given: Arguments<'_, '_>) -> PyResult<()> {
        let given = Arguments {
            // Where a result is only about to go, nothing is returned.
            returned: if given.tensors.is_empty() {
                &[]
            } else {
                &self.returned
            },
            ..given
        };
        let call = self.held.as_ref().map(|held| {
            let call = held.next_call();
            (held, call, held.is_close(call))
        });
        let neighbours = self.neighbours.get();
        if let Some((held, ..)) = call {
            self.keep_returned(py, held, given)?;
        }
        if !self.overwrites {
            neighbours.note_harmless();
        } else if !neighbours.is_last(self.number) {
            let closely = call.is_none_or(|(_, _, closely)| closely);
            neighbours.release(py, self.number, given, closely)?;
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
                is_told |= held.look(py, place, lent, given, closely, true)?;
            }
            if closely && !is_told && storage.is_held(py)? {
                held.tell(py, place, &output.lent, None, given, true)?;
            }
        }
        if held.is_close(call + 1) {
            let site = held.site(py)?;
            for leaf in &self.leaves {
                if let Leaf::Static(output) = leaf {
                    let (code, instruction) = &site;
                    let copy = (code.clone_ref(py), instruction.clone_ref(py));
                    output.lent.put_site(py, Some(copy));
                }
            }
        } else if closely {
            for leaf in &self.leaves {
                if let Leaf::Static(output) = leaf {
                    output.lent.put_site(py, None);
                }
            }
        }
        Ok(())
    }

    /// Gives arguments that the call returns memory of their own where they lie in results that it
    /// overwrites.
    #[inline]
    fn keep_returned(&self, py: Python<'_>, held: &Held, given: Arguments<'_, '_>) -> PyResult<()> {
        for place in given.returned {
            let tensor = given.tensors.get(*place);
            let storage = tensor.call_method0(intern!(py, "untyped_storage"))?;
            let storage = storage.getattr(intern!(py, "_cdata"))?.extract()?;
            let is_own = self.leaves.iter().any(|leaf| match leaf {
                Leaf::Static(output) => output.storage.get().is(storage),
                Leaf::Copied(_) | Leaf::Argument(_) | Leaf::Constant(_) => false,
            });
            if is_own || self.neighbours.get().have_lent(storage) {
                held.tell_late(py, *place, &tensor, None, 0, given)?;
            }
        }
        Ok(())
    }

    /// What the call returns.
    #[inline]
    pub(crate) fn result(&self, py: Python<'_>, tensors: Tensors<'_, '_>) -> PyResult<Py<PyAny>> {
        if let Some(held) = &self.held
            && !self.is_noted.load(Ordering::Relaxed)
        {
            self.is_noted.store(true, Ordering::Relaxed);
            self.neighbours.get().note(self.loans(py, held));
        }
        let all = || self.leaves.iter().map(|leaf| leaf.lend(py, tensors));
        match &self.build {
            Build::Single => self.leaves[0].lend(py, tensors),
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

    /// Shows the garbage collector what this owns. Tensors that no caller gets refer to nothing.
    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if let Build::Other(build) = &self.build {
            visit.call(build)?;
        }
        if let Some(held) = &self.held {
            held.traverse(visit)?;
        }
        self.leaves.iter().try_for_each(|leaf| match leaf {
            Leaf::Constant(constant) => visit.call(constant),
            Leaf::Static(output) => output.lent.traverse(visit),
            Leaf::Copied(_) | Leaf::Argument(_) => Ok(()),
        })
    }
}

impl Drop for Outputs {
    /// Results that a caller still has stay what other graphs may overwrite.
    fn drop(&mut self) {
        let Some(held) = self.held.take() else {
            return;
        };
        // Without the interpreter, at its end, nothing is replayed any more.
        Python::try_attach(|py| {
            // Only then may tensors go, which may run any code: all locks are open.
            let mut lent = Vec::new();
            for (place, leaf) in self.leaves.iter().enumerate() {
                if let Leaf::Static(output) = leaf {
                    let (tensor, site) = output.lent.take(py);
                    lent.extend(tensor.map(|tensor| (place, tensor, site)));
                }
            }
            for (place, tensor, site) in lent {
                let neighbours = self.neighbours.get();
                neighbours.orphan(tensor.bind(py), self.number, place, site, &held);
            }
        });
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
                lent.put(py, value.call_method0("detach")?.unbind());
                // A tensor of a class derived from torch's has a second one inside it, which `own`
                // was made with as well. Python code of the class may have let others go meanwhile.
                let references = TENSORS * (shared.references(py)? - before).max(1);
                shared.add(&lent, references);
                Self::Static(Output {
                    weak_references: WeakReferences::of(&value.get_type())?,
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
    fn lend(&self, py: Python<'_>, tensors: Tensors<'_, '_>) -> PyResult<Py<PyAny>> {
        match self {
            Self::Static(output) => output.lend(py),
            Self::Copied(own) => own.call_method0(py, intern!(py, "clone")),
            Self::Argument(place) => Ok(tensors.get(*place).to_owned().unbind()),
            Self::Constant(value) => Ok(value.clone_ref(py)),
        }
    }
}

impl Output {
    /// An alias that no caller has and that is as it was made.
    #[inline]
    fn lend(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let lent = self.lent.take_tensor(py);
        if let Some(lent) = lent.map(|lent| lent.into_bound(py)) {
            let signature = self.signature.get();
            let is_free = raw::references(&lent) == 1
                && signature.matches(&lent, false)? == Some(Match::Same)
                && is_as_given(&lent, self.own.bind(py))?
                && !self.weak_references.may_be_there(&lent)
                && signature.reader().get().is_untouched(&lent)?;
            if is_free {
                self.lent.put(py, lent.clone().unbind());
                return Ok(lent.unbind());
            }
        }
        let new = self.own.call_method0(py, intern!(py, "detach"))?;
        self.lent.put(py, new.clone_ref(py));
        Ok(new)
    }
}

/// Whether a tensor has the class of another one, and no attributes that a caller has given it.
#[inline]
fn is_as_given(tensor: &Bound<'_, PyAny>, own: &Bound<'_, PyAny>) -> PyResult<bool> {
    if !tensor.get_type().is(own.get_type()) {
        return Ok(false);
    }
    let given = raw::attributes(tensor)?;
    if given.is_empty() {
        return Ok(true);
    }
    // Those of a class derived from torch's.
    Ok(raw::has_just(&given, &items_of(&raw::attributes(own)?)))
}

impl Drop for Output {
    fn drop(&mut self) {
        self.storage.get().remove(&self.lent, self.references);
    }
}
