//! `FreshResults`: new tensors for the results of a replay, which are the caller's own.

use std::collections::HashMap;

use cg_core::{Address, Destination};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use smallvec::SmallVec;

use crate::arguments::MatchedTensors;
use crate::detach::require_unforked;
use crate::error::argument;
use crate::raw::{Form, NewTensor};
use crate::tensors::TensorReader;

/// Makes new tensors that are like the results of a graph: of the same dtypes, sizes and strides,
/// and sharing memory where those share it.
#[pyclass(frozen, name = "Fresh", module = "cgraph._core")]
pub(crate) struct FreshResults {
    /// The destination of a result that no tensor is made for: none.
    nowhere: Box<[Destination]>,
    groups: Vec<Group>,
    results: usize,
    reader: Py<TensorReader>,
    native: Option<NewTensor>,
    /// `torch.empty_strided`.
    empty_strided: Py<PyAny>,
}

/// New tensors, and where each piece of a graph's memory is to be copied to for them.
pub(crate) struct NewResults<'py> {
    tensors: Few<Option<Bound<'py, PyAny>>>,
    to: Few<Destination>,
}

/// So many have room without an allocation.
type Few<T> = SmallVec<[T; 4]>;

/// One piece of memory.
struct Group {
    /// The number of the graph's piece that it is a copy of.
    place: usize,
    /// Number of bytes of that.
    bytes: u64,
    /// The tensor that it is allocated as.
    layout: Layout,
    members: Members,
}

enum Members {
    /// That tensor is the result of this number.
    Alone(usize),
    /// Those are results, each a view of it.
    Views(Vec<View>),
}

struct Layout {
    sizes: Box<[i64]>,
    strides: Box<[i64]>,
    /// Its dtype and its device for torch's C functions; none where they do not tell.
    form: Option<Form>,
    args: Py<PyTuple>,
    kwargs: Py<PyDict>,
}

struct View {
    result: usize,
    /// None if all of the piece have the same.
    dtype: Option<Py<PyAny>>,
    /// Sizes, strides and offset.
    args: Py<PyTuple>,
}

/// One result, as it lies in the graph's memory.
struct Prototype<'py> {
    result: usize,
    place: usize,
    /// Its begin there, and the end of its last byte.
    start: u64,
    end: u64,
    element_bytes: u64,
    sizes: Vec<i64>,
    strides: Vec<i64>,
    tensor: Bound<'py, PyAny>,
}

/// Shared memory is a multiple of so many bytes, so that each dtype divides it.
const LARGEST_ELEMENT: u64 = 16;

#[pymethods]
impl FreshResults {
    /// `storages` are the pieces of memory that replays copy, as for `Outputs`, and `results` a tensor
    /// in that memory for each new one, with the place of its piece. `empty_strided` is torch's, and
    /// `functions` are the addresses of the C functions that do the same; without them it is called.
    #[new]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "pyo3 takes a vector out of any sequence"
    )]
    fn new(
        storages: Vec<(u64, u64)>,
        results: Vec<(usize, Bound<'_, PyAny>)>,
        reader: Bound<'_, TensorReader>,
        empty_strided: Bound<'_, PyAny>,
        functions: HashMap<String, usize>,
    ) -> PyResult<Self> {
        let nowhere = storages.iter().map(|(address, _)| Destination {
            address: Address(*address),
            bytes: 0,
        });
        let mut groups: Vec<Vec<Prototype<'_>>> = storages.iter().map(|_| Vec::new()).collect();
        for (number, (place, tensor)) in results.iter().enumerate() {
            let storage = *storages.get(*place).ok_or_else(|| {
                let expected = format!("less than {}", storages.len());
                argument("the place of a result", &place.to_string(), &expected)
            })?;
            let prototype = Prototype::new(reader.get(), number, *place, storage, tensor)?;
            groups[*place].push(prototype);
        }
        let groups = groups.into_iter().filter(|group| !group.is_empty());
        let groups = groups.map(|group| Group::new(reader.get(), &group));
        Ok(Self {
            nowhere: nowhere.collect(),
            groups: groups.collect::<PyResult<_>>()?,
            results: results.len(),
            native: NewTensor::find(&functions),
            reader: reader.unbind(),
            empty_strided: empty_strided.unbind(),
        })
    }

    /// Return whether torch's C functions make the tensors.
    #[getter]
    fn is_native(&self) -> bool {
        let all_known = self.groups.iter().all(|group| group.layout.form.is_some());
        self.native.is_some() && all_known
    }

    /// Make new tensors, allocated on the current stream, and address and bytes of where each piece of memory
    /// is to be copied to.
    #[pyo3(name = "make")]
    fn make_for_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let new = self.make(py)?;
        (new.tensors(), new.addresses()).into_pyobject(py)
    }
}

impl FreshResults {
    /// Return how many new tensors it makes.
    pub(crate) fn results(&self) -> usize {
        self.results
    }

    /// Make new tensors, allocated on the current stream.
    #[inline]
    pub(crate) fn make<'py>(&self, py: Python<'py>) -> PyResult<NewResults<'py>> {
        require_unforked()?;
        let mut new = NewResults {
            tensors: SmallVec::from_elem(None, self.results),
            to: SmallVec::from_slice(&self.nowhere),
        };
        for group in &self.groups {
            let (tensor, address) = self.allocate(py, &group.layout)?;
            if group.bytes > 0 {
                new.to[group.place] = Destination {
                    address: Address(address),
                    bytes: group.bytes,
                };
            }
            match &group.members {
                Members::Alone(result) => new.tensors[*result] = Some(tensor),
                Members::Views(views) => {
                    for view in views {
                        new.tensors[view.result] = Some(view.of(&tensor)?);
                    }
                }
            }
        }
        Ok(new)
    }

    #[inline]
    fn allocate<'py>(
        &self,
        py: Python<'py>,
        layout: &Layout,
    ) -> PyResult<(Bound<'py, PyAny>, u64)> {
        if let (Some(native), Some(form)) = (&self.native, &layout.form)
            && let Some(made) = native.make(py, form, &layout.sizes, &layout.strides)
        {
            return Ok(made);
        }
        let (args, kwargs) = (layout.args.bind(py), layout.kwargs.bind(py));
        let tensor = self.empty_strided.bind(py).call(args, Some(kwargs))?;
        let address = self.reader.get().address(&tensor)?;
        Ok((tensor, address))
    }
}

impl<'py> NewResults<'py> {
    /// Return where each piece of memory is to be copied to.
    #[inline]
    pub(crate) fn to(&self) -> &[Destination] {
        &self.to
    }

    /// One of the tensors.
    #[inline]
    pub(crate) fn get(&self, result: usize) -> Bound<'py, PyAny> {
        let tensor = self.tensors[result].clone();
        tensor.expect("each result is of one group")
    }

    pub(crate) fn tensors(&self) -> Vec<Bound<'py, PyAny>> {
        self.tensors.iter().flatten().cloned().collect()
    }

    /// [`Self::to`] for Python.
    pub(crate) fn addresses(&self) -> Vec<(u64, u64)> {
        self.to.iter().map(|to| (to.address.0, to.bytes)).collect()
    }
}

/// Call what replays with a tuple of tensors, and where there are new results with where they go.
pub(crate) fn call_with<'py>(
    replay: &Bound<'py, PyAny>,
    tensors: MatchedTensors<'_, 'py>,
    new: Option<&NewResults<'py>>,
) -> PyResult<Bound<'py, PyAny>> {
    let tensors = tensors.to_tuple(replay.py())?;
    match new {
        Some(new) => replay.call1((tensors, new.addresses())),
        None => replay.call1((tensors,)),
    }
}

impl<'py> Prototype<'py> {
    fn new(
        reader: &TensorReader,
        result: usize,
        place: usize,
        (address, bytes): (u64, u64),
        tensor: &Bound<'py, PyAny>,
    ) -> PyResult<Self> {
        let (at, element_bytes, sizes, strides) = reader.with(tensor, |view| {
            (
                view.address,
                view.element_bytes,
                view.shape.to_vec(),
                view.strides.to_vec(),
            )
        })?;
        let elements = if sizes.contains(&0) {
            0
        } else {
            let steps = sizes.iter().zip(&strides);
            1 + steps.map(|(size, stride)| (size - 1) * stride).sum::<i64>()
        };
        let span = elements.cast_unsigned() * element_bytes;
        let start = if span == 0 {
            0
        } else {
            at.wrapping_sub(address)
        };
        let end = start.saturating_add(span);
        if end > bytes {
            let given = format!("{span} bytes at {at:#x}");
            let expected = format!("inside of {bytes} at {address:#x}");
            return Err(argument("the memory of a result", &given, &expected));
        }
        Ok(Self {
            result,
            place,
            start,
            end,
            element_bytes,
            sizes,
            strides,
            tensor: tensor.clone(),
        })
    }

    fn dtype(&self) -> PyResult<Bound<'py, PyAny>> {
        self.tensor.getattr(intern!(self.tensor.py(), "dtype"))
    }

    /// Return the result as a view of a tensor of all bytes, or of all elements of its dtype.
    fn view(&self, is_typed: bool) -> PyResult<View> {
        let py = self.tensor.py();
        let offset = self.start / self.element_bytes;
        if !self.start.is_multiple_of(self.element_bytes) {
            let expected = format!("a multiple of {}", self.element_bytes);
            return Err(argument(
                "the begin of a result",
                &self.start.to_string(),
                &expected,
            ));
        }
        let (sizes, strides) = (
            PyTuple::new(py, &self.sizes)?,
            PyTuple::new(py, &self.strides)?,
        );
        Ok(View {
            result: self.result,
            dtype: if is_typed {
                None
            } else {
                Some(self.dtype()?.unbind())
            },
            args: (sizes, strides, offset).into_pyobject(py)?.unbind(),
        })
    }
}

impl Group {
    fn new(reader: &TensorReader, prototypes: &[Prototype<'_>]) -> PyResult<Self> {
        let end = prototypes.iter().map(|one| one.end).max().unwrap_or(0);
        let first = &prototypes[0];
        let place = first.place;
        if let [only] = prototypes
            && only.start == 0
        {
            return Ok(Self {
                place,
                bytes: end,
                layout: Layout::new(reader, &only.tensor, &only.sizes, &only.strides)?,
                members: Members::Alone(only.result),
            });
        }
        let dtype = first.dtype()?;
        let mut have_same = true;
        for one in prototypes {
            have_same &= one.dtype()?.is(&dtype);
        }
        let (like, element_bytes) = if have_same {
            (first.tensor.clone(), first.element_bytes)
        } else {
            let bytes = first.tensor.call_method1("new_empty", (0,))?;
            let uint8 = bytes.py().import("torch")?.getattr("uint8")?;
            (bytes.call_method1("view", (uint8,))?, 1)
        };
        let count = end.next_multiple_of(LARGEST_ELEMENT) / element_bytes;
        let views = prototypes.iter().map(|one| one.view(have_same));
        Ok(Self {
            place,
            bytes: end,
            layout: Layout::new(reader, &like, &[count.cast_signed()], &[1])?,
            members: Members::Views(views.collect::<PyResult<_>>()?),
        })
    }
}

impl Layout {
    /// That of a tensor of the dtype and the device of another one.
    fn new(
        reader: &TensorReader,
        like: &Bound<'_, PyAny>,
        sizes: &[i64],
        strides: &[i64],
    ) -> PyResult<Self> {
        let py = like.py();
        let kwargs = PyDict::new(py);
        kwargs.set_item("dtype", like.getattr("dtype")?)?;
        kwargs.set_item("device", like.getattr("device")?)?;
        let args = (PyTuple::new(py, sizes)?, PyTuple::new(py, strides)?);
        Ok(Self {
            sizes: sizes.into(),
            strides: strides.into(),
            form: reader.fast().and_then(|fast| fast.form(like)),
            args: args.into_pyobject(py)?.unbind(),
            kwargs: kwargs.unbind(),
        })
    }
}

impl View {
    fn of<'py>(&self, whole: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = whole.py();
        let view = |of: &Bound<'py, PyAny>| {
            of.call_method1(intern!(py, "as_strided"), self.args.bind(py).clone())
        };
        match &self.dtype {
            Some(dtype) => view(&whole.call_method1(intern!(py, "view"), (dtype.bind(py),))?),
            None => view(whole),
        }
    }
}
