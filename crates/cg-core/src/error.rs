//! [`Error`]: what went wrong, as owned data. Printing one calls nothing foreign.

use std::path::PathBuf;

use crate::code::{Call, Code};

/// Result of everything in this crate that can fail.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// A failure, with the call, the code and the numbers that belong to it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A driver call failed.
    #[error("{call} failed: {code}")]
    Driver {
        /// The call that failed.
        call: Call,
        /// The code that it returned.
        code: Code,
    },

    /// There is not enough memory.
    #[error(
        "out of memory: {requested} bytes requested, {in_use} in use, {reserved} reserved, limit {limit}"
    )]
    OutOfMemory {
        /// Bytes that were asked for; of a pool with a limit those of the segment that they need.
        requested: u64,
        /// Bytes in use by the device or pool.
        in_use: u64,
        /// Bytes that the pool holds, in use or not; for a device, the same as `in_use`.
        reserved: u64,
        /// Bytes there are at most.
        limit: u64,
    },

    /// A pool has given its memory back for a while.
    #[error("{pool} is paused: resume it before its memory is used")]
    Paused {
        /// The pool.
        pool: String,
    },

    /// A capture could not begin, go on or end.
    #[error("capture on {stream}: {reason}")]
    Capture {
        /// The stream that was to capture or captures.
        stream: String,
        /// The cause, and what to do.
        reason: String,
        /// The driver's code, where one is behind it.
        code: Option<Code>,
    },

    /// A template could not be instantiated.
    #[error("instantiate failed: {code}{}", at_node(.node))]
    Instantiate {
        /// The code that the driver returned.
        code: Code,
        /// The node at fault, where the driver names one.
        node: Option<String>,
    },

    /// An exec cannot take the change.
    #[error("exec update refused: {reason}{}", at_node(.node))]
    Update {
        /// The node at fault, where the driver names one.
        node: Option<String>,
        /// Why the exec cannot take it.
        reason: String,
    },

    /// An object of another device, template or driver was given.
    #[error(
        "{object} belongs to {found}, expected {expected}: use objects of one device and one graph together"
    )]
    Foreign {
        /// The object that was given.
        object: String,
        /// The place where it belongs.
        found: String,
        /// The place where it should belong.
        expected: String,
    },

    /// An argument is not acceptable.
    #[error("{argument} is {given}, expected {expected}")]
    Invalid {
        /// The argument.
        argument: String,
        /// The value given.
        given: String,
        /// Acceptable values.
        expected: String,
    },

    /// No usable CUDA driver was found.
    #[error(
        "no CUDA driver: {reason}{}. Fix: install NVIDIA's driver, or choose the simulator by name: \
         CGRAPH_DRIVER=sim or cgraph.sim.use(); Device::sim in Rust",
        tried(.looked_for)
    )]
    NoDriver {
        /// Why it cannot be used.
        reason: String,
        /// The libraries that were tried.
        looked_for: Vec<String>,
    },

    /// A file of saved graphs cannot be used.
    #[error("saved graphs in {}: {fault}", path.display())]
    Saved {
        /// The file.
        path: PathBuf,
        /// Why it cannot be used.
        fault: FileFault,
    },

    /// What kernels are loaded from cannot be kept.
    #[error("the images of kernels cannot be recorded: {reason}")]
    Images {
        /// Why.
        reason: String,
    },

    /// A hook failed; for hooks to return.
    #[error("hook failed: {reason}")]
    Hook {
        /// The text of the hook.
        reason: String,
    },
}

/// Why a file of saved graphs cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FileFault {
    /// It cannot be read, or there is none.
    #[error("it cannot be read: {0}")]
    Unread(String),
    /// It cannot be written; the one that was there is as before.
    #[error("it cannot be written: {0}")]
    Unwritten(String),
    /// Somebody else may have put code into it.
    #[error("{0}: code in it would run")]
    Untrusted(String),
    /// It is no such file, or not as it was written.
    #[error("{0}")]
    Damaged(String),
    /// Another version has written it.
    #[error("its format is version {found}, expected {expected}")]
    Version {
        /// The version of the file.
        found: u32,
        /// The version that is read.
        expected: u32,
    },
}

impl Error {
    /// Return the driver's code, where one is behind the error.
    #[must_use]
    pub fn code(&self) -> Option<Code> {
        match self {
            Self::Driver { code, .. } | Self::Instantiate { code, .. } => Some(*code),
            Self::Capture { code, .. } => *code,
            _ => None,
        }
    }

    pub(crate) fn capture(stream: &impl ToString, reason: impl Into<String>) -> Self {
        Self::Capture {
            stream: stream.to_string(),
            reason: reason.into(),
            code: None,
        }
    }

    pub(crate) fn invalid(
        argument: impl Into<String>,
        given: &impl ToString,
        expected: impl Into<String>,
    ) -> Self {
        Self::Invalid {
            argument: argument.into(),
            given: given.to_string(),
            expected: expected.into(),
        }
    }
}

fn tried(names: &[String]) -> String {
    match names {
        [] => String::new(),
        [name] => format!(" (looked for {name})"),
        [name, others @ ..] => format!(" (looked for {name} and {} more names)", others.len()),
    }
}

#[expect(
    clippy::ref_option,
    reason = "thiserror passes a reference to the field"
)]
fn at_node(node: &Option<String>) -> String {
    node.as_ref()
        .map(|node| format!(" at node {node}"))
        .unwrap_or_default()
}
