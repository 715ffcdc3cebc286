//! A loop over the driver's launch, for the Python benches to load with `ctypes`: what a replay
//! costs when nothing but the driver is called.
#![expect(
    unsafe_code,
    reason = "exports a C function and calls the driver with raw handles"
)]

use std::time::Instant;

use cg_core::driver::handle::{ExecHandle, StreamHandle};

/// Launches an exec `count` times on a stream of GPU `ordinal`; nanoseconds of host time per launch,
/// or a negative number if a call failed.
///
/// # Safety
/// `exec` and `stream` are live on that GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cg_bench_launch(ordinal: u32, exec: u64, stream: u64, count: u32) -> f64 {
    let Ok(device) = cg_core::Device::cuda(ordinal) else {
        return -1.0;
    };
    let start = Instant::now();
    for _ in 0..count {
        // SAFETY: both handles are live by the caller's promise; the caller synchronizes before it
        // lets anything go that the exec's nodes name.
        let launched = unsafe {
            device
                .driver()
                .exec_launch(ExecHandle(exec), StreamHandle(stream))
        };
        if launched.is_err() {
            return -1.0;
        }
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(count)
}
