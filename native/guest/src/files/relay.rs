//! The agent's side of a file operation: forks the worker and relays frames both ways.
//!
//! What the worker says is untrusted: it is bounded, its type and form are checked, and it can only
//! ever reach its own stream.

use super::request::{FileRequest, Op};
use super::worker;
use crate::agent::{Agent, Source};
use crate::reply::{Failure, Outcome};
use crate::streams::{Kind, Stream};
use crate::sys::consts::*;
use crate::sys::event::Epoll;
use crate::sys::{io, task, Errno, Fd};
use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::vec::Vec;
use dsec_wire::{frame, Value};

/// Workers at once at most.
const MAX_WORKERS: usize = 64;
/// Packets taken from one worker before others get their turn.
const PACKETS_A_TURN: usize = 4;

pub struct Worker {
    pid: i32,
    alive: bool,
    sock: Fd,
    /// Whether this operation sends file data at all.
    gives_data: bool,
    /// DATA from the edge that the worker has not taken yet; bounded by the stream's window.
    inbox: VecDeque<Vec<u8>>,
    fin: bool,
    fin_sent: bool,
    readable: bool,
    /// DATA of the worker that the window did not let through yet.
    pending: Vec<u8>,
}

impl Worker {
    /// Ends the worker if it is still there.
    pub fn kill(&self, epoll: &Epoll) {
        epoll.del(self.sock.raw());
        if self.alive {
            let _ = task::kill(self.pid, SIGKILL);
        }
    }

    /// The next packet of the worker. That it left data of ours unread is reported once, before what
    /// it sent; it is no error for us.
    fn receive(&self, packet: &mut Vec<u8>) -> Result<usize, Errno> {
        match io::recv_into(self.sock.raw(), packet) {
            Err(Errno::ECONNRESET) => io::recv_into(self.sock.raw(), packet),
            other => other,
        }
    }

    /// Hands over what the worker takes; returns the bytes taken.
    fn feed(&mut self) -> usize {
        let mut taken = 0;
        while let Some(packet) = self.inbox.front() {
            match io::send(self.sock.raw(), packet, false) {
                Ok(_) => taken += packet.len() - 1,
                // A worker that closed its end has answered already or died; both are seen elsewhere.
                Err(Errno::EPIPE | Errno::ECONNRESET) => taken += packet.len() - 1,
                Err(_) => return taken,
            }
            self.inbox.pop_front();
        }
        if self.fin && !self.fin_sent {
            self.fin_sent = io::send(self.sock.raw(), &[frame::FIN], false) != Err(Errno::EAGAIN);
        }
        taken
    }
}

impl Agent {
    pub fn method_file(&mut self, stream: u32, map: &Value<'_>, fin: bool) -> Outcome<()> {
        let request = FileRequest::parse(map)?;
        if self.workers.len() >= MAX_WORKERS {
            return Err(Failure::new(
                "too_many",
                alloc::format!("{MAX_WORKERS} file operations are running already"),
            ));
        }
        let failed = |e| Failure::kernel(e, "cannot start a file worker");
        let (ours, theirs) = io::seqpacket_pair().map_err(failed)?;
        let pid = match task::fork().map_err(failed)? {
            0 => worker::run(theirs.raw(), &request, &self.config, &self.around),
            pid => pid,
        };
        drop(theirs);
        let token = Source::Worker.token(u64::from(stream));
        if let Err(errno) = self
            .epoll
            .add(ours.raw(), EPOLLIN | EPOLLOUT | EPOLLET, token)
        {
            let _ = task::kill(pid, SIGKILL);
            return Err(failed(errno));
        }
        self.workers.insert(pid, stream);
        let worker = Worker {
            pid,
            alive: true,
            sock: ours,
            gives_data: matches!(request.op, Op::Read | Op::TarGet),
            inbox: VecDeque::new(),
            fin,
            fin_sent: false,
            readable: false,
            pending: Vec::new(),
        };
        let mut open = Stream::new(Kind::File(Box::new(worker)));
        open.fin = fin;
        self.streams.insert(stream, open);
        Ok(())
    }

    fn worker(&mut self, stream: u32) -> Option<&mut Worker> {
        match self.streams.get_mut(stream).map(|s| &mut s.kind) {
            Some(Kind::File(worker)) => Some(worker),
            _ => None,
        }
    }

    /// The worker's socket changed: room for our data, or news from it (read by `pump_worker`).
    pub fn worker_ready(&mut self, stream: u32, events: u32) {
        let Some(worker) = self.worker(stream) else {
            return;
        };
        worker.readable |= events & !EPOLLOUT != 0;
        let taken = worker.feed();
        self.grant(stream, taken);
    }

    /// The worker was reaped; what it sent before is still in the socket.
    pub fn worker_died(&mut self, stream: u32) {
        if let Some(worker) = self.worker(stream) {
            worker.alive = false;
            worker.readable = true;
        }
    }

    /// DATA or FIN of the edge for the worker.
    pub fn worker_data(&mut self, stream: u32, bytes: &[u8], fin: bool) {
        let Some(worker) = self.worker(stream) else {
            return;
        };
        if !bytes.is_empty() {
            let mut packet = Vec::with_capacity(bytes.len() + 1);
            packet.push(frame::DATA);
            packet.extend_from_slice(bytes);
            worker.inbox.push_back(packet);
        }
        worker.fin |= fin;
        let taken = worker.feed();
        self.grant(stream, taken);
    }

    /// Passes on what the worker says, as far as the window goes; true if anything moved.
    pub fn pump_worker(&mut self, id: u32) -> bool {
        let mut moved = false;
        for _ in 0..PACKETS_A_TURN {
            if !self.channel.can_take_data() || !self.pump_packet(id) {
                break;
            }
            moved = true;
        }
        moved
    }

    fn pump_packet(&mut self, id: u32) -> bool {
        if self.send_pending(id) {
            return true;
        }
        let mut packet = core::mem::take(&mut self.scratch);
        packet.clear();
        packet.reserve(frame::MAX_PACKET);
        let moved = match self.worker(id) {
            Some(worker) if worker.readable && worker.pending.is_empty() => {
                match worker.receive(&mut packet) {
                    Err(Errno::EAGAIN | Errno::EINTR) => {
                        worker.readable = false;
                        false
                    }
                    Ok(n) if n > 0 => {
                        self.worker_said(id, packet[0], &packet[1..]);
                        true
                    }
                    _ => {
                        self.fail(
                            id,
                            &Failure::new("io", "the file worker was killed before it was done"),
                        );
                        true
                    }
                }
            }
            _ => false,
        };
        self.scratch = packet;
        moved
    }

    /// Sends what is left of the last DATA packet, as much as the window allows.
    fn send_pending(&mut self, id: u32) -> bool {
        let Some(stream) = self.streams.get_mut(id) else {
            return false;
        };
        let Kind::File(worker) = &mut stream.kind else {
            return false;
        };
        let n = worker
            .pending
            .len()
            .min(usize::try_from(stream.send).unwrap_or(usize::MAX))
            .min(frame::MAX_PAYLOAD);
        if n == 0 {
            return false;
        }
        self.channel.put(id, frame::DATA, &worker.pending[..n]);
        stream.send -= n as u64;
        worker.pending.drain(..n);
        if worker.pending.is_empty() {
            worker.pending = Vec::new();
        }
        true
    }

    fn worker_said(&mut self, id: u32, kind: u8, payload: &[u8]) {
        let Some(stream) = self.streams.get_mut(id) else {
            return;
        };
        let Kind::File(worker) = &mut stream.kind else {
            return;
        };
        let fits = payload.len() <= frame::MAX_PAYLOAD;
        match kind {
            frame::DATA if fits && worker.gives_data && !payload.is_empty() => {
                let n = payload
                    .len()
                    .min(usize::try_from(stream.send).unwrap_or(usize::MAX));
                stream.send -= n as u64;
                worker.pending.extend_from_slice(&payload[n..]);
                if n > 0 {
                    self.channel.put(id, frame::DATA, &payload[..n]);
                }
            }
            frame::MSG if fits && is_map(payload) => self.channel.put(id, frame::MSG, payload),
            MSG_FIN if fits && is_map(payload) => {
                self.channel.put(id, MSG_FIN, payload);
                self.close_stream(id, false);
            }
            frame::RESET if fits && is_reset(payload) => {
                self.channel.put(id, frame::RESET, payload);
                self.close_stream(id, false);
            }
            _ => self.fail(
                id,
                &Failure::new("internal", "the file worker sent something it may not send"),
            ),
        }
    }
}

const MSG_FIN: u8 = frame::MSG | frame::FIN;

fn is_map(payload: &[u8]) -> bool {
    matches!(Value::decode(payload), Ok(Value::Map(_)))
}

fn is_reset(payload: &[u8]) -> bool {
    Value::decode(payload).is_ok_and(|map| map.get("code").and_then(Value::as_str).is_some())
}
