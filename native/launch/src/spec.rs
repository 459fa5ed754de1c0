//! The spawn spec of the launch protocol as typed values. Parsing checks shape and bounds; it opens nothing.

use rmpv::Value;

use crate::error::{Error, Result};
use crate::msg::{as_map, Map};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Namespaces {
    pub pid: bool,
    pub mnt: bool,
    pub net: bool,
    pub ipc: bool,
    pub uts: bool,
    pub cgroup: bool,
    pub user: bool,
}

#[derive(Clone, Debug)]
pub enum Upper {
    Tmpfs {
        bytes: u64,
        inodes: u64,
    },
    Image {
        template: String,
        dir: String,
        bytes: u64,
        volatile: bool,
    },
}

#[derive(Clone, Debug)]
pub enum Mount {
    Proc,
    Dev,
    Devpts,
    Tmpfs {
        path: String,
        bytes: u64,
        mode: u32,
    },
    Bind {
        source: String,
        path: String,
        ro: bool,
    },
    Mask {
        path: String,
    },
    Ro {
        path: String,
    },
}

#[derive(Clone, Debug)]
pub struct FileItem {
    pub path: String,
    pub data: Vec<u8>,
    pub mode: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    pub memory: Option<u64>,
    pub cpu_quota_us: Option<u64>,
    pub cpu_period_us: Option<u64>,
    pub cpu_shares: Option<u64>,
    pub pids: Option<u64>,
}

/// Descriptors a program can ask for, by the names of the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FdName {
    Channel,
    Userns,
    Runs,
    Pids,
    Oom,
}

impl FdName {
    fn parse(name: &str) -> Result<Self> {
        Ok(match name {
            "channel" => Self::Channel,
            "userns" => Self::Userns,
            "runs" => Self::Runs,
            "pids" => Self::Pids,
            "oom" => Self::Oom,
            _ => return Err(Error::Invalid(format!("fds: unknown descriptor {name}"))),
        })
    }

    pub fn known(name: &str) -> bool {
        Self::parse(name).is_ok()
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Channel => "channel",
            Self::Userns => "userns",
            Self::Runs => "runs",
            Self::Pids => "pids",
            Self::Oom => "oom",
        }
    }
}

#[derive(Clone, Debug)]
pub struct Spec {
    pub id: String,
    pub tag: Vec<u8>,
    pub project: String,
    /// Whether anybody inside may have CAP_NET_ADMIN over the network namespace.
    pub net_admin: bool,
    pub exe: Option<String>,
    pub argv: Vec<Vec<u8>>,
    pub env: Vec<Vec<u8>>,
    pub ns: Namespaces,
    pub identity: Option<(u32, u32)>,
    pub caps: u64,
    pub layers: Vec<String>,
    pub upper: Option<Upper>,
    pub mounts: Vec<Mount>,
    pub files: Vec<FileItem>,
    pub hostname: Option<String>,
    pub limits: Limits,
    pub fds: Vec<FdName>,
    pub affinity: u32,
    pub seccomp: Option<String>,
    pub rlimits: Vec<(u32, u64, u64)>,
    pub first: Vec<u8>,
    pub ready_ms: u64,
}

/// Bytes. A used group may still be charged with half of it, and no program starts with less.
const MIN_MEMORY: u64 = 2 << 20;
/// Most descriptors a program can be given; the numbers 3.. of every spawn are laid out for so many.
pub const MAX_FDS: usize = 5;

impl Spec {
    /// The spec of one item: each of its fields replaces the common one.
    pub fn merged(common: &Map, item: Value) -> Result<Self> {
        let mut fields = common.0.clone();
        fields.extend(as_map(item, "item")?.0);
        Self::parse(&Map(fields))
    }

    pub fn parse(map: &Map) -> Result<Self> {
        let argv = map.byte_list("argv")?;
        if argv.is_empty() || argv.len() > 256 {
            return Err(Error::Invalid("argv must have 1 to 256 words".into()));
        }
        let fds = map
            .texts("fds")?
            .iter()
            .map(|n| FdName::parse(n))
            .collect::<Result<Vec<_>>>()?;
        if fds.len() > MAX_FDS {
            return Err(Error::Invalid("fds: a descriptor is named twice".into()));
        }
        let spec = Self {
            id: parse_id(map)?,
            tag: map.bytes("tag")?.unwrap_or_default(),
            project: map.text("project")?.unwrap_or_default(),
            net_admin: map.boolean("net_admin")?.unwrap_or(true),
            exe: map.text("exe")?,
            argv,
            env: map.byte_list("env")?,
            ns: parse_ns(map)?,
            identity: parse_identity(map)?,
            caps: map.uint("caps")?.unwrap_or(0),
            layers: map.texts("layers")?,
            upper: map.sub("upper")?.map(|m| parse_upper(&m)).transpose()?,
            mounts: map
                .maps("mounts")?
                .iter()
                .map(parse_mount)
                .collect::<Result<_>>()?,
            files: map
                .maps("files")?
                .iter()
                .map(parse_file)
                .collect::<Result<_>>()?,
            hostname: map.text("hostname")?,
            limits: parse_limits(map)?,
            fds,
            affinity: map.uint32("affinity")?.unwrap_or(0),
            seccomp: map.text("seccomp")?,
            rlimits: map
                .list("rlimits")?
                .iter()
                .map(parse_rlimit)
                .collect::<Result<_>>()?,
            first: map.bytes("first")?.unwrap_or_default(),
            ready_ms: map.uint("ready_ms")?.unwrap_or(0),
        };
        spec.check()?;
        Ok(spec)
    }

    fn check(&self) -> Result<()> {
        let invalid = |text: &str| Err(Error::Invalid(text.into()));
        if !self.layers.is_empty() && !self.ns.mnt {
            return invalid("layers need the mnt namespace");
        }
        if !self.layers.is_empty() && self.upper.is_none() {
            return invalid("layers need an upper");
        }
        if self.layers.is_empty()
            && (self.upper.is_some() || !self.mounts.is_empty() || !self.files.is_empty())
        {
            return invalid("upper, mounts and files need layers");
        }
        if self.ns.net && !self.ns.user {
            return invalid("a new net namespace needs a user namespace that owns it");
        }
        if self.hostname.is_some() && !self.ns.uts {
            return invalid("hostname needs the uts namespace");
        }
        if self
            .hostname
            .as_ref()
            .is_some_and(|h| h.is_empty() || h.len() > 64)
        {
            return invalid("hostname must have 1 to 64 bytes");
        }
        if self.fds.contains(&FdName::Userns) && !self.ns.user {
            return invalid("the userns descriptor needs the user namespace");
        }
        if !self.fds.contains(&FdName::Channel) && (self.ready_ms > 0 || !self.first.is_empty()) {
            return invalid("first and ready_ms need the channel descriptor");
        }
        if self.first.len() > 65_600 {
            return invalid("first is longer than a packet (65,600 bytes)");
        }
        Ok(())
    }

    /// Whether nothing inside can have changed a sysctl of the slot's namespaces: there is no writable /proc/sys.
    pub fn sysctls_sealed(&self) -> bool {
        let proc = self.mounts.iter().any(|m| matches!(m, Mount::Proc));
        let sealed = |m: &Mount| matches!(m, Mount::Ro { path } if matches!(path.trim_end_matches('/'), "/proc/sys" | "/proc"));
        self.ns.mnt && !self.layers.is_empty() && (!proc || self.mounts.iter().any(sealed))
    }
}

fn parse_id(map: &Map) -> Result<String> {
    let id = map.need_text("id")?;
    if id.is_empty() || id.len() > 128 {
        return Err(Error::Invalid("id must have 1 to 128 bytes".into()));
    }
    Ok(id)
}

fn parse_ns(map: &Map) -> Result<Namespaces> {
    let mut ns = Namespaces::default();
    for name in map.texts("ns")? {
        *match name.as_str() {
            "pid" => &mut ns.pid,
            "mnt" => &mut ns.mnt,
            "net" => &mut ns.net,
            "ipc" => &mut ns.ipc,
            "uts" => &mut ns.uts,
            "cgroup" => &mut ns.cgroup,
            "user" => &mut ns.user,
            _ => return Err(Error::Invalid(format!("ns: unknown namespace {name}"))),
        } = true;
    }
    Ok(ns)
}

fn parse_identity(map: &Map) -> Result<Option<(u32, u32)>> {
    let Some(sub) = map.sub("identity")? else {
        return Ok(None);
    };
    let missing = || Error::Invalid("identity needs uid and gid".into());
    let uid = sub.uint32("uid")?.ok_or_else(missing)?;
    Ok(Some((uid, sub.uint32("gid")?.ok_or_else(missing)?)))
}

fn need_uint(map: &Map, key: &str) -> Result<u64> {
    map.uint(key)?
        .ok_or_else(|| Error::Invalid(format!("{key} is missing")))
}

fn need_path(map: &Map, key: &str) -> Result<String> {
    let path = map.need_text(key)?;
    if !path.starts_with('/')
        || path.len() > 4000
        || path.contains('\0')
        || path.split('/').any(|part| part == "..")
    {
        return Err(Error::Invalid(format!(
            "{key} must be an absolute path without `..`"
        )));
    }
    Ok(path)
}

fn parse_upper(map: &Map) -> Result<Upper> {
    match map.need_text("kind")?.as_str() {
        "tmpfs" => Ok(Upper::Tmpfs {
            bytes: need_uint(map, "bytes")?,
            inodes: map.uint("inodes")?.unwrap_or(0),
        }),
        "image" => Ok(Upper::Image {
            template: need_path(map, "template")?,
            dir: need_path(map, "dir")?,
            bytes: map.uint("bytes")?.unwrap_or(0),
            volatile: map.boolean("volatile")?.unwrap_or(true),
        }),
        kind => Err(Error::Invalid(format!("upper: unknown kind {kind}"))),
    }
}

fn parse_mount(map: &Map) -> Result<Mount> {
    Ok(match map.need_text("kind")?.as_str() {
        "proc" => Mount::Proc,
        "dev" => Mount::Dev,
        "devpts" => Mount::Devpts,
        "tmpfs" => Mount::Tmpfs {
            path: need_path(map, "path")?,
            bytes: need_uint(map, "bytes")?,
            mode: map.uint32("mode")?.unwrap_or(0o1777),
        },
        "bind" => Mount::Bind {
            source: need_path(map, "source")?,
            path: need_path(map, "path")?,
            ro: map.boolean("ro")?.unwrap_or(false),
        },
        "mask" => Mount::Mask {
            path: need_path(map, "path")?,
        },
        "ro" => Mount::Ro {
            path: need_path(map, "path")?,
        },
        kind => return Err(Error::Invalid(format!("mounts: unknown kind {kind}"))),
    })
}

fn parse_file(map: &Map) -> Result<FileItem> {
    Ok(FileItem {
        path: need_path(map, "path")?,
        data: map.bytes("data")?.unwrap_or_default(),
        mode: map.uint32("mode")?.unwrap_or(0o644) & 0o7777,
    })
}

fn parse_limits(map: &Map) -> Result<Limits> {
    let Some(sub) = map.sub("limits")? else {
        return Ok(Limits::default());
    };
    let limits = Limits {
        memory: sub.uint("memory")?,
        cpu_quota_us: sub.uint("cpu_quota_us")?,
        cpu_period_us: sub.uint("cpu_period_us")?,
        cpu_shares: sub.uint("cpu_shares")?,
        pids: sub.uint("pids")?,
    };
    let ranges = [
        (limits.memory, MIN_MEMORY, 1 << 50, "memory"),
        (limits.cpu_quota_us, 1000, 1 << 40, "cpu_quota_us"),
        (limits.cpu_period_us, 1000, 1_000_000, "cpu_period_us"),
        (limits.cpu_shares, 2, 262_144, "cpu_shares"),
        (limits.pids, 1, 4_194_304, "pids"),
    ];
    for (value, low, high, name) in ranges {
        if value.is_some_and(|v| v < low || v > high) {
            return Err(Error::Invalid(format!(
                "limits: {name} must lie between {low} and {high}"
            )));
        }
    }
    Ok(limits)
}

fn parse_rlimit(value: &Value) -> Result<(u32, u64, u64)> {
    let wrong = || Error::Invalid("rlimits: expected [resource, soft, hard]".into());
    let items = value
        .as_array()
        .filter(|a| a.len() == 3)
        .ok_or_else(wrong)?;
    let numbers: Vec<u64> = items.iter().filter_map(Value::as_u64).collect();
    match numbers[..] {
        [resource, soft, hard] if resource < 16 && soft <= hard => {
            Ok((resource as u32, soft, hard))
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::msg::map;

    fn common() -> Map {
        let list = |items: &[&str]| Value::Array(items.iter().map(|i| Value::from(*i)).collect());
        let fields = vec![
            ("argv", list(&["guest", "channel=%channel"])),
            ("ns", list(&["mnt", "user", "net"])),
            ("fds", list(&["channel"])),
            ("layers", list(&["base"])),
            (
                "upper",
                map(vec![("kind", "tmpfs".into()), ("bytes", 4096.into())]),
            ),
            (
                "mounts",
                Value::Array(vec![map(vec![("kind", "proc".into())])]),
            ),
        ];
        as_map(map(fields), "common").expect("a map")
    }

    #[test]
    fn an_item_replaces_common_fields() {
        let item = map(vec![
            ("id", "a".into()),
            ("argv", Value::Array(vec!["other".into()])),
        ]);
        let spec = Spec::merged(&common(), item).expect("valid");
        assert_eq!((spec.id.as_str(), spec.argv.len()), ("a", 1));
        assert!(spec.ns.user && !spec.ns.pid);
    }

    #[test]
    fn nil_in_an_item_unsets_the_common_field() {
        let item = map(vec![("id", "a".into()), ("upper", Value::Nil)]);
        assert!(matches!(
            Spec::merged(&common(), item),
            Err(Error::Invalid(_))
        ));
    }

    #[test]
    fn writable_sysctls_are_seen() {
        let item = |mounts| map(vec![("id", "a".into()), ("mounts", Value::Array(mounts))]);
        let proc = map(vec![("kind", "proc".into())]);
        let ro = map(vec![("kind", "ro".into()), ("path", "/proc/sys".into())]);
        assert!(!Spec::merged(&common(), item(vec![proc.clone()]))
            .expect("valid")
            .sysctls_sealed());
        assert!(Spec::merged(&common(), item(vec![proc, ro]))
            .expect("valid")
            .sysctls_sealed());
    }

    #[test]
    fn wrong_shapes_are_invalid() {
        let cases = vec![
            ("argv", Value::from(5)),
            ("ns", Value::Array(vec!["moon".into()])),
            ("limits", map(vec![("memory", Value::from(-5))])),
            ("limits", map(vec![("pids", Value::from(0))])),
            (
                "mounts",
                Value::Array(vec![map(vec![
                    ("kind", "ro".into()),
                    ("path", "/a/../b".into()),
                ])]),
            ),
            (
                "rlimits",
                Value::Array(vec![Value::Array(vec![7.into(), 9.into(), 1.into()])]),
            ),
            ("hostname", Value::from("x")),
            ("fds", Value::Array(vec!["gold".into()])),
        ];
        for (key, value) in cases {
            let item = map(vec![("id", "a".into()), (key, value)]);
            assert!(
                matches!(Spec::merged(&common(), item), Err(Error::Invalid(_))),
                "{key}"
            );
        }
    }
}
