//! A tree or a file as a tar stream.

use super::format::{header, padding, Meta};
use crate::files::path::{c_path, failed, split, Root};
use crate::files::port::Port;
use crate::files::request::FileRequest;
use crate::files::tree::{join, names, open_dir_at};
use crate::reply::{Failure, Outcome};
use crate::sys::consts::*;
use crate::sys::{fs, io, Errno, Fd};
use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use dsec_wire::frame::MAX_PAYLOAD;
use dsec_wire::Encoder;

/// Files with several names that are remembered, so that the second name becomes a link.
const MAX_LINKED: usize = 65_536;
/// Names of skipped entries that are told.
const MAX_SKIPPED: usize = 200;
/// Holes are kept for files with at most so many pieces of data.
const MAX_PIECES: usize = 8192;

/// Gathers the stream into full packets.
struct Out<'a> {
    port: &'a Port,
    buf: Vec<u8>,
}

impl Out<'_> {
    fn put(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let n = bytes.len().min(MAX_PAYLOAD - self.buf.len());
            self.buf.extend_from_slice(&bytes[..n]);
            bytes = &bytes[n..];
            if self.buf.len() == MAX_PAYLOAD {
                self.flush();
            }
        }
    }

    fn zeros(&mut self, mut n: u64) {
        while n > 0 {
            let piece = n.min(4096) as usize;
            self.put(&[0; 4096][..piece]);
            n -= piece as u64;
        }
    }

    fn flush(&mut self) {
        if !self.buf.is_empty() {
            self.port.send_data(&self.buf);
            self.buf.clear();
        }
    }
}

struct Archive<'a> {
    out: Out<'a>,
    entries: u64,
    skipped: Vec<Vec<u8>>,
    linked: BTreeMap<((u32, u32), u64), Vec<u8>>,
}

pub fn tar_get(port: &mut Port, root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("read", &request.path);
    let top = root.open_path(&request.path, O_PATH, 0).map_err(&wrap)?;
    let stat = fs::fstat(top.raw()).map_err(&wrap)?;
    let out = Out {
        port,
        buf: Vec::with_capacity(MAX_PAYLOAD),
    };
    let mut archive = Archive {
        out,
        entries: 0,
        skipped: Vec::new(),
        linked: BTreeMap::new(),
    };
    if stat.is_dir() {
        let base = root
            .open_path(&request.path, O_RDONLY | O_DIRECTORY, 0)
            .map_err(&wrap)?;
        archive.tree(&base, request)?;
    } else {
        let (_, leaf) = split(&request.path);
        let place = root.final_place(&request.path, false).map_err(&wrap)?;
        archive
            .add(&place.dir, place.leaf.to_bytes(), &leaf)
            .map_err(&wrap)?;
    }
    archive.out.zeros(1024);
    archive.out.flush();
    let mut e = Encoder::new();
    e.map(2)
        .str("entries")
        .uint(archive.entries)
        .str("skipped")
        .array(archive.skipped.len());
    for name in &archive.skipped {
        e.bin(name);
    }
    Ok(e.out)
}

impl Archive<'_> {
    fn tree(&mut self, base: &Fd, request: &FileRequest) -> Outcome<()> {
        let mut todo: Vec<Vec<u8>> = Vec::from([Vec::new()]);
        while let Some(below) = todo.pop() {
            let opened = if below.is_empty() {
                None
            } else {
                Some(open_dir_at(base.raw(), &below))
            };
            let dir = match opened {
                None => base,
                Some(Ok(ref fd)) => fd,
                Some(Err(Errno::ENOENT)) => continue,
                Some(Err(error)) => {
                    return Err(failed("read", &join(&request.path, &below))(error))
                }
            };
            let mut found = names(dir.raw()).map_err(failed("read", &request.path))?;
            found.sort_unstable();
            let mut subdirs = Vec::new();
            for name in found {
                let rel = join(&below, &name);
                match self.add(dir, &name, &rel) {
                    Ok(true) => subdirs.push(rel),
                    Ok(false) | Err(Errno::ENOENT) => {}
                    Err(error) => return Err(failed("read", &join(&request.path, &rel))(error)),
                }
            }
            todo.extend(subdirs.into_iter().rev());
        }
        Ok(())
    }

    /// Adds one entry; true if it is a directory.
    fn add(&mut self, dir: &Fd, name: &[u8], rel: &[u8]) -> Result<bool, Errno> {
        let c_name = c_path(name)?;
        let stat = fs::statat(dir.raw(), &c_name, AT_SYMLINK_NOFOLLOW)?;
        let mut meta = Meta {
            name: rel.to_vec(),
            mode: stat.mode & 0o7777,
            uid: stat.uid,
            gid: stat.gid,
            mtime: stat.mtime_ns.div_euclid(1_000_000_000),
            ..Meta::default()
        };
        match stat.kind() {
            S_IFDIR => {
                meta.kind = b'5';
                meta.name.push(b'/');
            }
            S_IFLNK => {
                meta.kind = b'2';
                meta.link = fs::readlinkat(dir.raw(), &c_name)?;
            }
            S_IFIFO => meta.kind = b'6',
            S_IFREG if stat.nlink > 1 && self.linked.contains_key(&(stat.dev, stat.ino)) => {
                meta.kind = b'1';
                meta.link = self.linked[&(stat.dev, stat.ino)].clone();
            }
            S_IFREG => return self.file(dir, &c_name, meta, &stat).map(|()| false),
            // Sockets cannot be kept, devices not be made again by whoever unpacks.
            _ => {
                if self.skipped.len() < MAX_SKIPPED {
                    self.skipped.push(rel[..rel.len().min(200)].to_vec());
                }
                return Ok(false);
            }
        }
        self.out.put(&header(&meta));
        self.entries += 1;
        Ok(stat.is_dir())
    }

    fn file(
        &mut self,
        dir: &Fd,
        name: &core::ffi::CStr,
        mut meta: Meta,
        stat: &fs::Stat,
    ) -> Result<(), Errno> {
        let file = fs::openat(
            dir.raw(),
            name,
            O_RDONLY | O_NONBLOCK | O_NOCTTY | O_NOFOLLOW,
            0,
        )?;
        let now = fs::fstat(file.raw())?;
        if !now.is_regular() {
            return Err(Errno::ENOENT);
        }
        meta.kind = b'0';
        let pieces = if now.blocks * 512 < now.size {
            data_pieces(&file, now.size)
        } else {
            None
        };
        match pieces {
            Some(pieces) => {
                let map = sparse_map(&pieces);
                meta.sparse = Some(now.size);
                meta.size = map.len() as u64 + pieces.iter().map(|(_, len)| len).sum::<u64>();
                self.out.put(&header(&meta));
                self.out.put(&map);
                for (from, len) in &pieces {
                    self.copy(&file, *from, *len)?;
                }
            }
            None => {
                meta.size = now.size;
                self.out.put(&header(&meta));
                self.copy(&file, 0, now.size)?;
            }
        }
        self.out.zeros(padding(meta.size) as u64);
        self.entries += 1;
        if stat.nlink > 1 && self.linked.len() < MAX_LINKED {
            self.linked.insert((stat.dev, stat.ino), meta.name);
        }
        Ok(())
    }

    /// Exactly `len` bytes: the header has promised them. A file that shrank is filled with zeros.
    fn copy(&mut self, file: &Fd, mut from: u64, mut len: u64) -> Result<(), Errno> {
        let mut buf = alloc::vec![0u8; len.min(MAX_PAYLOAD as u64) as usize];
        while len > 0 {
            let n = buf.len().min(len as usize);
            match io::pread(file.raw(), &mut buf[..n], from) {
                Ok(0) => {
                    self.out.zeros(len);
                    return Ok(());
                }
                Ok(n) => {
                    self.out.put(&buf[..n]);
                    from += n as u64;
                    len -= n as u64;
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// Where the data of a file with holes lies; None if that cannot be told, or there are too many pieces.
fn data_pieces(file: &Fd, size: u64) -> Option<Vec<(u64, u64)>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < size {
        let from = match io::lseek(file.raw(), at, SEEK_DATA) {
            Ok(from) => from,
            Err(Errno::ENXIO) => break,
            Err(_) => return None,
        };
        let to = io::lseek(file.raw(), from, SEEK_HOLE).ok()?.min(size);
        if to <= from {
            break;
        }
        pieces.push((from, to - from));
        if pieces.len() > MAX_PIECES {
            return None;
        }
        at = to;
    }
    // The end of the file is marked by an empty piece.
    if pieces.last().is_none_or(|(from, len)| from + len < size) {
        pieces.push((size, 0));
    }
    Some(pieces)
}

/// The map in front of the data, as GNU sparse 1.0 wants it: decimal lines, padded to a block.
fn sparse_map(pieces: &[(u64, u64)]) -> Vec<u8> {
    let mut map = alloc::format!("{}\n", pieces.len()).into_bytes();
    for (from, len) in pieces {
        map.extend_from_slice(alloc::format!("{from}\n{len}\n").as_bytes());
    }
    map.resize(map.len() + padding(map.len() as u64), 0);
    map
}

/// The error for a tar stream that cannot be read.
pub fn bad_tar(text: &str) -> Failure {
    Failure::new("invalid", text)
}
