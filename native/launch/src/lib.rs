//! The spawn server of a node: starts sandboxes, virtual machine monitors and helpers from one generic spec.

pub mod cgroup;
mod child;
mod clone;
pub mod engine;
pub mod error;
pub mod host;
pub mod msg;
pub mod netns;
pub mod packet;
mod pool;
mod reply;
mod requests;
pub mod root;
pub mod server;
pub mod slot;
pub mod spec;
mod storage;
pub mod sys;
