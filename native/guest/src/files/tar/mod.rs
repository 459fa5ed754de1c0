//! Trees as tar streams.

pub mod format;
pub mod get;
pub mod put;
