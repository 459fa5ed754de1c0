//! Files: each operation in a forked child that has the asked user's identity.
//!
//! `relay` is the agent's side and trusts nothing that the child says; the rest runs in the child.

pub mod ops;
pub mod path;
pub mod port;
pub mod relay;
pub mod request;
pub mod tar;
pub mod tree;
pub mod worker;
pub mod write;
