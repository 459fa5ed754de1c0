//! Shapes of answers, and the grouping of results into packets.

use std::collections::HashMap;

use rmpv::Value;

use crate::engine::{Ending, Sandbox, PHASES};
use crate::error::Error;
use crate::msg::map;

/// Results per packet: two descriptors each must stay below the kernel's 253.
pub const GROUP: usize = 64;
/// Bytes of results per packet, well below the protocol's 128 KiB with the frame around them.
pub const GROUP_BYTES: usize = 100 * 1024;

/// Results that wait for the end of the turn, by request.
#[derive(Default)]
pub struct Groups(HashMap<u64, Vec<(Value, Option<u64>)>>);

/// Seq, results, and tokens of the sandboxes whose descriptors go along.
pub type Group = (u64, Vec<Value>, Vec<u64>);

impl Groups {
    pub fn add(&mut self, seq: u64, result: Value, token: Option<u64>) {
        self.0.entry(seq).or_default().push((result, token));
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn take(&mut self) -> Vec<Group> {
        let mut groups = Vec::new();
        for (seq, results) in self.0.drain() {
            groups.extend(
                split(results)
                    .into_iter()
                    .map(|(values, tokens)| (seq, values, tokens)),
            );
        }
        groups
    }
}

/// Cuts results into what fits a packet.
pub fn split(results: Vec<(Value, Option<u64>)>) -> Vec<(Vec<Value>, Vec<u64>)> {
    let mut groups: Vec<(Vec<Value>, Vec<u64>)> = Vec::new();
    let mut bytes = 0;
    for (value, token) in results {
        let size = size(&value);
        if groups
            .last()
            .is_none_or(|(values, _)| values.len() >= GROUP || bytes + size > GROUP_BYTES)
        {
            groups.push((Vec::new(), Vec::new()));
            bytes = 0;
        }
        bytes += size;
        if let Some((values, tokens)) = groups.last_mut() {
            values.push(value);
            tokens.extend(token);
        }
    }
    groups
}

/// A bound of the encoded size.
fn size(value: &Value) -> usize {
    match value {
        Value::Map(entries) => {
            5 + entries
                .iter()
                .map(|(k, v)| size(k) + size(v))
                .sum::<usize>()
        }
        Value::Array(items) => 5 + items.iter().map(size).sum::<usize>(),
        Value::String(text) => 5 + text.as_bytes().len(),
        Value::Binary(bytes) => 5 + bytes.len(),
        _ => 9,
    }
}

pub fn error_fields(error: &Error) -> Vec<(&'static str, Value)> {
    let errno = error.errno().map_or(Value::Nil, Value::from);
    vec![
        ("code", error.code().into()),
        ("msg", error.to_string().into()),
        ("errno", errno),
    ]
}

pub fn spawn_error(index: u64, id: &str, error: &Error) -> Value {
    map(vec![
        ("i", index.into()),
        ("id", id.into()),
        ("error", map(error_fields(error))),
    ])
}

pub fn kill_error(id: &str, error: &Error) -> Value {
    map(vec![("id", id.into()), ("error", map(error_fields(error)))])
}

pub fn spawn_result(index: u64, id: &str, sandbox: &Sandbox, hello: Vec<u8>) -> Value {
    let us = PHASES
        .iter()
        .zip(sandbox.us)
        .map(|(name, us)| (*name, us.into()))
        .collect();
    map(vec![
        ("i", index.into()),
        ("id", id.into()),
        ("pid", sandbox.pid.into()),
        ("slot", sandbox.slot().into()),
        ("hello", Value::Binary(hello)),
        ("us", map(us)),
    ])
}

pub fn ending(ending: Ending) -> Vec<(&'static str, Value)> {
    let status = ending.status.map_or(Value::Nil, Value::from);
    vec![("status", status), ("oom_kills", ending.oom_kills.into())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_cut_by_number_and_size() {
        let small = (0..130).map(|i| (Value::from(i), Some(i))).collect();
        let sizes: Vec<usize> = split(small)
            .iter()
            .map(|(values, _)| values.len())
            .collect();
        assert_eq!(sizes, [64, 64, 2]);
        let large = (0..4)
            .map(|_| (Value::Binary(vec![0; 40_000]), None))
            .collect();
        let sizes: Vec<usize> = split(large)
            .iter()
            .map(|(values, _)| values.len())
            .collect();
        assert_eq!(sizes, [2, 2]);
    }
}
