//! Simulated devices, which know what the kernels of this crate do.

use std::sync::Arc;

use crate::device::Device;
use crate::driver::sim::Sim;
use crate::looped;
use crate::transfer;

impl Device {
    /// Return a simulated device.
    #[must_use]
    pub fn sim(sim: &Sim) -> Self {
        transfer::register(sim);
        looped::register(sim);
        Self::new(Arc::new(sim.clone()))
    }
}
