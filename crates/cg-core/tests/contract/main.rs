//! Behaviour of CUDA, and therefore of the simulator: every test runs on every driver.
//!
//! The `cuda` ones need a GPU and are ignored by default, so that a run without one says how many
//! did not run. Where there is one, `--include-ignored --test-threads=1` runs them, and
//! `CGRAPH_REQUIRE_CUDA=1` makes a missing GPU a failure. One thread, because a capture in global
//! mode forbids calls to all others.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "a test says what it ran on")]

/// Makes `sim::name` and `cuda::name` of each `fn name(device: &Device)`.
macro_rules! on_every_driver {
    ($($name:ident,)*) => {
        mod sim {
            $(#[test] fn $name() { crate::on_sim(super::$name); })*
        }

        #[cfg(feature = "cuda")]
        mod cuda {
            $(
                #[test]
                #[ignore = "needs a GPU"]
                fn $name() { crate::on_cuda(super::$name); }
            )*
        }
    };
}

#[path = "../support/mod.rs"]
mod support;

mod address;
mod capture;
mod capture_rules;
mod conditional;
mod data;
mod exec;
mod graph;
mod input_rows;
mod input_rules;
mod input_sizes;
mod inputs;
mod memory;
mod node;
mod output_rules;
mod outputs;
mod pages;
mod pool;
mod saved;
mod saved_rules;
mod stream;
mod tracker;
mod unsafe_calls;
mod update;

/// Run the test in several orders of what may run in any order.
fn on_sim(test: fn(&cg_core::Device)) {
    for seed in 0..4 {
        println!("seed {seed}");
        test(&support::sim_from(cg_core::Sim::builder().seed(seed)).1);
    }
}

#[cfg(feature = "cuda")]
fn on_cuda(test: fn(&cg_core::Device)) {
    match cg_core::Device::cuda(0) {
        Ok(device) => test(&device),
        Err(error) if std::env::var_os("CGRAPH_REQUIRE_CUDA").is_some() => panic!("{error}"),
        Err(error) => println!("not run: {error}"),
    }
}
