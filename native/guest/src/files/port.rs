//! The worker's end of the socket to the agent.

use crate::sys::{io, task};
use alloc::vec::Vec;
use dsec_wire::frame;

/// Blocking both ways: the agent's pace is the flow control.
pub struct Port {
    sock: i32,
    inbox: Vec<u8>,
    finished: bool,
}

impl Port {
    pub fn new(sock: i32) -> Port {
        Port {
            sock,
            inbox: Vec::new(),
            finished: false,
        }
    }

    /// Sends one packet; without an agent there is nothing left to do.
    pub fn send(&self, kind: u8, payload: &[u8]) {
        let mut packet = Vec::with_capacity(payload.len() + 1);
        packet.push(kind);
        packet.extend_from_slice(payload);
        if io::send(self.sock, &packet, true).is_err() {
            task::exit(1);
        }
    }

    pub fn send_data(&self, payload: &[u8]) {
        for piece in payload.chunks(frame::MAX_PAYLOAD) {
            self.send(frame::DATA, piece);
        }
    }

    /// The next piece of the opener's data; None after its FIN.
    pub fn receive(&mut self) -> Option<&[u8]> {
        if self.finished {
            return None;
        }
        self.inbox.resize(frame::MAX_PAYLOAD + 1, 0);
        match io::recv(self.sock, &mut self.inbox, true) {
            Ok(n) if n > 0 && self.inbox[0] == frame::DATA => Some(&self.inbox[1..n]),
            Ok(n) if n > 0 => {
                self.finished = true;
                None
            }
            _ => task::exit(1),
        }
    }
}
