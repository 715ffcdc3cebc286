//! Arguments of a call: the patterns that they are compared with, and those that fit.

mod leading_tensors;
mod matched;
mod pattern;
mod tensor_row;
mod written_memory;

pub(crate) use leading_tensors::LeadingTensors;
pub(crate) use matched::{Argument, MatchedArguments, MatchedTensor, MatchedTensors};
pub(crate) use pattern::{Pattern, all_fit, fits_dict, has_order};
pub(crate) use written_memory::WrittenMemory;
