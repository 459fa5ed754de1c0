//! The `exec` request, checked.

use crate::config::pairs;
use crate::reply::{Failure, Outcome};
use alloc::string::String;
use alloc::vec::Vec;
use dsec_wire::Value;

/// Output kept per stream unless the request says otherwise.
const DEFAULT_CAP: u64 = 10 << 20;

pub enum Program {
    Argv(Vec<Vec<u8>>),
    Shell(Vec<u8>),
}

pub struct ExecRequest {
    pub id: String,
    pub rid: Option<String>,
    pub program: Program,
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub cwd: Option<Vec<u8>>,
    pub user: Option<String>,
    pub stdin: bool,
    pub timeout_ms: Option<u64>,
    pub cap: u64,
    pub start: bool,
}

/// Bytes without a zero in them, as the kernel wants strings.
pub fn text(value: &Value<'_>, key: &str) -> Outcome<Option<Vec<u8>>> {
    let Some(found) = value.get(key) else {
        return Ok(None);
    };
    match found.as_bytes() {
        Some(bytes) if !bytes.contains(&0) => Ok(Some(bytes.to_vec())),
        Some(_) => Err(Failure::new(
            "invalid",
            alloc::format!("{key} contains a zero byte"),
        )),
        None => Err(Failure::new(
            "invalid",
            alloc::format!("{key} must be bytes or text"),
        )),
    }
}

fn name(value: &Value<'_>, key: &str) -> Outcome<Option<String>> {
    match value.get(key) {
        None => Ok(None),
        Some(v) => match v.as_str() {
            Some(s) if s.len() <= 256 => Ok(Some(s.into())),
            _ => Err(Failure::new(
                "invalid",
                alloc::format!("{key} must be a text of at most 256 bytes"),
            )),
        },
    }
}

impl ExecRequest {
    pub fn parse(map: &Value<'_>) -> Outcome<ExecRequest> {
        let flag = |key: &str| map.get(key).and_then(Value::as_bool).unwrap_or(false);
        let id = name(map, "id")?
            .filter(|id| !id.is_empty())
            .ok_or_else(|| Failure::new("invalid", "exec needs an id"))?;
        Ok(ExecRequest {
            id,
            rid: name(map, "rid")?,
            program: program(map)?,
            env: env(map)?,
            cwd: text(map, "cwd")?,
            user: name(map, "user")?,
            stdin: flag("stdin"),
            timeout_ms: map.get("timeout_ms").and_then(Value::as_u64),
            cap: map
                .get("cap")
                .and_then(Value::as_u64)
                .unwrap_or(DEFAULT_CAP),
            start: flag("start"),
        })
    }
}

fn program(map: &Value<'_>) -> Outcome<Program> {
    if let Some(shell) = text(map, "shell")? {
        return Ok(Program::Shell(shell));
    }
    let Some(words) = map
        .get("argv")
        .and_then(Value::as_array)
        .filter(|words| !words.is_empty())
    else {
        return Err(Failure::new("invalid", "exec needs argv or shell"));
    };
    let mut argv = Vec::with_capacity(words.len());
    for word in words {
        match word.as_bytes() {
            Some(bytes) if !bytes.contains(&0) => argv.push(bytes.to_vec()),
            _ => {
                return Err(Failure::new(
                    "invalid",
                    "a word of argv is not bytes or contains a zero byte",
                ))
            }
        }
    }
    Ok(Program::Argv(argv))
}

fn env(map: &Value<'_>) -> Outcome<Vec<(Vec<u8>, Vec<u8>)>> {
    let Some(value) = map.get("env") else {
        return Ok(Vec::new());
    };
    let bad = || {
        Failure::new(
            "invalid",
            "env must map names (no '=', no zero byte) to texts without zero bytes",
        )
    };
    let given = value.as_map().ok_or_else(bad)?.len();
    pairs(value)
        .filter(|found| found.len() == given)
        .ok_or_else(bad)
}
