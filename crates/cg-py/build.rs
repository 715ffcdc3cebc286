//! Refuses interpreters for which the crate is not written.

fn main() {
    if pyo3_build_config::get().is_free_threaded() {
        println!(
            "cargo::error=cgraph needs a Python with the GIL: build it for python3, not for the \
             free-threaded python3t"
        );
    }
}
