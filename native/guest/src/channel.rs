//! The channel to the edge: frames are gathered into packets and never waited for.

use crate::sys::{io, Errno, Fd};
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use dsec_wire::frame;

/// Control frames queued at most before the agent stops taking requests.
const QUEUE_LIMIT: usize = 1 << 20;

pub struct Channel {
    fd: Fd,
    /// The packet being filled.
    packet: Vec<u8>,
    /// Full packets that the kernel did not take yet.
    queue: VecDeque<Vec<u8>>,
    queued: usize,
    blocked: bool,
    /// The peer is gone.
    pub dead: bool,
}

impl Channel {
    pub fn new(fd: Fd) -> Channel {
        Channel {
            fd,
            packet: Vec::new(),
            queue: VecDeque::new(),
            queued: 0,
            blocked: false,
            dead: false,
        }
    }

    pub fn raw(&self) -> i32 {
        self.fd.raw()
    }

    /// Whether bulk data may be added now.
    pub fn can_take_data(&self) -> bool {
        !self.blocked && !self.dead
    }

    pub fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Whether so much is queued that no further request may be read.
    pub fn is_full(&self) -> bool {
        self.queued >= QUEUE_LIMIT
    }

    /// Adds a frame; it leaves with the packet at the next `flush`, or before if it does not fit.
    pub fn put(&mut self, stream: u32, kind: u8, payload: &[u8]) {
        self.put_parts(stream, kind, &[payload]);
    }

    /// As `put`, with a payload in several parts.
    pub fn put_parts(&mut self, stream: u32, kind: u8, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|p| p.len()).sum();
        if len > frame::MAX_PAYLOAD || self.dead {
            return;
        }
        if self.packet.len() + frame::HEADER + len > frame::MAX_PACKET {
            self.flush();
        }
        frame::put_header(&mut self.packet, stream, kind, len);
        for part in parts {
            self.packet.extend_from_slice(part);
        }
    }

    /// Payload bytes that still fit into the packet being filled.
    pub fn room(&self) -> usize {
        frame::MAX_PACKET
            .saturating_sub(self.packet.len() + frame::HEADER)
            .min(frame::MAX_PAYLOAD)
    }

    /// Sends what is gathered, as far as the kernel takes it.
    pub fn flush(&mut self) {
        if !self.packet.is_empty() {
            if self.blocked || !self.queue.is_empty() {
                self.enqueue();
            } else {
                match io::send(self.fd.raw(), &self.packet, false) {
                    Ok(_) => self.packet.clear(),
                    Err(error) => {
                        self.note(error);
                        self.enqueue();
                    }
                }
            }
        }
        // An idle guest keeps no large buffer.
        if self.packet.is_empty()
            && self.packet.capacity() > 2048
            && self.queue.is_empty()
            && !self.blocked
        {
            self.packet = Vec::new();
        }
    }

    fn enqueue(&mut self) {
        let packet = core::mem::take(&mut self.packet);
        if !self.dead {
            self.queued += packet.len();
            self.queue.push_back(packet);
        }
    }

    fn note(&mut self, error: Errno) {
        match error {
            Errno::EAGAIN | Errno::EINTR | Errno(105) => self.blocked = true,
            _ => self.dead = true,
        }
    }

    /// The channel became writable: sends the queue.
    pub fn writable(&mut self) {
        self.blocked = false;
        while let Some(packet) = self.queue.front() {
            match io::send(self.fd.raw(), packet, false) {
                Ok(_) => {
                    self.queued -= packet.len();
                    self.queue.pop_front();
                }
                Err(error) => return self.note(error),
            }
        }
        self.flush();
    }

    /// Drops everything not sent (a new edge will not want it).
    pub fn forget(&mut self) {
        self.packet = Vec::new();
        self.queue.clear();
        self.queued = 0;
    }

    /// Receives one packet into `buf`; None when there is none now.
    pub fn receive(&mut self, buf: &mut Vec<u8>) -> Option<usize> {
        buf.clear();
        buf.reserve(frame::MAX_PACKET);
        match io::recv_into(self.fd.raw(), buf) {
            Ok(0) => {
                self.dead = true;
                None
            }
            Ok(n) => Some(n),
            Err(Errno::EAGAIN | Errno::EINTR) => None,
            Err(_) => {
                self.dead = true;
                None
            }
        }
    }
}
