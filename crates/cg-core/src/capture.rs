//! [`Capture`]: a guard that records a stream's work into a template.

use std::sync::Arc;

use crate::code::Code;
use crate::driver::handle::StreamHandle;
use crate::driver::owned::OwnedGraph;
use crate::driver::spec::NodeSpec;
use crate::driver::{CaptureMode, CaptureStatus, is_exiting};
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::template::Template;

/// A capture on a stream: from [`Capture::begin`] on, what is enqueued there is recorded and does
/// not run. [`Capture::finish`] makes the template; dropping the guard throws the work away.
///
/// ```compile_fail
/// # use cg_core::{Capture, CaptureMode, Device, Sim, Stream};
/// let stream = Stream::new(&Device::sim(&Sim::default())).unwrap();
/// let capture = Capture::begin(&stream, CaptureMode::Global).unwrap();
/// capture.finish();
/// capture.finish(); // it is consumed
/// ```
#[derive(Debug)]
pub struct Capture {
    stream: Stream,
    id: u64,
    open: bool,
}

impl Capture {
    /// Begin a capture. The thread that begins it must also end it, unless the mode is relaxed.
    ///
    /// # Errors
    /// [`Error::Capture`] for the legacy default stream and for a stream that captures already.
    #[doc(alias = "cuStreamBeginCapture")]
    pub fn begin(stream: &Stream, mode: CaptureMode) -> Result<Self> {
        let owned = stream.owned();
        if stream.handle() == StreamHandle::LEGACY {
            return Err(Error::capture(
                stream,
                "the legacy default stream cannot capture; use a stream that you created",
            ));
        }
        if owned.capture_status()? != CaptureStatus::None {
            return Err(Error::capture(
                stream,
                "the stream captures already; finish that capture first",
            ));
        }
        stream.device().collect();
        let _order = stream.order();
        owned
            .begin_capture(mode)
            .map_err(|error| explain(stream, error))?;
        match owned.capture_status() {
            Ok(CaptureStatus::Active(id)) => {
                stream.device().capture_opened(id);
                Ok(Self {
                    stream: stream.clone(),
                    id,
                    open: true,
                })
            }
            other => {
                // The graph of this capture, if there is one, is dropped here.
                let _ = owned.end_capture();
                other?;
                Err(Error::capture(stream, "the capture did not become active"))
            }
        }
    }

    /// The same with a node that does nothing and that nothing waits for: for those who take a graph
    /// without nodes for a mistake.
    ///
    /// # Errors
    /// Those of [`Self::begin`].
    #[doc(alias = "cuGraphAddEmptyNode")]
    pub fn begin_with_node(stream: &Stream, mode: CaptureMode) -> Result<Self> {
        let capture = Self::begin(stream, mode)?;
        let order = stream.order();
        let added = stream.owned().capture_info().and_then(|info| {
            // A capture that was broken already is its end's affair.
            let Some(info) = info.filter(|info| info.id == capture.id) else {
                return Ok(());
            };
            let graph = OwnedGraph::borrowed(Arc::clone(stream.device().driver()), info.graph);
            graph.add_node(&[], &NodeSpec::Empty).map(drop)
        });
        drop(order);
        added.map(|()| capture)
    }

    /// Take over a capture that somebody else began on the stream.
    ///
    /// # Errors
    /// [`Error::Capture`] if the stream does not capture, or another guard has the capture.
    pub fn take_over(stream: &Stream) -> Result<Self> {
        let _order = stream.order();
        let id = match stream.owned().capture_status()? {
            CaptureStatus::Active(id) if stream.device().is_guarded(id) => {
                let reason = "another guard has the capture; finish that one, or let it hand over";
                return Err(Error::capture(stream, reason));
            }
            CaptureStatus::Active(id) => id,
            CaptureStatus::Invalidated => 0,
            CaptureStatus::None => {
                let reason = "the stream does not capture; there is nothing to take over";
                return Err(Error::capture(stream, reason));
            }
        };
        stream.device().capture_opened(id);
        Ok(Self {
            stream: stream.clone(),
            id,
            open: true,
        })
    }

    /// Leave the capture open for somebody else to end. What the work names so far stays alive
    /// until [`Self::take_over`] or, if there is no such call, as long as the device.
    pub fn hand_over(mut self) {
        self.open = false;
        self.stream.device().capture_handed_over(self.id);
    }

    /// Return the stream that captures.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// End the capture and make the template.
    ///
    /// # Errors
    /// [`Error::Capture`] with the driver's code and what to do, if the capture was broken or a
    /// forked stream was not joined. The stream does not capture any more, whatever happens.
    #[doc(alias = "cuStreamEndCapture")]
    pub fn finish(mut self) -> Result<Template> {
        self.open = false;
        let device = self.stream.device();
        let _order = self.stream.order();
        let own = self.is_own();
        let graph = own.then(|| self.stream.owned().end_capture());
        let retained = device.capture_closed(self.id);
        match graph {
            Some(Ok(graph)) => Ok(Template::with_graph(device, graph, retained)),
            Some(Err(error)) => Err(explain(&self.stream, error)),
            None => Err(Error::capture(
                &self.stream,
                "somebody else has ended the capture; only its guard may",
            )),
        }
    }
}

impl Capture {
    /// Return whether what the stream captures is this capture, and no later one.
    fn is_own(&self) -> bool {
        match self.stream.owned().capture_status() {
            Ok(CaptureStatus::Active(id)) => id == self.id,
            Ok(CaptureStatus::None) => false,
            // An unusable capture makes no template, whosever it is.
            Ok(CaptureStatus::Invalidated) | Err(_) => true,
        }
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        if self.open && !is_exiting() {
            let order = self.stream.order();
            let graph = self.is_own().then(|| self.stream.owned().end_capture());
            let retained = self.stream.device().capture_closed(self.id);
            drop(order);
            // Dropping runs foreign code: the lock is open.
            drop((graph, retained));
        }
    }
}

/// Add to a driver's code what to do about it.
fn explain(stream: &Stream, error: Error) -> Error {
    let Error::Driver { call, code } = error else {
        return error;
    };
    let advice = match code {
        Code::STREAM_CAPTURE_UNJOINED => {
            "; make the capturing stream wait for an event recorded on each forked stream before \
             the capture ends"
        }
        Code::STREAM_CAPTURE_INVALIDATED => {
            "; the operation that broke it is the first one that failed since the capture began"
        }
        Code::STREAM_CAPTURE_UNMATCHED => "; end it on the stream it began on",
        Code::STREAM_CAPTURE_WRONG_THREAD => "; end it on the thread it began on, or use relaxed",
        _ => "",
    };
    Error::Capture {
        stream: stream.to_string(),
        reason: format!("{call} failed: {code}{advice}"),
        code: Some(code),
    }
}
