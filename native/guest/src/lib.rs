//! The guest agent of a sandbox: pid 1 of containers and microVMs, without libc.
//!
//! It serves the guest protocol (docs/protocols.md, section 1) over one channel: commands, their
//! streams, files. It stands outside the sandbox's user namespace; only children that it forks enter.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod agent;
pub mod channel;
pub mod config;
pub mod files;
pub mod heap;
pub mod methods;
pub mod process;
pub mod reply;
pub mod start;
pub mod streams;
pub mod sys;
pub mod users;
