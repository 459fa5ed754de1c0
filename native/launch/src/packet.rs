//! SEQPACKET sockets with descriptors: one packet in, one packet out.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::error::{Error, Result};
use crate::sys;

/// Longest message of the launch protocol, bytes.
pub const MAX_MESSAGE: usize = 128 * 1024;
/// Most descriptors the kernel passes with one packet.
pub const MAX_FDS: usize = 253;

pub enum Received {
    Packet(Vec<u8>, Vec<OwnedFd>),
    /// The packet was longer than `MAX_MESSAGE`, or had descriptors that there was no room for.
    TooLong,
    Nothing,
    Closed,
}

fn control_space() -> usize {
    // SAFETY: pure arithmetic.
    unsafe { libc::CMSG_SPACE((MAX_FDS * size_of::<RawFd>()) as u32) as usize }
}

pub fn receive(socket: BorrowedFd, buf: &mut [u8]) -> Received {
    let mut control = vec![0u64; control_space().div_ceil(8)];
    let mut iov = libc::iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    };
    // SAFETY: msghdr is plain data, for which zero is a value.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    msg.msg_control = control.as_mut_ptr().cast();
    msg.msg_controllen = control_space() as _;
    let n = loop {
        // SAFETY: all buffers are valid for their lengths.
        let n = unsafe {
            libc::recvmsg(
                socket.as_raw_fd(),
                &mut msg,
                libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC,
            )
        };
        if n >= 0 {
            break n as usize;
        }
        match io::Error::last_os_error().kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => return Received::Nothing,
            _ => return Received::Closed,
        }
    };
    let fds = take_fds(&msg);
    if n == 0 && fds.is_empty() {
        return Received::Closed;
    }
    if msg.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0 {
        return Received::TooLong;
    }
    Received::Packet(buf[..n].to_vec(), fds)
}

fn take_fds(msg: &libc::msghdr) -> Vec<OwnedFd> {
    let mut fds = Vec::new();
    // SAFETY: the kernel filled the control buffer; the macros stay inside it.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(msg);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let bytes = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                let data = libc::CMSG_DATA(header).cast::<RawFd>();
                fds.extend(
                    (0..bytes / size_of::<RawFd>())
                        .map(|i| OwnedFd::from_raw_fd(data.add(i).read_unaligned())),
                );
            }
            header = libc::CMSG_NXTHDR(msg, header);
        }
    }
    fds
}

/// Sends a packet; Ok(false) if the peer's queue is full.
pub fn send(socket: BorrowedFd, packet: &[u8], fds: &[RawFd]) -> io::Result<bool> {
    let mut control = vec![0u64; control_space().div_ceil(8)];
    let mut iov = libc::iovec {
        iov_base: packet.as_ptr() as *mut _,
        iov_len: packet.len(),
    };
    // SAFETY: msghdr is plain data, for which zero is a value.
    let mut msg: libc::msghdr = unsafe { std::mem::zeroed() };
    msg.msg_iov = &mut iov;
    msg.msg_iovlen = 1;
    if !fds.is_empty() {
        let bytes = std::mem::size_of_val(fds) as u32;
        msg.msg_control = control.as_mut_ptr().cast();
        // SAFETY: the control buffer has room for MAX_FDS, and callers pass no more.
        unsafe {
            msg.msg_controllen = libc::CMSG_SPACE(bytes) as _;
            let header = libc::CMSG_FIRSTHDR(&msg);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes) as _;
            std::ptr::copy_nonoverlapping(
                fds.as_ptr().cast::<u8>(),
                libc::CMSG_DATA(header),
                bytes as usize,
            );
        }
    }
    loop {
        // SAFETY: all buffers are valid for their lengths.
        let n = unsafe {
            libc::sendmsg(
                socket.as_raw_fd(),
                &msg,
                libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL,
            )
        };
        if n >= 0 {
            return Ok(true);
        }
        let error = io::Error::last_os_error();
        match error.kind() {
            io::ErrorKind::Interrupted => {}
            io::ErrorKind::WouldBlock => return Ok(false),
            _ => return Err(error),
        }
    }
}

/// A listening socket that only this user may connect to. An old socket file at the path is replaced.
pub fn listen(path: &str) -> Result<OwnedFd> {
    // SAFETY: plain system call.
    let fd = unsafe {
        libc::socket(
            libc::AF_UNIX,
            libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK,
            0,
        )
    };
    if fd < 0 {
        return Err(Error::last("socket", path));
    }
    // SAFETY: just made.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_un is plain data, for which zero is a value.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as u16;
    if path.len() >= address.sun_path.len() {
        return Err(Error::Invalid(format!("socket path {path} is too long")));
    }
    for (to, from) in address.sun_path.iter_mut().zip(path.bytes()) {
        *to = from as libc::c_char;
    }
    let name = sys::cstring(path)?;
    // SAFETY: NUL-terminated path.
    unsafe { libc::unlink(name.as_ptr()) };
    let size = size_of::<libc::sockaddr_un>() as u32;
    // The mask makes the file 0600 from its first moment on.
    // SAFETY: the address is valid for its size; umask and listen take no pointers.
    let done = unsafe {
        let old = libc::umask(0o177);
        let bound = libc::bind(socket.as_raw_fd(), (&raw const address).cast(), size);
        libc::umask(old);
        bound == 0 && libc::listen(socket.as_raw_fd(), 16) == 0
    };
    if done {
        Ok(socket)
    } else {
        Err(Error::last("bind", path))
    }
}

pub fn accept(listener: BorrowedFd) -> Option<OwnedFd> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: null address pointers are allowed.
    let fd = unsafe {
        libc::accept4(
            listener.as_raw_fd(),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            flags,
        )
    };
    // SAFETY: just made.
    (fd >= 0).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}
