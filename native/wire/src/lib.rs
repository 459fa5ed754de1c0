//! Frames and msgpack: what the guest speaks on its channel.
//!
//! Owns the byte layout only; it knows neither methods nor streams' states. The rule a reader could
//! break: everything decoded here comes from a peer that may be hostile, so no function may panic,
//! recurse without a bound or allocate more than a small multiple of its input.
#![cfg_attr(not(test), no_std)]

extern crate alloc;

pub mod frame;
pub mod msgpack;

pub use frame::{Frame, FrameError, Frames};
pub use msgpack::{DecodeError, Encoder, Value};

/// The protocol generation spoken here.
pub const PROTO: u64 = 1;
