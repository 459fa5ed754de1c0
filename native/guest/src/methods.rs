//! The methods, by name, and the DATA that comes to their streams.

use crate::agent::{Agent, Source};
use crate::process::run::running;
use crate::process::table::{Phase, Reason};
use crate::reply::{Failure, Outcome};
use crate::streams::{Kind, Stream};
use crate::sys::consts::*;
use crate::sys::{event, fs, task};
use alloc::vec::Vec;
use dsec_wire::{frame, Encoder, Value};

/// Streams open at once at most.
const MAX_STREAMS: usize = 4096;
/// Room that one entry of `ps` may take in a frame, so that each list fits.
const PS_FRAME: usize = 60_000;

impl Agent {
    /// A stream was opened: does what it asks for, or ends it with an error.
    pub fn open(&mut self, stream: u32, payload: &[u8], fin: bool) {
        let outcome = match Value::decode(payload) {
            Ok(map) => self.call(stream, &map, fin),
            Err(_) => Err(Failure::new("invalid", "the request is not a msgpack map")),
        };
        if let Err(failure) = outcome {
            self.fail(stream, &failure);
        }
    }

    fn call(&mut self, stream: u32, map: &Value<'_>, fin: bool) -> Outcome<()> {
        if self.streams.iter().count() >= MAX_STREAMS {
            return Err(Failure::new("too_many", "too many open streams"));
        }
        match map.get("m").and_then(Value::as_str) {
            Some("exec") => self.method_exec(stream, map, fin),
            Some("output") => self.method_output(stream, map),
            Some("stdin") => self.method_stdin(stream, map, fin),
            Some("signal") => self.method_signal(stream, map),
            Some("wait") => self.method_wait(stream, map),
            Some("ps") => self.method_ps(stream),
            Some("usage") => self.method_usage(stream),
            Some("file") => self.method_file(stream, map, fin),
            Some("config") => {
                let config = map
                    .get("config")
                    .ok_or_else(|| Failure::new("invalid", "config is missing"))?;
                self.config.update(config);
                self.answer_empty(stream)
            }
            Some(other) => Err(Failure::new(
                "unsupported",
                alloc::format!("unknown method {other:?}"),
            )),
            None => Err(Failure::new("invalid", "the request names no method")),
        }
    }

    fn answer_empty(&mut self, stream: u32) -> Outcome<()> {
        self.channel.put(stream, frame::MSG | frame::FIN, &[0x80]);
        Ok(())
    }

    /// The process that a request means by `id`.
    pub fn named(&self, map: &Value<'_>) -> Outcome<u64> {
        let id = map
            .get("id")
            .and_then(Value::as_str)
            .ok_or_else(|| Failure::new("invalid", "id is missing"))?;
        self.table
            .find(id)
            .ok_or_else(|| Failure::new("no_process", alloc::format!("no process {id:?}")))
    }

    fn method_stdin(&mut self, stream: u32, map: &Value<'_>, fin: bool) -> Outcome<()> {
        let key = self.named(map)?;
        let Some(proc) = self.table.get(key) else {
            return Ok(());
        };
        if !proc.stdin.is_open() {
            return Err(Failure::new(
                "bad_state",
                "the process's stdin is closed, or was never a pipe",
            ));
        }
        let accepted = proc.stdin.accepted;
        let skip = match map.get("offset").and_then(Value::as_u64) {
            Some(offset) if offset > accepted => {
                let text =
                    alloc::format!("offset {offset} is beyond the {accepted} bytes written so far");
                return Err(Failure::new("bad_state", text));
            }
            Some(offset) => accepted - offset,
            None => 0,
        };
        self.streams.insert(
            stream,
            Stream::new(Kind::Stdin {
                proc: key,
                skip,
                written: 0,
            }),
        );
        if fin {
            self.data(stream, &[], true);
        }
        Ok(())
    }

    fn method_signal(&mut self, stream: u32, map: &Value<'_>) -> Outcome<()> {
        let key = match map.get("pid").and_then(Value::as_i64) {
            Some(pid) if map.get("id").is_none() => {
                self.table.find_pid(pid as i32).ok_or_else(|| {
                    Failure::new(
                        "no_process",
                        alloc::format!("no running process has the pid {pid}"),
                    )
                })?
            }
            _ => self.named(map)?,
        };
        let sig = map
            .get("sig")
            .and_then(Value::as_u64)
            .filter(|n| (0..=64).contains(n));
        let sig = sig.ok_or_else(|| Failure::new("invalid", "sig must be a signal number"))? as u32;
        let tree = map.get("tree").and_then(Value::as_bool).unwrap_or(false);
        let Some(proc) = self.table.get(key) else {
            return Ok(());
        };
        if tree && sig == SIGKILL {
            if !proc.alive && proc.leaf.is_none() {
                return Err(Failure::new("no_process", "the process has ended"));
            }
            self.kill_run(key, Reason::Killed);
        } else if proc.alive {
            // It is our child and not reaped yet, so the number cannot mean another process.
            task::kill(proc.pid, sig)
                .map_err(|e| Failure::kernel(e, "cannot signal the process"))?;
        } else {
            return Err(Failure::new("no_process", "the process has ended"));
        }
        self.answer_empty(stream)
    }

    fn method_wait(&mut self, stream: u32, map: &Value<'_>) -> Outcome<()> {
        let key = self.named(map)?;
        let Some(proc) = self.table.get_mut(key) else {
            return Ok(());
        };
        let timeout_ms = map.get("timeout_ms").and_then(Value::as_u64);
        match proc.ending {
            Some(ending) if proc.phase == Phase::Ended => {
                let answer = proc.result(&ending, None);
                self.channel.put(stream, frame::MSG | frame::FIN, &answer);
            }
            _ if timeout_ms == Some(0) => {
                self.channel
                    .put(stream, frame::MSG | frame::FIN, &running())
            }
            _ => {
                proc.waiters.push(stream);
                let deadline =
                    timeout_ms.map(|ms| event::now_us().saturating_add(ms.saturating_mul(1000)));
                self.streams.insert(
                    stream,
                    Stream::new(Kind::Wait {
                        proc: key,
                        deadline,
                    }),
                );
            }
        }
        Ok(())
    }

    /// The list comes in as many messages as it needs; the last one has FIN.
    fn method_ps(&mut self, stream: u32) -> Outcome<()> {
        let entries: Vec<Vec<u8>> = self
            .table
            .iter()
            .filter(|(_, p)| !p.forgotten)
            .map(|(_, p)| p.describe())
            .collect();
        let mut at = 0;
        loop {
            let mut end = at;
            let mut bytes = 0;
            while end < entries.len() && (end == at || bytes + entries[end].len() <= PS_FRAME) {
                bytes += entries[end].len();
                end += 1;
            }
            let mut e = Encoder::new();
            e.map(1).str("processes").array(end - at);
            entries[at..end]
                .iter()
                .for_each(|entry| e.out.extend_from_slice(entry));
            let last = end == entries.len();
            self.channel.put(
                stream,
                frame::MSG | if last { frame::FIN } else { 0 },
                &e.out,
            );
            if last {
                return Ok(());
            }
            at = end;
        }
    }

    fn method_usage(&mut self, stream: u32) -> Outcome<()> {
        // The root directory itself: no name that the sandbox could have replaced.
        let usage = fs::openat(AT_FDCWD, c"/", O_PATH | O_DIRECTORY, 0)
            .and_then(|root| fs::fs_usage(root.raw()))
            .map_err(|e| Failure::kernel(e, "cannot ask the root file system"))?;
        let mut e = Encoder::new();
        e.map(5);
        e.str("disk_used").uint(
            usage
                .blocks
                .saturating_sub(usage.blocks_free)
                .saturating_mul(usage.block_bytes),
        );
        e.str("disk_total")
            .uint(usage.blocks.saturating_mul(usage.block_bytes));
        e.str("inodes_used")
            .uint(usage.inodes.saturating_sub(usage.inodes_free));
        e.str("inodes_total").uint(usage.inodes);
        e.str("processes").uint(
            self.table
                .iter()
                .filter(|(_, p)| p.phase != Phase::Ended)
                .count() as u64,
        );
        self.channel.put(stream, frame::MSG | frame::FIN, &e.out);
        Ok(())
    }

    /// DATA (or a bare FIN) on a stream that the edge opened.
    pub fn data(&mut self, id: u32, bytes: &[u8], fin: bool) {
        let Some(stream) = self.streams.get_mut(id) else {
            return;
        };
        if stream.fin {
            return;
        }
        if bytes.len() as u64 > stream.recv {
            return self.fail(
                id,
                &Failure::new("invalid", "more data than the window allows"),
            );
        }
        stream.recv -= bytes.len() as u64;
        stream.fin = fin;
        let key = match &mut stream.kind {
            Kind::Exec { proc } => *proc,
            Kind::Start { proc, written } => {
                *written += bytes.len() as u64;
                *proc
            }
            Kind::Stdin {
                proc,
                skip,
                written,
            } => {
                *written += bytes.len() as u64;
                let known = (*skip).min(bytes.len() as u64) as usize;
                *skip -= known as u64;
                let key = *proc;
                self.grant(id, known);
                return self.feed(key, id, &bytes[known..], fin);
            }
            Kind::File(_) => return self.worker_data(id, bytes, fin),
            Kind::Output(_) | Kind::Wait { .. } => return,
        };
        self.feed(key, id, bytes, fin);
    }

    fn feed(&mut self, key: u64, id: u32, bytes: &[u8], fin: bool) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        if !proc.stdin.is_open() {
            // Nobody reads it: the sender may go on and will see the end of the command.
            return self.grant(id, bytes.len());
        }
        if !bytes.is_empty() {
            proc.stdin.push(id, bytes);
        }
        proc.stdin.eof |= fin;
        self.stdin_ready(key);
    }

    /// The stdin pipe may take more: writes, grants, closes.
    pub fn stdin_ready(&mut self, key: u64) {
        let Some(proc) = self.table.get_mut(key) else {
            return;
        };
        let raw = proc.stdin.fd.as_ref().map(crate::sys::Fd::raw);
        let credits = proc.stdin.write();
        let wants = proc.stdin.fd.is_some() && !proc.stdin.is_idle();
        if let (Some(raw), true) = (raw, proc.stdin.fd.is_some() && wants != proc.stdin.armed) {
            if wants {
                let _ = self.epoll.add(raw, EPOLLOUT, Source::Stdin.token(key));
            } else {
                self.epoll.del(raw);
            }
            proc.stdin.armed = wants;
        }
        let closed = proc.stdin.fd.is_none();
        for (stream, n) in credits {
            self.grant(stream, n);
        }
        if closed {
            self.end_stdin_streams(key);
        }
    }

    /// The process's stdin is closed: ends the streams that feed it.
    pub fn end_stdin_streams(&mut self, key: u64) {
        // Those whose start is not confirmed yet get their last message with the pid.
        let early = self
            .table
            .get(key)
            .map(|p| p.waiters.clone())
            .unwrap_or_default();
        let ended: Vec<(u32, Option<u64>)> = self
            .streams
            .iter()
            .filter_map(|(id, s)| match s.kind {
                Kind::Stdin { proc, written, .. } if proc == key => {
                    Some((id, s.fin.then_some(written)))
                }
                Kind::Start { proc, written } if proc == key && !early.contains(&id) => {
                    Some((id, Some(written)))
                }
                _ => None,
            })
            .collect();
        for (id, written) in ended {
            match written {
                Some(written) => {
                    let mut e = Encoder::new();
                    e.map(1).str("written").uint(written);
                    self.finish(id, &e.out);
                }
                None => self.fail(
                    id,
                    &Failure::new("bad_state", "the process's stdin is closed"),
                ),
            }
        }
    }
}
