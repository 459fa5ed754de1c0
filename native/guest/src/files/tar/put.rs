//! A tar stream unpacked below a directory that no entry may leave.

use super::format::{padding, parse, safe_name, Meta, Overrides, BLOCK, MAX_EXTENSION};
use super::get::bad_tar;
use crate::files::path::{c_path, failed, Place, Root};
use crate::files::port::Port;
use crate::files::request::FileRequest;
use crate::files::write::write_all;
use crate::reply::{Failure, Outcome};
use crate::sys::consts::*;
use crate::sys::{fs, io, Errno, Fd, Result as SysResult};
use alloc::vec::Vec;
use dsec_wire::Encoder;

/// Names of refused entries that are told.
const MAX_REFUSED: usize = 200;
/// Numbers in the map of a sparse file at most.
const MAX_MAP: u64 = 200_000;

/// The incoming stream in pieces of any size.
struct Source<'a> {
    port: &'a mut Port,
    buf: Vec<u8>,
    at: usize,
}

impl Source<'_> {
    /// Up to `limit` bytes; empty at the end.
    fn some(&mut self, limit: usize) -> &[u8] {
        while self.at == self.buf.len() {
            match self.port.receive() {
                Some(piece) => {
                    self.buf.clear();
                    self.buf.extend_from_slice(piece);
                    self.at = 0;
                }
                None => return &[],
            }
        }
        let n = limit.min(self.buf.len() - self.at);
        let from = self.at;
        self.at += n;
        &self.buf[from..from + n]
    }

    /// Passes exactly `n` bytes to `each`.
    fn take(&mut self, n: u64, mut each: impl FnMut(&[u8]) -> Outcome<()>) -> Outcome<()> {
        let mut left = n;
        while left > 0 {
            let piece = self.some(left.min(1 << 20) as usize);
            if piece.is_empty() {
                return Err(bad_tar("the tar stream ends in the middle of an entry"));
            }
            left -= piece.len() as u64;
            each(piece)?;
        }
        Ok(())
    }

    fn skip(&mut self, n: u64) -> Outcome<()> {
        self.take(n, |_| Ok(()))
    }

    fn bytes(&mut self, n: u64) -> Outcome<Vec<u8>> {
        let mut out = Vec::new();
        self.take(n, |piece| {
            out.extend_from_slice(piece);
            Ok(())
        })?;
        Ok(out)
    }

    /// A header block; None at a clean end of the stream.
    fn block(&mut self) -> Outcome<Option<[u8; BLOCK]>> {
        let mut block = [0u8; BLOCK];
        let mut have = 0;
        while have < BLOCK {
            let piece = self.some(BLOCK - have);
            if piece.is_empty() {
                return if have == 0 {
                    Ok(None)
                } else {
                    Err(bad_tar("the tar stream ends inside a header"))
                };
            }
            block[have..have + piece.len()].copy_from_slice(piece);
            have += piece.len();
        }
        Ok(Some(block))
    }
}

struct Unpack<'a> {
    source: Source<'a>,
    target: Root,
    entries: u64,
    refused: Vec<Vec<u8>>,
    /// Modes and times of directories, set when nothing is written into them any more.
    dirs: Vec<(Vec<u8>, u32, i64)>,
}

pub fn tar_put(port: &mut Port, root: &Root, request: &FileRequest) -> Outcome<Vec<u8>> {
    let wrap = failed("unpack into", &request.path);
    let dir = match root.open_path(&request.path, O_PATH | O_DIRECTORY, 0) {
        Err(Errno::ENOENT) if request.parents.unwrap_or(true) => {
            root.make_dirs(&request.path, 0o755).map_err(&wrap)?
        }
        other => other.map_err(&wrap)?,
    };
    let source = Source {
        port,
        buf: Vec::new(),
        at: 0,
    };
    let mut unpack = Unpack {
        source,
        target: Root::beneath(dir),
        entries: 0,
        refused: Vec::new(),
        dirs: Vec::new(),
    };
    unpack.all()?;
    unpack.finish_dirs();
    // What follows the end mark is padding; the sender is not left with unread data.
    while !unpack.source.some(1 << 20).is_empty() {}
    let mut e = Encoder::new();
    e.map(2)
        .str("entries")
        .uint(unpack.entries)
        .str("refused")
        .array(unpack.refused.len());
    for name in &unpack.refused {
        e.bin(name);
    }
    Ok(e.out)
}

impl Unpack<'_> {
    fn all(&mut self) -> Outcome<()> {
        let mut overrides = Overrides::default();
        while let Some(block) = self.source.block()? {
            let Some(mut meta) = parse(&block).map_err(bad_tar)? else {
                return Ok(());
            };
            if matches!(meta.kind, b'x' | b'g' | b'L' | b'K') {
                self.extension(&meta, &mut overrides)?;
                continue;
            }
            let told = core::mem::take(&mut overrides);
            let old_sparse = told.old_sparse;
            told.apply(&mut meta);
            let left = self.entry(&meta, old_sparse)?;
            self.source.skip(left + padding(meta.size) as u64)?;
        }
        Ok(())
    }

    fn extension(&mut self, meta: &Meta, overrides: &mut Overrides) -> Outcome<()> {
        if meta.size > MAX_EXTENSION {
            return Err(bad_tar("a name or an extended header is larger than 1 MiB"));
        }
        let mut bytes = self.source.bytes(meta.size)?;
        self.source.skip(padding(meta.size) as u64)?;
        match meta.kind {
            b'x' => overrides.pax(&bytes).map_err(bad_tar)?,
            b'g' => {}
            kind => {
                bytes.truncate(bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len()));
                let field = if kind == b'L' {
                    &mut overrides.name
                } else {
                    &mut overrides.link
                };
                *field = Some(bytes);
            }
        }
        Ok(())
    }

    fn refuse(&mut self, name: &[u8]) {
        if self.refused.len() < MAX_REFUSED {
            self.refused.push(name[..name.len().min(200)].to_vec());
        }
    }

    /// Makes one entry; returns how much of its data is still unread.
    fn entry(&mut self, meta: &Meta, old_sparse: bool) -> Outcome<u64> {
        let data = if matches!(meta.kind, b'1'..=b'6') {
            0
        } else {
            meta.size
        };
        let name = match safe_name(&meta.name) {
            Some(name) if name.is_empty() => return Ok(data),
            Some(name) => name,
            None => {
                self.refuse(&meta.name);
                return Ok(data);
            }
        };
        if old_sparse || !matches!(meta.kind, b'0' | b'7' | b'1' | b'2' | b'5' | b'6') {
            self.refuse(&meta.name);
            return Ok(data);
        }
        let place = match self.target.place(&name, true) {
            Ok(place) => place,
            // Links that lead out, or no directory, or a name that cannot be.
            Err(
                Errno::EXDEV | Errno::ELOOP | Errno::ENOTDIR | Errno::ENAMETOOLONG | Errno::ENOENT,
            ) => {
                self.refuse(&meta.name);
                return Ok(data);
            }
            Err(error) => return Err(failed("unpack", &name)(error)),
        };
        let made = match meta.kind {
            b'0' | b'7' => return self.file(meta, &name, &place),
            b'5' => self.directory(meta, &name, &place),
            b'2' => replace(&place, || {
                fs::symlinkat(&c_path(&meta.link)?, place.dir.raw(), &place.leaf)
            }),
            b'6' => replace(&place, || {
                fs::mkfifoat(place.dir.raw(), &place.leaf, meta.mode)
            }),
            _ => self.hard_link(meta, &place),
        };
        match made {
            Ok(()) => {
                if matches!(meta.kind, b'2' | b'6') {
                    let _ = fs::set_mtime(
                        place.dir.raw(),
                        &place.leaf,
                        meta.mtime.saturating_mul(1_000_000_000),
                    );
                }
                self.entries += 1;
            }
            Err(
                Errno::EXDEV
                | Errno::ELOOP
                | Errno::EISDIR
                | Errno::ENOTDIR
                | Errno::ENOENT
                | Errno::EINVAL
                | Errno::ENAMETOOLONG,
            ) => self.refuse(&meta.name),
            Err(error) => return Err(failed("unpack", &name)(error)),
        }
        Ok(data)
    }

    fn directory(&mut self, meta: &Meta, name: &[u8], place: &Place) -> SysResult<()> {
        let dir = place.dir.raw();
        match fs::statat(dir, &place.leaf, AT_SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.is_dir() => {}
            _ => replace(place, || fs::mkdirat(dir, &place.leaf, 0o700))?,
        }
        self.dirs.push((name.to_vec(), meta.mode, meta.mtime));
        Ok(())
    }

    fn finish_dirs(&mut self) {
        for (name, mode, mtime) in core::mem::take(&mut self.dirs).into_iter().rev() {
            let Ok(place) = self.target.place(&name, false) else {
                continue;
            };
            let Ok(dir) = crate::files::tree::open_dir_at(place.dir.raw(), place.leaf.to_bytes())
            else {
                continue;
            };
            let _ = fs::fchmod(dir.raw(), mode);
            let _ = fs::set_mtime(
                place.dir.raw(),
                &place.leaf,
                mtime.saturating_mul(1_000_000_000),
            );
        }
    }

    fn hard_link(&mut self, meta: &Meta, place: &Place) -> SysResult<()> {
        let name = safe_name(&meta.link)
            .filter(|name| !name.is_empty())
            .ok_or(Errno::EXDEV)?;
        let from = self.target.place(&name, false)?;
        let same = fs::statat(from.dir.raw(), &from.leaf, AT_SYMLINK_NOFOLLOW)?;
        if fs::statat(place.dir.raw(), &place.leaf, AT_SYMLINK_NOFOLLOW)
            .is_ok_and(|s| (s.dev, s.ino) == (same.dev, same.ino))
        {
            return Ok(());
        }
        replace(place, || {
            fs::linkat(from.dir.raw(), &from.leaf, place.dir.raw(), &place.leaf)
        })
    }

    fn file(&mut self, meta: &Meta, name: &[u8], place: &Place) -> Outcome<u64> {
        let wrap = failed("unpack", name);
        let dir = place.dir.raw();
        let mut made = None;
        let created = replace(place, || {
            made = Some(fs::openat(
                dir,
                &place.leaf,
                O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW,
                0o600,
            )?);
            Ok(())
        });
        let file = match (created, made) {
            (Ok(()), Some(file)) => file,
            (Err(Errno::EISDIR | Errno::ENAMETOOLONG), _) => {
                self.refuse(&meta.name);
                return Ok(meta.size);
            }
            (Err(error), _) => return Err(wrap(error)),
            (Ok(()), None) => return Err(wrap(Errno::EIO)),
        };
        let written = match meta.sparse {
            Some(real) => self.sparse_data(meta.size, real, &file, &wrap),
            None => self.source.take(meta.size, |piece| {
                write_all(file.raw(), piece).map_err(&wrap)
            }),
        };
        if let Err(failure) = written {
            // Half a file must not look like a whole one.
            let _ = fs::unlinkat(dir, &place.leaf, 0);
            return Err(failure);
        }
        fs::fchmod(file.raw(), meta.mode).map_err(&wrap)?;
        drop(file);
        let _ = fs::set_mtime(dir, &place.leaf, meta.mtime.saturating_mul(1_000_000_000));
        self.entries += 1;
        Ok(0)
    }

    /// GNU sparse 1.0: a map of decimal lines, padded to a block, then the pieces.
    fn sparse_data(
        &mut self,
        size: u64,
        real: u64,
        file: &Fd,
        wrap: &dyn Fn(Errno) -> Failure,
    ) -> Outcome<()> {
        let mut used = 0u64;
        let mut numbers: Vec<u64> = Vec::new();
        let mut number: Option<u64> = None;
        while numbers
            .first()
            .is_none_or(|n| (numbers.len() as u64) < 1 + n * 2)
        {
            if used + BLOCK as u64 > size || numbers.first().is_some_and(|n| *n > MAX_MAP) {
                return Err(bad_tar("the map of a sparse file is malformed"));
            }
            for byte in self.source.bytes(BLOCK as u64)? {
                match byte {
                    b'0'..=b'9' => {
                        let n = number
                            .unwrap_or(0)
                            .checked_mul(10)
                            .and_then(|n| n.checked_add(u64::from(byte - b'0')));
                        number = Some(
                            n.ok_or_else(|| bad_tar("the map of a sparse file is malformed"))?,
                        );
                    }
                    b'\n' => numbers.extend(number.take()),
                    0 => {}
                    _ => return Err(bad_tar("the map of a sparse file is malformed")),
                }
            }
            used += BLOCK as u64;
        }
        let pieces = &numbers[1..1 + numbers[0] as usize * 2];
        for pair in pieces.chunks_exact(2) {
            let (from, len) = (pair[0], pair[1]);
            if from.checked_add(len).is_none_or(|end| end > real) || used.saturating_add(len) > size
            {
                return Err(bad_tar("the map of a sparse file is malformed"));
            }
            io::lseek(file.raw(), from, SEEK_SET).map_err(wrap)?;
            self.source
                .take(len, |piece| write_all(file.raw(), piece).map_err(wrap))?;
            used += len;
        }
        self.source.skip(size - used)?;
        io::ftruncate(file.raw(), real).map_err(wrap)
    }
}

/// Makes something at a place after removing what is there, unless that is a directory (EISDIR).
fn replace(place: &Place, make: impl FnOnce() -> SysResult<()>) -> SysResult<()> {
    match fs::unlinkat(place.dir.raw(), &place.leaf, 0) {
        Ok(()) | Err(Errno::ENOENT) => {}
        Err(Errno::EPERM)
            if fs::statat(place.dir.raw(), &place.leaf, AT_SYMLINK_NOFOLLOW)
                .is_ok_and(|s| s.is_dir()) =>
        {
            return Err(Errno::EISDIR)
        }
        Err(error) => return Err(error),
    }
    make()
}
