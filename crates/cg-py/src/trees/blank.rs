//! `Blank`: what makes the only prototype of a piece of memory anew, without Python.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use super::{End, Renewal};
use crate::raw::Form;
use crate::tensors::{TensorReader, View, is_lazy};

/// The only prototype of a piece.
pub(super) struct Blank {
    /// Its number.
    number: usize,
    memory: u64,
    form: Form,
    sizes: Box<[i64]>,
    strides: Box<[i64]>,
    offset: i64,
    /// The bytes of a clone's memory, with each element in the same place; none if these are others.
    dense_bytes: Option<u64>,
}

impl Blank {
    /// Return what makes the prototype of a piece anew; none if there are more, or it cannot be read.
    pub(super) fn of(
        reader: &TensorReader,
        places: &[usize],
        prototypes: &Bound<'_, PyTuple>,
        piece: usize,
    ) -> PyResult<Option<Self>> {
        let mut found = places.iter().enumerate().filter(|(_, of)| **of == piece);
        let (Some((number, _)), None) = (found.next(), found.next()) else {
            return Ok(None);
        };
        if number >= prototypes.len() {
            return Ok(None);
        }
        let tensor = prototypes.get_item(number)?;
        let Some(form) = reader.fast().and_then(|fast| fast.form(&tensor)) else {
            return Ok(None);
        };
        if is_lazy(&tensor)? {
            return Ok(None);
        }
        let read = |view: &View<'_>| (view.shape.into(), view.strides.into());
        let (sizes, strides): (Box<[i64]>, Box<[i64]>) = reader.with(&tensor, read)?;
        let int = |object: &Bound<'_, PyAny>, name| object.call_method0(name)?.extract::<i64>();
        let nbytes = int(&tensor.call_method0("untyped_storage")?, "nbytes")?;
        let (element, offset) = (
            int(&tensor, "element_size")?,
            int(&tensor, "storage_offset")?,
        );
        let steps = sizes
            .iter()
            .zip(&strides)
            .map(|(size, step)| (size - 1) * step);
        let end = offset + steps.sum::<i64>() + 1;
        if sizes.contains(&0) || end * element != nbytes {
            // The new storage would be smaller.
            return Ok(None);
        }
        let count: i64 = sizes.iter().product();
        Ok(Some(Self {
            dense_bytes: (offset == 0 && count * element == nbytes).then(|| nbytes.unsigned_abs()),
            number,
            memory: reader.location(&tensor)?.1,
            form,
            sizes,
            strides,
            offset,
        }))
    }

    /// Make the prototype anew, over the same memory, or over other memory with the same contents if the piece is
    /// kept: its number, the tensor, its storage and the bytes of a clone. None if only Python can do that.
    pub(super) fn renew<'py>(
        &self,
        reader: &TensorReader,
        prototypes: &Bound<'py, PyTuple>,
        end: End,
        with: &Renewal,
    ) -> Option<(usize, Bound<'py, PyAny>, u64, u64)> {
        let py = prototypes.py();
        let made = match end {
            End::Kept if self.dense_bytes.is_none() => return None,
            End::Kept => {
                let before = prototypes.get_item(self.number).ok()?;
                before.call_method0(intern!(py, "clone")).ok()?
            }
            End::Stale => {
                let extents = (&*self.sizes, &*self.strides, self.offset);
                with.new_tensor.over(py, self.memory, &self.form, extents)?
            }
        };
        // Python's object of a storage counts, and stays: it is made before others make it.
        made.call_method0(intern!(py, "untyped_storage")).ok()?;
        let storage = reader.fast()?.storage(&made)?;
        Some((
            self.number,
            made,
            storage,
            self.dense_bytes.unwrap_or_default(),
        ))
    }
}
