//! Changes an exec in place: one node, then all of them, and a change that it cannot take.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

mod common;

use cg_core::{Device, Exec, InstantiateFlags, Memory, Node, Result, Stream, Template, Work};

fn main() -> Result<()> {
    let device = common::device()?;
    let (x, y) = (
        common::memory(&device, &[1, 2, 3])?,
        common::memory(&device, &[0; 3])?,
    );
    let (template, kernel) = scaled(&device, 2, &x, &y)?;
    let mut exec = template.instantiate(InstantiateFlags::default())?;
    show(&device, &exec, &y, "as it was made")?;

    exec.set(&template, kernel, &common::axpy(&device, 5, &x, &y)?)?;
    show(&device, &exec, &y, "one node set")?;

    let z = common::memory(&device, &[100, 200, 300])?;
    exec.update(&scaled(&device, 7, &z, &y)?.0)?;
    show(&device, &exec, &y, "updated from a template")?;

    let other = Template::new(&device)?;
    other.add(&Work::memset(&y, 1)?, &[])?;
    if let Err(error) = exec.update(&other) {
        println!("{error}");
    }
    show(&device, &exec, &y, "as before")
}

/// Return a template that sets `y` to `a * x`, and its kernel node.
fn scaled(device: &Device, a: u32, x: &Memory, y: &Memory) -> Result<(Template, Node)> {
    let template = Template::new(device)?;
    let clear = template.add(&Work::memset(y, 0)?, &[])?;
    let kernel = template.add(&common::axpy(device, a, x, y)?, &[clear])?;
    Ok((template, kernel))
}

fn show(device: &Device, exec: &Exec, y: &Memory, what: &str) -> Result<()> {
    let stream = Stream::new(device)?;
    exec.replay(&stream)?;
    stream.synchronize()?;
    println!("{what}: y is {:?}", common::numbers(y)?);
    Ok(())
}
