//! The launcher's one error type. It owns the mapping from kernel errors to the codes of the launch protocol.

use std::io;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{op} {what}: {source}")]
    Sys {
        op: &'static str,
        what: String,
        source: io::Error,
    },
    #[error("child, {step}: {source}")]
    Child {
        step: &'static str,
        source: io::Error,
    },
    #[error("{0}")]
    Invalid(String),
    #[error("{0}")]
    NotFound(String),
    #[error("{0}")]
    Exists(String),
    #[error("{0}")]
    Busy(String),
    #[error("{0}")]
    TooMany(String),
    #[error("{0}")]
    Unsupported(String),
    #[error("no packet from the program within {0} ms")]
    Timeout(u64),
    #[error("the program ended before its first packet (status {0:?})")]
    Ended(Option<i32>),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The error of the system call that just failed on this thread.
    pub fn last(op: &'static str, what: impl Into<String>) -> Self {
        Self::os(op, what, io::Error::last_os_error())
    }

    pub fn os(op: &'static str, what: impl Into<String>, source: io::Error) -> Self {
        Self::Sys {
            op,
            what: what.into(),
            source,
        }
    }

    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Sys { source, .. } | Self::Child { source, .. } => source.raw_os_error(),
            _ => None,
        }
    }

    /// The code of the launch protocol that tells the controller what it can do about it.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Invalid(_) => "invalid",
            Self::NotFound(_) => "not_found",
            Self::Exists(_) => "exists",
            Self::Busy(_) => "busy",
            Self::TooMany(_) => "too_many",
            Self::Unsupported(_) => "unsupported",
            Self::Timeout(_) => "timeout",
            Self::Ended(_) => "kernel",
            Self::Sys { .. } | Self::Child { .. } => match self.errno() {
                Some(libc::ENOSPC | libc::EDQUOT) => "no_space",
                Some(libc::ENOMEM) => "no_memory",
                Some(libc::EMFILE | libc::ENFILE | libc::EAGAIN | libc::EUSERS) => "too_many",
                Some(libc::ENOENT) => "not_found",
                Some(libc::ENOSYS | libc::EOPNOTSUPP) => "unsupported",
                _ => "kernel",
            },
        }
    }
}
