//! Streams, events and captures of a [`Cuda`] device.

#![expect(unsafe_code, reason = "calls of the CUDA driver")]

use std::sync::Arc;
use std::{ptr, slice};

use cudarc::driver::sys;

use super::{Cuda, call, check, finished, out, size, work};
use crate::code::{Call, Code};
use crate::driver::handle::{EventHandle, GraphHandle, NodeHandle, StreamHandle};
use crate::driver::spec::WorkSpec;
use crate::driver::{CaptureInfo, CaptureMode, CaptureStatus, StreamCalls, failed};
use crate::error::Result;

/// `CU_STREAM_NON_BLOCKING`.
const NON_BLOCKING: u32 = 1;

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: u32 = 2;

impl StreamCalls for Cuda {
    fn stream_create(&self) -> Result<StreamHandle> {
        let _entered = self.enter()?;
        // SAFETY: the call writes one handle, through `stream`.
        let stream = out(Call::StreamCreate, ptr::null_mut(), |stream| unsafe {
            call!(cuStreamCreate(stream, NON_BLOCKING))
        })?;
        Ok(StreamHandle(stream as u64))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `stream` comes from cuStreamCreate and this is its only destroy, by the contract.
        unsafe { call!(cuStreamDestroy_v2(stream.0 as sys::CUstream)) };
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: `stream` is live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuStreamSynchronize(stream.0 as sys::CUstream)) };
        check(Call::StreamSynchronize, result)
    }

    unsafe fn stream_query(&self, stream: StreamHandle) -> Result<bool> {
        let _entered = self.enter()?;
        // SAFETY: `stream` is live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuStreamQuery(stream.0 as sys::CUstream)) };
        finished(Call::StreamQuery, result)
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> Result<()> {
        let _entered = self.enter()?;
        let (stream, event) = (stream.0 as sys::CUstream, event.0 as sys::CUevent);
        // SAFETY: `stream` and `event` are live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuStreamWaitEvent(stream, event, 0)) };
        check(Call::StreamWaitEvent, result)
    }

    unsafe fn stream_enqueue(&self, stream: StreamHandle, work: &WorkSpec) -> Result<()> {
        let _entered = self.enter()?;
        let stream = stream.0 as sys::CUstream;
        match work {
            WorkSpec::Kernel {
                function,
                grid,
                block,
                shared_bytes,
                args,
            } => {
                let mut args = work::argument_pointers(args);
                // SAFETY: `stream` and the function are live and the arguments are the kernel's, by
                // the contract; the driver copies the arguments before it returns.
                let result = unsafe {
                    call!(cuLaunchKernel(
                        function.0 as sys::CUfunction,
                        grid.x,
                        grid.y,
                        grid.z,
                        block.x,
                        block.y,
                        block.z,
                        *shared_bytes,
                        stream,
                        args.as_mut_ptr(),
                        ptr::null_mut(),
                    ))
                };
                check(Call::LaunchKernel, result)
            }
            WorkSpec::Memcpy { dst, src, bytes } => {
                // SAFETY: `stream` is live, and both sides stay mapped for `bytes` until it has
                // passed the copy, by the contract.
                let result = unsafe { call!(cuMemcpyAsync(dst.0, src.0, size(*bytes), stream)) };
                check(Call::MemcpyAsync, result)
            }
            WorkSpec::Memset {
                dst,
                value,
                element_bytes,
                count,
            } => {
                let (dst, count) = (dst.0, size(*count));
                let [low, high, ..] = value.to_le_bytes();
                let result = match element_bytes {
                    // SAFETY: `stream` is live, and `dst` stays mapped for `count` bytes until it
                    // has passed the memset, by the contract.
                    1 => unsafe { call!(cuMemsetD8Async(dst, low, count, stream)) },
                    2 => {
                        let value = u16::from_le_bytes([low, high]);
                        // SAFETY: as for one byte, with two to an element.
                        unsafe { call!(cuMemsetD16Async(dst, value, count, stream)) }
                    }
                    // SAFETY: as for one byte, with four to an element.
                    4 => unsafe { call!(cuMemsetD32Async(dst, *value, count, stream)) },
                    _ => return Err(work::bad_element(*element_bytes)),
                };
                check(Call::MemsetAsync, result)
            }
            WorkSpec::Host(function) => {
                let function = Arc::as_ptr(function).cast_mut().cast();
                // SAFETY: `stream` is live, and the caller keeps the function alive until it has
                // passed the call, by the contract; `call_host` only reads it.
                let result =
                    unsafe { call!(cuLaunchHostFunc(stream, Some(work::call_host), function)) };
                check(Call::LaunchHostFunc, result)
            }
        }
    }

    unsafe fn stream_begin_capture(&self, stream: StreamHandle, mode: CaptureMode) -> Result<()> {
        let _entered = self.enter()?;
        let stream = stream.0 as sys::CUstream;
        // SAFETY: `stream` is live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuStreamBeginCapture_v2(stream, raw_mode(mode))) };
        check(Call::StreamBeginCapture, result)
    }

    unsafe fn stream_end_capture(&self, stream: StreamHandle) -> Result<GraphHandle> {
        let _entered = self.enter()?;
        let stream = stream.0 as sys::CUstream;
        // SAFETY: `stream` is live by the contract; the call writes one handle, through `graph`.
        let graph = out(Call::StreamEndCapture, ptr::null_mut(), |graph| unsafe {
            call!(cuStreamEndCapture(stream, graph))
        })?;
        Ok(GraphHandle(graph as u64))
    }

    unsafe fn stream_capture_status(&self, stream: StreamHandle) -> Result<CaptureStatus> {
        let _entered = self.enter()?;
        let stream = stream.0 as sys::CUstream;
        let mut id = 0;
        // SAFETY: `stream` is live by the contract; the call writes a C enum, which has the size of
        // a u32, through `status`, and a u64 to `id`; the other outputs may be null.
        let status = out(Call::StreamGetCaptureInfo, 0_u32, |status| unsafe {
            call!(cuStreamGetCaptureInfo_v2(
                stream,
                status.cast(),
                &raw mut id,
                ptr::null_mut(),
                ptr::null_mut(),
                ptr::null_mut(),
            ))
        })?;
        Ok(match status {
            0 => CaptureStatus::None,
            1 => CaptureStatus::Active(id),
            _ => CaptureStatus::Invalidated,
        })
    }

    unsafe fn stream_capture_info(&self, stream: StreamHandle) -> Result<Option<CaptureInfo>> {
        let _entered = self.enter()?;
        let stream = stream.0 as sys::CUstream;
        let (mut id, mut graph, mut count) = (0, ptr::null_mut(), 0);
        let (mut after, mut edges) = (ptr::null(), ptr::null());
        // SAFETY: `stream` is live by the contract; the call writes a C enum, which has the size of
        // a u32, through `status`, and one value to each of the others. The edges are asked for
        // because a call without them refuses those that are not of the full kind.
        let status = out(Call::StreamGetCaptureInfo, 0_u32, |status| unsafe {
            call!(cuStreamGetCaptureInfo_v3(
                stream,
                status.cast(),
                &raw mut id,
                &raw mut graph,
                &raw mut after,
                &raw mut edges,
                &raw mut count,
            ))
        })?;
        if status != 1 {
            return Ok(None);
        }
        let after: &[sys::CUgraphNode] = if count == 0 {
            &[]
        } else {
            // SAFETY: the driver has set `after` to its own array of `count` nodes, which stays
            // until the next call that works on the stream; that would be a call of a thread that
            // enqueues on it or ends its capture while this one asks.
            unsafe { slice::from_raw_parts(after, count) }
        };
        Ok(Some(CaptureInfo {
            id,
            graph: GraphHandle(graph as u64),
            after: after.iter().map(|node| NodeHandle(*node as u64)).collect(),
        }))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        let _entered = self.enter()?;
        let call = Call::ThreadExchangeCaptureMode;
        // SAFETY: the call reads and writes a C enum, which has the size of a u32, through `mode`.
        let before = out(call, raw_mode(mode) as u32, |mode| unsafe {
            call!(cuThreadExchangeStreamCaptureMode(mode.cast()))
        })?;
        match before {
            0 => Ok(CaptureMode::Global),
            1 => Ok(CaptureMode::ThreadLocal),
            2 => Ok(CaptureMode::Relaxed),
            _ => Err(failed(call, Code::UNKNOWN)),
        }
    }

    fn event_create(&self) -> Result<EventHandle> {
        let _entered = self.enter()?;
        // SAFETY: the call writes one handle, through `event`.
        let event = out(Call::EventCreate, ptr::null_mut(), |event| unsafe {
            call!(cuEventCreate(event, DISABLE_TIMING))
        })?;
        Ok(EventHandle(event as u64))
    }

    unsafe fn event_destroy(&self, event: EventHandle) {
        let Ok(_entered) = self.enter() else { return };
        // SAFETY: `event` comes from cuEventCreate and this is its only destroy, by the contract.
        unsafe { call!(cuEventDestroy_v2(event.0 as sys::CUevent)) };
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> Result<()> {
        let _entered = self.enter()?;
        let (event, stream) = (event.0 as sys::CUevent, stream.0 as sys::CUstream);
        // SAFETY: `event` and `stream` are live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuEventRecord(event, stream)) };
        check(Call::EventRecord, result)
    }

    unsafe fn event_query(&self, event: EventHandle) -> Result<bool> {
        let _entered = self.enter()?;
        // SAFETY: `event` is live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuEventQuery(event.0 as sys::CUevent)) };
        finished(Call::EventQuery, result)
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<()> {
        let _entered = self.enter()?;
        // SAFETY: `event` is live by the contract; the call writes nothing of ours.
        let result = unsafe { call!(cuEventSynchronize(event.0 as sys::CUevent)) };
        check(Call::EventSynchronize, result)
    }
}

fn raw_mode(mode: CaptureMode) -> sys::CUstreamCaptureMode {
    match mode {
        CaptureMode::Global => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    }
}
