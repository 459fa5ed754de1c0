//! What a sandbox writes to: a bounded tmpfs, or an ext4 image on a loop device that frees itself.
//!
//! Neither has a name on the host, so both vanish with the last mount that uses them, whatever happens to the launcher.

use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use crate::error::{Error, Result};
use crate::host::Host;
use crate::spec::{FileItem, Upper};
use crate::sys::{self, FsContext};

/// A detached mount that holds the directories `u` and `w` of an overlay.
pub struct Store {
    pub mount: OwnedFd,
    pub volatile: bool,
}

/// Makes the upper with the given files in it, then maps its owners into the sandbox. After that a host process could not
/// make files in it any more (EOVERFLOW), hence the order.
pub fn make(
    host: &Host,
    upper: &Upper,
    files: &[FileItem],
    userns: Option<BorrowedFd>,
) -> Result<Store> {
    let store = match upper {
        Upper::Tmpfs { bytes, inodes } => make_tmpfs(*bytes, *inodes)?,
        Upper::Image {
            template,
            dir,
            bytes,
            volatile,
        } => make_image(host, template, dir, *bytes, *volatile)?,
    };
    for name in [c"u", c"w"] {
        make_dir(store.mount.as_fd(), name)?;
    }
    if !files.is_empty() {
        let root = sys::openat(store.mount.as_fd(), "u", libc::O_PATH | libc::O_DIRECTORY)?;
        files.iter().try_for_each(|file| write_file(&root, file))?;
    }
    if userns.is_some() {
        sys::mount_setattr(store.mount.as_fd(), 0, userns)?;
    }
    Ok(store)
}

/// mkdir with exactly mode 0755: the launcher runs with umask 0.
fn make_dir(dir: BorrowedFd, name: &CStr) -> Result<()> {
    // SAFETY: the name is NUL-terminated.
    match unsafe { libc::mkdirat(dir.as_raw_fd(), name.as_ptr(), 0o755) } {
        0 => Ok(()),
        _ => Err(Error::last(
            "mkdir",
            format!("upper/{}", name.to_string_lossy()),
        )),
    }
}

fn write_file(root: &OwnedFd, file: &FileItem) -> Result<()> {
    let path = file.path.trim_start_matches('/');
    for (at, _) in path.match_indices('/') {
        match sys::mkdirat(root.as_fd(), &path[..at], 0o755) {
            Err(e) if e.errno() != Some(libc::EEXIST) => return Err(e),
            _ => {}
        }
    }
    let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC | libc::O_NOFOLLOW;
    let fd = sys::openat_mode(root.as_fd(), path, flags, file.mode)?;
    std::io::Write::write_all(&mut std::fs::File::from(fd), &file.data)
        .map_err(|e| Error::os("write", path, e))
}

fn make_tmpfs(bytes: u64, inodes: u64) -> Result<Store> {
    let context = FsContext::open(c"tmpfs")?;
    context.string(c"size", &bytes.to_string())?;
    if inodes > 0 {
        context.string(c"nr_inodes", &inodes.to_string())?;
    }
    context.string(c"mode", "0755")?;
    Ok(Store {
        mount: context.mount(0)?,
        volatile: false,
    })
}

fn make_image(host: &Host, template: &str, dir: &str, bytes: u64, volatile: bool) -> Result<Store> {
    let source = host.file(template)?;
    let size = length(source.as_fd())?;
    if bytes != 0 && bytes != size {
        return Err(Error::Invalid(format!(
            "{template} has {size} bytes, not the {bytes} asked for"
        )));
    }
    let place = sys::open_in_root(host.root.as_fd(), dir, libc::O_RDONLY | libc::O_DIRECTORY)?;
    let image = sys::openat_mode(place.as_fd(), ".", libc::O_TMPFILE | libc::O_RDWR, 0o600)?;
    copy_sparse(source.as_fd(), image.as_fd(), size)?;
    // The descriptor keeps the device from freeing itself until the mount holds it.
    let (_device, name) = attach_loop(host, image.as_fd())?;
    let mount = in_host(host, || {
        let context = FsContext::open(c"ext4")?;
        context.string(c"source", &name)?;
        // The file system lives no longer than its sandbox: ordering for a crash and lazy initialisation are wasted on it.
        for option in [c"noinit_itable", c"nobarrier", c"discard"] {
            context.flag(option)?;
        }
        context.mount(0)
    })?;
    Ok(Store { mount, volatile })
}

/// Runs `work` in the host's mount namespace, where device names mean something, and comes back to the worker's empty one.
pub fn in_host<T>(host: &Host, work: impl FnOnce() -> Result<T>) -> Result<T> {
    let own = sys::openat(host.proc.as_fd(), "thread-self/ns/mnt", libc::O_RDONLY)?;
    sys::setns(host.mnt.as_fd(), libc::CLONE_NEWNS)?;
    let result = work();
    sys::setns(own.as_fd(), libc::CLONE_NEWNS)?;
    result
}

fn length(fd: BorrowedFd) -> Result<u64> {
    // SAFETY: plain system call on an open descriptor.
    match unsafe { libc::lseek(fd.as_raw_fd(), 0, libc::SEEK_END) } {
        -1 => Err(Error::last("lseek", "template")),
        size => Ok(size as u64),
    }
}

/// Copies the data and keeps the holes. `from` is shared between threads, so no call here may use its position: the seeks
/// that look for data do not read through it.
fn copy_sparse(from: BorrowedFd, to: BorrowedFd, size: u64) -> Result<()> {
    // SAFETY: plain system call.
    if unsafe { libc::ftruncate(to.as_raw_fd(), size as i64) } != 0 {
        return Err(Error::last("ftruncate", "image"));
    }
    let mut at: i64 = 0;
    loop {
        // SAFETY: plain system calls.
        let start = unsafe { libc::lseek(from.as_raw_fd(), at, libc::SEEK_DATA) };
        if start < 0 {
            return match std::io::Error::last_os_error().raw_os_error() {
                Some(libc::ENXIO) => Ok(()),
                _ => Err(Error::last("lseek", "template")),
            };
        }
        // SAFETY: as above.
        let end = unsafe { libc::lseek(from.as_raw_fd(), start, libc::SEEK_HOLE) };
        let (mut input, mut output) = (start, start);
        while input < end {
            let count = (end - input) as usize;
            // SAFETY: both offsets are valid for writing.
            let n = unsafe {
                libc::copy_file_range(
                    from.as_raw_fd(),
                    &mut input,
                    to.as_raw_fd(),
                    &mut output,
                    count,
                    0,
                )
            };
            let n = match n {
                // Template and image lie on different file systems (/run is a tmpfs), or this one cannot.
                ..0 => {
                    let n = copy_through_memory(from, to, input, end)?;
                    input += n;
                    output += n;
                    n
                }
                n => n as i64,
            };
            if n == 0 {
                return Err(Error::Busy(
                    "the template shrank while it was copied".into(),
                ));
            }
        }
        at = end;
    }
}

/// Copies what a buffer holds of `start..end`; returns how much, 0 at the template's end.
fn copy_through_memory(from: BorrowedFd, to: BorrowedFd, start: i64, end: i64) -> Result<i64> {
    let mut buf = vec![0u8; ((end - start) as usize).min(128 << 10)];
    // SAFETY: the buffer is valid for its length.
    let read = unsafe { libc::pread(from.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), start) };
    if read < 0 {
        return Err(Error::last("read", "template"));
    }
    let mut done = 0;
    while done < read {
        let rest = &buf[done as usize..read as usize];
        let at = start + done as i64;
        // SAFETY: as above.
        let n = unsafe { libc::pwrite(to.as_raw_fd(), rest.as_ptr().cast(), rest.len(), at) };
        if n <= 0 {
            return Err(Error::last("write", "image"));
        }
        done += n;
    }
    Ok(read as i64)
}

#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// struct loop_info64; lo_flags are 4 bytes at offset 52.
    info: [u8; 232],
    reserved: [u64; 8],
}

/// Attaches the image to a free loop device that detaches itself once nothing uses it.
fn attach_loop(host: &Host, image: BorrowedFd) -> Result<(OwnedFd, String)> {
    const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
    const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
    const LO_FLAGS_AUTOCLEAR: u32 = 4;
    const LO_FLAGS_AT: usize = 52;
    let control = sys::open_in_root(host.root.as_fd(), "/dev/loop-control", libc::O_RDWR)?;
    let mut config = LoopConfig {
        fd: image.as_raw_fd() as u32,
        block_size: 0,
        info: [0; 232],
        reserved: [0; 8],
    };
    config.info[LO_FLAGS_AT..LO_FLAGS_AT + 4].copy_from_slice(&LO_FLAGS_AUTOCLEAR.to_ne_bytes());
    for _ in 0..1000 {
        // SAFETY: the request takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
        if number < 0 {
            return Err(Error::last("ioctl", "LOOP_CTL_GET_FREE"));
        }
        let name = format!("/dev/loop{number}");
        let device = sys::open_in_root(host.root.as_fd(), &name, libc::O_RDWR)?;
        // SAFETY: `config` has the layout of struct loop_config.
        if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &config) } == 0 {
            return Ok((device, name));
        }
        // Another thread or program took this one between the two calls.
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::EBUSY) {
            return Err(Error::last("ioctl", "LOOP_CONFIGURE"));
        }
    }
    Err(Error::TooMany(
        "no loop device stays free long enough to be taken".into(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::FromRawFd;
    use std::os::unix::fs::{FileExt, MetadataExt};

    #[test]
    fn a_template_on_another_file_system_is_copied_with_its_holes() {
        // SAFETY: a plain system call; the descriptor is ours.
        let template = unsafe {
            let fd = libc::memfd_create(c"template".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        let size = 8u64 << 20;
        template.set_len(size).unwrap();
        let block: Vec<u8> = (0..300_000u32).map(|i| (i % 251) as u8).collect();
        template.write_all_at(&block, 4096).unwrap();
        template.write_all_at(b"end", size - 3).unwrap();
        let path = std::env::temp_dir().join(format!("dsec-copy-{}", std::process::id()));
        let image = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        std::fs::remove_file(&path).unwrap();
        copy_sparse(template.as_fd(), image.as_fd(), size).unwrap();
        let mut copied = vec![0u8; size as usize];
        image.read_exact_at(&mut copied, 0).unwrap();
        let mut wanted = vec![0u8; size as usize];
        wanted[4096..4096 + block.len()].copy_from_slice(&block);
        wanted[size as usize - 3..].copy_from_slice(b"end");
        assert!(copied == wanted);
        assert!(image.metadata().unwrap().blocks() * 512 < size / 4);
    }
}
