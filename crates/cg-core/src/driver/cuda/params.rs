//! The parameters of a kernel node.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::ffi::c_void;
use std::mem;
use std::ptr;
use std::slice;

use cudarc::driver::sys;

use super::{call, check, out};
use crate::code::{Call, Code};
use crate::driver::handle::NodeHandle;
use crate::error::Result;

/// `CU_LAUNCH_PARAM_BUFFER_POINTER`: what follows is where all parameters lie, one after the other.
const BUFFER_POINTER: usize = 1;
/// `CU_LAUNCH_PARAM_BUFFER_SIZE`: what follows is where their size in bytes stands.
const BUFFER_SIZE: usize = 2;
/// There are no other keys than the two.
const MOST_KEYS: usize = 2;

const WORD: usize = size_of::<u64>();

/// Return the 8-byte words among a kernel's parameters; the context is current.
///
/// # Safety
/// `node` is a node of a live graph.
pub(super) unsafe fn words(node: NodeHandle) -> Result<Vec<u64>> {
    let node = node.0 as sys::CUgraphNode;
    // SAFETY: `node` is live by the contract; the call writes a C enum, which has the size of a
    // u32, through `kind`.
    let kind = out(Call::GraphNodeGetType, 0_u32, |kind| unsafe {
        call!(cuGraphNodeGetType(node, kind.cast()))
    })?;
    if kind != sys::CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL as u32 {
        return Ok(Vec::new());
    }
    // SAFETY: `node` is a live kernel node.
    let Ok(params) = (unsafe { of_kernel(node) }) else {
        return Ok(Vec::new());
    };
    if !params.kernelParams.is_null() {
        // SAFETY: the driver has just described a live node.
        return Ok(unsafe { separate(&params) });
    }
    if !params.extra.is_null() {
        // SAFETY: the driver has just described a live node.
        return Ok(unsafe { buffer(params.extra) }.map_or_else(Vec::new, aligned));
    }
    Ok(Vec::new())
}

/// Return the parameters of a kernel node.
///
/// # Safety
/// `node` is a kernel node of a live graph.
pub(super) unsafe fn of_kernel(node: sys::CUgraphNode) -> Result<sys::CUDA_KERNEL_NODE_PARAMS> {
    // SAFETY: the struct has only integers and raw pointers, for which zero is a value.
    let zero: sys::CUDA_KERNEL_NODE_PARAMS = unsafe { mem::zeroed() };
    // SAFETY: `node` is a live kernel node by the contract; the call writes its parameters.
    out(Call::GraphNodeGetParams, zero, |params| unsafe {
        call!(cuGraphKernelNodeGetParams_v2(node, params))
    })
}

/// Return the bytes of each parameter, in order; none where the driver does not tell all.
///
/// # Safety
/// `params` are those of a live node.
pub(super) unsafe fn arguments(
    params: &sys::CUDA_KERNEL_NODE_PARAMS,
) -> Result<Option<Vec<Box<[u8]>>>> {
    if params.func.is_null() && params.kern.is_null() {
        return Ok(None);
    }
    // SAFETY: `extra` is that of a live node.
    let whole = (!params.extra.is_null()).then(|| unsafe { buffer(params.extra) });
    let (mut arguments, mut end) = (Vec::new(), 0);
    for index in 0.. {
        // SAFETY: the function or kernel of a live node is live.
        let Some((offset, size)) = unsafe { extent(params, index) }? else {
            break;
        };
        end = offset + size;
        let bytes = if params.kernelParams.is_null() {
            let inside = whole
                .flatten()
                .and_then(|whole| whole.get(offset..offset + size));
            let Some(bytes) = inside else {
                return Ok(None);
            };
            bytes
        } else {
            // SAFETY: the node has a pointer for each parameter that its kernel takes.
            let parameter = unsafe { *params.kernelParams.wrapping_add(index) };
            if parameter.is_null() {
                return Ok(None);
            }
            // SAFETY: it points to as many bytes as the parameter has, which live as long as the node.
            unsafe { slice::from_raw_parts(parameter.cast::<u8>(), size) }
        };
        arguments.push(bytes.into());
    }
    let has_more = whole.flatten().is_some_and(|whole| whole.len() > end);
    Ok((!has_more).then_some(arguments))
}

/// Return the words where there is a pointer to each parameter.
///
/// # Safety
/// `params` are those of a live node, and its `kernelParams` is not null.
unsafe fn separate(params: &sys::CUDA_KERNEL_NODE_PARAMS) -> Vec<u64> {
    let mut words = Vec::new();
    for index in 0.. {
        // SAFETY: the function or kernel of a live node is live.
        let Ok(Some((offset, size))) = (unsafe { extent(params, index) }) else {
            break;
        };
        // SAFETY: the node has a pointer for each parameter that its kernel takes.
        let parameter = unsafe { *params.kernelParams.wrapping_add(index) };
        if parameter.is_null() {
            continue;
        }
        // SAFETY: it points to as many bytes as the parameter has, which are the driver's and live
        // and stay the same as long as the node.
        let bytes = unsafe { slice::from_raw_parts(parameter.cast::<u8>(), size) };
        let first = offset.next_multiple_of(WORD) - offset;
        words.extend(aligned(bytes.get(first..).unwrap_or_default()));
    }
    words
}

/// Return where the parameter of this number begins among all, and its size; none behind the last.
///
/// # Safety
/// The function or kernel of `params` is live.
unsafe fn extent(
    params: &sys::CUDA_KERNEL_NODE_PARAMS,
    index: usize,
) -> Result<Option<(usize, usize)>> {
    let (mut offset, mut size) = (0, 0);
    let result = if !params.func.is_null() {
        // SAFETY: the function is live by the contract; the call writes two sizes, to `offset` and
        // to `size`.
        unsafe {
            call!(cuFuncGetParamInfo(
                params.func,
                index,
                &raw mut offset,
                &raw mut size
            ))
        }
    } else if !params.kern.is_null() {
        // SAFETY: the kernel is live by the contract; the call writes two sizes, to `offset` and to
        // `size`.
        unsafe {
            call!(cuKernelGetParamInfo(
                params.kern,
                index,
                &raw mut offset,
                &raw mut size
            ))
        }
    } else {
        return Ok(None);
    };
    match check(Call::GraphNodeGetParams, result) {
        Ok(()) => Ok(Some((offset, size))),
        // There is none of this number.
        Err(error) if error.code() == Some(Code::INVALID_VALUE) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Return where all parameters lie in one buffer, as cuBLAS launches kernels; none for other keys.
///
/// # Safety
/// `extra` belongs to a node that is live for `'a`, and is not null.
unsafe fn buffer<'a>(extra: *const *mut c_void) -> Option<&'a [u8]> {
    let (mut start, mut size): (*const u8, *const usize) = (ptr::null(), ptr::null());
    for key in 0..MOST_KEYS {
        // SAFETY: keys and values take turns up to a key that is zero, and this one has not come.
        let name = unsafe { *extra.wrapping_add(2 * key) };
        if name.is_null() {
            break;
        }
        // SAFETY: behind a key that is not zero its value stands.
        let value = unsafe { *extra.wrapping_add(2 * key + 1) };
        match name.addr() {
            BUFFER_POINTER => start = value.cast(),
            BUFFER_SIZE => size = value.cast(),
            _ => return None,
        }
    }
    if start.is_null() || size.is_null() {
        return None;
    }
    // SAFETY: the key was that of a pointer to a size, which lives as long as the node.
    let size = unsafe { *size };
    // SAFETY: the buffer has as many bytes, and lives and stays the same as long as the node.
    Some(unsafe { slice::from_raw_parts(start, size) })
}

/// Return the whole words of bytes that begin where a word may.
fn aligned(bytes: &[u8]) -> Vec<u64> {
    let (words, _) = bytes.as_chunks::<WORD>();
    words.iter().map(|word| u64::from_ne_bytes(*word)).collect()
}
