//! The `file` request, checked by the agent before it forks.

use crate::process::request::text;
use crate::reply::{Failure, Outcome};
use alloc::string::String;
use alloc::vec::Vec;
use dsec_wire::Value;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Op {
    Read,
    Write,
    Stat,
    List,
    Mkdir,
    Remove,
    Move,
    Chmod,
    Chown,
    TarGet,
    TarPut,
}

const OPS: [(&str, Op); 11] = [
    ("read", Op::Read),
    ("write", Op::Write),
    ("stat", Op::Stat),
    ("list", Op::List),
    ("mkdir", Op::Mkdir),
    ("remove", Op::Remove),
    ("move", Op::Move),
    ("chmod", Op::Chmod),
    ("chown", Op::Chown),
    ("tar_get", Op::TarGet),
    ("tar_put", Op::TarPut),
];

pub struct FileRequest {
    pub op: Op,
    pub path: Vec<u8>,
    pub to: Option<Vec<u8>>,
    pub user: Option<String>,
    pub owner: Option<String>,
    pub offset: u64,
    pub limit: Option<u64>,
    pub mode: Option<u32>,
    pub depth: u64,
    pub append: bool,
    pub parents: Option<bool>,
    pub follow: Option<bool>,
    pub recursive: bool,
    pub overwrite: bool,
}

impl FileRequest {
    pub fn parse(map: &Value<'_>) -> Outcome<FileRequest> {
        let name = map.get("op").and_then(Value::as_str).unwrap_or("");
        let op = OPS.iter().find(|(n, _)| *n == name).map(|(_, op)| *op);
        let op = op.ok_or_else(|| {
            Failure::new(
                "unsupported",
                alloc::format!("unknown file operation {name:?}"),
            )
        })?;
        let flag = |key: &str| map.get(key).and_then(Value::as_bool);
        let number = |key: &str| map.get(key).and_then(Value::as_u64);
        let string = |key: &str| map.get(key).and_then(Value::as_str).map(String::from);
        let mode = match number("mode") {
            Some(mode) if mode > 0o7777 => {
                return Err(Failure::new("invalid", "mode must be at most 0o7777"))
            }
            mode => mode.map(|mode| mode as u32),
        };
        Ok(FileRequest {
            op,
            path: text(map, "path")?
                .filter(|p| !p.is_empty())
                .ok_or_else(|| Failure::new("invalid", "path is missing or empty"))?,
            to: text(map, "to")?,
            user: string("user"),
            owner: string("owner"),
            offset: number("offset").unwrap_or(0),
            limit: number("limit"),
            mode,
            depth: number("depth").unwrap_or(1),
            append: flag("append").unwrap_or(false),
            parents: flag("parents"),
            follow: flag("follow"),
            recursive: flag("recursive").unwrap_or(false),
            overwrite: flag("overwrite").unwrap_or(true),
        })
    }
}
