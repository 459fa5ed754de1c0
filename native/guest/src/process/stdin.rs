//! The way from streams to a command's standard input.

use crate::sys::{io, Errno, Fd};
use alloc::collections::VecDeque;
use alloc::vec::Vec;

struct Chunk {
    stream: u32,
    data: Vec<u8>,
    at: usize,
}

/// The write end of the pipe and what waits for it. Bounded by the streams' windows: credit is
/// granted only for what was written.
#[derive(Default)]
pub struct Stdin {
    pub fd: Option<Fd>,
    queue: VecDeque<Chunk>,
    /// Close the pipe once the queue is empty.
    pub eof: bool,
    /// The event loop waits for the pipe to take more.
    pub armed: bool,
    /// Bytes ever accepted, for resuming by offset.
    pub accepted: u64,
}

impl Stdin {
    pub fn new(fd: Option<Fd>) -> Stdin {
        Stdin {
            fd,
            ..Stdin::default()
        }
    }

    pub fn is_open(&self) -> bool {
        self.fd.is_some() && !self.eof
    }

    pub fn push(&mut self, stream: u32, data: &[u8]) {
        self.accepted += data.len() as u64;
        self.queue.push_back(Chunk {
            stream,
            data: data.to_vec(),
            at: 0,
        });
    }

    pub fn is_idle(&self) -> bool {
        self.queue.is_empty()
    }

    /// Writes what the pipe takes. Returns the bytes consumed per stream, to be granted again.
    pub fn write(&mut self) -> Vec<(u32, usize)> {
        let mut done: Vec<(u32, usize)> = Vec::new();
        while let Some(chunk) = self.queue.front_mut() {
            let Some(fd) = &self.fd else { break };
            match io::write(fd.raw(), &chunk.data[chunk.at..]) {
                Ok(n) => {
                    credit(&mut done, chunk.stream, n);
                    chunk.at += n;
                    if chunk.at == chunk.data.len() {
                        self.queue.pop_front();
                    }
                }
                Err(Errno::EAGAIN | Errno::EINTR) => return done,
                // The reader is gone.
                Err(_) => self.fd = None,
            }
        }
        if self.fd.is_none() || self.eof {
            done.extend(self.close());
        }
        done
    }

    /// Closes the pipe and drops what waits; what was dropped is returned as consumed.
    pub fn close(&mut self) -> Vec<(u32, usize)> {
        self.fd = None;
        self.eof = true;
        let mut done = Vec::new();
        for chunk in self.queue.drain(..) {
            credit(&mut done, chunk.stream, chunk.data.len() - chunk.at);
        }
        done
    }
}

fn credit(done: &mut Vec<(u32, usize)>, stream: u32, n: usize) {
    match done.iter_mut().find(|(s, _)| *s == stream) {
        Some((_, total)) => *total += n,
        None => done.push((stream, n)),
    }
}
