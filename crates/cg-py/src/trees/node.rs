//! `TreeNode`: a recorded graph with what a replay takes and returns, and who holds its outputs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use smallvec::SmallVec;

use super::blank::Blank;
use super::deliveries::Deliveries;
use super::{End, Renewal};
use crate::error::argument;
use crate::graph::{FreshResults, Graph, ReplayTensors};
use crate::raw::{self, Attached};
use crate::tensors::TensorReader;

/// A recorded call.
#[pyclass(frozen, subclass, weakref, module = "cgraph._core")]
pub(crate) struct TreeNode {
    graph: Py<Graph>,
    /// The places of the inputs that a replay copies.
    copied: Vec<usize>,
    /// Those among them, by their number, whose elements overlap: they are copied as so many in a row.
    spans: Vec<(usize, usize)>,
    /// The inputs that lie in outputs of the path, by place: called without arguments, each makes a tensor that
    /// is like the input.
    stand_ins: Vec<(usize, Py<PyAny>)>,
    outputs: Vec<Output>,
    /// The places of the outputs that require gradients.
    with_gradients: Vec<usize>,
    /// The tensors that callers get aliases of.
    prototypes: Attached<Py<PyTuple>>,
    /// The number of the piece of each prototype.
    places: Vec<usize>,
    pieces: Attached<Vec<Piece>>,
    /// What makes a prototype anew, for each piece that has one only.
    blanks: Attached<Vec<Option<Blank>>>,
    keeps_held: bool,
    reader: Py<TensorReader>,
    /// Counts the references to a storage, by the address of its object; none where that is read in place.
    count_uses: Option<Py<PyAny>>,
    replays: AtomicU64,
    /// The bytes of its outputs that were copied as somebody held them.
    kept: AtomicU64,
    /// Makes new tensors in place of aliases of prototypes.
    fresh: Option<Py<FreshResults>>,
    /// Another recording may have that, if this one does not.
    may_be_fresh: AtomicBool,
    deliveries: Deliveries,
}

/// New tensors of a replay.
pub(super) type FreshTensors<'py> = Vec<Bound<'py, PyAny>>;

/// What a call returns at one place.
enum Output {
    /// An alias of a prototype.
    Own(usize),
    /// A tensor over an output of another node of the path: called without arguments, it makes one.
    OfPath(Py<PyAny>),
    /// The input at a place, itself.
    Input(usize),
    /// An alias of a tensor that was there before.
    Static(Py<PyAny>),
    /// Something else than a tensor.
    Constant(Py<PyAny>),
}

/// The storage of a piece of memory.
#[derive(Clone, Copy)]
struct Piece {
    /// The address of its object, which something else keeps.
    storage: u64,
    /// The references to it that are not a caller's.
    own: u32,
}

#[pymethods]
impl TreeNode {
    /// `graph` replays with the inputs that are copied, which lie at the places `copied`. `spans` says of how many elements in a row those among them are that overlap themselves.
    /// `outputs` are pairs: `("own", number)` of a prototype, `("input", place)`, `("path", make)`,
    /// `("static", tensor)` or `("constant", value)`; those at the places `with_gradients` require gradients.
    /// `places` are the numbers of the pieces of memory of the prototypes, which
    /// `reader` reads. With `keeps_held`, outputs that are held when the path ends get memory of their own.
    /// `count_uses` counts the references to a storage, by the address of its object, in a torch where that
    /// cannot be read in place.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "given once for each recording")]
    fn new(
        py: Python<'_>,
        graph: Py<Graph>,
        copied: Vec<usize>,
        spans: Vec<(usize, usize)>,
        stand_ins: Vec<(usize, Py<PyAny>)>,
        outputs: &Bound<'_, PyList>,
        with_gradients: Vec<usize>,
        places: Vec<usize>,
        keeps_held: bool,
        reader: Py<TensorReader>,
        count_uses: Option<Py<PyAny>>,
        fresh: Option<Py<FreshResults>>,
        may_be_fresh: bool,
    ) -> PyResult<Self> {
        let outputs = outputs.iter().map(|one| Output::parse(&one));
        Ok(Self {
            graph,
            copied,
            spans,
            stand_ins,
            outputs: outputs.collect::<PyResult<_>>()?,
            with_gradients,
            prototypes: Attached::new(PyTuple::empty(py).unbind()),
            places,
            pieces: Attached::default(),
            blanks: Attached::default(),
            keeps_held,
            reader,
            count_uses,
            replays: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            deliveries: Deliveries::new(fresh.is_some()),
            fresh,
            may_be_fresh: AtomicBool::new(may_be_fresh),
        })
    }

    /// Take the prototypes, and the storage of each piece: its address, and how many references to it are
    /// not a caller's. The caller keeps the storages, by these tensors or by weak references.
    ///
    /// At the same time, `ends` are called with nothing: they end what callers have.
    #[pyo3(signature = (prototypes, storages, ends=Vec::new()))]
    fn hold(
        &self,
        prototypes: Bound<'_, PyTuple>,
        storages: Vec<(u64, u32)>,
        ends: Vec<Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let py = prototypes.py();
        let blanks = (0..storages.len())
            .map(|piece| Blank::of(self.reader.get(), &self.places, &prototypes, piece));
        let blanks: Vec<_> = blanks.collect::<PyResult<_>>()?;
        drop(self.blanks.replace(py, blanks));
        let pieces = storages.into_iter();
        let pieces = pieces.map(|(storage, own)| Piece { storage, own });
        drop(self.pieces.replace(py, pieces.collect()));
        let before = self.prototypes.replace(py, prototypes.unbind());
        for end in ends {
            end.call0()?;
        }
        drop(before);
        Ok(())
    }

    /// Count bytes of outputs that were copied as somebody held them.
    fn note_kept(&self, bytes: u64) {
        self.deliveries.note_held();
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// The bytes of its outputs that were copied as somebody held them.
    #[getter]
    fn kept_bytes(&self) -> u64 {
        self.kept.load(Ordering::Relaxed)
    }

    /// Return how often it was replayed for a call.
    #[getter]
    fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    /// Outputs that are held when the path ends get memory of their own.
    #[getter]
    pub(super) fn keeps_held(&self) -> bool {
        self.keeps_held
    }

    /// The number of the piece of memory of each prototype.
    #[getter]
    fn places(&self) -> Vec<usize> {
        self.places.clone()
    }

    /// The tensors that callers get aliases of.
    #[getter]
    fn prototypes(&self, py: Python<'_>) -> Py<PyTuple> {
        self.prototypes.get(py)
    }

    /// Return whether somebody holds a piece.
    fn is_held(&self, py: Python<'_>, index: usize) -> bool {
        self.is_alive(py, index)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.graph)?;
        for output in &self.outputs {
            match output {
                Output::OfPath(one) | Output::Static(one) | Output::Constant(one) => {
                    visit.call(one)?;
                }
                Output::Own(_) | Output::Input(_) => {}
            }
        }
        visit.call(&self.fresh)?;
        visit.call(&self.count_uses)
    }
}

impl TreeNode {
    #[inline]
    pub(super) fn is_alive(&self, py: Python<'_>, index: usize) -> bool {
        let pieces = self.pieces.take(py);
        let piece = pieces.get(index).copied();
        drop(self.pieces.replace(py, pieces));
        piece.is_some_and(|piece| self.uses(py, piece.storage) > piece.own)
    }

    /// Return how many references a storage has; more than there can be if torch does not say.
    #[inline]
    fn uses(&self, py: Python<'_>, storage: u64) -> u32 {
        let Some(count) = &self.count_uses else {
            return raw::storage_uses(storage);
        };
        let counted = count.bind(py).call1((storage,));
        counted.and_then(|uses| uses.extract()).unwrap_or(u32::MAX)
    }

    /// Take a piece away from those who hold it: they get other memory, or what accesses theirs raises `message`. The
    /// prototype is another one. False if only Python can do that.
    #[inline]
    pub(super) fn take_away(
        &self,
        py: Python<'_>,
        index: usize,
        end: End,
        with: &Renewal,
        message: &Py<PyAny>,
    ) -> PyResult<bool> {
        if self.count_uses.is_some() || (end == End::Kept && !with.exchanges) {
            return Ok(false);
        }
        let prototypes = self.prototypes.get(py).into_bound(py);
        let blanks = self.blanks.take(py);
        let made = blanks
            .get(index)
            .and_then(Option::as_ref)
            .and_then(|blank| blank.renew(self.reader.get(), &prototypes, end, with));
        drop(self.blanks.replace(py, blanks));
        let Some((number, made, storage, bytes)) = made else {
            return Ok(false);
        };
        let others = prototypes.iter_borrowed().enumerate();
        let next: SmallVec<[Bound<'_, PyAny>; 8]> = others
            .map(|(place, one)| {
                if place == number {
                    made.clone()
                } else {
                    one.to_owned()
                }
            })
            .collect();
        let next = PyTuple::new(py, next)?.unbind();
        let mut pieces = self.pieces.take(py);
        let own = raw::storage_uses(storage);
        let before = std::mem::replace(&mut pieces[index], Piece { storage, own });
        drop(self.pieces.replace(py, pieces));
        // The storage before lives as long as its prototype.
        let others = self.prototypes.replace(py, next);
        match end {
            End::Kept => {
                raw::exchange_memory(before.storage, storage);
                self.note_kept(bytes);
            }
            End::Stale => drop(with.set_error.call1(py, (before.storage, message))?),
        }
        drop(others);
        Ok(true)
    }

    /// The inputs that lie in outputs of the path: their places, and what makes another tensor like each.
    #[inline]
    pub(super) fn stand_ins(&self) -> &[(usize, Py<PyAny>)] {
        &self.stand_ins
    }

    /// Return, once, whether a recording is wanted whose replays can copy results to new memory.
    #[inline]
    pub(super) fn wants_fresh(&self) -> bool {
        self.keeps_held
            && self.fresh.is_none()
            && self.deliveries.are_wanted()
            && self.may_be_fresh.swap(false, Ordering::Relaxed)
    }

    /// Enqueue a replay with the inputs at the places that are copied; new tensors in place of aliases of
    /// prototypes, if it has made some.
    #[inline]
    pub(super) fn replay<'py>(
        &self,
        py: Python<'py>,
        inputs: &[Option<Bound<'py, PyAny>>],
        stream: u64,
    ) -> PyResult<Option<FreshTensors<'py>>> {
        let copied = self.copied.iter();
        let mut copied: SmallVec<[Bound<'_, PyAny>; 16]> =
            copied.filter_map(|place| inputs[*place].clone()).collect();
        for (number, count) in &self.spans {
            let tensor = &copied[*number];
            copied[*number] = tensor.call_method1(intern!(py, "as_strided"), ((count,), (1,)))?;
        }
        let delivers = self.deliveries.next(self.fresh.is_some());
        let copied = PyTuple::new(py, copied)?;
        let (graph, given) = (self.graph.bind(py), ReplayTensors::of(&copied));
        match &self.fresh {
            Some(fresh) if delivers => {
                Graph::replay_made(graph, fresh.get(), given, Some(stream)).map(Some)
            }
            _ => Graph::run(graph, given, None, Some(stream)).map(|()| None),
        }
    }

    /// Return what a call with these inputs returns; `fresh` are new tensors of the replay.
    #[inline]
    pub(super) fn result<'py>(
        &self,
        py: Python<'py>,
        inputs: &[Option<Bound<'py, PyAny>>],
        fresh: Option<&FreshTensors<'py>>,
    ) -> PyResult<Bound<'py, PyList>> {
        raw::count(&self.replays);
        let prototypes = self.prototypes.get(py).into_bound(py);
        let alias = |tensor: &Bound<'py, PyAny>| tensor.call_method0(intern!(py, "detach"));
        let outputs = self.outputs.iter().map(|output| match output {
            Output::Own(number) => match fresh {
                Some(fresh) => Ok(fresh[*number].clone()),
                None => alias(&prototypes.get_item(*number)?),
            },
            Output::Input(place) => Ok(inputs[*place]
                .clone()
                .unwrap_or_else(|| py.None().into_bound(py))),
            Output::OfPath(make) => make.bind(py).call0(),
            Output::Static(tensor) => alias(tensor.bind(py)),
            Output::Constant(value) => Ok(value.bind(py).clone()),
        });
        let outputs: SmallVec<[Bound<'py, PyAny>; 8]> = outputs.collect::<PyResult<_>>()?;
        for place in &self.with_gradients {
            outputs[*place].call_method0(intern!(py, "requires_grad_"))?;
        }
        PyList::new(py, outputs)
    }
}

impl Output {
    fn parse(from: &Bound<'_, PyAny>) -> PyResult<Self> {
        let kind: String = from.get_item(0)?.extract()?;
        let value = from.get_item(1)?;
        Ok(match kind.as_str() {
            "own" => Self::Own(value.extract()?),
            "input" => Self::Input(value.extract()?),
            "path" => Self::OfPath(value.unbind()),
            "static" => Self::Static(value.unbind()),
            "constant" => Self::Constant(value.unbind()),
            _ => {
                let expected = "own, input, path, static or constant";
                return Err(argument("the kind of an output", &kind, expected));
            }
        })
    }
}
