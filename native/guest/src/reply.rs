//! What a method answers when it cannot do what it was asked.

use crate::sys::Errno;
use alloc::string::String;
use alloc::vec::Vec;
use dsec_wire::Encoder;

/// The payload of a RESET.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    pub code: &'static str,
    pub msg: String,
    pub errno: Option<Errno>,
    pub path: Option<Vec<u8>>,
}

impl Failure {
    pub fn new(code: &'static str, msg: impl Into<String>) -> Failure {
        Failure {
            code,
            msg: msg.into(),
            errno: None,
            path: None,
        }
    }

    /// An error of the kernel while doing `what`.
    pub fn kernel(errno: Errno, what: &str) -> Failure {
        Failure {
            code: errno.code(),
            msg: alloc::format!("{what}: {}", errno.text()),
            errno: Some(errno),
            path: None,
        }
    }

    pub fn at(mut self, path: &[u8]) -> Failure {
        self.path = Some(path[..path.len().min(4096)].to_vec());
        self
    }

    pub fn coded(mut self, code: &'static str) -> Failure {
        self.code = code;
        self
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut e = Encoder::new();
        e.map(2 + usize::from(self.errno.is_some()) + usize::from(self.path.is_some()));
        e.str("code").str(self.code).str("msg").str(&self.msg);
        if let Some(errno) = self.errno {
            e.str("errno").uint(errno.0 as u64);
        }
        if let Some(path) = &self.path {
            e.str("path").bin(path);
        }
        e.out
    }
}

pub type Outcome<T> = Result<T, Failure>;
