//! `OperatorNotes`: where the tensors of a call's operators come from.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use super::reader::{OperatorReader, TensorFacts};

/// Notes the origins of tensors.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct OperatorNotes {
    reader: Py<OperatorReader>,
    /// For tensors that the call got, by `id`: the origin.
    inputs: Py<PyDict>,
    /// By the number of the storage.
    origins: Py<PyDict>,
    made: Py<PyDict>,
    /// Makes the weak references of `made`.
    weak_storage: Py<PyAny>,
    /// Where each input begins in its storage, in elements; none if its copy has other strides.
    begins: Vec<Option<i64>>,
    has_nested: AtomicBool,
}

/// What [`OperatorNotes::take`] says of an operator.
type Taken<'py> = (
    Bound<'py, PyTuple>,
    Bound<'py, PyTuple>,
    Vec<u64>,
    Vec<Outside<'py>>,
);

/// Memory from outside that was not known: the number of the storage, its origin, and a tensor there.
type Outside<'py> = (u64, Bound<'py, PyTuple>, Bound<'py, PyAny>);

/// Such memory of one operator, in order, and its places by the number of the storage.
#[derive(Default)]
struct New<'py> {
    all: Vec<Outside<'py>>,
    places: HashMap<u64, usize>,
}

#[pymethods]
impl OperatorNotes {
    #[new]
    fn new(
        reader: Py<OperatorReader>,
        inputs: Py<PyDict>,
        origins: Py<PyDict>,
        made: Py<PyDict>,
        weak_storage: Py<PyAny>,
        begins: Vec<Option<i64>>,
    ) -> Self {
        Self {
            reader,
            inputs,
            origins,
            made,
            weak_storage,
            begins,
            has_nested: AtomicBool::new(false),
        }
    }

    /// True if an operator got a nested tensor.
    #[getter]
    fn has_nested(&self) -> bool {
        self.has_nested.load(Ordering::Relaxed)
    }

    /// Take the arguments of an operator apart: those that are no tensors of the device, the origin and layout of
    /// each tensor, the numbers of the storages, and memory from outside that was not known. `outside` is how much
    /// such memory is known; the caller notes what is new.
    fn take<'py>(
        &self,
        args: &Bound<'py, PyAny>,
        kwargs: &Bound<'py, PyDict>,
        outside: usize,
    ) -> PyResult<Taken<'py>> {
        let py = args.py();
        let found = self.reader.get().arguments(args, kwargs)?;
        let mut given = Vec::with_capacity(found.tensors.len());
        let (mut uses, mut new) = (Vec::with_capacity(given.capacity()), New::default());
        for (tensor, facts) in &found.tensors {
            given.push(facts.storage.unwrap_or(0));
            uses.push(self.origin(tensor, facts, outside, &mut new)?);
        }
        Ok((
            PyTuple::new(py, found.numbers)?,
            PyTuple::new(py, uses)?,
            given,
            new.all,
        ))
    }

    /// Note the storages that the operator at a place made: those of its results that it did not get.
    fn make(&self, result: &Bound<'_, PyAny>, given: Vec<u64>, place: usize) -> PyResult<()> {
        let py = result.py();
        let given: HashSet<u64> = given.into_iter().collect();
        let mut results = Vec::new();
        self.reader.get().results(result, &mut results, 0)?;
        for (order, (tensor, facts)) in results.iter().enumerate() {
            let Some(storage) = facts.storage.filter(|one| !given.contains(one)) else {
                continue;
            };
            let weak = self.weak_storage.call1(py, (tensor,))?;
            self.made.bind(py).set_item(storage, weak)?;
            let origin = (intern!(py, "operator"), place, order);
            self.origins.bind(py).set_item(storage, origin)?;
        }
        Ok(())
    }
}

impl OperatorNotes {
    /// Return a tensor's origin, and its layout there.
    fn origin<'py>(
        &self,
        tensor: &Bound<'py, PyAny>,
        facts: &TensorFacts,
        outside: usize,
        new: &mut New<'py>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let py = tensor.py();
        let id = tensor.as_ptr().addr();
        if let Some(input) = self.inputs.bind(py).get_item(id)? {
            return (input,).into_pyobject(py);
        }
        let dtype = facts.kind.dtype.bind(py);
        if facts.is_single && !facts.kind.is_worked_on() {
            return ((intern!(py, "host"),), dtype).into_pyobject(py);
        }
        let other = |what: &str| (intern!(py, "other"), what).into_pyobject(py);
        let is_known = facts.offset.is_some();
        if !is_known && tensor.getattr(intern!(py, "is_nested"))?.is_truthy()? {
            // It has no shape.
            self.has_nested.store(true, Ordering::Relaxed);
            return (other("nested tensor")?, dtype).into_pyobject(py);
        }
        let shape = tensor.getattr(intern!(py, "shape"))?;
        let Some(storage) = facts.storage else {
            let class = tensor.get_type().name()?;
            return (other(&class.to_cow()?)?, shape, dtype).into_pyobject(py);
        };
        let known = self.origins.bind(py).get_item(storage)?;
        let place = new.places.get(&storage).copied();
        let is_new = known.is_none() && place.is_none();
        let origin = match (known, place) {
            (Some(known), _) => known.cast_into()?,
            (None, Some(place)) => new.all[place].1.clone(),
            (None, None) => (intern!(py, "outside"), outside + new.all.len()).into_pyobject(py)?,
        };
        let offset = match facts.offset {
            Some(offset) => offset.cast_signed(),
            None => tensor
                .call_method0(intern!(py, "storage_offset"))?
                .extract()?,
        };
        let offset = self.offset(&origin, offset)?;
        if is_new {
            new.places.insert(storage, new.all.len());
            new.all.push((storage, origin.clone(), tensor.clone()));
        }
        (origin, offset, shape, dtype).into_pyobject(py)
    }

    /// Return an offset from the begin of the input that it lies in; none if copies may have other strides.
    fn offset(&self, origin: &Bound<'_, PyTuple>, offset: i64) -> PyResult<Option<i64>> {
        let kind = origin.get_borrowed_item(0)?;
        if !kind.eq(intern!(origin.py(), "input"))? {
            return Ok(Some(offset));
        }
        let place: usize = origin.get_borrowed_item(1)?.extract()?;
        let begin = self.begins.get(place).copied().flatten();
        Ok(begin.map(|begin| if offset == 0 { 0 } else { offset - begin }))
    }
}
