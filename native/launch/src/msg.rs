//! Reading and building msgpack maps: typed access that turns anything unexpected into `Error::Invalid`.

use rmpv::Value;

use crate::error::{Error, Result};

/// A decoded map; lookups are linear since our maps have few keys.
#[derive(Clone, Debug)]
pub struct Map(pub Vec<(Value, Value)>);

pub fn decode(packet: &[u8]) -> Result<Map> {
    let mut rest = packet;
    let value = rmpv::decode::read_value_with_max_depth(&mut rest, 16)
        .map_err(|e| Error::Invalid(format!("not msgpack: {e}")))?;
    as_map(value, "message")
}

pub fn encode(fields: Vec<(&str, Value)>) -> Vec<u8> {
    let mut out = Vec::new();
    // Writing to a Vec cannot fail.
    let _ = rmpv::encode::write_value(&mut out, &map(fields));
    out
}

pub fn map(fields: Vec<(&str, Value)>) -> Value {
    Value::Map(
        fields
            .into_iter()
            .map(|(k, v)| (Value::from(k), v))
            .collect(),
    )
}

pub fn as_map(value: Value, what: &str) -> Result<Map> {
    match value {
        Value::Map(entries) => Ok(Map(entries)),
        _ => Err(Error::Invalid(format!("{what} is not a map"))),
    }
}

fn wrong(key: &str, wanted: &str) -> Error {
    Error::Invalid(format!("{key}: expected {wanted}"))
}

/// `str` and `bin` stand for each other everywhere.
pub fn as_bytes(value: &Value, key: &str) -> Result<Vec<u8>> {
    match value {
        Value::Binary(bytes) => Ok(bytes.clone()),
        Value::String(text) => Ok(text.as_bytes().to_vec()),
        _ => Err(wrong(key, "bytes")),
    }
}

pub fn as_text(value: &Value, key: &str) -> Result<String> {
    String::from_utf8(as_bytes(value, key)?).map_err(|_| wrong(key, "UTF-8 text"))
}

impl Map {
    /// A present value that is not nil.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.0
            .iter()
            .rev()
            .find(|(k, _)| k.as_str() == Some(key))
            .map(|(_, v)| v)
            .filter(|v| !v.is_nil())
    }

    pub fn text(&self, key: &str) -> Result<Option<String>> {
        self.get(key).map(|v| as_text(v, key)).transpose()
    }

    pub fn need_text(&self, key: &str) -> Result<String> {
        self.text(key)?
            .ok_or_else(|| Error::Invalid(format!("{key} is missing")))
    }

    pub fn bytes(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.get(key).map(|v| as_bytes(v, key)).transpose()
    }

    pub fn uint(&self, key: &str) -> Result<Option<u64>> {
        self.get(key)
            .map(|v| v.as_u64().ok_or_else(|| wrong(key, "an unsigned integer")))
            .transpose()
    }

    pub fn uint32(&self, key: &str) -> Result<Option<u32>> {
        self.uint(key)?
            .map(|v| u32::try_from(v).map_err(|_| wrong(key, "a 32-bit integer")))
            .transpose()
    }

    pub fn boolean(&self, key: &str) -> Result<Option<bool>> {
        self.get(key)
            .map(|v| v.as_bool().ok_or_else(|| wrong(key, "a boolean")))
            .transpose()
    }

    pub fn list(&self, key: &str) -> Result<&[Value]> {
        match self.get(key) {
            None => Ok(&[]),
            Some(Value::Array(items)) => Ok(items),
            Some(_) => Err(wrong(key, "a list")),
        }
    }

    pub fn texts(&self, key: &str) -> Result<Vec<String>> {
        self.list(key)?.iter().map(|v| as_text(v, key)).collect()
    }

    pub fn byte_list(&self, key: &str) -> Result<Vec<Vec<u8>>> {
        self.list(key)?.iter().map(|v| as_bytes(v, key)).collect()
    }

    pub fn maps(&self, key: &str) -> Result<Vec<Map>> {
        self.list(key)?
            .iter()
            .map(|v| as_map(v.clone(), key))
            .collect()
    }

    pub fn sub(&self, key: &str) -> Result<Option<Map>> {
        self.get(key).map(|v| as_map(v.clone(), key)).transpose()
    }
}
