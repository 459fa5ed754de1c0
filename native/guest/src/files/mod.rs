//! Files: each operation in a forked child that has the asked user's identity.

pub mod relay;
