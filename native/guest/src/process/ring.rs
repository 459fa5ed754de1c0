//! The output of one stream: the head and the tail are kept, the middle is dropped and marked.

use alloc::vec::Vec;

/// Bytes kept at the tail at least while somebody follows, so that reading can go on in pieces.
const FOLLOW_TAIL: usize = 65_536;
/// Bytes kept at the tail even where memory is short: the last lines say most.
const LEAST_TAIL: usize = 4096;
/// The buffer of the tail grows in steps of this.
const STEP: usize = 32_768;

pub struct Ring {
    head: Vec<u8>,
    head_limit: usize,
    /// Circular once it has reached `tail_limit`.
    tail: Vec<u8>,
    start: usize,
    tail_limit: usize,
    total: u64,
}

impl Ring {
    /// Keeps about `cap` bytes: half at the head, the rest at the tail.
    pub fn new(cap: u64) -> Ring {
        let cap = cap.min(1 << 30) as usize;
        Ring {
            head: Vec::new(),
            head_limit: cap / 2,
            tail: Vec::new(),
            start: 0,
            tail_limit: cap - cap / 2,
            total: 0,
        }
    }

    /// Bytes ever written.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of memory held.
    pub fn held(&self) -> usize {
        self.head.capacity() + self.tail.capacity()
    }

    /// Bytes that may be written past a follower's offset without dropping what it has not seen.
    pub fn follow_window(&mut self) -> u64 {
        if self.tail_limit < FOLLOW_TAIL {
            self.straighten();
            self.tail_limit = FOLLOW_TAIL;
        }
        self.tail_limit.min(262_144) as u64
    }

    /// Bytes that may still be written before anything is dropped.
    pub fn room(&self) -> usize {
        let head = if self.tail.is_empty() {
            self.head_limit - self.head.len()
        } else {
            0
        };
        head + (self.tail_limit - self.tail.len().min(self.tail_limit))
    }

    /// Forgets the content and keeps none of what comes later.
    pub fn discard(&mut self) {
        *self = Ring {
            total: self.total,
            ..Ring::new(0)
        };
    }

    /// Grows no more than it has: the middle is dropped from here on, earlier than at the cap.
    pub fn stop_growing(&mut self) {
        if self.tail.is_empty() {
            self.head_limit = self.head.len();
        }
        self.tail_limit = self.tail_limit.min(self.tail.len().max(LEAST_TAIL));
    }

    pub fn push(&mut self, mut bytes: &[u8]) {
        self.total += bytes.len() as u64;
        if self.head.len() < self.head_limit && self.tail.is_empty() {
            let n = bytes.len().min(self.head_limit - self.head.len());
            grow(&mut self.head, n, self.head_limit);
            self.head.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
        }
        if bytes.is_empty() || self.tail_limit == 0 {
            return;
        }
        if bytes.len() >= self.tail_limit {
            self.tail.clear();
            self.start = 0;
            bytes = &bytes[bytes.len() - self.tail_limit..];
        }
        let n = bytes.len().min(self.tail_limit - self.tail.len());
        if n > 0 {
            grow(&mut self.tail, n, self.tail_limit);
            self.tail.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
        }
        while !bytes.is_empty() {
            let n = bytes.len().min(self.tail.len() - self.start);
            self.tail[self.start..self.start + n].copy_from_slice(&bytes[..n]);
            self.start = (self.start + n) % self.tail.len();
            bytes = &bytes[n..];
        }
    }

    /// All kept bytes, the gap left out.
    pub fn to_vec(&self) -> Vec<u8> {
        [
            &self.head[..],
            &self.tail[self.start..],
            &self.tail[..self.start],
        ]
        .concat()
    }

    fn straighten(&mut self) {
        self.tail.rotate_left(self.start);
        self.start = 0;
    }

    /// The range of offsets that was dropped.
    pub fn gap(&self) -> Option<(u64, u64)> {
        let from = self.head.len() as u64;
        let to = self.total - self.tail.len() as u64;
        (from < to).then_some((from, to))
    }

    /// Bytes kept.
    pub fn kept(&self) -> u64 {
        (self.head.len() + self.tail.len()) as u64
    }

    /// The kept bytes from `offset` on, as far as they lie together in memory. Empty at the end, and inside the gap.
    pub fn at(&self, offset: u64) -> &[u8] {
        let head = self.head.len() as u64;
        if offset < head {
            return &self.head[offset as usize..];
        }
        let tail_from = self.total - self.tail.len() as u64;
        if offset < tail_from || offset >= self.total {
            return &[];
        }
        let place = self.start + (offset - tail_from) as usize;
        match place.checked_sub(self.tail.len()) {
            Some(wrapped) => &self.tail[wrapped..self.start],
            None => &self.tail[place..],
        }
    }
}

/// Makes room for `more` bytes in steps, never beyond `limit`.
fn grow(buf: &mut Vec<u8>, more: usize, limit: usize) {
    let needed = buf.len() + more;
    if needed > buf.capacity() {
        // Small outputs stay small; large ones grow by half, so that copies (where mremap has to
        // move nothing) stay rare.
        let wanted = if needed <= 1024 {
            needed
        } else {
            (needed + needed / 2).max(STEP.min(needed * 2))
        };
        buf.reserve_exact(wanted.min(limit).max(needed) - buf.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn collect(ring: &Ring, mut offset: u64) -> Vec<u8> {
        let mut out = Vec::new();
        loop {
            if let Some((from, to)) = ring.gap() {
                if offset >= from && offset < to {
                    offset = to;
                }
            }
            let piece = ring.at(offset);
            if piece.is_empty() {
                return out;
            }
            out.extend_from_slice(piece);
            offset += piece.len() as u64;
        }
    }

    #[test]
    fn keeps_head_and_tail_for_any_sizes() {
        for cap in [0u64, 1, 2, 7, 10, 100, 5000] {
            for step in [1usize, 3, 7, 50, 4096] {
                let mut ring = Ring::new(cap);
                let all: Vec<u8> = (0..20_000u32).map(|n| (n * 7 + n / 251) as u8).collect();
                for piece in all.chunks(step) {
                    ring.push(piece);
                    assert!(ring.kept() <= cap);
                }
                let head = (cap / 2) as usize;
                let tail = cap as usize - head;
                let mut expected = all[..head].to_vec();
                expected.extend_from_slice(&all[all.len() - tail..]);
                assert_eq!(collect(&ring, 0), expected, "cap {cap} step {step}");
                assert_eq!(ring.gap(), Some((head as u64, (all.len() - tail) as u64)));
                assert_eq!(ring.total(), all.len() as u64);
            }
        }
    }

    #[test]
    fn nothing_is_lost_below_the_cap() {
        let mut ring = Ring::new(1000);
        ring.push(&[1; 600]);
        ring.push(&[2; 400]);
        assert_eq!(ring.gap(), None);
        assert_eq!(
            collect(&ring, 550),
            [[1; 50].as_slice(), &[2; 400]].concat()
        );
        assert!(ring.held() <= 1000);
        ring.push(&[3]);
        assert_eq!(ring.gap(), Some((500, 501)));
    }

    #[test]
    fn a_ring_that_may_not_grow_drops_its_middle() {
        let mut ring = Ring::new(1 << 20);
        ring.push(&[1; 10_000]);
        ring.stop_growing();
        for _ in 0..100 {
            ring.push(&[2; 1000]);
        }
        assert_eq!(ring.gap(), Some((10_000, 110_000 - 4096)));
        assert_eq!(collect(&ring, 105_000), [2; 4096]);
        ring.stop_growing();
        ring.push(&[3; 5000]);
        assert_eq!(ring.kept(), 14_096);
    }

    #[test]
    fn a_follower_widens_a_small_tail() {
        let mut ring = Ring::new(10);
        ring.push(b"0123456789abc");
        assert_eq!(ring.follow_window(), 65_536);
        ring.push(b"def");
        assert_eq!(collect(&ring, 8), b"89abcdef");
        ring.discard();
        assert_eq!((ring.total(), ring.kept()), (16, 0));
        ring.push(b"gone");
        assert_eq!((ring.total(), ring.kept()), (20, 0));
    }
}
