//! The agent's side of a file operation.

use crate::agent::Agent;
use crate::reply::{Failure, Outcome};
use crate::sys::event::Epoll;
use dsec_wire::Value;

pub struct Worker {}

impl Worker {
    pub fn kill(&self, _epoll: &Epoll) {}
}

impl Agent {
    pub fn method_file(&mut self, _stream: u32, _map: &Value<'_>, _fin: bool) -> Outcome<()> {
        Err(Failure::new(
            "unsupported",
            "file operations are not there yet",
        ))
    }

    pub fn worker_ready(&mut self, _stream: u32, _events: u32) {}

    pub fn worker_died(&mut self, _stream: u32) {}

    pub fn worker_data(&mut self, _stream: u32, _bytes: &[u8], _fin: bool) {}

    pub fn pump_worker(&mut self, _stream: u32) -> bool {
        false
    }
}
