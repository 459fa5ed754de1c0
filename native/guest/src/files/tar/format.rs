//! The tar format: headers of ustar, pax records, GNU long names. No I/O.

use alloc::string::String;
use alloc::vec::Vec;

pub const BLOCK: usize = 512;
/// Bytes of a pax header or of a GNU long name at most.
pub const MAX_EXTENSION: u64 = 1 << 20;

/// What a header says about one entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    pub name: Vec<u8>,
    pub link: Vec<u8>,
    /// The type flag: `0` file, `1` hard link, `2` symlink, `5` directory, `6` fifo, ...
    pub kind: u8,
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    /// Bytes of data that follow.
    pub size: u64,
    pub mtime: i64,
    /// The file's size, where the data is a GNU sparse 1.0 map with its pieces.
    pub sparse: Option<u64>,
}

/// Bytes of padding behind `size` bytes of data.
pub fn padding(size: u64) -> usize {
    (BLOCK as u64 - size % BLOCK as u64) as usize % BLOCK
}

fn octal(field: &mut [u8], n: u64) {
    let digits = field.len() - 1;
    let mut n = n;
    for at in (0..digits).rev() {
        field[at] = b'0' + (n & 7) as u8;
        n >>= 3;
    }
    field[digits] = 0;
}

fn fits(width: usize, n: u64) -> bool {
    n < 1 << (3 * (width - 1))
}

fn block(meta: &Meta) -> [u8; BLOCK] {
    let mut b = [0u8; BLOCK];
    let short = |field: &[u8]| field.len().min(100);
    b[..short(&meta.name)].copy_from_slice(&meta.name[..short(&meta.name)]);
    octal(&mut b[100..108], u64::from(meta.mode & 0o7777));
    octal(
        &mut b[108..116],
        if fits(8, u64::from(meta.uid)) {
            u64::from(meta.uid)
        } else {
            0
        },
    );
    octal(
        &mut b[116..124],
        if fits(8, u64::from(meta.gid)) {
            u64::from(meta.gid)
        } else {
            0
        },
    );
    octal(
        &mut b[124..136],
        if fits(12, meta.size) { meta.size } else { 0 },
    );
    octal(
        &mut b[136..148],
        u64::try_from(meta.mtime)
            .ok()
            .filter(|n| fits(12, *n))
            .unwrap_or(0),
    );
    b[156] = meta.kind;
    b[157..157 + short(&meta.link)].copy_from_slice(&meta.link[..short(&meta.link)]);
    b[257..265].copy_from_slice(b"ustar\x0000");
    let sum = checksum(&b);
    octal(&mut b[148..155], sum);
    b[155] = b' ';
    b
}

fn checksum(b: &[u8]) -> u64 {
    b.iter()
        .enumerate()
        .map(|(i, byte)| {
            if (148..156).contains(&i) {
                u64::from(b' ')
            } else {
                u64::from(*byte)
            }
        })
        .sum()
}

fn record(out: &mut Vec<u8>, key: &str, value: &[u8]) {
    let body = key.len() + value.len() + 3;
    let mut total = body + 1;
    while body + decimal(total) != total {
        total = body + decimal(total);
    }
    out.extend_from_slice(alloc::format!("{total} {key}=").as_bytes());
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn decimal(n: usize) -> usize {
    alloc::format!("{n}").len()
}

/// The blocks in front of an entry's data, with a pax header before it where ustar does not suffice.
pub fn header(meta: &Meta) -> Vec<u8> {
    let mut pax = Vec::new();
    let number =
        |pax: &mut Vec<u8>, key: &str, n: i64| record(pax, key, alloc::format!("{n}").as_bytes());
    let not_text = |bytes: &[u8]| core::str::from_utf8(bytes).is_err();
    if not_text(&meta.name) || not_text(&meta.link) {
        record(&mut pax, "hdrcharset", b"BINARY");
    }
    let ascii = |bytes: &[u8]| bytes.is_ascii() && bytes.len() <= 100;
    if let Some(real) = meta.sparse {
        record(&mut pax, "GNU.sparse.major", b"1");
        record(&mut pax, "GNU.sparse.minor", b"0");
        record(&mut pax, "GNU.sparse.name", &meta.name);
        number(&mut pax, "GNU.sparse.realsize", real as i64);
    } else if !ascii(&meta.name) {
        record(&mut pax, "path", &meta.name);
    }
    if !ascii(&meta.link) {
        record(&mut pax, "linkpath", &meta.link);
    }
    if !fits(12, meta.size) {
        number(&mut pax, "size", meta.size as i64);
    }
    if !fits(8, u64::from(meta.uid)) {
        number(&mut pax, "uid", i64::from(meta.uid));
    }
    if !fits(8, u64::from(meta.gid)) {
        number(&mut pax, "gid", i64::from(meta.gid));
    }
    if meta.mtime < 0 || !fits(12, meta.mtime as u64) {
        number(&mut pax, "mtime", meta.mtime);
    }
    let mut out = Vec::new();
    if !pax.is_empty() {
        let ext = Meta {
            name: b"././@PaxHeader".to_vec(),
            kind: b'x',
            mode: 0o644,
            size: pax.len() as u64,
            ..Meta::default()
        };
        out.extend_from_slice(&block(&ext));
        out.extend_from_slice(&pax);
        out.resize(out.len() + padding(pax.len() as u64), 0);
    }
    out.extend_from_slice(&block(meta));
    out
}

fn text(field: &[u8]) -> Vec<u8> {
    field[..field.iter().position(|b| *b == 0).unwrap_or(field.len())].to_vec()
}

/// A number in octal, or in GNU's base 256. None if it is neither, or too large.
fn parse_number(field: &[u8]) -> Option<i64> {
    if field[0] & 0x80 != 0 {
        let negative = field[0] & 0x40 != 0;
        let mut n: i128 = if negative { -1 } else { 0 };
        for (i, byte) in field.iter().enumerate() {
            let byte = if i == 0 && !negative {
                byte & 0x7f
            } else {
                *byte
            };
            n = n << 8 | i128::from(byte);
        }
        return i64::try_from(n).ok();
    }
    let digits: Vec<u8> = field
        .iter()
        .copied()
        .skip_while(|b| *b == b' ')
        .take_while(|b| !matches!(b, b' ' | 0))
        .collect();
    if digits.is_empty() {
        return Some(0);
    }
    i64::from_str_radix(core::str::from_utf8(&digits).ok()?, 8).ok()
}

/// Reads a header block. Ok(None) is a block of zeros: the end.
pub fn parse(b: &[u8; BLOCK]) -> Result<Option<Meta>, &'static str> {
    if b.iter().all(|byte| *byte == 0) {
        return Ok(None);
    }
    let sum = parse_number(&b[148..156]).ok_or("a header's checksum is not a number")?;
    let signed: i64 = b
        .iter()
        .enumerate()
        .map(|(i, x)| {
            if (148..156).contains(&i) {
                32
            } else {
                i64::from(*x as i8)
            }
        })
        .sum();
    if sum != checksum(b) as i64 && sum != signed {
        return Err("a header's checksum is wrong: this is not a tar stream");
    }
    let number = |range: core::ops::Range<usize>| {
        parse_number(&b[range]).ok_or("a header holds a bad number")
    };
    let mut name = text(&b[..100]);
    if &b[257..263] == b"ustar\0" && b[345] != 0 {
        name = [&text(&b[345..500]), b"/".as_slice(), &name].concat();
    }
    let size = u64::try_from(number(124..136)?).map_err(|_| "a header holds a negative size")?;
    Ok(Some(Meta {
        name,
        link: text(&b[157..257]),
        kind: if b[156] == 0 { b'0' } else { b[156] },
        mode: number(100..108)? as u32 & 0o7777,
        uid: number(108..116)? as u32,
        gid: number(116..124)? as u32,
        size,
        mtime: number(136..148)?,
        sparse: None,
    }))
}

/// What a pax header or GNU long names say about the next entry.
#[derive(Default)]
pub struct Overrides {
    pub name: Option<Vec<u8>>,
    pub link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<i64>,
    sparse_name: Option<Vec<u8>>,
    sparse_size: Option<u64>,
    sparse_major: Option<u64>,
    /// A sparse format that is not 1.0.
    pub old_sparse: bool,
}

impl Overrides {
    /// Takes in the records of a pax header.
    pub fn pax(&mut self, mut bytes: &[u8]) -> Result<(), &'static str> {
        const BAD: &str = "a pax header is malformed";
        while !bytes.is_empty() && bytes[0] != 0 {
            let space = bytes.iter().take(8).position(|b| *b == b' ').ok_or(BAD)?;
            let len: usize = core::str::from_utf8(&bytes[..space])
                .ok()
                .and_then(|t| t.parse().ok())
                .ok_or(BAD)?;
            if len <= space + 1 || len > bytes.len() || bytes[len - 1] != b'\n' {
                return Err(BAD);
            }
            let pair = &bytes[space + 1..len - 1];
            let equals = pair.iter().position(|b| *b == b'=').ok_or(BAD)?;
            self.set(&pair[..equals], &pair[equals + 1..]).ok_or(BAD)?;
            bytes = &bytes[len..];
        }
        Ok(())
    }

    fn set(&mut self, key: &[u8], value: &[u8]) -> Option<()> {
        let number = || {
            core::str::from_utf8(value)
                .ok()
                .and_then(|t| t.trim().parse::<u64>().ok())
        };
        match key {
            b"path" => self.name = Some(value.to_vec()),
            b"linkpath" => self.link = Some(value.to_vec()),
            b"size" => self.size = Some(number()?),
            b"mtime" => {
                let whole: String = core::str::from_utf8(value)
                    .ok()?
                    .chars()
                    .take_while(|c| *c != '.')
                    .collect();
                self.mtime = Some(whole.parse().ok()?);
            }
            b"GNU.sparse.name" => self.sparse_name = Some(value.to_vec()),
            b"GNU.sparse.realsize" => self.sparse_size = Some(number()?),
            b"GNU.sparse.major" => self.sparse_major = Some(number()?),
            b"GNU.sparse.map" | b"GNU.sparse.numblocks" => self.old_sparse = true,
            _ => {}
        }
        Some(())
    }

    /// Lays the overrides over an entry.
    pub fn apply(self, meta: &mut Meta) {
        if let Some(name) = self.sparse_name.or(self.name) {
            meta.name = name;
        }
        if let Some(link) = self.link {
            meta.link = link;
        }
        meta.size = self.size.unwrap_or(meta.size);
        meta.mtime = self.mtime.unwrap_or(meta.mtime);
        if self.sparse_major == Some(1) {
            meta.sparse = self.sparse_size;
        }
    }
}

/// Splits an entry's name into what may be used below the target. None: it must be refused.
/// An empty name is the target itself.
pub fn safe_name(name: &[u8]) -> Option<Vec<u8>> {
    if name.first() == Some(&b'/') || name.contains(&0) {
        return None;
    }
    let mut out: Vec<u8> = Vec::new();
    for part in name.split(|b| *b == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return None,
            part => {
                if !out.is_empty() {
                    out.push(b'/');
                }
                out.extend_from_slice(part);
            }
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads back what `header` wrote.
    fn read(bytes: &[u8]) -> Meta {
        let mut overrides = Overrides::default();
        let mut at = 0;
        loop {
            let block: &[u8; BLOCK] = bytes[at..at + BLOCK].try_into().unwrap();
            let mut meta = parse(block).unwrap().unwrap();
            at += BLOCK;
            if meta.kind != b'x' {
                assert_eq!(at, bytes.len());
                overrides.apply(&mut meta);
                return meta;
            }
            let size = meta.size as usize;
            overrides.pax(&bytes[at..at + size]).unwrap();
            at += size + padding(size as u64);
        }
    }

    #[test]
    fn headers_round_trip() {
        let plain = Meta {
            name: b"a/b".to_vec(),
            kind: b'0',
            mode: 0o4755,
            uid: 1000,
            gid: 5,
            size: 77,
            mtime: 1_700_000_000,
            ..Meta::default()
        };
        assert_eq!(header(&plain).len(), BLOCK);
        assert_eq!(read(&header(&plain)), plain);
        for len in [99, 100, 101, 255, 4000] {
            let long = Meta {
                name: vec![b'n'; len],
                link: vec![b'l'; len],
                kind: b'2',
                ..plain.clone()
            };
            assert_eq!(read(&header(&long)), long);
        }
        let odd = Meta {
            name: b"\xff\xfe\n=".to_vec(),
            size: 1 << 40,
            mtime: -5,
            ..plain.clone()
        };
        assert_eq!(read(&header(&odd)), odd);
        let sparse = Meta {
            sparse: Some(1 << 33),
            ..plain
        };
        assert_eq!(read(&header(&sparse)), sparse);
    }

    #[test]
    fn pax_lengths_count_themselves() {
        for n in 0..1200 {
            let mut out = Vec::new();
            record(&mut out, "path", &vec![b'x'; n]);
            let mut o = Overrides::default();
            o.pax(&out).unwrap();
            assert_eq!(o.name.unwrap().len(), n);
        }
    }

    #[test]
    fn hostile_headers_are_refused() {
        for bad in [
            &b"0 path=x\n"[..],
            b"99 path=x\n",
            b"9 path=x",
            b"x",
            b"3 \n",
            b"8 pathx\n",
            b"10 size=x\n",
            b"-5 a=b\n",
        ] {
            assert!(Overrides::default().pax(bad).is_err(), "{bad:?}");
        }
        let mut block = [b'7'; BLOCK];
        assert!(parse(&block).is_err());
        block[124..136].copy_from_slice(&[0xff; 12]);
        assert!(parse(&block).is_err());
        assert_eq!(parse(&[0; BLOCK]), Ok(None));
        assert_eq!(
            parse_number(&[0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0]),
            Some(1 << 33)
        );
        assert_eq!(
            parse_number(&[0x80, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0, 0, 0]),
            None
        );
        let mut seed = 1u64;
        for _ in 0..20_000 {
            let mut b = [0u8; BLOCK];
            for byte in &mut b {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = (seed >> 40) as u8;
            }
            let sum = checksum(&b);
            octal(&mut b[148..155], sum);
            b[155] = b' ';
            let _ = parse(&b);
            let _ = Overrides::default().pax(&b);
        }
    }

    #[test]
    fn names_that_leave_are_refused() {
        for bad in ["/abs", "..", "../up", "a/../../b", "a/..", "x\0y"] {
            assert_eq!(safe_name(bad.as_bytes()), None, "{bad}");
        }
        assert_eq!(safe_name(b"./a//b/./c/"), Some(b"a/b/c".to_vec()));
        assert_eq!(safe_name(b"./"), Some(Vec::new()));
        assert_eq!(safe_name(b"..a/b.."), Some(b"..a/b..".to_vec()));
    }
}
