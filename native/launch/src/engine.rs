//! Starts and ends single sandboxes. Owns what all workers share; knows nothing of sockets and requests.

use std::ffi::{c_char, c_void, CString};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use crate::cgroup::Cgroups;
use crate::child::{self, Plan, MARKS};
use crate::clone::{clone_vm, Stack};
use crate::error::{Error, Result};
use crate::host::{self, Host};
use crate::root::{self, Layers, Root};
use crate::slot::{Key, Past, Slot, Slots};
use crate::spec::{FdName, Namespaces, Spec};
use crate::sys::{self, raw, FsContext};

pub struct Engine {
    pub host: Host,
    pub cgroups: Cgroups,
    pub slots: Slots,
    pub layers: Layers,
    pub workers: usize,
    next_cpu: AtomicUsize,
    cpus: Vec<usize>,
    nofile: libc::rlimit,
}

/// A running sandbox. Holds four descriptors: the pidfd, the channel, and the slot's two namespaces.
pub struct Sandbox {
    pub pid: i32,
    pub pidfd: OwnedFd,
    pub channel: Option<OwnedFd>,
    pub us: [u64; PHASES.len()],
    slot: Slot,
    /// None for an adopted sandbox, whose slot is not reused.
    key: Option<Key>,
    past: Past,
    /// Its first process is pid 1 of a namespace: with it, everything ends.
    pid_ns: bool,
    _layers: Vec<Arc<OwnedFd>>,
}

impl Sandbox {
    pub fn slot(&self) -> u32 {
        self.slot.index
    }
}

/// Names of the phases in a spawn's `us`; `MARKS` of them are the child's.
pub const PHASES: [&str; 10] = [
    "slot", "compose", "limits", "clone", "root", "mounts", "cgroup", "seccomp", "cred", "exec",
];

/// How a sandbox ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ending {
    /// Exit code n as n, signal n as -n, None if unknown.
    pub status: Option<i32>,
    pub oom_kills: u64,
}

/// Prepares the calling thread for work that changes ids and mounts: capabilities survive a change of uid.
pub fn keep_capabilities() -> Result<()> {
    const SECBIT_NO_SETUID_FIXUP: libc::c_ulong = 4;
    // SAFETY: acts on this thread alone.
    match unsafe { libc::prctl(libc::PR_SET_SECUREBITS, SECBIT_NO_SETUID_FIXUP, 0, 0, 0) } {
        0 => Ok(()),
        _ => Err(Error::last("prctl", "PR_SET_SECUREBITS (is this root?)")),
    }
}

/// Raises the limit of open files as far as it goes; returns what it was, for the programs started.
pub fn raise_open_files() -> Result<libc::rlimit> {
    let mut old = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: `old` is valid for writing.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut old) } != 0 {
        return Err(Error::last("getrlimit", "NOFILE"));
    }
    let new = libc::rlimit {
        rlim_cur: old.rlim_max,
        rlim_max: old.rlim_max,
    };
    // SAFETY: `new` is valid for reading.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &new) } != 0 {
        return Err(Error::last("setrlimit", "NOFILE"));
    }
    Ok(old)
}

impl Engine {
    /// Call `host::claim_numbers` with the same number of workers before anything else.
    pub fn new(cgroup_name: &str, uid_base: u32, workers: usize) -> Result<Self> {
        let ids = u64::from(uid_base)
            + (u64::from(crate::slot::SLOTS) + 1) * u64::from(crate::netns::IDS);
        if uid_base < crate::netns::IDS || ids > u64::from(u32::MAX) {
            return Err(Error::Invalid(format!(
                "uid base {uid_base}: the block must lie in 65,536..2^32"
            )));
        }
        // SAFETY: only sets this process's file mode mask; modes are given in full everywhere.
        unsafe { libc::umask(0) };
        keep_capabilities()?;
        let nofile = raise_open_files()?;
        let host = Host::open()?;
        let cgroups = Cgroups::open(cgroup_name)?;
        let slots = Slots::new(&host, uid_base)?;
        let engine = Self {
            host,
            cgroups,
            slots,
            layers: Layers::default(),
            workers,
            next_cpu: AtomicUsize::new(0),
            cpus: allowed_cpus(),
            nofile,
        };
        engine.sweep();
        Ok(engine)
    }

    /// Removes groups that an earlier launcher left empty; those with processes are kept for `adopt`.
    fn sweep(&self) {
        for index in self.cgroups.existing() {
            if self.cgroups.populated(index) || self.cgroups.remove(index).is_err() {
                let _ = self.slots.reserve(index);
            }
        }
    }

    /// Takes over a sandbox that an earlier launcher started.
    pub fn adopt(&self, pid: i32, index: u32, pidfd: OwnedFd, channel: OwnedFd) -> Result<Sandbox> {
        self.slots.reserve(index)?;
        let slot = Slot {
            index,
            userns: None,
            netns: None,
            entry: None,
            limits: Default::default(),
        };
        Ok(Sandbox {
            pid,
            pidfd,
            channel: Some(channel),
            us: Default::default(),
            slot,
            key: None,
            past: Past {
                sealed: false,
                net_admin: true,
            },
            pid_ns: false,
            _layers: Vec::new(),
        })
    }

    /// Ends a sandbox if it lives, and removes everything of it. Returns only when all is gone.
    pub fn end(&self, sandbox: Sandbox) -> Result<Ending> {
        let Sandbox {
            pidfd,
            channel,
            mut slot,
            key,
            past,
            pid_ns,
            _layers: layers,
            ..
        } = sandbox;
        sys::pidfd_kill(pidfd.as_fd());
        let status = sys::wait_child(pidfd.as_fd()).or_else(|| {
            // Not our child: an adopted one. Its pidfd becomes readable at its end.
            sys::poll_in(pidfd.as_fd(), None);
            sys::pidfd_exit_status(pidfd.as_fd())
        });
        drop((pidfd, channel, layers));
        let index = slot.index;
        if !pid_ns {
            self.cgroups.kill(index)?;
        }
        let oom_kills = self.cgroups.oom_kills(index);
        self.cgroups.remove_runs(index)?;
        slot.entry = None;
        match key {
            // Without a pid namespace cgroup.kill was used just now: see `Worker::start`.
            Some(key) if pid_ns => {
                self.slots
                    .give_back(&self.host, &self.cgroups, slot, key, past)?
            }
            _ => self.slots.discard(&self.cgroups, slot)?,
        }
        Ok(Ending { status, oom_kills })
    }

    /// Removes what this launcher keeps ready. Sandboxes are left alone.
    pub fn close(&self) {
        self.slots.close(&self.cgroups);
        self.cgroups.remove_roots();
    }

    fn affinity(&self, count: u32) -> Option<libc::cpu_set_t> {
        let count = count as usize;
        if count == 0 || count >= self.cpus.len() {
            return None;
        }
        let first = self.next_cpu.fetch_add(count, Ordering::Relaxed);
        // SAFETY: cpu_set_t is plain data, for which zero is a value.
        let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
        for i in 0..count {
            // SAFETY: the number comes from the kernel's own set.
            unsafe { libc::CPU_SET(self.cpus[(first + i) % self.cpus.len()], &mut set) };
        }
        Some(set)
    }
}

fn allowed_cpus() -> Vec<usize> {
    // SAFETY: cpu_set_t is plain data that sched_getaffinity fills.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is valid for its size.
    unsafe { libc::sched_getaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &mut set) };
    // SAFETY: all numbers are below the set's size.
    (0..libc::CPU_SETSIZE as usize)
        .filter(|cpu| unsafe { libc::CPU_ISSET(*cpu, &set) })
        .collect()
}

/// A thread that starts and ends sandboxes. It lives in an empty mount namespace, so that a child's copy of it costs nothing.
pub struct Worker {
    engine: Arc<Engine>,
    stack: Stack,
    stage: RawFd,
}

/// The descriptors of one spawn, in the order of the spec's `fds`.
struct Given {
    ours: Option<OwnedFd>,
    named: Vec<OwnedFd>,
}

impl Worker {
    /// Binds the calling thread to number `number` below the engine's `workers`. It must do nothing else afterwards.
    pub fn enter(engine: Arc<Engine>, number: usize) -> Result<Self> {
        keep_capabilities()?;
        empty_mount_namespace()?;
        Ok(Self {
            engine,
            stack: Stack::new()?,
            stage: host::stage_base(number),
        })
    }

    /// Starts a sandbox. On error nothing of it is left.
    pub fn start(&mut self, spec: &Spec) -> Result<Sandbox> {
        let engine = self.engine.clone();
        let begin = raw::now_us();
        let layers = engine.layers.get(&spec.layers)?;
        let key = Key::of(spec);
        let (slot, prepared) = engine.slots.take(&engine.host, &engine.cgroups, &key)?;
        match self.start_with(spec, slot, &key, layers.clone(), begin) {
            // A clone into a group on which cgroup.kill was ever used dies at birth (seen on 6.18), and no file tells of that
            // use. So what died in a used slot gets a second chance in a new one.
            Err(Error::Ended(_)) if prepared => {
                let slot = engine.slots.make(&engine.host, &engine.cgroups, &key)?;
                self.start_with(spec, slot, &key, layers, begin)
            }
            done => done,
        }
    }

    fn start_with(
        &mut self,
        spec: &Spec,
        mut slot: Slot,
        key: &Key,
        layers: Vec<Arc<OwnedFd>>,
        begin: u64,
    ) -> Result<Sandbox> {
        let mut us = [0; PHASES.len()];
        us[0] = raw::now_us() - begin;
        match self.start_in(spec, &mut slot, &layers, &mut us) {
            Ok((pid, pidfd, channel)) => {
                slot.entry = None;
                Ok(Sandbox {
                    pid,
                    pidfd,
                    channel,
                    us,
                    slot,
                    key: Some(key.clone()),
                    past: Past {
                        sealed: spec.sysctls_sealed(),
                        net_admin: spec.net_admin,
                    },
                    pid_ns: spec.ns.pid,
                    _layers: layers,
                })
            }
            Err(e) => {
                // The child may have been killed anywhere, so nothing is known about what it left in the slot.
                self.engine.slots.discard(&self.engine.cgroups, slot)?;
                Err(e)
            }
        }
    }

    fn start_in(
        &mut self,
        spec: &Spec,
        slot: &mut Slot,
        layers: &[Arc<OwnedFd>],
        us: &mut [u64; PHASES.len()],
    ) -> Result<(i32, OwnedFd, Option<OwnedFd>)> {
        let engine = self.engine.clone();
        let base = engine.slots.first_id(slot.index);
        let start = raw::now_us();
        let filter = spec
            .seccomp
            .as_ref()
            .map(|path| engine.host.filter(path))
            .transpose()?;
        let exe = spec
            .exe
            .as_ref()
            .map(|path| engine.host.file(path))
            .transpose()?;
        let mut root = root::compose(
            &engine.host,
            spec,
            layers,
            slot.userns.as_ref().map(AsFd::as_fd),
            base,
        )?;
        us[1] = raw::now_us() - start;
        engine
            .cgroups
            .limit(slot.index, &slot.limits, &spec.limits)?;
        slot.limits = spec.limits;
        let given = self.given(spec, slot)?;
        us[2] = raw::now_us() - start - us[1];
        let guard = Stage::fill(self.stage, &given.named, exe.as_deref(), &engine.host.null)?;
        let done = self.clone_child(
            spec,
            slot,
            base,
            root.as_mut(),
            filter.as_deref(),
            exe.is_some(),
            us,
        );
        drop(guard);
        let (pid, pidfd) = done?;
        Ok((pid, pidfd, given.ours))
    }

    fn given(&self, spec: &Spec, slot: &Slot) -> Result<Given> {
        let cgroups = &self.engine.cgroups;
        let absent =
            |what: &str| Error::Unsupported(format!("this host has no {what} descriptor to give"));
        let mut given = Given {
            ours: None,
            named: Vec::with_capacity(spec.fds.len()),
        };
        for name in &spec.fds {
            given.named.push(match name {
                FdName::Channel => {
                    let (ours, theirs) = socket_pair()?;
                    if !spec.first.is_empty() {
                        send(&ours, &spec.first)?;
                    }
                    given.ours = Some(ours);
                    theirs
                }
                FdName::Userns => match &slot.userns {
                    Some(ns) => sys::dup(ns.as_fd())?,
                    None => return Err(absent("userns")),
                },
                FdName::Runs => cgroups.runs(slot.index)?,
                // Where the controller lies elsewhere or nowhere, the program is told by the word's absence.
                FdName::Pids => match cgroups.pids(slot.index)? {
                    Some(fd) => fd,
                    None => continue,
                },
                FdName::Oom => match cgroups.oom(slot.index)? {
                    Some(fd) => fd,
                    None => continue,
                },
            });
        }
        Ok(given)
    }

    #[allow(clippy::too_many_arguments)]
    fn clone_child(
        &mut self,
        spec: &Spec,
        slot: &Slot,
        base: u32,
        root: Option<&mut Root>,
        filter: Option<&Vec<u64>>,
        exe: bool,
        us: &mut [u64; PHASES.len()],
    ) -> Result<(i32, OwnedFd)> {
        let engine = self.engine.clone();
        let entry = slot
            .entry
            .as_ref()
            .ok_or_else(|| Error::Invalid("slot is not prepared".into()))?;
        let tasks = Cgroups::attach_numbers(entry);
        let (argv, named) = argv_words(spec, &engine)?;
        let argv_pointers = pointers(&argv);
        let env = spec
            .env
            .iter()
            .map(|e| sys::cstring(e.clone()))
            .collect::<Result<Vec<_>>>()?;
        let envp = pointers(&env);
        let hostname = spec
            .hostname
            .as_ref()
            .map(|h| sys::cstring(h.as_str()))
            .transpose()?;
        let affinity = engine.affinity(spec.affinity);
        let mut rlimits = spec.rlimits.clone();
        if !rlimits.iter().any(|r| r.0 == libc::RLIMIT_NOFILE) {
            rlimits.insert(
                0,
                (
                    libc::RLIMIT_NOFILE,
                    engine.nofile.rlim_cur,
                    engine.nofile.rlim_max,
                ),
            );
        }
        let agent = engine.slots.agent(slot.index);
        let (overlay, parts, steps) = match root {
            Some(root) => (
                Some(root.overlay.as_raw_fd()),
                root.parts.as_slice(),
                root.steps.as_mut_slice(),
            ),
            None => (None, Default::default(), Default::default()),
        };
        let mut plan = Plan {
            net: if spec.ns.net {
                slot.netns.as_ref().map(AsRawFd::as_raw_fd)
            } else {
                None
            },
            host_mnt: engine.host.mnt.as_raw_fd(),
            tasks: &tasks,
            new_cgroup_ns: spec.ns.cgroup,
            own_mounts: spec.ns.mnt,
            overlay,
            parts,
            steps,
            fsid: if spec.ns.user { base } else { 0 },
            hostname: hostname.as_deref(),
            affinity: affinity.as_ref(),
            rlimits: &rlimits,
            filter: filter.map(Vec::as_slice),
            stage: self.stage,
            null: self.stage + host::STAGE_WIDTH - 1,
            named,
            exe,
            end: host::stage_base(engine.workers),
            first_final: host::FIRST_FINAL,
            identity: spec.identity.unwrap_or((agent, agent)),
            caps: spec.caps,
            sealed: !spec.ns.user,
            argv: &argv_pointers,
            envp: &envp,
            step: "clone",
            errno: 0,
            marks: [0; MARKS.len()],
        };
        let flags = clone_flags(&spec.ns) | libc::CLONE_VFORK as u64;
        let begin = raw::now_us();
        let arg = (&raw mut plan).cast::<c_void>();
        // SAFETY: `child::run` keeps the module's rule; the plan outlives the call, which waits for exec or end.
        let (pid, pidfd) = unsafe {
            clone_vm(
                flags,
                Some(entry.agent.as_raw_fd()),
                &mut self.stack,
                child::run,
                arg,
            )
        }?;
        let end = raw::now_us();
        // SAFETY: the child wrote through the pointer; a volatile read keeps the compiler from assuming it did not.
        let (errno, marks) = unsafe {
            (
                std::ptr::read_volatile(&raw const plan.errno),
                std::ptr::read_volatile(&raw const plan.marks),
            )
        };
        if errno != 0 {
            sys::wait_child(pidfd.as_fd());
            return Err(Error::Child {
                step: plan.step,
                source: std::io::Error::from_raw_os_error(errno),
            });
        }
        if marks[MARKS.len() - 1] == 0 {
            // Killed from outside on its way.
            return Err(Error::Ended(sys::wait_child(pidfd.as_fd())));
        }
        let mut last = begin;
        for (i, mark) in marks.into_iter().chain([end]).enumerate() {
            us[3 + i] = mark.saturating_sub(last);
            last = mark;
        }
        Ok((pid, pidfd))
    }
}

fn clone_flags(ns: &Namespaces) -> u64 {
    // A child of the mnt namespace copies the worker's empty one. User, net and cgroup come from the slot or from unshare.
    let wanted = [
        (ns.pid, libc::CLONE_NEWPID),
        (ns.mnt, libc::CLONE_NEWNS),
        (ns.ipc, libc::CLONE_NEWIPC),
        (ns.uts, libc::CLONE_NEWUTS),
    ];
    wanted
        .iter()
        .filter(|(on, _)| *on)
        .map(|(_, flag)| *flag as u64)
        .sum()
}

/// The words of argv with `NAME=%NAME` replaced, or left out where this host has no such descriptor; and how many
/// descriptors are given.
fn argv_words(spec: &Spec, engine: &Engine) -> Result<(Vec<CString>, i32)> {
    let present: Vec<&str> = spec
        .fds
        .iter()
        .filter(|name| engine.cgroups.has(**name))
        .map(|name| name.name())
        .collect();
    let mut words = Vec::with_capacity(spec.argv.len());
    for word in &spec.argv {
        let text = String::from_utf8_lossy(word);
        match text.split_once("=%") {
            Some((left, name)) if left == name && FdName::known(name) => {
                if let Some(at) = present.iter().position(|p| *p == name) {
                    words.push(sys::cstring(format!(
                        "{name}={}",
                        host::FIRST_FINAL + at as i32
                    ))?);
                }
            }
            _ => words.push(sys::cstring(word.clone())?),
        }
    }
    if words.is_empty() {
        return Err(Error::Invalid("argv has no words left".into()));
    }
    Ok((words, present.len() as i32))
}

fn pointers(words: &[CString]) -> Vec<*const c_char> {
    words
        .iter()
        .map(|w| w.as_ptr())
        .chain([std::ptr::null()])
        .collect()
}

fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
    let mut pair = [0; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: `pair` has room for two descriptors.
    if unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) } != 0 {
        return Err(Error::last("socketpair", ""));
    }
    // SAFETY: both were just made.
    Ok(unsafe { (OwnedFd::from_raw_fd(pair[0]), OwnedFd::from_raw_fd(pair[1])) })
}

fn send(socket: &OwnedFd, packet: &[u8]) -> Result<()> {
    // SAFETY: the packet is valid for its length.
    let n = unsafe {
        libc::send(
            socket.as_raw_fd(),
            packet.as_ptr().cast(),
            packet.len(),
            libc::MSG_NOSIGNAL,
        )
    };
    if n < 0 {
        return Err(Error::last("send", "first packet"));
    }
    Ok(())
}

/// A worker's reserved numbers while they hold the descriptors of a spawn.
struct Stage<'a> {
    base: RawFd,
    count: i32,
    null: &'a OwnedFd,
}

impl<'a> Stage<'a> {
    fn fill(
        base: RawFd,
        named: &[OwnedFd],
        exe: Option<&OwnedFd>,
        null: &'a OwnedFd,
    ) -> Result<Self> {
        let mut stage = Self {
            base,
            count: 0,
            null,
        };
        for fd in named.iter().chain(exe) {
            sys::dup_onto(fd.as_raw_fd(), base + stage.count)?;
            stage.count += 1;
        }
        Ok(stage)
    }
}

impl Drop for Stage<'_> {
    fn drop(&mut self) {
        // A copy of the sandbox's end of the channel kept here would hide its end of file.
        for i in 0..self.count {
            let _ = sys::dup_onto(self.null.as_raw_fd(), self.base + i);
        }
    }
}

fn empty_mount_namespace() -> Result<()> {
    // SAFETY: acts on this thread alone: CLONE_NEWNS implies a root and working directory of its own.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(Error::last("unshare", "mount namespace"));
    }
    let private = libc::MS_REC | libc::MS_PRIVATE;
    // SAFETY: null source, type and data are allowed for a change of propagation.
    if unsafe {
        libc::mount(
            std::ptr::null(),
            c"/".as_ptr(),
            std::ptr::null(),
            private,
            std::ptr::null(),
        )
    } != 0
    {
        return Err(Error::last("mount", "private /"));
    }
    let context = FsContext::open(c"tmpfs")?;
    context.string(c"size", "4k")?;
    let mount = context.mount(0)?;
    child::furnish(mount.as_fd())?;
    // Onto /proc, which every host has; pivot_root then makes it the only mount.
    if let Err(errno) = raw::move_mount(mount.as_raw_fd(), libc::AT_FDCWD, c"/proc") {
        return Err(Error::os(
            "move_mount",
            "/proc",
            std::io::Error::from_raw_os_error(errno),
        ));
    }
    // SAFETY: NUL-terminated strings; acts on this thread's own namespace.
    unsafe {
        if libc::fchdir(mount.as_raw_fd()) != 0
            || libc::syscall(libc::SYS_pivot_root, c".".as_ptr(), c".".as_ptr()) != 0
            || libc::umount2(c".".as_ptr(), libc::MNT_DETACH) != 0
            || libc::chdir(c"/".as_ptr()) != 0
        {
            return Err(Error::last("pivot_root", "empty namespace"));
        }
    }
    sys::mount_setattr(mount.as_fd(), sys::MOUNT_ATTR_RDONLY, None)
}
