//! The kernels of `contract/kernels.cu`: as PTX for a GPU, as closures for the simulator.

use cg_core::{Args, Device, Function, KernelCall, Memory, Module, Sim, Work};

/// The module that declares them, for either driver.
pub(crate) const PTX: &str = include_str!("../contract/kernels.ptx");

/// Threads per block.
const BLOCK: u32 = 128;

/// Tell a simulator what the kernels do.
pub(crate) fn register(sim: &Sim) {
    sim.kernel("axpy", |call| {
        let (a, n) = (call.u32(0), call.u32(3));
        let (x, y) = (
            call.memory(1, u64::from(n) * 4),
            call.memory(2, u64::from(n) * 4),
        );
        for i in 0..reached(call, n) {
            y.set_word(i, a.wrapping_mul(x.word(i)).wrapping_add(y.word(i)));
        }
        Ok(())
    });
    let fill = |call: &KernelCall<'_>| {
        let (value, n) = (call.u32(1), call.u32(2));
        let x = call.memory(0, u64::from(n) * 4);
        for i in 0..reached(call, n) {
            x.set_word(i, value);
        }
        Ok(())
    };
    sim.kernel("fill", fill);
    sim.kernel("slow_fill", fill);
    sim.kernel("count_down", |call| {
        let left = call.memory(0, 4);
        left.set_word(0, left.word(0).wrapping_sub(1));
        call.set_condition(1, u32::from(left.word(0) != 0));
        Ok(())
    });
    sim.kernel("if_odd", |call| {
        call.set_condition(1, call.memory(0, 4).word(0) & 1);
        Ok(())
    });
}

/// Return how many of `n` elements the launch has threads for.
fn reached(call: &KernelCall<'_>, n: u32) -> usize {
    n.min(call.grid.x * call.block.x) as usize
}

/// The kernels of one device.
pub(crate) struct Kernels {
    axpy: Function,
    fill: Function,
    slow_fill: Function,
    count_down: Function,
    if_odd: Function,
}

impl Kernels {
    pub(crate) fn load(device: &Device) -> Self {
        let module = Module::load(device, PTX.as_bytes()).unwrap();
        Self {
            axpy: module.function("axpy").unwrap(),
            fill: module.function("fill").unwrap(),
            slow_fill: module.function("slow_fill").unwrap(),
            count_down: module.function("count_down").unwrap(),
            if_odd: module.function("if_odd").unwrap(),
        }
    }

    /// `y = a * x + y`.
    pub(crate) fn axpy(&self, a: u32, x: &Memory, y: &Memory) -> Work {
        assert_eq!(x.bytes(), y.bytes());
        let n = count(y);
        let args = Args::new().u32(a).memory(x).memory(y).u32(n);
        launch(&self.axpy, n.div_ceil(BLOCK), args)
    }

    /// The same for the first `blocks` blocks of `y` only.
    pub(crate) fn axpy_blocks(&self, a: u32, x: &Memory, y: &Memory, blocks: u32) -> Work {
        assert_eq!(x.bytes(), y.bytes());
        let args = Args::new().u32(a).memory(x).memory(y).u32(count(y));
        launch(&self.axpy, blocks, args)
    }

    /// One less in the first word of `left`, and the condition true unless that is zero.
    pub(crate) fn count_down(&self, left: &Memory, condition: u64) -> Work {
        launch(&self.count_down, 1, Args::new().memory(left).u64(condition))
    }

    /// The condition true if the first word of `number` is odd.
    pub(crate) fn if_odd(&self, number: &Memory, condition: u64) -> Work {
        launch(&self.if_odd, 1, Args::new().memory(number).u64(condition))
    }

    /// Return all of `x` set to `value`.
    pub(crate) fn fill(&self, x: &Memory, value: u32) -> Work {
        let n = count(x);
        let args = Args::new().memory(x).u32(value).u32(n);
        launch(&self.fill, n.div_ceil(BLOCK), args)
    }

    /// The same after many milliseconds, as GPUs count them.
    pub(crate) fn slow_fill(&self, x: &Memory, value: u32) -> Work {
        let n = count(x);
        let nanoseconds = 50_000_000;
        let args = Args::new().memory(x).u32(value).u32(n).u64(nanoseconds);
        launch(&self.slow_fill, n.div_ceil(BLOCK), args)
    }
}

fn count(memory: &Memory) -> u32 {
    u32::try_from(memory.bytes() / 4).unwrap()
}

#[expect(unsafe_code, reason = "nobody can check what a kernel touches")]
fn launch(function: &Function, blocks: u32, args: Args) -> Work {
    // SAFETY: the callers pass what kernels.cu declares, and a number of elements that is the size
    // of each memory.
    unsafe { Work::kernel(function, blocks, BLOCK, args) }.unwrap()
}
