//! Captures work of a stream, instantiates the template and replays the exec.
#![expect(clippy::print_stdout, reason = "an example shows what it does")]

mod common;

use cg_core::{Capture, CaptureMode, InstantiateFlags, Result, Stream, Work};

fn main() -> Result<()> {
    let device = common::device()?;
    let stream = Stream::new(&device)?;
    println!("on {}", device.name());
    let x = common::memory(&device, &[1, 2, 3, 4])?;
    let y = common::memory(&device, &[0; 4])?;
    let history = common::memory(&device, &[0; 4])?;
    let axpy = common::axpy(&device, 10, &x, &y)?;

    let capture = Capture::begin(&stream, CaptureMode::Global)?;
    stream.enqueue(&Work::memcpy(&history, &y)?)?;
    stream.enqueue(&axpy)?;
    let template = capture.finish()?;
    println!("captured, not run: y is {:?}", common::numbers(&y)?);
    print!("{}", template.data()?.dot(true));

    let exec = template.instantiate(InstantiateFlags::default())?;
    for _ in 0..3 {
        exec.replay(&stream)?;
    }
    stream.synchronize()?;
    println!("replayed three times: y is {:?}", common::numbers(&y)?);
    println!(
        "before the third time: it was {:?}",
        common::numbers(&history)?
    );
    Ok(())
}
