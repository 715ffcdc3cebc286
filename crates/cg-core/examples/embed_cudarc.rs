//! A program that has a context, a stream and memory of its own hands them to cgraph.
//!
//! With the feature `cuda`, `CGRAPH_DRIVER=cuda` and a GPU they are cudarc's; otherwise the
//! simulator's, made by its driver calls.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]
#![expect(
    unsafe_code,
    reason = "the program vouches for its raw stream and addresses"
)]

mod common;

use cg_core::{Capture, CaptureMode, InstantiateFlags, Memory, Stream};
#[cfg(feature = "cuda")]
use cg_core::{Device, Error};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> Result<()> {
    #[cfg(feature = "cuda")]
    match on_cuda() {
        Some(Ok(device)) => return with_cudarc(&device),
        Some(Err(Error::NoDriver { reason, .. })) => println!("{reason}: on the simulator"),
        Some(Err(error)) => return Err(error.into()),
        None => println!("CGRAPH_DRIVER is not cuda: on the simulator"),
    }
    #[cfg(not(feature = "cuda"))]
    println!("built without the feature cuda: on the simulator");
    with_simulator()
}

/// Return what the program lets cgraph do with its stream and memory: `y = 3 * x + y`, twice.
fn replay_twice(stream: &Stream, x: &Memory, y: &Memory) -> Result<()> {
    let axpy = common::axpy(stream.device(), 3, x, y)?;
    let capture = Capture::begin(stream, CaptureMode::ThreadLocal)?;
    stream.enqueue(&axpy)?;
    let exec = capture.finish()?.instantiate(InstantiateFlags::default())?;
    exec.replay(stream)?;
    exec.replay(stream)?;
    stream.synchronize()?;
    Ok(())
}

/// Return the GPU, if it is asked for.
#[cfg(feature = "cuda")]
fn on_cuda() -> Option<cg_core::Result<Device>> {
    let asked = std::env::var("CGRAPH_DRIVER").is_ok_and(|driver| driver == "cuda");
    asked.then(|| Device::cuda(0))
}

#[cfg(feature = "cuda")]
fn with_cudarc(device: &Device) -> Result<()> {
    use cg_core::{Address, StreamHandle};
    use cudarc::driver::{CudaContext, DevicePtr as _, DevicePtrMut as _};

    // cgraph works in the primary context, and so does cudarc.
    let context = CudaContext::new(0)?;
    let own = context.new_stream()?;
    let x = own.clone_htod(&[1_u32, 2, 3, 4])?;
    let mut y = own.clone_htod(&[10_u32, 20, 30, 40])?;
    own.synchronize()?;
    {
        let (from, _read) = x.device_ptr(&own);
        let (to, _written) = y.device_ptr_mut(&own);
        // SAFETY: cudarc's stream outlives this block, and nothing of it is kept beyond.
        let stream = unsafe { Stream::from_raw(device, StreamHandle(own.cu_stream() as u64)) };
        // SAFETY: `x` has four numbers and outlives this block.
        let x = unsafe { Memory::from_raw(device, Address(from), 16) };
        // SAFETY: `y` has four numbers and outlives this block.
        let y = unsafe { Memory::from_raw(device, Address(to), 16) };
        replay_twice(&stream, &x, &y)?;
    }
    println!("on cudarc's stream: y is {:?}", own.clone_dtoh(&y)?);
    Ok(())
}

fn with_simulator() -> Result<()> {
    let device = common::simulated();
    let driver = device.driver();
    let own = driver.stream_create()?;
    let (x, y) = (driver.mem_alloc(16)?, driver.mem_alloc(16)?);
    {
        // SAFETY: the stream is destroyed only after this block.
        let stream = unsafe { Stream::from_raw(&device, own) };
        // SAFETY: the memory has 16 bytes and is freed only after this block.
        let x = unsafe { Memory::from_raw(&device, x, 16) };
        // SAFETY: the memory has 16 bytes and is freed only after this block.
        let y = unsafe { Memory::from_raw(&device, y, 16) };
        x.write(&[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0])?;
        y.write(&[10, 0, 0, 0, 20, 0, 0, 0, 30, 0, 0, 0, 40, 0, 0, 0])?;
        replay_twice(&stream, &x, &y)?;
        println!("on a raw stream: y is {:?}", common::numbers(&y)?);
    }
    // SAFETY: nothing uses the stream any more.
    unsafe { driver.stream_destroy(own) };
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.mem_free(x) };
    // SAFETY: nothing uses the memory any more.
    unsafe { driver.mem_free(y) };
    Ok(())
}
