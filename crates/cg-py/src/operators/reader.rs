//! `OperatorReader`: takes the arguments and the results of operators apart.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyRecursionError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyComplex, PyDict, PyFloat, PyList, PyTuple, PyType};

use crate::raw;
use crate::tensors::TensorReader;

/// Reads the operators of a call.
#[pyclass(frozen, module = "cgraph._core")]
pub(crate) struct OperatorReader {
    tensors: Py<TensorReader>,
    /// torch's own classes of tensors.
    plain: Vec<Py<PyType>>,
    generator: Py<PyType>,
    script_object: Py<PyType>,
    /// Returns the storage of a tensor, or none.
    memory_of: Py<PyAny>,
    device_type: String,
    seen: Mutex<Seen>,
}

/// The dtypes and devices of the tensors so far.
#[derive(Default)]
struct Seen {
    /// By the word that tensors of torch's own classes have for both.
    kinds: HashMap<u64, Arc<Kind>>,
    devices: Vec<Py<PyAny>>,
}

/// A dtype and a device.
pub(super) struct Kind {
    pub(super) dtype: Py<PyAny>,
    place: DevicePlace,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DevicePlace {
    /// Of the type that a capture works on.
    Worked,
    Meta,
    Elsewhere,
}

/// What is noted of a tensor.
pub(super) struct TensorFacts {
    /// The number of its storage; none where [`OperatorReader::memory_of`] has found none.
    pub(super) storage: Option<u64>,
    /// In elements; none if torch must be asked.
    pub(super) offset: Option<u64>,
    pub(super) kind: Arc<Kind>,
    pub(super) is_single: bool,
    /// True if it is of just one of torch's own classes.
    pub(super) is_plain: bool,
}

/// The arguments of an operator.
pub(super) struct Arguments<'py> {
    /// Those that are no tensors of a device, in order.
    pub(super) numbers: Vec<Bound<'py, PyAny>>,
    pub(super) tensors: Vec<(Bound<'py, PyAny>, TensorFacts)>,
}

#[pymethods]
impl OperatorReader {
    #[new]
    fn new(
        tensors: Py<TensorReader>,
        plain: Vec<Py<PyType>>,
        generator: Py<PyType>,
        script_object: Py<PyType>,
        memory_of: Py<PyAny>,
        device_type: String,
    ) -> Self {
        Self {
            tensors,
            plain,
            generator,
            script_object,
            memory_of,
            device_type,
            seen: Mutex::default(),
        }
    }

    /// Split arguments, in order: those that are no tensors of the device, and tensors.
    fn split<'py>(
        &self,
        args: &Bound<'py, PyAny>,
        kwargs: &Bound<'py, PyDict>,
    ) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyList>)> {
        let found = self.arguments(args, kwargs)?;
        let tensors = found.tensors.into_iter().map(|(tensor, _)| tensor);
        let py = args.py();
        Ok((
            PyTuple::new(py, found.numbers)?,
            PyList::new(py, tensors.collect::<Vec<_>>())?,
        ))
    }

    /// The devices of the tensors so far.
    #[getter]
    fn devices(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        let seen = self.seen();
        seen.devices.iter().map(|one| one.clone_ref(py)).collect()
    }
}

impl OperatorReader {
    pub(super) fn arguments<'py>(
        &self,
        args: &Bound<'py, PyAny>,
        kwargs: &Bound<'py, PyDict>,
    ) -> PyResult<Arguments<'py>> {
        let mut found = Arguments {
            numbers: Vec::new(),
            tensors: Vec::new(),
        };
        self.take_each(args, &mut found, 0)?;
        self.take_named(kwargs, &mut found, 0)?;
        Ok(found)
    }

    /// Collect the tensors among the results, in tuples, lists and dictionaries alone.
    pub(super) fn results<'py>(
        &self,
        result: &Bound<'py, PyAny>,
        found: &mut Vec<(Bound<'py, PyAny>, TensorFacts)>,
        depth: usize,
    ) -> PyResult<()> {
        if self.is_tensor(result) {
            found.push((result.clone(), self.facts(result)?));
            return Ok(());
        }
        let parts = match result.cast::<PyDict>() {
            Ok(dict) => dict.call_method0(intern!(result.py(), "values"))?,
            Err(_) if is_sequence(result) => result.clone(),
            Err(_) => return Ok(()),
        };
        let depth = deeper(depth)?;
        for part in parts.try_iter()? {
            self.results(&part?, found, depth)?;
        }
        Ok(())
    }

    fn take_each<'py>(
        &self,
        values: &Bound<'py, PyAny>,
        found: &mut Arguments<'py>,
        depth: usize,
    ) -> PyResult<()> {
        for value in values.try_iter()? {
            self.take(value?, found, depth)?;
        }
        Ok(())
    }

    fn take_named<'py>(
        &self,
        values: &Bound<'py, PyDict>,
        found: &mut Arguments<'py>,
        depth: usize,
    ) -> PyResult<()> {
        if values.is_empty() {
            return Ok(());
        }
        // By its own method: a class may have another one, and code of a value may change the dictionary.
        for item in values
            .call_method0(intern!(values.py(), "items"))?
            .try_iter()?
        {
            let (name, value) = item?.extract()?;
            found.numbers.push(name);
            self.take(value, found, depth)?;
        }
        Ok(())
    }

    fn take<'py>(
        &self,
        value: Bound<'py, PyAny>,
        found: &mut Arguments<'py>,
        depth: usize,
    ) -> PyResult<()> {
        let py = value.py();
        if self.is_tensor(&value) {
            let facts = self.facts(&value)?;
            if facts.is_single && facts.is_plain && facts.kind.place == DevicePlace::Elsewhere {
                // A kernel gets it as a number.
                let number = value.call_method0(intern!(py, "item"))?.repr()?;
                let number = (py.get_type::<PyFloat>(), number).into_pyobject(py)?;
                found.numbers.push(number.into_any());
            }
            found.tensors.push((value, facts));
            return Ok(());
        }
        if is_sequence(&value) {
            return self.take_each(&value, found, deeper(depth)?);
        }
        if let Ok(dict) = value.cast::<PyDict>() {
            return self.take_named(dict, found, deeper(depth)?);
        }
        let number = if value.is_instance_of::<PyFloat>() || value.is_instance_of::<PyComplex>() {
            (value.get_type(), value.repr()?)
                .into_pyobject(py)?
                .into_any()
        } else if raw::is_instance(&value, &self.generator) {
            value.getattr(intern!(py, "_cdata"))?
        } else if raw::is_instance(&value, &self.script_object) {
            // A process group or a reduction has another one around it in each call, and packed weights
            // cannot be compared. Guards tell such objects of Python's apart.
            let class = value.call_method0(intern!(py, "_type"))?;
            class.call_method0(intern!(py, "qualified_name"))?
        } else {
            (value.get_type(), value).into_pyobject(py)?.into_any()
        };
        found.numbers.push(number);
        Ok(())
    }

    fn is_tensor(&self, value: &Bound<'_, PyAny>) -> bool {
        self.tensors.get().is_tensor(value)
    }

    fn facts(&self, tensor: &Bound<'_, PyAny>) -> PyResult<TensorFacts> {
        let py = tensor.py();
        let fast = self.tensors.get().fast();
        if let Some(stored) = fast.and_then(|fast| fast.stored(tensor)) {
            let known = self.seen().kinds.get(&stored.kind).map(Arc::clone);
            let kind = match known {
                Some(kind) => kind,
                None => self.new_kind(tensor, Some(stored.kind))?,
            };
            return Ok(TensorFacts {
                storage: Some(stored.storage),
                offset: Some(stored.offset),
                is_single: stored.dim == 0,
                is_plain: true,
                kind,
            });
        }
        let memory = self.memory_of.call1(py, (tensor,))?.into_bound(py);
        let number = |memory: Bound<'_, PyAny>| memory.getattr(intern!(py, "_cdata"))?.extract();
        let storage = (!memory.is_none()).then(|| number(memory)).transpose()?;
        Ok(TensorFacts {
            storage,
            offset: None,
            kind: self.new_kind(tensor, None)?,
            is_single: tensor.call_method0(intern!(py, "dim"))?.extract::<u64>()? == 0,
            is_plain: self.plain.iter().any(|class| tensor.get_type().is(class)),
        })
    }

    /// Ask torch for a tensor's dtype and device, and note the device.
    fn new_kind(&self, tensor: &Bound<'_, PyAny>, word: Option<u64>) -> PyResult<Arc<Kind>> {
        let py = tensor.py();
        let device = tensor.getattr(intern!(py, "device"))?;
        let of_type: String = device.getattr(intern!(py, "type"))?.extract()?;
        let kind = Arc::new(Kind {
            dtype: tensor.getattr(intern!(py, "dtype"))?.unbind(),
            place: match of_type.as_str() {
                of_type if of_type == self.device_type => DevicePlace::Worked,
                "meta" => DevicePlace::Meta,
                _ => DevicePlace::Elsewhere,
            },
        });
        let mut is_known = false;
        for one in self.devices(py) {
            is_known |= device.eq(one)?;
        }
        let mut seen = self.seen();
        if !is_known {
            seen.devices.push(device.unbind());
        }
        if let Some(word) = word {
            seen.kinds.insert(word, Arc::clone(&kind));
        }
        Ok(kind)
    }

    /// What was seen. Nothing that may run code of Python's happens while it is locked.
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kind {
    /// Return whether captures work on such tensors.
    pub(super) fn is_worked_on(&self) -> bool {
        self.place == DevicePlace::Worked
    }
}

fn is_sequence(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyTuple>() || value.is_instance_of::<PyList>()
}

/// How deep arguments may be in each other.
const DEEPEST: usize = 500;

fn deeper(depth: usize) -> PyResult<usize> {
    if depth == DEEPEST {
        let text = format!("arguments of an operator lie {DEEPEST} lists deep in each other");
        return Err(PyRecursionError::new_err(text));
    }
    Ok(depth + 1)
}
