//! The agent: one loop over the channel, the children's pipes, their deaths and their deadlines.
//!
//! The rule: nothing here waits for anything that the sandbox can influence. Descriptors are
//! non-blocking, files are touched only by forked children.

use crate::channel::Channel;
use crate::config::Config;
use crate::process::cgroup::{Cgroups, Leaf};
use crate::process::child::Surroundings;
use crate::process::table::Table;
use crate::streams::{Kind, Stream, Streams};
use crate::sys::consts::*;
use crate::sys::event::{self, Epoll, Event};
use crate::sys::{io, task, Fd, Result};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use dsec_wire::frame::{self, Frames};
use dsec_wire::{Encoder, Value, PROTO};

/// Packets taken from the channel in a row before others get their turn.
const PACKETS_A_TURN: usize = 16;
/// A buffer that grew is given back after so long without events.
const IDLE_MS: i32 = 1000;

/// What an event belongs to; the upper byte of its token, the lower 56 bits are the key.
#[derive(Clone, Copy)]
#[repr(u8)]
pub enum Source {
    Channel = 1,
    Children,
    Status,
    Stdout,
    Stderr,
    Stdin,
    Leaf,
    Worker,
}

impl Source {
    pub fn token(self, key: u64) -> u64 {
        (self as u64) << 56 | key
    }
}

pub struct Agent {
    pub epoll: Epoll,
    pub channel: Channel,
    pub streams: Streams,
    pub table: Table,
    pub config: Config,
    pub cgroups: Cgroups,
    pub around: Surroundings,
    pub oom: Option<Fd>,
    /// Leaves of failed starts, given back once they are empty.
    pub closing: Vec<Leaf>,
    /// Streams by the pid of their file worker.
    pub workers: BTreeMap<i32, u32>,
    /// Buffer for pipes and workers.
    pub scratch: Vec<u8>,
    packet: Vec<u8>,
    children: Fd,
    epoch: u64,
    /// Requests are served only after the first HELLO.
    greeted: bool,
    born_us: u64,
    watching_write: bool,
    reading: bool,
}

impl Agent {
    pub fn new(
        channel: Fd,
        around: Surroundings,
        cgroups: Cgroups,
        oom: Option<Fd>,
        born_us: u64,
    ) -> Result<Agent> {
        let children = event::signalfd(SIGCHLD)?;
        let epoll = Epoll::new()?;
        epoll.add(channel.raw(), EPOLLIN, Source::Channel.token(0))?;
        epoll.add(children.raw(), EPOLLIN, Source::Children.token(0))?;
        Ok(Agent {
            epoll,
            channel: Channel::new(channel),
            streams: Streams::default(),
            table: Table::default(),
            config: Config::default(),
            cgroups,
            around,
            oom,
            closing: Vec::new(),
            workers: BTreeMap::new(),
            scratch: Vec::new(),
            packet: Vec::new(),
            children,
            epoch: 0,
            greeted: false,
            born_us,
            watching_write: false,
            reading: true,
        })
    }

    /// Runs until the channel ends.
    pub fn run(&mut self) {
        let mut events = [Event::default(); 64];
        while !self.channel.dead {
            let trim = self.scratch.capacity() + self.packet.capacity() > 0;
            let timeout = self.timeout_ms().min(if trim { IDLE_MS } else { i32::MAX });
            let ready = self
                .epoll
                .wait(&mut events, if timeout == i32::MAX { -1 } else { timeout });
            if ready.is_empty() && timeout == IDLE_MS {
                self.scratch = Vec::new();
                self.packet = Vec::new();
            }
            let mut deaths = false;
            for event in ready {
                let Event { events, data } = *event;
                deaths |= self.dispatch(events, data);
            }
            // After the pipes' events, so that what a process wrote last is read first.
            if deaths {
                self.reap();
            }
            self.expire();
            self.pump();
            self.channel.flush();
            self.watch_channel();
        }
    }

    /// Handles one event; true if children have died.
    fn dispatch(&mut self, events: u32, token: u64) -> bool {
        let key = token & ((1 << 56) - 1);
        match (token >> 56) as u8 {
            t if t == Source::Channel as u8 => {
                if events & EPOLLOUT != 0 {
                    self.channel.writable();
                }
                if events & !EPOLLOUT != 0 {
                    self.receive();
                }
            }
            t if t == Source::Children as u8 => return true,
            t if t == Source::Status as u8 => self.status_ready(key),
            t if t == Source::Stdout as u8 => self.output_ready(key, 0),
            t if t == Source::Stderr as u8 => self.output_ready(key, 1),
            t if t == Source::Stdin as u8 => self.stdin_ready(key),
            t if t == Source::Leaf as u8 => self.leaf_changed(key),
            t if t == Source::Worker as u8 => self.worker_ready(key as u32, events),
            _ => {}
        }
        false
    }

    fn reap(&mut self) {
        let mut info = [0u8; 128];
        while io::read(self.children.raw(), &mut info).is_ok() {}
        while let Some(change) = task::change() {
            let ended = match change {
                task::Change::Ended(ended) => ended,
                task::Change::Stopped(pid) => {
                    self.stopped(pid);
                    continue;
                }
            };
            if let Some(stream) = self.workers.remove(&ended.pid) {
                self.worker_died(stream);
            } else if let Some(key) = self.table.reaped(ended.pid) {
                self.main_died(key, &ended);
            }
        }
    }

    /// Root in the sandbox can stop a child of ours that is not yet, or never becomes, a command: its caller
    /// would wait for ever. A command may be stopped, and stay so.
    fn stopped(&mut self, pid: i32) {
        let ours = self.workers.contains_key(&pid)
            || self.table.find_pid(pid).is_some_and(|key| {
                // It may have become the command just before.
                self.status_ready(key);
                self.table.is_starting(key)
            });
        if ours {
            let _ = task::kill(pid, SIGKILL);
        }
    }

    /// Keeps the interest in the channel: writable only while blocked, readable unless too much is queued.
    fn watch_channel(&mut self) {
        let write = self.channel.is_blocked();
        let read = !self.channel.is_full();
        if (write, read) != (self.watching_write, self.reading) {
            let events = if write { EPOLLOUT } else { 0 } | if read { EPOLLIN } else { 0 };
            let _ = self
                .epoll
                .modify(self.channel.raw(), events, Source::Channel.token(0));
            (self.watching_write, self.reading) = (write, read);
        }
    }

    fn receive(&mut self) {
        for _ in 0..PACKETS_A_TURN {
            if self.channel.is_full() {
                return;
            }
            let mut packet = core::mem::take(&mut self.packet);
            let Some(n) = self.channel.receive(&mut packet) else {
                self.packet = packet;
                return;
            };
            // A broken frame spoils the rest of its packet only; the next packet starts anew.
            for frame in Frames::new(&packet[..n]).map_while(|f| f.ok()) {
                self.frame(&frame);
            }
            self.packet = packet;
        }
    }

    fn frame(&mut self, frame: &frame::Frame<'_>) {
        if frame.stream == 0 {
            return self.connection_frame(frame);
        }
        if !self.greeted {
            return;
        }
        match frame.kind {
            frame::OPEN if self.streams.may_open(frame.stream) => {
                self.open(frame.stream, frame.payload, frame.fin)
            }
            frame::DATA => self.data(frame.stream, frame.payload, frame.fin),
            frame::MSG if frame.fin => self.data(frame.stream, &[], true),
            frame::CREDIT => {
                if let (Some(stream), Ok(more)) = (
                    self.streams.get_mut(frame.stream),
                    <[u8; 4]>::try_from(frame.payload),
                ) {
                    stream.send = stream
                        .send
                        .saturating_add(u64::from(u32::from_le_bytes(more)));
                }
            }
            frame::RESET => self.close_stream(frame.stream, true),
            frame::PING => self.channel.put(frame.stream, frame::PONG, frame.payload),
            _ => {}
        }
    }

    fn connection_frame(&mut self, frame: &frame::Frame<'_>) {
        match frame.kind {
            frame::HELLO => {
                if let Ok(hello) = Value::decode(frame.payload) {
                    self.hello(&hello);
                }
            }
            frame::PING => self.channel.put(0, frame::PONG, frame.payload),
            _ => {}
        }
    }

    fn hello(&mut self, hello: &Value<'_>) {
        let epoch = hello.get("epoch").and_then(Value::as_u64).unwrap_or(0);
        if self.greeted && epoch <= self.epoch {
            return;
        }
        if self.greeted {
            self.forget_streams();
        }
        self.greeted = true;
        self.epoch = epoch;
        if let Some(config) = hello.get("config") {
            self.config.update(config);
        }
        let mut e = Encoder::new();
        e.map(4).str("proto").uint(PROTO).str("epoch").uint(epoch);
        e.str("version")
            .str(env!("CARGO_PKG_VERSION"))
            .str("boot_us")
            .uint(event::now_us() - self.born_us);
        self.channel.put(0, frame::HELLO, &e.out);
    }

    /// Processes live on, also those whose exec nobody waits for any more.
    fn forget_streams(&mut self) {
        self.channel.forget();
        for (_, stream) in self.streams.clear() {
            if let Kind::File(worker) = stream.kind {
                worker.kill(&self.epoll);
            }
        }
        self.workers.clear();
        for key in self.table.keys() {
            if let Some(proc) = self.table.get_mut(key) {
                proc.waiters.clear();
                proc.readers.clear();
            }
            self.resume_reading(key);
        }
    }

    /// Tells the peer that it may send `n` more bytes.
    pub fn grant(&mut self, stream: u32, n: usize) {
        if let Some(open) = self.streams.get_mut(stream) {
            open.recv += n as u64;
            if n > 0 && !open.fin {
                self.channel
                    .put(stream, frame::CREDIT, &(n as u32).to_le_bytes());
            }
        }
    }

    /// Answers with the last MSG of a stream and ends it.
    pub fn finish(&mut self, stream: u32, answer: &[u8]) {
        self.channel.put(stream, frame::MSG | frame::FIN, answer);
        self.streams.remove(stream);
    }

    /// Ends a stream with an error.
    pub fn fail(&mut self, stream: u32, failure: &crate::reply::Failure) {
        self.channel.put(stream, frame::RESET, &failure.encode());
        self.close_stream(stream, false);
    }

    /// Forgets a stream; `by_peer` a reset of an exec kills what it runs.
    pub fn close_stream(&mut self, id: u32, by_peer: bool) {
        let Some(Stream { kind, .. }) = self.streams.remove(id) else {
            return;
        };
        match kind {
            Kind::Exec { proc } | Kind::Wait { proc, .. } => {
                let abandoned = self.table.get_mut(proc).is_some_and(|p| {
                    p.waiters.retain(|s| *s != id);
                    !p.start && p.waiters.is_empty()
                });
                if by_peer && abandoned && matches!(kind, Kind::Exec { .. }) {
                    self.kill_run(proc, crate::process::table::Reason::Killed);
                }
            }
            Kind::Output(reader) => {
                if let Some(proc) = self.table.get_mut(reader.proc) {
                    proc.readers.retain(|s| *s != id);
                }
                self.resume_reading(reader.proc);
            }
            Kind::Start { .. } | Kind::Stdin { .. } => {}
            Kind::File(worker) => {
                self.workers.retain(|_, s| *s != id);
                worker.kill(&self.epoll);
            }
        }
    }
}
