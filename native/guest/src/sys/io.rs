//! Descriptors: reading, writing, pipes, sockets.

use super::consts::*;
use super::{call, nr, Result};

/// An owned descriptor, closed when dropped.
#[derive(Debug)]
pub struct Fd(i32);

impl Fd {
    /// Takes over a descriptor that nobody else will close.
    pub fn own(raw: i32) -> Fd {
        Fd(raw)
    }

    pub fn raw(&self) -> i32 {
        self.0
    }

    /// Gives the descriptor up without closing it.
    pub fn into_raw(self) -> i32 {
        let raw = self.0;
        core::mem::forget(self);
        raw
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let _ = call!(nr::CLOSE, self.0);
    }
}

pub fn read(fd: i32, buf: &mut [u8]) -> Result<usize> {
    call!(nr::READ, fd, buf.as_mut_ptr(), buf.len())
}

/// Reads into the spare room of `buf`, at most `limit` bytes, and lengthens it by what came.
pub fn read_into(fd: i32, buf: &mut alloc::vec::Vec<u8>, limit: usize) -> Result<usize> {
    let room = (buf.capacity() - buf.len()).min(limit);
    let spare = buf.spare_capacity_mut();
    let n = call!(nr::READ, fd, spare.as_mut_ptr(), room)?;
    // SAFETY: the kernel wrote `n` <= room bytes there.
    unsafe { buf.set_len(buf.len() + n) };
    Ok(n)
}

pub fn pread(fd: i32, buf: &mut [u8], offset: u64) -> Result<usize> {
    call!(nr::PREAD64, fd, buf.as_mut_ptr(), buf.len(), offset)
}

pub fn write(fd: i32, buf: &[u8]) -> Result<usize> {
    call!(nr::WRITE, fd, buf.as_ptr(), buf.len())
}

pub fn lseek(fd: i32, offset: u64, whence: u32) -> Result<u64> {
    call!(nr::LSEEK, fd, offset, whence).map(|n| n as u64)
}

pub fn ftruncate(fd: i32, size: u64) -> Result<()> {
    call!(nr::FTRUNCATE, fd, size).map(drop)
}

/// A close-on-exec pipe as (read end, write end).
pub fn pipe(flags: u32) -> Result<(Fd, Fd)> {
    let mut fds = [0i32; 2];
    call!(nr::PIPE2, fds.as_mut_ptr(), flags | O_CLOEXEC)?;
    Ok((Fd(fds[0]), Fd(fds[1])))
}

/// A close-on-exec SEQPACKET pair.
pub fn seqpacket_pair() -> Result<(Fd, Fd)> {
    let mut fds = [0i32; 2];
    call!(nr::SOCKETPAIR, 1, 5 | O_CLOEXEC, 0, fds.as_mut_ptr())?;
    Ok((Fd(fds[0]), Fd(fds[1])))
}

const MSG_DONTWAIT: u32 = 0x40;
const MSG_NOSIGNAL: u32 = 0x4000;

pub fn send(fd: i32, buf: &[u8], wait: bool) -> Result<usize> {
    let flags = MSG_NOSIGNAL | if wait { 0 } else { MSG_DONTWAIT };
    call!(nr::SENDTO, fd, buf.as_ptr(), buf.len(), flags, 0, 0)
}

pub fn recv(fd: i32, buf: &mut [u8], wait: bool) -> Result<usize> {
    let flags = if wait { 0 } else { MSG_DONTWAIT };
    call!(nr::RECVFROM, fd, buf.as_mut_ptr(), buf.len(), flags, 0, 0)
}

/// Receives one packet into the spare room of `buf` (which is emptied first), without waiting.
pub fn recv_into(fd: i32, buf: &mut alloc::vec::Vec<u8>) -> Result<usize> {
    buf.clear();
    let spare = buf.spare_capacity_mut();
    let n = call!(
        nr::RECVFROM,
        fd,
        spare.as_mut_ptr(),
        spare.len(),
        MSG_DONTWAIT,
        0,
        0
    )?;
    // SAFETY: the kernel wrote `n` <= capacity bytes there.
    unsafe { buf.set_len(n) };
    Ok(n)
}

/// Bytes that wait in a pipe.
pub fn bytes_readable(fd: i32) -> Result<usize> {
    const FIONREAD: u32 = 0x541b;
    let mut n = 0i32;
    call!(nr::IOCTL, fd, FIONREAD, &mut n as *mut i32)?;
    Ok(n.max(0) as usize)
}

pub fn fd_is_open(fd: i32) -> bool {
    const F_GETFD: u32 = 1;
    call!(nr::FCNTL, fd, F_GETFD).is_ok()
}

pub fn set_cloexec(fd: i32) -> Result<()> {
    const F_SETFD: u32 = 2;
    call!(nr::FCNTL, fd, F_SETFD, 1).map(drop)
}

/// Makes an open file non-blocking (whoever shares it sees that too).
pub fn set_nonblocking(fd: i32) -> Result<()> {
    const F_SETFL: u32 = 4;
    call!(nr::FCNTL, fd, F_SETFL, O_NONBLOCK).map(drop)
}

/// A close-on-exec duplicate numbered `at_least` or above.
pub fn dup_above(fd: i32, at_least: i32) -> Result<Fd> {
    const F_DUPFD_CLOEXEC: u32 = 1030;
    call!(nr::FCNTL, fd, F_DUPFD_CLOEXEC, at_least).map(|n| Fd(n as i32))
}

/// `dup2` that also works where both are the same (close-on-exec is then cleared).
pub fn dup_to(fd: i32, to: i32) -> Result<()> {
    if fd == to {
        const F_SETFD: u32 = 2;
        return call!(nr::FCNTL, fd, F_SETFD, 0).map(drop);
    }
    call!(nr::DUP3, fd, to, 0).map(drop)
}

/// Marks every descriptor from `first` on close-on-exec.
pub fn cloexec_from(first: i32) -> Result<()> {
    const CLOSE_RANGE_CLOEXEC: u32 = 4;
    call!(nr::CLOSE_RANGE, first, u32::MAX, CLOSE_RANGE_CLOEXEC).map(drop)
}

/// Closes the descriptors `first..=last`; nothing in this program may own one of them any more.
pub fn close_between(first: u32, last: u32) -> Result<()> {
    call!(nr::CLOSE_RANGE, first, last, 0).map(drop)
}

pub fn random(buf: &mut [u8]) -> Result<usize> {
    call!(nr::GETRANDOM, buf.as_mut_ptr(), buf.len(), 0)
}
