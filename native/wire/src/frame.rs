//! Frames: `u32le length | u32le stream | u8 type | payload`.

use alloc::vec::Vec;

/// Bytes of one frame's payload at most.
pub const MAX_PAYLOAD: usize = 65_536;
/// Bytes before the payload: length, stream and type.
pub const HEADER: usize = 9;
/// Bytes of one packet at most, which may hold several frames.
pub const MAX_PACKET: usize = 65_600;
/// DATA payload bytes that each side may send on a fresh stream.
pub const WINDOW: u64 = 262_144;

pub const HELLO: u8 = 0;
pub const OPEN: u8 = 1;
pub const MSG: u8 = 2;
pub const DATA: u8 = 3;
pub const RESET: u8 = 4;
pub const CREDIT: u8 = 5;
pub const PING: u8 = 6;
pub const PONG: u8 = 7;
/// Set in the type of the sender's last frame on a stream.
pub const FIN: u8 = 0x80;

/// One frame, its payload borrowed from the packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    pub stream: u32,
    /// Type without the FIN bit.
    pub kind: u8,
    pub fin: bool,
    pub payload: &'a [u8],
}

/// Why the rest of a packet cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FrameError {
    /// The packet ends inside a frame.
    Truncated,
    /// The length field is below 5 or above the limit.
    BadLength,
}

/// Iterates over the frames of one packet; ends after the first error.
pub struct Frames<'a> {
    rest: &'a [u8],
}

impl<'a> Frames<'a> {
    pub fn new(packet: &'a [u8]) -> Self {
        Frames { rest: packet }
    }
}

impl<'a> Iterator for Frames<'a> {
    type Item = Result<Frame<'a>, FrameError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        match split(self.rest) {
            Ok((frame, rest)) => {
                self.rest = rest;
                Some(Ok(frame))
            }
            Err(error) => {
                self.rest = &[];
                Some(Err(error))
            }
        }
    }
}

/// Splits the first frame off `bytes`.
pub fn split(bytes: &[u8]) -> Result<(Frame<'_>, &[u8]), FrameError> {
    if bytes.len() < HEADER {
        return Err(FrameError::Truncated);
    }
    let length = u32_at(bytes, 0) as usize;
    if !(5..=5 + MAX_PAYLOAD).contains(&length) {
        return Err(FrameError::BadLength);
    }
    let end = 4 + length;
    if bytes.len() < end {
        return Err(FrameError::Truncated);
    }
    let frame = Frame {
        stream: u32_at(bytes, 4),
        kind: bytes[8] & !FIN,
        fin: bytes[8] & FIN != 0,
        payload: &bytes[HEADER..end],
    };
    Ok((frame, &bytes[end..]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

/// Appends the header of a frame whose payload of `len` bytes the caller appends next.
pub fn put_header(out: &mut Vec<u8>, stream: u32, kind: u8, len: usize) {
    debug_assert!(len <= MAX_PAYLOAD);
    out.extend_from_slice(&(len as u32 + 5).to_le_bytes());
    out.extend_from_slice(&stream.to_le_bytes());
    out.push(kind);
}

/// Appends one whole frame.
pub fn put(out: &mut Vec<u8>, stream: u32, kind: u8, payload: &[u8]) {
    put_header(out, stream, kind, payload.len());
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_frames_in_one_packet() {
        let mut packet = Vec::new();
        put(&mut packet, 1, OPEN, b"abc");
        put(&mut packet, 7, DATA | FIN, b"");
        let got: Vec<_> = Frames::new(&packet).map(|f| f.unwrap()).collect();
        assert_eq!(got.len(), 2);
        assert_eq!(
            got[0],
            Frame {
                stream: 1,
                kind: OPEN,
                fin: false,
                payload: b"abc"
            }
        );
        assert_eq!(
            got[1],
            Frame {
                stream: 7,
                kind: DATA,
                fin: true,
                payload: b""
            }
        );
    }

    #[test]
    fn hostile_lengths_end_the_iteration() {
        for length in [0u32, 4, 65_542, u32::MAX] {
            let mut packet = length.to_le_bytes().to_vec();
            packet.extend_from_slice(&[0; 40]);
            let got: Vec<_> = Frames::new(&packet).collect();
            assert_eq!(got, [Err(FrameError::BadLength)]);
        }
        let mut packet = Vec::new();
        put(&mut packet, 1, MSG, b"abcdef");
        for cut in 1..packet.len() {
            assert_eq!(
                Frames::new(&packet[..cut]).next(),
                Some(Err(FrameError::Truncated))
            );
        }
    }

    #[test]
    fn largest_frame_fits_a_packet() {
        let mut packet = Vec::new();
        put(&mut packet, u32::MAX, DATA, &[5; MAX_PAYLOAD]);
        assert!(packet.len() <= MAX_PACKET);
        assert_eq!(split(&packet).unwrap().0.payload.len(), MAX_PAYLOAD);
    }
}
