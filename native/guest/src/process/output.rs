//! Reading what commands print, and sending it to those who follow.

use super::table::Phase;
use crate::agent::{Agent, Source};
use crate::reply::{Failure, Outcome};
use crate::streams::{Kind, Reader, Stream};
use crate::sys::consts::*;
use crate::sys::{io, Errno};
use dsec_wire::{frame, Encoder, Value};

/// Bytes read from a pipe at a time, so that all descriptors get their turn.
const PIECE: usize = 65_536;
/// Before the payload of DATA on output streams: channel and offset.
const DATA_HEADER: usize = 9;

impl Agent {
    pub fn method_output(&mut self, stream: u32, map: &Value<'_>) -> Outcome<()> {
        let key = self.named(map)?;
        let number = |name: &str| map.get(name).and_then(Value::as_u64).unwrap_or(0);
        let follow = map.get("follow").and_then(Value::as_bool).unwrap_or(false);
        let Some(proc) = self.table.get_mut(key) else {
            return Ok(());
        };
        let totals = [proc.outs[0].ring.total(), proc.outs[1].ring.total()];
        let reader = Reader {
            proc: key,
            next: [
                number("since_out").min(totals[0]),
                number("since_err").min(totals[1]),
            ],
            end: (!follow).then_some(totals),
            tell_gaps: true,
        };
        proc.readers.push(stream);
        proc.hold_until = None;
        self.streams
            .insert(stream, Stream::new(Kind::Output(reader)));
        self.go_on_reading(key);
        Ok(())
    }

    /// No reader came in time: from now on the middle is dropped at the cap.
    pub fn end_hold(&mut self, key: u64, now: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        if proc.hold_until.is_some_and(|at| at <= now) {
            proc.hold_until = None;
            self.go_on_reading(key);
        }
    }

    /// Something that held a process back has changed.
    fn go_on_reading(&mut self, key: u64) {
        self.resume_reading(key);
        if self
            .table
            .get(key)
            .is_some_and(|p| p.phase == Phase::Draining)
        {
            for channel in 0..2 {
                self.drain_output(key, channel);
            }
            self.try_finalise(key);
        }
    }

    /// Bytes that may be read from a pipe now, so that no follower loses anything.
    fn allowance(&mut self, key: u64, channel: usize) -> usize {
        let spare =
            self.config
                .output_budget()
                .saturating_sub(self.table.output_held() + (2 * PIECE) as u64) as usize;
        let Some(proc) = self.table.get_mut(key) else {
            return 0;
        };
        let out = &mut proc.outs[channel];
        if proc.readers.is_empty() {
            return match proc.hold_until {
                Some(_) => out.ring.room().min(spare).min(PIECE),
                None => PIECE,
            };
        }
        let behind = proc
            .readers
            .iter()
            .filter_map(|id| match self.streams.get_mut(*id).map(|s| &s.kind) {
                Some(Kind::Output(reader)) => Some(reader.next[channel]),
                _ => None,
            })
            .min();
        let Some(next) = behind else { return PIECE };
        let unsent = out.ring.total().saturating_sub(next);
        out.ring
            .follow_window()
            .saturating_sub(unsent)
            .min(PIECE as u64) as usize
    }

    /// One read; returns the bytes read, None at the end of file or if the pipe is closed already.
    fn read_once(
        &mut self,
        key: u64,
        channel: usize,
        limit: usize,
    ) -> Result<Option<usize>, Errno> {
        let full = self.table.output_held() + (2 * PIECE) as u64 > self.config.output_budget();
        let Some(proc) = self.table.get_mut(key) else {
            return Ok(None);
        };
        let out = &mut proc.outs[channel];
        let Some(fd) = &out.fd else { return Ok(None) };
        self.scratch.clear();
        self.scratch.reserve(PIECE);
        let n = io::read_into(fd.raw(), &mut self.scratch, limit.min(PIECE))?;
        if n == 0 {
            out.fd = None;
            out.armed = false;
            out.drain = 0;
            return Ok(None);
        }
        if !proc.forgotten {
            if full {
                out.ring.stop_growing();
            }
            out.ring.push(&self.scratch);
        }
        out.drain = if out.drain == usize::MAX {
            usize::MAX
        } else {
            out.drain.saturating_sub(n)
        };
        Ok(Some(n))
    }

    /// A pipe is readable.
    pub fn output_ready(&mut self, key: u64, channel: usize) {
        let allowed = self.allowance(key, channel);
        if allowed == 0 {
            self.disarm(key, channel);
            return;
        }
        let draining = self
            .table
            .get(key)
            .is_some_and(|p| p.phase == Phase::Draining);
        if draining {
            self.drain_output(key, channel);
            self.try_finalise(key);
            return;
        }
        if let Ok(None) = self.read_once(key, channel, allowed) {
            self.table.sweep(key);
        }
    }

    fn unfollowed(&self, key: u64) -> bool {
        self.table.get(key).is_some_and(|p| p.readers.is_empty())
    }

    fn disarm(&mut self, key: u64, channel: usize) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        let out = &mut proc.outs[channel];
        if let (Some(fd), true) = (&out.fd, out.armed) {
            self.epoll.del(fd.raw());
            out.armed = false;
        }
    }

    /// Watches the pipes again that may be read.
    pub fn resume_reading(&mut self, key: u64) {
        for (channel, source) in [Source::Stdout, Source::Stderr].into_iter().enumerate() {
            let idle = self
                .table
                .get(key)
                .is_some_and(|p| p.outs[channel].fd.is_some() && !p.outs[channel].armed);
            if idle && self.allowance(key, channel) > 0 {
                if let Some(out) = self.table.get_mut(key).map(|p| &mut p.outs[channel]) {
                    if let Some(fd) = &out.fd {
                        out.armed = self.epoll.add(fd.raw(), EPOLLIN, source.token(key)).is_ok();
                    }
                }
            }
        }
    }

    /// After the main process's end: reads what was in the pipe then, as far as followers allow.
    pub fn drain_output(&mut self, key: u64, channel: usize) {
        loop {
            let left = self.table.get(key).map_or(0, |p| p.outs[channel].drain);
            let limit = left.min(self.allowance(key, channel));
            if left == 0 || limit == 0 {
                return self.resume_reading(key);
            }
            match self.read_once(key, channel, limit) {
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(_) => {
                    if let Some(proc) = self.table.get_mut(key) {
                        proc.outs[channel].drain = 0;
                    }
                    return;
                }
            }
        }
    }

    /// All writers are gone: takes what they left and closes the pipe.
    pub fn drain_rest(&mut self, key: u64, channel: usize) {
        while let Ok(Some(_)) = self.read_once(key, channel, PIECE) {}
        if let Some(proc) = self.table.get_mut(key) {
            proc.outs[channel].fd = None;
            proc.outs[channel].armed = false;
        }
    }

    /// Sends what followers and file readers are owed, each a piece in turn, while the channel takes it.
    pub fn pump(&mut self) {
        loop {
            let mut progress = false;
            for id in self.streams.senders() {
                if !self.channel.can_take_data() {
                    return;
                }
                let is_output = matches!(
                    self.streams.get_mut(id).map(|s| &s.kind),
                    Some(Kind::Output(_))
                );
                progress |= if is_output {
                    self.pump_output(id)
                } else {
                    self.pump_worker(id)
                };
            }
            if !progress {
                return;
            }
        }
    }

    /// Sends one piece per channel; true if anything was sent.
    fn pump_output(&mut self, id: u32) -> bool {
        let mut sent = false;
        for channel in 0..2 {
            sent |= self.send_piece(id, channel);
        }
        if !sent {
            return self.end_output(id);
        }
        if let Some(Kind::Output(reader)) = self.streams.get_mut(id).map(|s| &s.kind) {
            let key = reader.proc;
            self.go_on_reading(key);
        }
        sent
    }

    fn send_piece(&mut self, id: u32, channel: usize) -> bool {
        let Some(stream) = self.streams.get_mut(id) else {
            return false;
        };
        let Kind::Output(reader) = &mut stream.kind else {
            return false;
        };
        let Some(proc) = self.table.get(reader.proc) else {
            return false;
        };
        let ring = &proc.outs[channel].ring;
        let end = reader.end.map_or(ring.total(), |end| end[channel]);
        if let Some((from, to)) = ring.gap() {
            let next = reader.next[channel];
            if (from..to).contains(&next) && next < end {
                let to = to.min(end);
                reader.next[channel] = to;
                if reader.tell_gaps {
                    let mut e = Encoder::new();
                    e.map(1)
                        .str("gap")
                        .array(3)
                        .uint(channel as u64 + 1)
                        .uint(next)
                        .uint(to);
                    self.channel.put(id, frame::MSG, &e.out);
                }
            }
        }
        let next = reader.next[channel];
        let bytes = ring.at(next);
        // The header is payload too, so it counts against the window.
        let window = usize::try_from(stream.send)
            .unwrap_or(usize::MAX)
            .saturating_sub(DATA_HEADER);
        let n = bytes
            .len()
            .min(window)
            .min(usize::try_from(end - next.min(end)).unwrap_or(usize::MAX))
            .min(frame::MAX_PAYLOAD - DATA_HEADER);
        if n == 0 {
            return false;
        }
        let offset = next.to_le_bytes();
        self.channel.put_parts(
            id,
            frame::DATA,
            &[&[channel as u8 + 1], &offset, &bytes[..n]],
        );
        reader.next[channel] += n as u64;
        stream.send -= (n + DATA_HEADER) as u64;
        true
    }

    /// Ends a reader's stream once it has got everything.
    fn end_output(&mut self, id: u32) -> bool {
        let Some(Kind::Output(reader)) = self.streams.get_mut(id).map(|s| &s.kind) else {
            return false;
        };
        let reader = *reader;
        let Some(proc) = self.table.get(reader.proc) else {
            self.fail(
                id,
                &Failure::new("no_process", "the process's output is no longer kept"),
            );
            return true;
        };
        let ended = proc.phase == Phase::Ended;
        let all = |end: [u64; 2]| (0..2).all(|c| reader.next[c] >= end[c]);
        let done = match reader.end {
            Some(end) => all(end),
            None => ended && all([proc.outs[0].ring.total(), proc.outs[1].ring.total()]),
        };
        if !done {
            return false;
        }
        let answer = match &proc.ending {
            Some(ending) if ended => proc.result(ending, None),
            _ => super::run::running(),
        };
        let delivered = !reader.tell_gaps && proc.rid.is_none() && !proc.start;
        self.finish(id, &answer);
        if let Some(proc) = self.table.get_mut(reader.proc) {
            proc.readers.retain(|s| *s != id);
        }
        self.resume_reading(reader.proc);
        if delivered && self.unfollowed(reader.proc) {
            self.table.forget(reader.proc);
        }
        true
    }
}
