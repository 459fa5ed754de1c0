//! Who a command runs as: `name`, `uid`, `name:group`, `uid:gid`, resolved by the sandbox's own files.
//!
//! `/etc/passwd` and `/etc/group` are written by the sandbox: everything here is bounded and skips
//! what it does not understand.

use alloc::string::String;
use alloc::vec::Vec;

/// Supplementary groups at most (the kernel takes 65,536; nobody needs so many).
const MAX_GROUPS: usize = 1024;
/// Bytes of either file that are read.
pub const MAX_FILE: usize = 1 << 20;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
    pub home: Vec<u8>,
    pub name: Vec<u8>,
}

fn number(text: &[u8]) -> Option<u32> {
    let n: u32 = core::str::from_utf8(text).ok()?.parse().ok()?;
    // (u32)-1 means "leave as it is" to the kernel.
    (n != u32::MAX && text[0].is_ascii_digit()).then_some(n)
}

/// Fields of the first line of `file` that `wanted` accepts.
fn find<'a>(
    file: &'a [u8],
    fields: usize,
    wanted: impl Fn(&[&'a [u8]]) -> bool,
) -> Option<Vec<&'a [u8]>> {
    file.split(|b| *b == b'\n')
        .map(|line| line.split(|b| *b == b':').take(8).collect::<Vec<_>>())
        .find(|parts| parts.len() >= fields && wanted(parts))
}

/// Resolves `user` against the contents of passwd and group. Err holds a sentence.
pub fn resolve(user: &str, passwd: &[u8], group: &[u8]) -> Result<Identity, String> {
    let (who, which) = match user.split_once(':') {
        Some((who, which)) => (who, Some(which)),
        None => (user, None),
    };
    let id = number(who.as_bytes());
    let entry = find(passwd, 6, |p| match id {
        Some(id) => number(p[2]) == Some(id),
        None => p[0] == who.as_bytes() && !who.is_empty() && number(p[2]).is_some(),
    });
    let mut identity = match (&entry, id) {
        (Some(p), _) => Identity {
            uid: number(p[2]).unwrap_or(0),
            gid: number(p[3]).unwrap_or(0),
            groups: Vec::new(),
            home: p[5].to_vec(),
            name: p[0].to_vec(),
        },
        // An id needs no entry; as elsewhere its group is then 0.
        (None, Some(id)) => {
            let name = if id == 0 { "root" } else { who };
            Identity {
                uid: id,
                gid: 0,
                groups: Vec::new(),
                home: Vec::new(),
                name: name.into(),
            }
        }
        // The default user of images: a sandbox that broke its passwd stays usable.
        (None, None) if who == "root" => Identity {
            uid: 0,
            gid: 0,
            groups: Vec::new(),
            home: b"/root".to_vec(),
            name: b"root".to_vec(),
        },
        (None, None) => {
            return Err(alloc::format!(
                "no user {who:?} in the sandbox's /etc/passwd"
            ))
        }
    };
    if identity.home.is_empty() || identity.home[0] != b'/' {
        identity.home = b"/".to_vec();
    }
    match which {
        Some(which) => {
            identity.gid = number(which.as_bytes())
                .or_else(|| {
                    find(group, 3, |p| p[0] == which.as_bytes() && !which.is_empty())
                        .and_then(|p| number(p[2]))
                })
                .ok_or_else(|| alloc::format!("no group {which:?} in the sandbox's /etc/group"))?;
            identity.groups.push(identity.gid);
        }
        None => {
            identity.groups.push(identity.gid);
            if entry.is_some() {
                add_member_groups(&mut identity, group);
            }
        }
    }
    Ok(identity)
}

fn add_member_groups(identity: &mut Identity, group: &[u8]) {
    for line in group.split(|b| *b == b'\n') {
        let mut parts = line.split(|b| *b == b':').skip(2);
        let (Some(gid), Some(members)) = (parts.next().and_then(number), parts.next()) else {
            continue;
        };
        let member = members
            .split(|b| *b == b',')
            .any(|m| m == identity.name.as_slice());
        if member && !identity.groups.contains(&gid) && identity.groups.len() < MAX_GROUPS {
            identity.groups.push(gid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\n# note\nbad\nann:x:1000:1001:Ann:/home/ann:/bin/sh\nneg:x:-1:0::/:\nmax:x:4294967295:0::/:\nhomeless:x:7:7:::\n";
    const GROUP: &[u8] =
        b"root:x:0:\nann:x:1001:\nwheel:x:10:ann,bob\nsudo:x:27:bob,ann\nbroken:x:zz:ann\n";

    #[test]
    fn names_ids_and_groups() {
        let ann = resolve("ann", PASSWD, GROUP).unwrap();
        assert_eq!(
            (ann.uid, ann.gid, ann.groups.as_slice()),
            (1000, 1001, [1001, 10, 27].as_slice())
        );
        assert_eq!(ann.home, b"/home/ann");
        assert_eq!(resolve("1000", PASSWD, GROUP).unwrap().name, b"ann");
        let other = resolve("ann:wheel", PASSWD, GROUP).unwrap();
        assert_eq!((other.gid, other.groups.as_slice()), (10, [10].as_slice()));
        let ids = resolve("5000:6000", PASSWD, GROUP).unwrap();
        assert_eq!(
            (ids.uid, ids.gid, ids.home.as_slice()),
            (5000, 6000, b"/".as_slice())
        );
        assert_eq!(resolve("homeless", PASSWD, GROUP).unwrap().home, b"/");
    }

    #[test]
    fn unknown_and_hostile() {
        for user in [
            "nobody",
            "",
            ":",
            "neg",
            "max",
            "4294967295",
            "-1",
            "+5",
            "ann:nogroup",
            "ann:",
        ] {
            assert!(resolve(user, PASSWD, GROUP).is_err(), "{user:?}");
        }
        assert_eq!(resolve("0", b"", b"").unwrap().uid, 0);
        assert!(resolve("x", &[b':'; 100_000], &[b'\n'; 100_000]).is_err());
        let many: Vec<u8> = (0..5000)
            .flat_map(|n| format!("g{n}:x:{}:ann\n", n + 2).into_bytes())
            .collect();
        assert_eq!(
            resolve("ann", PASSWD, &many).unwrap().groups.len(),
            MAX_GROUPS
        );
    }
}
