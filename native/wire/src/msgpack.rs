//! A small strict msgpack: the types that the protocols use, bounded in depth and in items.

use alloc::vec::Vec;

/// Nesting of arrays and maps at most.
pub const MAX_DEPTH: u32 = 8;
/// Values in one document at most (a value takes 32 bytes when decoded).
pub const MAX_ITEMS: usize = 32_768;

/// Why bytes are not a document of ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecodeError {
    Truncated,
    Trailing,
    TooDeep,
    TooMany,
    BadUtf8,
    /// A type the protocols do not use (ext, or the reserved byte 0xc1).
    BadType,
}

/// A decoded value; text and bytes are borrowed from the input.
#[derive(Debug, Clone, PartialEq)]
pub enum Value<'a> {
    Nil,
    Bool(bool),
    UInt(u64),
    /// Negative integers only.
    Int(i64),
    Float(f64),
    Str(&'a str),
    Bin(&'a [u8]),
    Array(Vec<Value<'a>>),
    Map(Vec<(Value<'a>, Value<'a>)>),
}

impl<'a> Value<'a> {
    /// Decodes exactly one document.
    pub fn decode(bytes: &'a [u8]) -> Result<Value<'a>, DecodeError> {
        let mut reader = Reader {
            rest: bytes,
            items: 0,
        };
        let value = reader.value(0)?;
        if reader.rest.is_empty() {
            Ok(value)
        } else {
            Err(DecodeError::Trailing)
        }
    }

    /// The value of a text key in a map; nil counts as absent.
    pub fn get(&self, key: &str) -> Option<&Value<'a>> {
        let Value::Map(pairs) = self else { return None };
        let found = pairs
            .iter()
            .find(|(k, _)| k.as_str() == Some(key))
            .map(|(_, v)| v)?;
        (!matches!(found, Value::Nil)).then_some(found)
    }

    pub fn as_str(&self) -> Option<&'a str> {
        match self {
            Value::Str(s) => Some(s),
            Value::Bin(b) => core::str::from_utf8(b).ok(),
            _ => None,
        }
    }

    pub fn as_bytes(&self) -> Option<&'a [u8]> {
        match self {
            Value::Str(s) => Some(s.as_bytes()),
            Value::Bin(b) => Some(b),
            _ => None,
        }
    }

    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::UInt(n) => Some(*n),
            _ => None,
        }
    }

    pub fn as_i64(&self) -> Option<i64> {
        match self {
            Value::UInt(n) => i64::try_from(*n).ok(),
            Value::Int(n) => Some(*n),
            _ => None,
        }
    }

    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Value::Bool(b) => Some(*b),
            _ => None,
        }
    }

    pub fn as_array(&self) -> Option<&[Value<'a>]> {
        match self {
            Value::Array(items) => Some(items),
            _ => None,
        }
    }

    pub fn as_map(&self) -> Option<&[(Value<'a>, Value<'a>)]> {
        match self {
            Value::Map(pairs) => Some(pairs),
            _ => None,
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
    items: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Result<&'a [u8], DecodeError> {
        if n > self.rest.len() {
            return Err(DecodeError::Truncated);
        }
        let (head, rest) = self.rest.split_at(n);
        self.rest = rest;
        Ok(head)
    }

    fn be(&mut self, n: usize) -> Result<u64, DecodeError> {
        Ok(self
            .take(n)?
            .iter()
            .fold(0, |acc, b| acc << 8 | u64::from(*b)))
    }

    fn text(&mut self, n: usize) -> Result<Value<'a>, DecodeError> {
        let bytes = self.take(n)?;
        core::str::from_utf8(bytes)
            .map(Value::Str)
            .map_err(|_| DecodeError::BadUtf8)
    }

    fn array(&mut self, n: usize, depth: u32) -> Result<Value<'a>, DecodeError> {
        self.room(n)?;
        let mut items = Vec::with_capacity(n);
        for _ in 0..n {
            items.push(self.value(depth + 1)?);
        }
        Ok(Value::Array(items))
    }

    fn map(&mut self, n: usize, depth: u32) -> Result<Value<'a>, DecodeError> {
        self.room(n.saturating_mul(2))?;
        let mut pairs = Vec::with_capacity(n);
        for _ in 0..n {
            pairs.push((self.value(depth + 1)?, self.value(depth + 1)?));
        }
        Ok(Value::Map(pairs))
    }

    /// Each value takes at least a byte, so a count above the bytes left is a lie: refused before
    /// anything is allocated for it.
    fn room(&mut self, n: usize) -> Result<(), DecodeError> {
        if n > self.rest.len() {
            return Err(DecodeError::Truncated);
        }
        self.items += n;
        if self.items > MAX_ITEMS {
            return Err(DecodeError::TooMany);
        }
        Ok(())
    }

    fn value(&mut self, depth: u32) -> Result<Value<'a>, DecodeError> {
        if depth > MAX_DEPTH {
            return Err(DecodeError::TooDeep);
        }
        let tag = self.take(1)?[0];
        Ok(match tag {
            0x00..=0x7f => Value::UInt(u64::from(tag)),
            0x80..=0x8f => self.map(usize::from(tag & 15), depth)?,
            0x90..=0x9f => self.array(usize::from(tag & 15), depth)?,
            0xa0..=0xbf => self.text(usize::from(tag & 31))?,
            0xc0 => Value::Nil,
            0xc2 => Value::Bool(false),
            0xc3 => Value::Bool(true),
            0xc4..=0xc6 => {
                let n = self.be(1 << (tag - 0xc4))? as usize;
                Value::Bin(self.take(n)?)
            }
            0xca => Value::Float(f64::from(f32::from_bits(self.be(4)? as u32))),
            0xcb => Value::Float(f64::from_bits(self.be(8)?)),
            0xcc..=0xcf => Value::UInt(self.be(1 << (tag - 0xcc))?),
            0xd0..=0xd3 => {
                let size = 1 << (tag - 0xd0);
                let shift = 64 - 8 * size as u32;
                signed(((self.be(size)? << shift) as i64) >> shift)
            }
            0xd9..=0xdb => {
                let n = self.be(1 << (tag - 0xd9))? as usize;
                self.text(n)?
            }
            0xdc | 0xdd => {
                let n = self.be(2 << (tag - 0xdc))? as usize;
                self.array(n, depth)?
            }
            0xde | 0xdf => {
                let n = self.be(2 << (tag - 0xde))? as usize;
                self.map(n, depth)?
            }
            0xe0..=0xff => Value::Int(i64::from(tag as i8)),
            0xc1 | 0xc7..=0xc9 | 0xd4..=0xd8 => return Err(DecodeError::BadType),
        })
    }
}

fn signed<'a>(n: i64) -> Value<'a> {
    u64::try_from(n).map_or(Value::Int(n), Value::UInt)
}

/// Writes one document; the caller keeps the promised counts of maps and arrays.
#[derive(Default)]
pub struct Encoder {
    pub out: Vec<u8>,
}

impl Encoder {
    pub fn new() -> Self {
        Encoder::default()
    }

    fn sized(&mut self, n: usize, fix: Option<(u8, usize)>, tags: [Option<u8>; 3]) -> &mut Self {
        match (fix, tags) {
            (Some((base, limit)), _) if n < limit => self.out.push(base | n as u8),
            (_, [Some(t), ..]) if n <= 0xff => self.out.extend_from_slice(&[t, n as u8]),
            (_, [_, Some(t), _]) if n <= 0xffff => {
                self.out.push(t);
                self.out.extend_from_slice(&(n as u16).to_be_bytes());
            }
            (_, [_, _, t]) => {
                self.out.push(t.unwrap_or(0xc1));
                self.out.extend_from_slice(&(n as u32).to_be_bytes());
            }
        }
        self
    }

    pub fn map(&mut self, n: usize) -> &mut Self {
        self.sized(n, Some((0x80, 16)), [None, Some(0xde), Some(0xdf)])
    }

    pub fn array(&mut self, n: usize) -> &mut Self {
        self.sized(n, Some((0x90, 16)), [None, Some(0xdc), Some(0xdd)])
    }

    pub fn str(&mut self, s: &str) -> &mut Self {
        self.sized(
            s.len(),
            Some((0xa0, 32)),
            [Some(0xd9), Some(0xda), Some(0xdb)],
        );
        self.out.extend_from_slice(s.as_bytes());
        self
    }

    pub fn bin(&mut self, b: &[u8]) -> &mut Self {
        self.sized(b.len(), None, [Some(0xc4), Some(0xc5), Some(0xc6)]);
        self.out.extend_from_slice(b);
        self
    }

    pub fn nil(&mut self) -> &mut Self {
        self.out.push(0xc0);
        self
    }

    pub fn bool(&mut self, b: bool) -> &mut Self {
        self.out.push(0xc2 | u8::from(b));
        self
    }

    pub fn uint(&mut self, n: u64) -> &mut Self {
        match n {
            0..=0x7f => self.out.push(n as u8),
            0x80..=0xff => self.out.extend_from_slice(&[0xcc, n as u8]),
            0x100..=0xffff => {
                self.out.push(0xcd);
                self.out.extend_from_slice(&(n as u16).to_be_bytes());
            }
            0x1_0000..=0xffff_ffff => {
                self.out.push(0xce);
                self.out.extend_from_slice(&(n as u32).to_be_bytes());
            }
            _ => {
                self.out.push(0xcf);
                self.out.extend_from_slice(&n.to_be_bytes());
            }
        }
        self
    }

    pub fn int(&mut self, n: i64) -> &mut Self {
        if let Ok(n) = u64::try_from(n) {
            return self.uint(n);
        }
        if n >= -32 {
            self.out.push(n as u8);
        } else {
            self.out.push(0xd3);
            self.out.extend_from_slice(&n.to_be_bytes());
        }
        self
    }

    pub fn value(&mut self, value: &Value<'_>) -> &mut Self {
        match value {
            Value::Nil => self.nil(),
            Value::Bool(b) => self.bool(*b),
            Value::UInt(n) => self.uint(*n),
            Value::Int(n) => self.int(*n),
            Value::Float(f) => {
                self.out.push(0xcb);
                self.out.extend_from_slice(&f.to_bits().to_be_bytes());
                self
            }
            Value::Str(s) => self.str(s),
            Value::Bin(b) => self.bin(b),
            Value::Array(items) => {
                self.array(items.len());
                items.iter().fold(self, |e, v| e.value(v))
            }
            Value::Map(pairs) => {
                self.map(pairs.len());
                pairs.iter().fold(self, |e, (k, v)| e.value(k).value(v))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round(value: Value<'_>) {
        let mut e = Encoder::new();
        e.value(&value);
        assert_eq!(Value::decode(&e.out), Ok(value));
    }

    #[test]
    fn integers_round_trip_at_every_border() {
        for shift in 0..64 {
            for delta in [-1i128, 0, 1] {
                let n = (1i128 << shift) + delta;
                if let Ok(n) = u64::try_from(n) {
                    round(Value::UInt(n));
                }
                if let Ok(n) = i64::try_from(-n) {
                    if n < 0 {
                        round(Value::Int(n));
                    }
                }
            }
        }
        round(Value::UInt(u64::MAX));
        round(Value::Int(i64::MIN));
        assert_eq!(Value::decode(&[0xd0, 0x85]), Ok(Value::Int(-123)));
        assert_eq!(Value::decode(&[0xd1, 0x00, 0x85]), Ok(Value::UInt(133)));
    }

    #[test]
    fn texts_and_containers_round_trip() {
        let long = "x".repeat(70_000);
        for n in [0, 1, 31, 32, 255, 256, 65_535, 65_536] {
            round(Value::Str(&long[..n]));
            round(Value::Bin(&long.as_bytes()[..n]));
        }
        for n in [0, 15, 16, 300] {
            round(Value::Array(vec![Value::Bool(true); n]));
            round(Value::Map(vec![(Value::Str("k"), Value::Nil); n]));
        }
        round(Value::Float(-1.5));
    }

    #[test]
    fn lies_about_counts_allocate_nothing() {
        let hostile: [&[u8]; 4] = [
            &[0xdd, 0xff, 0xff, 0xff, 0xff],
            &[0xdf, 0xff, 0xff, 0xff, 0xff, 1],
            &[0xc6, 0xff, 0xff, 0xff, 0xff, 1],
            &[0xdb, 0xff, 0xff, 0xff, 0xff, 1],
        ];
        for bytes in hostile {
            assert_eq!(Value::decode(bytes), Err(DecodeError::Truncated));
        }
    }

    #[test]
    fn depth_and_items_are_bounded() {
        assert_eq!(Value::decode(&[0x91; 5000]), Err(DecodeError::TooDeep));
        let mut many = vec![0xdd, 0, 1, 0, 0];
        many.extend(std::iter::repeat_n(0xc0, 0x10000));
        assert_eq!(Value::decode(&many), Err(DecodeError::TooMany));
        assert_eq!(Value::decode(&[1, 2]), Err(DecodeError::Trailing));
        assert_eq!(Value::decode(&[0xc1]), Err(DecodeError::BadType));
        assert_eq!(Value::decode(&[0xa1, 0xff]), Err(DecodeError::BadUtf8));
    }

    #[test]
    fn random_bytes_never_panic_and_decoded_ones_round_trip() {
        let mut state = 0x1234_5678_9abc_def0u64;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..200_000 {
            let n = (next() % 40) as usize;
            let bytes: Vec<u8> = (0..n).map(|_| (next() >> 11) as u8).collect();
            if let Ok(value) = Value::decode(&bytes) {
                if !format!("{value:?}").contains("NaN") {
                    round(value);
                }
            }
        }
    }
}
