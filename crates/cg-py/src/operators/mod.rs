//! Operators of an observed call: their arguments, and where their tensors come from.

mod notes;
mod reader;

pub(crate) use notes::OperatorNotes;
pub(crate) use reader::OperatorReader;
