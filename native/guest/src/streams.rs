//! The streams that the edge has open.

use crate::files::relay::Worker;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use dsec_wire::frame::WINDOW;

/// A reader of a process's output.
#[derive(Clone, Copy, Debug)]
pub struct Reader {
    pub proc: u64,
    /// Next offset per channel.
    pub next: [u64; 2],
    /// Stop there; None: at the present end, once the process has ended.
    pub end: Option<[u64; 2]>,
    /// Whether gaps are told by a MSG (else the result map tells them).
    pub tell_gaps: bool,
}

pub enum Kind {
    /// An exec that waits for its result; its DATA is stdin.
    Exec {
        proc: u64,
    },
    /// A started process; its DATA is stdin, if it has one.
    Start {
        proc: u64,
        written: u64,
    },
    Output(Reader),
    Stdin {
        proc: u64,
        skip: u64,
        written: u64,
    },
    Wait {
        proc: u64,
        deadline: Option<u64>,
    },
    File(Box<Worker>),
}

pub struct Stream {
    pub kind: Kind,
    /// DATA bytes we may still send.
    pub send: u64,
    /// DATA bytes the peer may still send.
    pub recv: u64,
    /// The peer sent FIN.
    pub fin: bool,
}

impl Stream {
    pub fn new(kind: Kind) -> Stream {
        Stream {
            kind,
            send: WINDOW,
            recv: WINDOW,
            fin: false,
        }
    }
}

#[derive(Default)]
pub struct Streams {
    map: BTreeMap<u32, Stream>,
    highest: u32,
    /// Where the next round of sending starts, so that all get their turn.
    turn: u32,
}

impl Streams {
    /// Whether the peer may open `id`: odd and above all before.
    pub fn may_open(&mut self, id: u32) -> bool {
        if id % 2 == 0 || id <= self.highest {
            return false;
        }
        self.highest = id;
        true
    }

    pub fn insert(&mut self, id: u32, stream: Stream) {
        self.map.insert(id, stream);
    }

    pub fn get_mut(&mut self, id: u32) -> Option<&mut Stream> {
        self.map.get_mut(&id)
    }

    pub fn remove(&mut self, id: u32) -> Option<Stream> {
        self.map.remove(&id)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u32, &Stream)> {
        self.map.iter().map(|(id, s)| (*id, s))
    }

    /// Ids of the streams that may have bulk data to send, another one first each time.
    pub fn senders(&mut self) -> Vec<u32> {
        let mut ids: Vec<u32> = self
            .map
            .iter()
            .filter(|(_, s)| matches!(s.kind, Kind::Output(_) | Kind::File(_)))
            .map(|(id, _)| *id)
            .collect();
        let at = ids.iter().position(|id| *id > self.turn).unwrap_or(0);
        ids.rotate_left(at);
        self.turn = ids.first().copied().unwrap_or(0);
        ids
    }

    /// A new epoch: takes all streams out and starts numbering anew.
    pub fn clear(&mut self) -> BTreeMap<u32, Stream> {
        self.highest = 0;
        core::mem::take(&mut self.map)
    }
}
