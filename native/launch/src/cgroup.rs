//! Control groups of an instance and its slots, on cgroup v1 controllers, cgroup2, or both at once.
//!
//! Owns the directories `NAME/s{k}`. The rule a reader could break: what the sandbox's agent may change is its runs (the
//! directories and the files to attach with), never a limit: those files stay root's, so a limit that was once written needs
//! no second look.

use std::fs;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::spec::{FdName, Limits};
use crate::sys;

/// Where a controller lives on this host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Home {
    V1(PathBuf),
    V2,
    Nowhere,
}

/// What the mount table and cgroup2's controller list say.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    pub unified: PathBuf,
    pub memory: Home,
    pub cpu: Home,
    pub pids: Home,
}

impl Layout {
    /// `mounts` is the text of /proc/self/mounts; `controllers` gives the content of `cgroup.controllers` of a cgroup2 mount.
    pub fn parse(mounts: &str, controllers: impl Fn(&Path) -> String) -> Result<Self> {
        let mut unified = None;
        let mut v1: Vec<(PathBuf, Vec<&str>)> = Vec::new();
        for line in mounts.lines() {
            let mut words = line.split(' ').skip(1);
            let (Some(path), Some(kind), Some(options)) =
                (words.next(), words.next(), words.next())
            else {
                continue;
            };
            match kind {
                "cgroup2" if unified.is_none() => unified = Some(PathBuf::from(path)),
                "cgroup" => v1.push((path.into(), options.split(',').collect())),
                _ => {}
            }
        }
        let unified = unified.ok_or_else(|| Error::Unsupported("no cgroup2 is mounted".into()))?;
        let available = controllers(&unified);
        let home = |name: &str| match v1.iter().find(|(_, options)| options.contains(&name)) {
            Some((path, _)) => Home::V1(path.clone()),
            None if available.split_whitespace().any(|c| c == name) => Home::V2,
            None => Home::Nowhere,
        };
        Ok(Self {
            memory: home("memory"),
            cpu: home("cpu"),
            pids: home("pids"),
            unified,
        })
    }

    /// The word that enables in a `cgroup.subtree_control` what this host has on cgroup2; empty on hybrid hosts.
    fn subtree_control(&self) -> String {
        let homes = [
            ("memory", &self.memory),
            ("cpu", &self.cpu),
            ("pids", &self.pids),
        ];
        let names: Vec<_> = homes
            .iter()
            .filter(|(_, h)| **h == Home::V2)
            .map(|(n, _)| format!("+{n}"))
            .collect();
        names.join(" ")
    }
}

/// The instance's directories, one a hierarchy.
pub struct Cgroups {
    layout: Layout,
    unified: OwnedFd,
    memory: Option<OwnedFd>,
    cpu: Option<OwnedFd>,
    pids: Option<OwnedFd>,
    roots: Vec<PathBuf>,
}

/// Descriptors with which a child enters a slot's groups.
pub struct Entry {
    pub agent: OwnedFd,
    pub tasks: Vec<OwnedFd>,
}

fn open_dir(path: &Path) -> Result<OwnedFd> {
    let dir = fs::File::open(path).map_err(|e| Error::os("open", path.display().to_string(), e))?;
    Ok(dir.into())
}

fn make_dir(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(Error::os("mkdir", path.display().to_string(), e))
        }
        _ => Ok(()),
    }
}

impl Cgroups {
    pub fn open(name: &str) -> Result<Self> {
        if name.is_empty() || name.contains('/') || name.starts_with('.') {
            return Err(Error::Invalid(format!("cgroup name {name:?}")));
        }
        let mounts = fs::read_to_string("/proc/self/mounts")
            .map_err(|e| Error::os("read", "/proc/self/mounts", e))?;
        let layout = Layout::parse(&mounts, |path| {
            fs::read_to_string(path.join("cgroup.controllers")).unwrap_or_default()
        })?;
        let mut roots = Vec::new();
        let mut dir = |base: &Path| -> Result<OwnedFd> {
            let path = base.join(name);
            make_dir(&path)?;
            roots.push(path.clone());
            open_dir(&path)
        };
        let unified = dir(&layout.unified)?;
        let mut v1 = |home: &Home| match home {
            Home::V1(path) => dir(path).map(Some),
            _ => Ok(None),
        };
        let (memory, cpu, pids) = (v1(&layout.memory)?, v1(&layout.cpu)?, v1(&layout.pids)?);
        let words = layout.subtree_control();
        if !words.is_empty() {
            let root = open_dir(&layout.unified)?;
            sys::write_at(root.as_fd(), "cgroup.subtree_control", &words)?;
            sys::write_at(unified.as_fd(), "cgroup.subtree_control", &words)?;
        }
        Ok(Self {
            layout,
            unified,
            memory,
            cpu,
            pids,
            roots,
        })
    }

    fn v1_dirs(&self) -> impl Iterator<Item = &OwnedFd> {
        [&self.memory, &self.cpu, &self.pids].into_iter().flatten()
    }

    /// Makes the groups of slot `k`; `agent` becomes the owner of what the guest manages.
    pub fn make(&self, k: u32, agent: u32) -> Result<()> {
        let done = self.make_all(k, agent);
        if done.is_err() {
            let _ = self.remove(k);
        }
        done
    }

    fn make_all(&self, k: u32, agent: u32) -> Result<()> {
        let v2 = self.unified.as_fd();
        for name in [format!("s{k}"), format!("s{k}/agent"), format!("s{k}/runs")] {
            sys::mkdirat(v2, &name, 0o755)?;
        }
        let words = self.layout.subtree_control();
        if !words.is_empty() {
            sys::write_at(v2, &format!("s{k}/cgroup.subtree_control"), &words)?;
            if self.layout.pids == Home::V2 {
                sys::write_at(v2, &format!("s{k}/runs/cgroup.subtree_control"), "+pids")?;
            }
        }
        for name in [
            "",
            "/cgroup.procs",
            "/cgroup.threads",
            "/runs",
            "/runs/cgroup.procs",
            "/runs/cgroup.threads",
        ] {
            sys::chownat(v2, &format!("s{k}{name}"), agent)?;
        }
        sys::chownat(v2, &format!("s{k}/runs/cgroup.subtree_control"), agent)?;
        for dir in self.v1_dirs() {
            sys::mkdirat(dir.as_fd(), &format!("s{k}"), 0o755)?;
        }
        if let Some(pids) = &self.pids {
            for name in ["", "/cgroup.procs", "/tasks"] {
                sys::chownat(pids.as_fd(), &format!("s{k}{name}"), agent)?;
            }
        }
        Ok(())
    }

    pub fn entry(&self, k: u32) -> Result<Entry> {
        let agent = sys::openat(
            self.unified.as_fd(),
            &format!("s{k}/agent"),
            libc::O_PATH | libc::O_DIRECTORY,
        )?;
        let tasks = [&self.memory, &self.cpu].into_iter().flatten();
        let tasks = tasks
            .map(|d| sys::openat(d.as_fd(), &format!("s{k}/tasks"), libc::O_WRONLY))
            .collect::<Result<_>>()?;
        Ok(Entry { agent, tasks })
    }

    pub fn runs(&self, k: u32) -> Result<OwnedFd> {
        sys::openat(
            self.unified.as_fd(),
            &format!("s{k}/runs"),
            libc::O_RDONLY | libc::O_DIRECTORY,
        )
    }

    /// The v1 pids directory whose children the guest may make; None where `runs` has the controller or nothing does.
    pub fn pids(&self, k: u32) -> Result<Option<OwnedFd>> {
        let open = |d: &OwnedFd| {
            sys::openat(
                d.as_fd(),
                &format!("s{k}"),
                libc::O_RDONLY | libc::O_DIRECTORY,
            )
        };
        self.pids.as_ref().map(open).transpose()
    }

    /// Whether this host has a descriptor of that name to give.
    pub fn has(&self, name: FdName) -> bool {
        match name {
            FdName::Pids => self.pids.is_some(),
            FdName::Oom => self.layout.memory != Home::Nowhere,
            _ => true,
        }
    }

    pub fn oom(&self, k: u32) -> Result<Option<OwnedFd>> {
        Ok(match (&self.memory, &self.layout.memory) {
            (Some(dir), _) => Some(sys::openat(
                dir.as_fd(),
                &format!("s{k}/memory.oom_control"),
                libc::O_RDONLY,
            )?),
            (None, Home::V2) => Some(sys::openat(
                self.unified.as_fd(),
                &format!("s{k}/memory.events"),
                libc::O_RDONLY,
            )?),
            _ => None,
        })
    }

    /// Writes the limits that differ from `old` (what the slot's groups hold now).
    pub fn limit(&self, k: u32, old: &Limits, new: &Limits) -> Result<()> {
        let missing = |what: &str| {
            Err(Error::Unsupported(format!(
                "no {what} controller on this host"
            )))
        };
        if old.memory != new.memory {
            match (&self.memory, &self.layout.memory) {
                (Some(dir), _) => limit_memory_v1(dir, k, new.memory)?,
                (None, Home::V2) => limit_memory_v2(&self.unified, k, new.memory)?,
                _ if new.memory.is_some() => return missing("memory"),
                _ => {}
            }
        }
        if (old.cpu_quota_us, old.cpu_period_us, old.cpu_shares)
            != (new.cpu_quota_us, new.cpu_period_us, new.cpu_shares)
        {
            match (&self.cpu, &self.layout.cpu) {
                (Some(dir), _) => limit_cpu_v1(dir, k, new)?,
                (None, Home::V2) => limit_cpu_v2(&self.unified, k, new)?,
                _ if new.cpu_quota_us.is_some() || new.cpu_shares.is_some() => {
                    return missing("cpu")
                }
                _ => {}
            }
        }
        if old.pids != new.pids {
            let text = new.pids.map_or("max".into(), |n| n.to_string());
            match (&self.pids, &self.layout.pids) {
                (Some(dir), _) => sys::write_at(dir.as_fd(), &format!("s{k}/pids.max"), &text)?,
                (None, Home::V2) => {
                    sys::write_at(self.unified.as_fd(), &format!("s{k}/runs/pids.max"), &text)?
                }
                _ if new.pids.is_some() => return missing("pids"),
                _ => {}
            }
        }
        Ok(())
    }

    /// How often the kernel killed something of the slot for want of memory, since its groups were made.
    pub fn oom_kills(&self, k: u32) -> u64 {
        let text = match &self.memory {
            Some(dir) => sys::read_small(dir.as_fd(), &format!("s{k}/memory.oom_control")),
            None => sys::read_small(self.unified.as_fd(), &format!("s{k}/memory.events")),
        };
        parse_counter(&text.unwrap_or_default(), "oom_kill")
    }

    /// Kills everything in the slot's cgroup2 subtree and waits until nothing is left.
    pub fn kill(&self, k: u32) -> Result<()> {
        sys::write_at(self.unified.as_fd(), &format!("s{k}/cgroup.kill"), "1")?;
        for _ in 0..2000 {
            if !self.populated(k) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Err(Error::Busy(format!("processes of slot {k} do not end")))
    }

    pub fn populated(&self, k: u32) -> bool {
        let text = sys::read_small(self.unified.as_fd(), &format!("s{k}/cgroup.events"))
            .unwrap_or_default();
        parse_counter(&text, "populated") == 1
    }

    /// Removes the run groups that the guest made, on both hierarchies.
    pub fn remove_runs(&self, k: u32) -> Result<()> {
        remove_below(&self.unified, &format!("s{k}/runs"))?;
        remove_below(&self.unified, &format!("s{k}/agent"))?;
        // The agent owns s{k} and may have made groups beside ours.
        if sys::subdirectories(self.unified.as_fd(), &format!("s{k}")).unwrap_or(0) > 2 {
            for (name, is_dir) in sys::list_at(self.unified.as_fd(), &format!("s{k}"))? {
                if is_dir && name != "runs" && name != "agent" {
                    remove_tree(&self.unified, &format!("s{k}/{name}"))?;
                }
            }
        }
        match &self.pids {
            Some(pids) => remove_below(pids, &format!("s{k}")),
            None => Ok(()),
        }
    }

    /// Makes the groups as good as new for the next sandbox. False: they cannot be, and must be made anew.
    ///
    /// The OOM counter cannot be reset. Page cache that the last sandbox was charged with stays in the group: up to
    /// `KEEP_BYTES` of it are let be (it is reclaimed first thing), more is forced out.
    pub fn reset(&self, k: u32) -> Result<bool> {
        const KEEP_BYTES: u64 = 1 << 20;
        if self.oom_kills(k) != 0 {
            return Ok(false);
        }
        let Some(memory) = &self.memory else {
            // cgroup2's peak and event counters cannot be reset from here, so memory groups are made anew.
            return Ok(self.layout.memory != Home::V2);
        };
        let usage = |name: &str| -> Result<u64> {
            Ok(sys::read_small(memory.as_fd(), &format!("s{k}/{name}"))?
                .trim()
                .parse()
                .unwrap_or(u64::MAX))
        };
        if usage("memory.usage_in_bytes")? > KEEP_BYTES {
            let _ = sys::write_at(memory.as_fd(), &format!("s{k}/memory.force_empty"), "0");
            if usage("memory.usage_in_bytes")? > KEEP_BYTES {
                return Ok(false);
            }
        }
        sys::write_at(
            memory.as_fd(),
            &format!("s{k}/memory.max_usage_in_bytes"),
            "0",
        )?;
        if usage("memory.failcnt")? != 0 {
            sys::write_at(memory.as_fd(), &format!("s{k}/memory.failcnt"), "0")?;
        }
        if let Some(cpu) = &self.cpu {
            // Throttling statistics cannot be reset.
            let text = sys::read_small(cpu.as_fd(), &format!("s{k}/cpu.stat"))?;
            if parse_counter(&text, "nr_throttled") != 0 {
                return Ok(false);
            }
        }
        if let Some(pids) = &self.pids {
            let text =
                sys::read_small(pids.as_fd(), &format!("s{k}/pids.events")).unwrap_or_default();
            if parse_counter(&text, "max") != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Removes all groups of a slot. What does not exist is no error.
    pub fn remove(&self, k: u32) -> Result<()> {
        remove_tree(&self.unified, &format!("s{k}"))?;
        self.v1_dirs()
            .try_for_each(|dir| remove_tree(dir, &format!("s{k}")))
    }

    /// Slots that have a cgroup2 or v1 directory, of this or an earlier launcher.
    pub fn existing(&self) -> Vec<u32> {
        let mut found: Vec<u32> = std::iter::once(&self.unified)
            .chain(self.v1_dirs())
            .flat_map(|dir| sys::list_at(dir.as_fd(), ".").unwrap_or_default())
            .filter_map(|(name, _)| name.strip_prefix('s')?.parse().ok())
            .collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Removes the instance's own directories, if no slot is left in them.
    pub fn remove_roots(&self) {
        for path in &self.roots {
            // Refused by the kernel while a slot exists, which is what is wanted.
            let _ = fs::remove_dir(path);
        }
    }

    /// The raw numbers a child writes "0" to.
    pub fn attach_numbers(entry: &Entry) -> Vec<RawFd> {
        entry
            .tasks
            .iter()
            .map(std::os::fd::AsRawFd::as_raw_fd)
            .collect()
    }
}

fn limit_memory_v1(dir: &OwnedFd, k: u32, limit: Option<u64>) -> Result<()> {
    let (plain, swap) = (
        format!("s{k}/memory.limit_in_bytes"),
        format!("s{k}/memory.memsw.limit_in_bytes"),
    );
    let text = limit.map_or("-1".into(), |n| n.to_string());
    let has_swap = sys::openat(dir.as_fd(), &swap, libc::O_WRONLY).is_ok();
    // The kernel keeps memsw >= memory at every moment, so the old memsw must go out of the way first.
    if has_swap {
        sys::write_at(dir.as_fd(), &swap, "-1")?;
    }
    sys::write_at(dir.as_fd(), &plain, &text)?;
    if has_swap {
        sys::write_at(dir.as_fd(), &swap, &text)?;
    }
    Ok(())
}

fn limit_memory_v2(dir: &OwnedFd, k: u32, limit: Option<u64>) -> Result<()> {
    let text = limit.map_or("max".into(), |n| n.to_string());
    sys::write_at(dir.as_fd(), &format!("s{k}/memory.max"), &text)?;
    let swap = if limit.is_some() { "0" } else { "max" };
    match sys::write_at(dir.as_fd(), &format!("s{k}/memory.swap.max"), swap) {
        Err(e) if e.errno() != Some(libc::ENOENT) => Err(e),
        _ => Ok(()),
    }
}

fn limit_cpu_v1(dir: &OwnedFd, k: u32, new: &Limits) -> Result<()> {
    // Quota first off, so that no intermediate pair is out of bounds.
    sys::write_at(dir.as_fd(), &format!("s{k}/cpu.cfs_quota_us"), "-1")?;
    let period = new.cpu_period_us.unwrap_or(100_000);
    sys::write_at(
        dir.as_fd(),
        &format!("s{k}/cpu.cfs_period_us"),
        &period.to_string(),
    )?;
    if let Some(quota) = new.cpu_quota_us {
        sys::write_at(
            dir.as_fd(),
            &format!("s{k}/cpu.cfs_quota_us"),
            &quota.to_string(),
        )?;
    }
    sys::write_at(
        dir.as_fd(),
        &format!("s{k}/cpu.shares"),
        &new.cpu_shares.unwrap_or(1024).to_string(),
    )
}

fn limit_cpu_v2(dir: &OwnedFd, k: u32, new: &Limits) -> Result<()> {
    sys::write_at(dir.as_fd(), &format!("s{k}/cpu.max"), &cpu_max(new))?;
    let weight = new.cpu_shares.map_or(100, shares_to_weight);
    sys::write_at(
        dir.as_fd(),
        &format!("s{k}/cpu.weight"),
        &weight.to_string(),
    )
}

fn cpu_max(limits: &Limits) -> String {
    let quota = limits.cpu_quota_us.map_or("max".into(), |q| q.to_string());
    format!("{quota} {}", limits.cpu_period_us.unwrap_or(100_000))
}

/// The usual mapping of v1 shares (2..262144) onto v2 weights (1..10000).
fn shares_to_weight(shares: u64) -> u64 {
    1 + (shares.clamp(2, 262_144) - 2) * 9999 / 262_142
}

/// The number after `name ` at the start of a line.
pub fn parse_counter(text: &str, name: &str) -> u64 {
    let line = text
        .lines()
        .find_map(|l| l.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|v| v.trim().parse().ok()).unwrap_or(0)
}

fn remove_below(dir: &OwnedFd, path: &str) -> Result<()> {
    if sys::subdirectories(dir.as_fd(), path).unwrap_or(0) == 0 {
        return Ok(());
    }
    let names = sys::list_at(dir.as_fd(), path)?;
    names
        .iter()
        .filter(|(_, is_dir)| *is_dir)
        .try_for_each(|(name, _)| remove_tree(dir, &format!("{path}/{name}")))
}

fn remove_tree(dir: &OwnedFd, path: &str) -> Result<()> {
    // The last task of a group may still be on its way out after its parent saw it end: EBUSY then, for a moment.
    for _ in 0..200 {
        match sys::rmdirat(dir.as_fd(), path) {
            Ok(()) => return Ok(()),
            Err(e) if e.errno() == Some(libc::ENOENT) => return Ok(()),
            Err(e) if e.errno() == Some(libc::EBUSY) => {}
            Err(e) => return Err(e),
        }
        remove_below(dir, path)?;
        if sys::rmdirat(dir.as_fd(), path).is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Err(Error::Busy(format!("cgroup {path} stays busy")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HYBRID: &str = "cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0\n\
        cgroup /sys/fs/cgroup/cpuacct cgroup rw,relatime,cpuacct 0 0\n\
        cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0\n\
        cgroup /sys/fs/cgroup/pids cgroup rw,relatime,pids 0 0\n\
        cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0\n";

    #[test]
    fn hybrid_hosts_have_their_controllers_on_v1() {
        let layout = Layout::parse(HYBRID, |_| String::new()).expect("parsed");
        assert_eq!(layout.cpu, Home::V1("/sys/fs/cgroup/cpu".into()));
        assert_eq!(layout.memory, Home::V1("/sys/fs/cgroup/memory".into()));
        assert_eq!(layout.unified, PathBuf::from("/sys/fs/cgroup/unified"));
        assert_eq!(layout.subtree_control(), "");
    }

    #[test]
    fn pure_hosts_enable_what_they_have() {
        let mounts = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid,nsdelegate 0 0\n";
        let layout =
            Layout::parse(mounts, |_| "cpuset cpu io memory pids\n".into()).expect("parsed");
        assert_eq!(
            (&layout.cpu, &layout.memory, &layout.pids),
            (&Home::V2, &Home::V2, &Home::V2)
        );
        assert_eq!(layout.subtree_control(), "+memory +cpu +pids");
        let poor = Layout::parse(mounts, |_| "cpu io\n".into()).expect("parsed");
        assert_eq!(
            (&poor.memory, poor.subtree_control().as_str()),
            (&Home::Nowhere, "+cpu")
        );
    }

    #[test]
    fn a_host_without_cgroup2_is_unsupported() {
        assert!(matches!(
            Layout::parse("", |_| String::new()),
            Err(Error::Unsupported(_))
        ));
    }

    #[test]
    fn counters_and_conversions() {
        let text = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n";
        assert_eq!(
            (
                parse_counter(text, "oom_kill"),
                parse_counter(text, "absent")
            ),
            (3, 0)
        );
        assert_eq!(
            (
                shares_to_weight(2),
                shares_to_weight(1024),
                shares_to_weight(262_144)
            ),
            (1, 39, 10_000)
        );
        let limits = Limits {
            cpu_quota_us: Some(50_000),
            ..Limits::default()
        };
        assert_eq!(
            (
                cpu_max(&limits).as_str(),
                cpu_max(&Limits::default()).as_str()
            ),
            ("50000 100000", "max 100000")
        );
    }
}
