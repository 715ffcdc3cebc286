//! Torch tensors, read by C functions of torch's where they can, else by Python calls; and static tensors,
//! which others are compared with.

mod fast_signature;
mod own_memory;
mod same_places;
mod signature;

use std::collections::{BTreeMap, HashMap};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

use crate::error::argument;
use crate::raw::{self, DlpackReader, FastReader};

pub(crate) use crate::raw::{Dtype, Lazy, Place, View};
pub(crate) use fast_signature::{FastMatch, FastSignature};
pub(crate) use own_memory::Match;
pub(crate) use same_places::SamePlaces;
pub(crate) use signature::Signature;

/// Reads tensors.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct TensorReader {
    fast: Option<FastReader>,
    function: Option<DlpackReader>,
    class: Py<PyType>,
}

#[pymethods]
impl TensorReader {
    /// Return where it reads fields of tensors and of their storages, in bytes.
    #[staticmethod]
    fn places() -> BTreeMap<&'static str, usize> {
        BTreeMap::from(raw::PLACES)
    }

    /// `tensor_type` is `torch.Tensor`, `exchange_api` its `__dlpack_c_exchange_api__` or `None`,
    /// `functions` the addresses of torch's stable functions, by their names. These read what is of
    /// just the classes of the samples. `fields` are where what is read without them was found.
    #[new]
    #[pyo3(signature = (tensor_type, exchange_api, functions=None, samples=Vec::new(), fields=HashMap::new()))]
    #[expect(
        clippy::needless_pass_by_value,
        reason = "a list and a dictionary of Python's"
    )]
    fn new(
        tensor_type: &Bound<'_, PyType>,
        exchange_api: Option<&Bound<'_, PyCapsule>>,
        functions: Option<HashMap<String, usize>>,
        samples: Vec<Bound<'_, PyAny>>,
        fields: HashMap<String, usize>,
    ) -> PyResult<Self> {
        let class = tensor_type.clone().unbind();
        let fast = functions.map(|known| FastReader::new(&known, &fields, &samples, &class));
        let mut fast = fast.transpose()?.flatten();
        if let Some(fast) = &mut fast {
            let flags = samples.iter().map(|one| gradient_flag(one).ok());
            let gradients_agree = flags.eq(samples.iter().map(|one| fast.requires_grad(one)));
            let flags = samples.iter().map(|one| lazy_flags(one).ok());
            let lazy_agree = flags.eq(samples.iter().map(|one| fast.is_lazy(one)));
            fast.require(gradients_agree, lazy_agree);
        }
        let function = exchange_api.map(|capsule| DlpackReader::new(capsule, tensor_type));
        Ok(Self {
            fast,
            function: function.transpose()?,
            class,
        })
    }

    /// Return whether torch's stable functions read what they can.
    #[getter]
    fn uses_stable_functions(&self) -> bool {
        self.fast.as_ref().is_some_and(|fast| !fast.has_failed())
    }

    /// Return whether tensors are read by their fields where they can.
    #[getter]
    fn uses_fields(&self) -> bool {
        let fast = self.fast.as_ref();
        self.uses_stable_functions() && fast.is_some_and(FastReader::has_fields)
    }

    /// Return whether a tensor requires a gradient.
    #[inline]
    pub(crate) fn requires_grad(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        if let Some(answer) = self.fast().and_then(|fast| fast.requires_grad(tensor)) {
            return Ok(answer);
        }
        gradient_flag(tensor)
    }
}

impl TensorReader {
    /// Return whether a value is a tensor, or of a class derived from it.
    #[inline]
    pub(crate) fn is_tensor(&self, value: &Bound<'_, PyAny>) -> bool {
        raw::is_instance(value, &self.class)
    }

    /// Return whether a tensor that requires no gradient has neither one nor hooks nor names. Where fields are
    /// not known, hooks of torch's own are not seen.
    #[inline]
    pub(crate) fn is_untouched(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        if let Some(answer) = self.fast().and_then(|fast| fast.is_untouched(tensor)) {
            return Ok(answer);
        }
        let py = tensor.py();
        let hooks = tensor.getattr(intern!(py, "_backward_hooks"))?;
        // torch 2.15 has no names any more.
        let has_names = tensor.getattr_opt(intern!(py, "has_names"))?;
        let has_names = has_names.map_or(Ok(false), |has_names| has_names.call0()?.is_truthy())?;
        let grad = tensor.getattr(intern!(py, "grad"))?;
        Ok(grad.is_none() && hooks.is_none() && !has_names)
    }

    /// Return where a tensor's memory is.
    pub(crate) fn address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<u64> {
        match self.fast().and_then(|fast| fast.address(tensor)) {
            Some(address) => Ok(address),
            None => tensor
                .call_method0(intern!(tensor.py(), "data_ptr"))?
                .extract(),
        }
    }

    /// Return where a tensor is, and where the memory of its storage begins; 0 for both if it has none.
    ///
    /// # Errors
    /// What torch raises where the memory was taken away.
    pub(crate) fn location(&self, tensor: &Bound<'_, PyAny>) -> PyResult<(u64, u64)> {
        let py = tensor.py();
        let memory = match self.fast().and_then(|fast| fast.memory(tensor)) {
            Some(memory) => memory,
            None => tensor
                .call_method0(intern!(py, "untyped_storage"))?
                .call_method0(intern!(py, "data_ptr"))?
                .extract()?,
        };
        if memory == 0 {
            return Ok((0, 0));
        }
        Ok((self.address(tensor)?, memory))
    }

    /// Return what reads tensors of torch's own classes without a call by Python; none if nothing does.
    #[inline]
    pub(crate) fn fast(&self) -> Option<&FastReader> {
        self.fast.as_ref()
    }

    /// Run `with` on what the tensor is. `with` runs no Python code.
    pub(crate) fn with<T>(
        &self,
        tensor: &Bound<'_, PyAny>,
        mut with: impl FnMut(&View<'_>) -> T,
    ) -> PyResult<T> {
        let read = self.function.as_ref();
        match read.and_then(|function| function.with(tensor, &mut with)) {
            Some(result) => Ok(result),
            None => self.with_python(tensor, with),
        }
    }

    /// The same by Python calls, whose errors say why a tensor cannot be read.
    #[cold]
    fn with_python<T>(
        &self,
        tensor: &Bound<'_, PyAny>,
        with: impl FnOnce(&View<'_>) -> T,
    ) -> PyResult<T> {
        let py = tensor.py();
        if !tensor.is_instance(self.class.bind(py))? {
            let given = tensor.get_type().name()?;
            return Err(argument("the tensor", &given.to_string(), "a torch.Tensor"));
        }
        let shape: Vec<i64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        let strides: Vec<i64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        let element_bytes = tensor.call_method0(intern!(py, "element_size"))?;
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let is_quantized = tensor.getattr(intern!(py, "is_quantized"))?;
        let address: u64 = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        Ok(with(&View {
            address,
            element_bytes: element_bytes.extract()?,
            shape: &shape,
            strides: &strides,
            dtype: Dtype::Object(dtype.as_ptr().addr()),
            place: place(&tensor.getattr(intern!(py, "device"))?)?,
            lazy: if is_quantized.extract()? || is_lazy(tensor)? {
                Lazy::Yes
            } else {
                Lazy::No
            },
        }))
    }
}

/// Return whether the memory holds the conjugate or the negative of the values.
pub(crate) fn is_lazy(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(lazy_flags(tensor)?.contains(&true))
}

fn lazy_flags(tensor: &Bound<'_, PyAny>) -> PyResult<[bool; 2]> {
    let py = tensor.py();
    let is = |name| tensor.call_method0(name)?.extract();
    Ok([is(intern!(py, "is_conj"))?, is(intern!(py, "is_neg"))?])
}

/// Return whether a tensor requires a gradient, as it says itself.
fn gradient_flag(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    let name = intern!(tensor.py(), "requires_grad");
    tensor.getattr(name)?.is_truthy()
}

/// Return a tensor in words, for errors.
pub(crate) fn describe(tensor: &Bound<'_, PyAny>) -> PyResult<String> {
    let sizes: Vec<String> = tensor
        .getattr("shape")?
        .try_iter()?
        .map(|size| Ok(size?.str()?.to_string()))
        .collect::<PyResult<_>>()?;
    let (dtype, device) = (tensor.getattr("dtype")?, tensor.getattr("device")?);
    Ok(in_words(&dtype, &sizes, &device))
}

/// Return a tensor of this kind in words.
pub(crate) fn in_words(
    dtype: &Bound<'_, PyAny>,
    shape: &[impl ToString],
    device: &Bound<'_, PyAny>,
) -> String {
    let sizes: Vec<String> = shape.iter().map(ToString::to_string).collect();
    let sizes = sizes.join(", ");
    format!("a {dtype} tensor of shape [{sizes}] on {device}")
}

fn place(device: &Bound<'_, PyAny>) -> PyResult<Place> {
    let kind: String = device.getattr("type")?.extract()?;
    Ok(match kind.as_str() {
        "cpu" => Place::Cpu,
        "cuda" => {
            let index: Option<i32> = device.getattr("index")?.extract()?;
            let index = index.ok_or_else(|| PyRuntimeError::new_err("a device without a number"));
            Place::Cuda(index?)
        }
        _ => Place::Elsewhere,
    })
}
