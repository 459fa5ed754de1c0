//! User and network namespaces of slots: making them, and proving that a used one is as good as new.
//!
//! The proof is a fingerprint of everything that can be read of a network namespace without traffic changing it on its own.
//! The rule a reader could break: only time stamps and indices may be left out of it.

use std::collections::hash_map::DefaultHasher;
use std::ffi::c_void;
use std::hash::Hasher;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::clone::{clone_vm, Stack};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::sys;

/// Ids a slot maps.
pub const IDS: u32 = 65_536;

extern "C" fn hold(parent: *mut c_void) -> ! {
    // SAFETY: bare system calls that touch no memory. Shares the errno of a running thread, so libc's wrappers are off limits.
    unsafe {
        syscall2(
            libc::SYS_prctl,
            libc::PR_SET_PDEATHSIG as i64,
            libc::SIGKILL as i64,
        );
        // A parent that died before the line above left us to another one.
        while syscall2(libc::SYS_getppid, 0, 0) == parent as i64 {
            syscall2(libc::SYS_pause, 0, 0);
        }
        loop {
            syscall2(libc::SYS_exit, 0, 0);
        }
    }
}

/// # Safety
/// As the system call itself.
unsafe fn syscall2(number: i64, a: i64, b: i64) -> i64 {
    let result: i64;
    // SAFETY: an ordinary system call; the caller answers for its arguments.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") a,
            in("rsi") b,
            in("rdx") 0,
            in("r10") 0,
            in("r8") 0,
            lateout("rcx") _,
            lateout("r11") _,
        );
    }
    result
}

/// Makes a user namespace that maps `base..base+65536` and is owned by the uid `owner`, and a network namespace that belongs
/// to it. The calling thread must have SECBIT_NO_SETUID_FIXUP set, or it loses its capabilities.
pub fn make(host: &Host, base: u32, owner: u32, net: bool) -> Result<(OwnedFd, Option<OwnedFd>)> {
    let mut stack = Stack::new()?;
    let flags = libc::CLONE_NEWUSER | if net { libc::CLONE_NEWNET } else { 0 };
    // The owner of a user namespace is the effective uid of its maker: with it, the agent may enter without a capability.
    set_euid(owner)?;
    // SAFETY: `hold` only makes system calls; the stack lives until the child was reaped below.
    let child = unsafe {
        clone_vm(
            flags as u64,
            None,
            &mut stack,
            hold,
            std::process::id() as usize as *mut c_void,
        )
    };
    set_euid(0)?;
    let (pid, pidfd) = child?;
    let made = describe(host, pid, pidfd.as_fd(), base, net);
    sys::pidfd_kill(pidfd.as_fd());
    sys::wait_child(pidfd.as_fd());
    made
}

fn set_euid(id: u32) -> Result<()> {
    // SAFETY: the raw call acts on this thread alone, unlike libc's.
    match unsafe { libc::syscall(libc::SYS_setresuid, -1, id, -1) } {
        0 => Ok(()),
        _ => Err(Error::last("setresuid", id.to_string())),
    }
}

fn describe(
    host: &Host,
    pid: i32,
    pidfd: BorrowedFd,
    base: u32,
    net: bool,
) -> Result<(OwnedFd, Option<OwnedFd>)> {
    let map = format!("0 {base} {IDS}");
    sys::write_at(host.proc.as_fd(), &format!("{pid}/uid_map"), &map)?;
    sys::write_at(host.proc.as_fd(), &format!("{pid}/gid_map"), &map)?;
    let user = sys::pidfd_namespace(pidfd, true)?;
    if !net {
        return Ok((user, None));
    }
    let net = sys::pidfd_namespace(pidfd, false)?;
    within(host, net.as_fd(), || configure(host))?;
    Ok((user, Some(net)))
}

/// Runs `work` on this thread inside a network namespace.
pub fn within<T>(host: &Host, net: BorrowedFd, work: impl FnOnce() -> Result<T>) -> Result<T> {
    sys::setns(net, libc::CLONE_NEWNET)?;
    let result = work();
    sys::setns(host.net.as_fd(), libc::CLONE_NEWNET)?;
    result
}

fn configure(host: &Host) -> Result<()> {
    // SAFETY: plain socket call; the descriptor is ours.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return Err(Error::last("socket", ""));
    }
    // SAFETY: just made.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: ifreq is plain data, for which zero is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_name[0] = b'l' as libc::c_char;
    request.ifr_name[1] = b'o' as libc::c_char;
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as i16;
    // SAFETY: the request is a valid ifreq.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &request) } != 0 {
        return Err(Error::last("ioctl", "lo up"));
    }
    // As in other container engines: any user may ping and listen on low ports of its own namespace.
    sys::write_at(
        host.proc.as_fd(),
        "sys/net/ipv4/ping_group_range",
        "0 2147483647",
    )?;
    sys::write_at(
        host.proc.as_fd(),
        "sys/net/ipv4/ip_unprivileged_port_start",
        "0",
    )
}

const NLMSG_DONE: u16 = 3;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST_DUMP: u16 = 0x301;
/// (request, length of the fixed part of its answers, attributes that hold time stamps).
const DUMPS: [(u16, usize, &[u16]); 5] = [
    (18, 16, &[26]), // RTM_GETLINK; IFLA_AF_SPEC holds IPv6 time stamps (its settings are sysctls). Includes lo's counters.
    (22, 8, &[6]),   // RTM_GETADDR; IFA_CACHEINFO
    (26, 12, &[12]), // RTM_GETROUTE; RTA_CACHEINFO
    (34, 12, &[]),   // RTM_GETRULE
    (38, 20, &[3, 7]), // RTM_GETQDISC; TCA_STATS, TCA_STATS2
];
/// netstat is left out: nothing in it counts unless a packet passed lo, which the link's own counters show.
/// Any other counter, and a socket in TIME_WAIT, needs a packet, which these count.
const COUNTERS: [&str; 3] = ["dev", "snmp", "snmp6"];
const MORE_COUNTERS: [&str; 1] = ["sockstat"];

/// What a network namespace looks like; two that never did anything look the same. `configurable` tells whether anybody inside
/// could have had CAP_NET_ADMIN: only then links, addresses, routes, rules, queues and packet filters need a look.
pub fn fingerprint(host: &Host, net: BorrowedFd, configurable: bool) -> Result<u64> {
    within(host, net, || {
        let mut hash = DefaultHasher::new();
        if configurable {
            let socket = netlink(libc::NETLINK_ROUTE)?;
            for (kind, fixed, skip) in DUMPS {
                dump(&socket, kind, fixed, skip, &mut hash)?;
            }
            nft_generation(&mut hash);
        }
        let more = if configurable {
            &MORE_COUNTERS[..]
        } else {
            &[]
        };
        for name in COUNTERS.iter().chain(more) {
            let text = sys::read_small(host.proc.as_fd(), &format!("thread-self/net/{name}"))?;
            if *name == "sockstat" {
                hash.write(own_sockets(&text).as_bytes());
            } else {
                hash.write(text.as_bytes());
            }
        }
        Ok(hash.finish())
    })
}

/// The figures of sockstat that are the namespace's own: `orphan`, `alloc` and `mem` count the whole host.
fn own_sockets(text: &str) -> String {
    let mut own = String::new();
    for line in text.lines() {
        let words: Vec<&str> = line.split(' ').collect();
        own += words[0];
        for pair in words[1..]
            .chunks(2)
            .filter(|pair| ["inuse", "used", "tw"].contains(&pair[0]))
        {
            own += &pair.join("=");
        }
    }
    own
}

fn netlink(protocol: i32) -> Result<OwnedFd> {
    // SAFETY: plain socket call; the descriptor is ours.
    match unsafe {
        libc::socket(
            libc::AF_NETLINK,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            protocol,
        )
    } {
        -1 => Err(Error::last("socket", "netlink")),
        // SAFETY: just made.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

fn request(socket: &OwnedFd, kind: u16, flags: u16, body: &[u8]) -> Result<()> {
    let mut packet = Vec::with_capacity(16 + body.len());
    packet.extend_from_slice(&(16 + body.len() as u32).to_ne_bytes());
    packet.extend_from_slice(&kind.to_ne_bytes());
    packet.extend_from_slice(&flags.to_ne_bytes());
    packet.extend_from_slice(&[0; 8]);
    packet.extend_from_slice(body);
    // SAFETY: the packet is valid for its length.
    match unsafe { libc::send(socket.as_raw_fd(), packet.as_ptr().cast(), packet.len(), 0) } {
        -1 => Err(Error::last("send", "netlink")),
        _ => Ok(()),
    }
}

fn dump(
    socket: &OwnedFd,
    kind: u16,
    fixed: usize,
    skip: &[u16],
    hash: &mut DefaultHasher,
) -> Result<()> {
    request(socket, kind, NLM_F_REQUEST_DUMP, &[0; 20][..fixed.max(16)])?;
    let mut buf = [0u8; 16_384];
    loop {
        // SAFETY: the buffer is valid for its length.
        let n = unsafe { libc::recv(socket.as_raw_fd(), buf.as_mut_ptr().cast(), buf.len(), 0) };
        if n < 0 {
            return Err(Error::last("recv", "netlink"));
        }
        let mut rest = &buf[..n as usize];
        while rest.len() >= 16 {
            let length = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            let answer = u16::from_ne_bytes([rest[4], rest[5]]);
            match answer {
                NLMSG_DONE => return Ok(()),
                NLMSG_ERROR => {
                    return Err(Error::Unsupported(format!(
                        "netlink request {kind} refused"
                    )))
                }
                _ if length < 16 || length > rest.len() => {
                    return Err(Error::Invalid("netlink answer".into()))
                }
                _ => hash_message(answer, &rest[16..length], fixed, skip, hash),
            }
            rest = &rest[((length + 3) & !3).min(rest.len())..];
        }
    }
}

fn hash_message(kind: u16, body: &[u8], fixed: usize, skip: &[u16], hash: &mut DefaultHasher) {
    hash.write_u16(kind);
    let (head, mut rest) = body.split_at(fixed.min(body.len()));
    hash.write(head);
    while rest.len() >= 4 {
        let length = usize::from(u16::from_ne_bytes([rest[0], rest[1]])).clamp(4, rest.len());
        let attribute = u16::from_ne_bytes([rest[2], rest[3]]) & 0x3fff;
        if !skip.contains(&attribute) {
            hash.write(&rest[..length]);
        }
        rest = &rest[((length + 3) & !3).min(rest.len())..];
    }
}

/// nftables counts every change of its rules in the namespace. Hosts without nf_tables have nothing to count.
fn nft_generation(hash: &mut DefaultHasher) {
    const NFNL_SUBSYS_NFTABLES_GETGEN: u16 = 10 << 8 | 16;
    let Ok(socket) = netlink(libc::NETLINK_NETFILTER) else {
        return;
    };
    if request(&socket, NFNL_SUBSYS_NFTABLES_GETGEN, 1, &[0; 4]).is_err() {
        return;
    }
    let mut buf = [0u8; 1024];
    // SAFETY: the buffer is valid for its length.
    let n = unsafe {
        libc::recv(
            socket.as_raw_fd(),
            buf.as_mut_ptr().cast(),
            buf.len(),
            libc::MSG_DONTWAIT,
        )
    };
    if n >= 28 && u16::from_ne_bytes([buf[4], buf[5]]) != NLMSG_ERROR {
        // Attribute 1 is the generation; the rest names the asking process.
        hash.write(&buf[20..28]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_the_whole_host_are_left_out() {
        let text =
            "sockets: used 3\nTCP: inuse 1 orphan 5 tw 2 alloc 9 mem 7\nUDP: inuse 0 mem 4\n";
        assert_eq!(
            own_sockets(text),
            "sockets:used=3TCP:inuse=1tw=2UDP:inuse=0"
        );
    }
}
