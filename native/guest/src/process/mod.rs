//! Commands: their start, their output, their end.

pub mod cgroup;
pub mod child;
pub mod output;
pub mod request;
pub mod ring;
pub mod run;
pub mod stdin;
pub mod table;
