//! Shared by the examples: the choice of the driver, and a kernel.
#![allow(dead_code, reason = "each example uses a part of it")]

use std::env;

use cg_core::{Args, Device, Error, Memory, Module, Result, Sim, Work};

/// Return the device that `CGRAPH_DRIVER` names: `cuda`, or `sim`, which is also the default.
pub(crate) fn device() -> Result<Device> {
    match env::var("CGRAPH_DRIVER").as_deref() {
        #[cfg(feature = "cuda")]
        Ok("cuda") => Device::cuda(0),
        Ok("sim") | Err(_) => Ok(simulated()),
        Ok(other) => Err(Error::NoDriver {
            reason: format!("CGRAPH_DRIVER is {other}, which this build does not know"),
            looked_for: vec![],
        }),
    }
}

/// Return a simulated device, which has to be told what the kernel does.
pub(crate) fn simulated() -> Device {
    let sim = Sim::default();
    sim.kernel("axpy", |call| {
        let (a, n) = (call.u32(0), call.u32(3));
        let (x, y) = (
            call.memory(1, u64::from(n) * 4),
            call.memory(2, u64::from(n) * 4),
        );
        for i in 0..n as usize {
            y.set_word(i, a * x.word(i) + y.word(i));
        }
        Ok(())
    });
    Device::sim(&sim)
}

/// Return the work `y = a * x + y`, of numbers of 32 bits.
#[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
pub(crate) fn axpy(device: &Device, a: u32, x: &Memory, y: &Memory) -> Result<Work> {
    let ptx = include_str!("../../tests/contract/kernels.ptx");
    let kernel = Module::load(device, ptx.as_bytes())?.function("axpy")?;
    let n = u32::try_from(x.bytes().min(y.bytes()) / 4).unwrap_or(u32::MAX);
    let args = Args::new().u32(a).memory(x).memory(y).u32(n);
    // SAFETY: these are the arguments of the kernel, and both memories have `n` numbers.
    unsafe { Work::kernel(&kernel, n.div_ceil(128), 128, args) }
}

/// Memory that holds `numbers`.
pub(crate) fn memory(device: &Device, numbers: &[u32]) -> Result<Memory> {
    let bytes: Vec<u8> = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    let memory = Memory::new(device, bytes.len() as u64)?;
    memory.write(&bytes)?;
    Ok(memory)
}

/// Return the numbers that memory holds.
pub(crate) fn numbers(memory: &Memory) -> Result<Vec<u32>> {
    let bytes = memory.read()?;
    let (numbers, _) = bytes.as_chunks();
    Ok(numbers
        .iter()
        .map(|number| u32::from_le_bytes(*number))
        .collect())
}
