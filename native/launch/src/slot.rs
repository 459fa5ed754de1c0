//! Slots: an index with its block of ids, its namespaces and its cgroups; and the pools of prepared ones.
//!
//! The rule a reader could break: a slot goes back to a pool only through `reset`, and only to its own project's.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::cgroup::{Cgroups, Entry};
use crate::error::{Error, Result};
use crate::host::Host;
use crate::netns;
use crate::spec::{Limits, Spec};
use crate::sys;

/// Slot indices are below this: the block's last 65,536 ids are the agents'.
pub const SLOTS: u32 = 4095;
/// Prepared slots over all projects.
pub const MAX_PREPARED: usize = 64;
/// Prepared for a project that asked for nothing, once it has started something.
const DEFAULT_TARGET: usize = 8;
/// While sandboxes come and go at least this often, their slots do too.
const BUSY: Duration = Duration::from_millis(50);
/// A pool that nobody drew from for so long is emptied.
const IDLE: Duration = Duration::from_secs(120);

/// What an ended sandbox could have done to its slot.
#[derive(Clone, Copy, Debug)]
pub struct Past {
    /// Its sysctls cannot have been changed.
    pub sealed: bool,
    /// Somebody inside may have had CAP_NET_ADMIN.
    pub net_admin: bool,
}

pub struct Slot {
    pub index: u32,
    pub userns: Option<OwnedFd>,
    pub netns: Option<OwnedFd>,
    /// Open only while the slot is prepared.
    pub entry: Option<Entry>,
    pub limits: Limits,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Key {
    pub project: String,
    pub user: bool,
    pub net: bool,
}

impl Key {
    pub fn of(spec: &Spec) -> Self {
        Self {
            project: spec.project.clone(),
            user: spec.ns.user,
            net: spec.ns.net,
        }
    }
}

#[derive(Default)]
struct Pool {
    ready: Vec<Slot>,
    target: usize,
    /// Set by request: such a pool is never drained for idleness.
    asked: bool,
    used: Option<Instant>,
}

#[derive(Default)]
struct Table {
    taken: Vec<bool>,
    hint: u32,
    pools: HashMap<Key, Pool>,
    closing: bool,
    /// The filler is making or removing a slot outside the lock.
    filling: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Stats {
    pub prepared: usize,
    pub taken: usize,
    pub reused: u64,
    pub renewed: u64,
    pub made: u64,
}

pub struct Slots {
    pub base: u32,
    table: Mutex<Table>,
    wake: Condvar,
    /// What an untouched network namespace looks like; None if two untouched ones differ, and then none is ever reused.
    pristine: Option<[u64; 2]>,
    counts: Mutex<(u64, u64, u64)>,
}

impl Table {
    fn prepared(&self) -> usize {
        self.pools.values().map(|p| p.ready.len()).sum()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Slots {
    /// The calling thread must keep its capabilities over changes of uid (`worker::keep_capabilities`).
    pub fn new(host: &Host, base: u32) -> Result<Self> {
        let mut table = Table {
            taken: vec![false; SLOTS as usize],
            ..Table::default()
        };
        table.hint = SLOTS - 1;
        let look = || -> Result<[u64; 2]> {
            let (_user, net) = netns::make(host, base, base, true)?;
            let net = net.ok_or_else(|| Error::Unsupported("no network namespace".into()))?;
            let print = |configurable| netns::fingerprint(host, net.as_fd(), configurable);
            Ok([print(false)?, print(true)?])
        };
        let (first, second) = (look()?, look()?);
        Ok(Self {
            base,
            table: Mutex::new(table),
            wake: Condvar::new(),
            pristine: (first == second).then_some(first),
            counts: Mutex::default(),
        })
    }

    pub fn first_id(&self, index: u32) -> u32 {
        self.base + netns::IDS * index
    }

    pub fn agent(&self, index: u32) -> u32 {
        self.base + netns::IDS * SLOTS + index
    }

    pub fn reuses(&self) -> bool {
        self.pristine.is_some()
    }

    /// Marks a slot as used by a sandbox or leftover of an earlier launcher.
    pub fn reserve(&self, index: u32) -> Result<()> {
        let mut table = lock(&self.table);
        match table.taken.get_mut(index as usize) {
            None => Err(Error::Invalid(format!("slot {index} is out of range"))),
            Some(taken) => {
                *taken = true;
                Ok(())
            }
        }
    }

    fn allocate(&self) -> Result<u32> {
        let mut table = lock(&self.table);
        for step in 1..=SLOTS {
            let index = (table.hint + step) % SLOTS;
            if !table.taken[index as usize] {
                table.taken[index as usize] = true;
                table.hint = index;
                return Ok(index);
            }
        }
        Err(Error::TooMany(format!("all {SLOTS} slots are in use")))
    }

    fn free(&self, index: u32) {
        lock(&self.table).taken[index as usize] = false;
    }

    /// A prepared slot of the project, or one made now. The bool tells whether it was prepared.
    pub fn take(&self, host: &Host, cgroups: &Cgroups, key: &Key) -> Result<(Slot, bool)> {
        {
            let mut table = lock(&self.table);
            let pool = table.pools.entry(key.clone()).or_default();
            if !pool.asked {
                pool.target = DEFAULT_TARGET;
            }
            pool.used = Some(Instant::now());
            let found = pool.ready.pop();
            if pool.ready.len() < pool.target {
                self.wake.notify_all();
            }
            if let Some(slot) = found {
                return Ok((slot, true));
            }
        }
        self.make(host, cgroups, key).map(|slot| (slot, false))
    }

    /// A new slot, whatever is prepared.
    pub fn make(&self, host: &Host, cgroups: &Cgroups, key: &Key) -> Result<Slot> {
        let index = self.allocate()?;
        let made = self.make_at(host, cgroups, key, index);
        if made.is_err() {
            self.free(index);
        }
        lock(&self.counts).2 += 1;
        made
    }

    fn make_at(&self, host: &Host, cgroups: &Cgroups, key: &Key, index: u32) -> Result<Slot> {
        let (userns, netns) = self.namespaces(host, index, key.user, key.net)?;
        cgroups.make(index, self.agent(index))?;
        let entry = match cgroups.entry(index) {
            Ok(entry) => Some(entry),
            Err(e) => {
                let _ = cgroups.remove(index);
                return Err(e);
            }
        };
        Ok(Slot {
            index,
            userns,
            netns,
            entry,
            limits: Limits::default(),
        })
    }

    fn namespaces(
        &self,
        host: &Host,
        index: u32,
        user: bool,
        net: bool,
    ) -> Result<(Option<OwnedFd>, Option<OwnedFd>)> {
        if !user {
            return Ok((None, None));
        }
        let (userns, netns) = netns::make(host, self.first_id(index), self.agent(index), net)?;
        Ok((Some(userns), netns))
    }

    /// Takes back the slot of an ended sandbox: into the pool if it is proven clean, else away. Nothing of the sandbox may live
    /// any more.
    pub fn give_back(
        &self,
        host: &Host,
        cgroups: &Cgroups,
        mut slot: Slot,
        key: Key,
        past: Past,
    ) -> Result<()> {
        let wanted = {
            let table = lock(&self.table);
            !table.closing && table.prepared() < MAX_PREPARED && table.pools.contains_key(&key)
        };
        if !wanted {
            return self.discard(cgroups, slot);
        }
        if let Err(e) = self.reset(host, cgroups, &mut slot, &key, past) {
            let _ = self.discard(cgroups, slot);
            return Err(e);
        }
        let mut table = lock(&self.table);
        if !table.closing && table.prepared() < MAX_PREPARED {
            if let Some(pool) = table.pools.get_mut(&key) {
                pool.ready.push(slot);
                return Ok(());
            }
        }
        drop(table);
        self.discard(cgroups, slot)
    }

    fn reset(
        &self,
        host: &Host,
        cgroups: &Cgroups,
        slot: &mut Slot,
        key: &Key,
        past: Past,
    ) -> Result<()> {
        let clean = past.sealed && self.namespaces_clean(host, slot, past);
        if !clean && key.user {
            (slot.userns, slot.netns) = (None, None);
            (slot.userns, slot.netns) = self.namespaces(host, slot.index, key.user, key.net)?;
        }
        {
            let mut counts = lock(&self.counts);
            if clean {
                counts.0 += 1;
            } else {
                counts.1 += 1;
            }
        }
        if !cgroups.reset(slot.index)? {
            slot.entry = None;
            cgroups.remove(slot.index)?;
            cgroups.make(slot.index, self.agent(slot.index))?;
            slot.limits = Limits::default();
        }
        if slot.entry.is_none() {
            slot.entry = Some(cgroups.entry(slot.index)?);
        }
        Ok(())
    }

    /// Proves that the network namespace never carried a packet nor was configured, and that no key exists under the slot's ids.
    fn namespaces_clean(&self, host: &Host, slot: &Slot, past: Past) -> bool {
        let network = match (&slot.netns, self.pristine) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(net), Some(pristine)) => netns::fingerprint(host, net.as_fd(), past.net_admin)
                .is_ok_and(|f| f == pristine[usize::from(past.net_admin)]),
        };
        network && (slot.userns.is_none() || self.keyless(host, slot.index))
    }

    /// A user namespace keeps the keyrings of its users for as long as it lives.
    fn keyless(&self, host: &Host, index: u32) -> bool {
        let Ok(text) = sys::read_at(host.proc.as_fd(), "key-users") else {
            return false;
        };
        let first = self.first_id(index);
        no_keys_of(&text, |id| {
            (first..first + netns::IDS).contains(&id) || id == self.agent(index)
        })
    }

    /// Removes a slot for good.
    pub fn discard(&self, cgroups: &Cgroups, slot: Slot) -> Result<()> {
        let index = slot.index;
        drop(slot);
        // On failure the index stays taken: its groups still hold something.
        cgroups.remove(index)?;
        self.free(index);
        Ok(())
    }

    /// Sets how many slots are kept ready for a project.
    pub fn set_target(&self, project: &str, target: usize) {
        let mut table = lock(&self.table);
        let target = target.min(MAX_PREPARED);
        let mut known = false;
        for (_, pool) in table
            .pools
            .iter_mut()
            .filter(|(key, _)| key.project == project)
        {
            (pool.target, pool.asked, known) = (target, target > 0, true);
        }
        if !known {
            // Nearly all sandboxes want both namespaces; the first spawn corrects it.
            let key = Key {
                project: project.to_owned(),
                user: true,
                net: true,
            };
            table.pools.insert(
                key,
                Pool {
                    target,
                    asked: target > 0,
                    ..Pool::default()
                },
            );
        }
        self.wake.notify_all();
    }

    /// Fills and drains pools until `close`. Runs on a thread of its own that keeps its capabilities.
    pub fn run_filler(&self, host: &Host, cgroups: &Cgroups) {
        let mut failed = false;
        loop {
            let mut table = lock(&self.table);
            if table.closing {
                return;
            }
            let wanted = if failed || table.prepared() >= MAX_PREPARED {
                None
            } else {
                wanted(&table)
            };
            let stale = drain_idle(&mut table);
            if wanted.is_none() && stale.is_empty() {
                failed = false;
                // Idle pools are looked for now and then, and a failed filling is tried again no sooner.
                drop(self.wake.wait_timeout(table, Duration::from_secs(1)));
                continue;
            }
            table.filling = true;
            drop(table);
            failed = !self.fill(host, cgroups, wanted, stale);
            lock(&self.table).filling = false;
            self.wake.notify_all();
        }
    }

    /// One turn of the filler; false if a slot could not be made.
    fn fill(&self, host: &Host, cgroups: &Cgroups, wanted: Option<Key>, stale: Vec<Slot>) -> bool {
        for slot in stale {
            let _ = self.discard(cgroups, slot);
        }
        let Some(key) = wanted else { return true };
        match self.make(host, cgroups, &key) {
            Ok(slot) => {
                let mut table = lock(&self.table);
                // Slots given back meanwhile may have filled the pools.
                let room = table.prepared() < MAX_PREPARED;
                match table.pools.get_mut(&key) {
                    Some(pool) if room => pool.ready.push(slot),
                    _ => {
                        drop(table);
                        let _ = self.discard(cgroups, slot);
                    }
                }
                true
            }
            Err(e) => {
                eprintln!("dsec-launch: cannot prepare a slot: {e}");
                false
            }
        }
    }

    /// Ends the filler and removes all prepared slots.
    pub fn close(&self, cgroups: &Cgroups) {
        let pools = {
            let mut table = lock(&self.table);
            table.closing = true;
            self.wake.notify_all();
            while table.filling {
                table = self
                    .wake
                    .wait(table)
                    .unwrap_or_else(PoisonError::into_inner);
            }
            std::mem::take(&mut table.pools)
        };
        for slot in pools.into_values().flat_map(|p| p.ready) {
            let _ = self.discard(cgroups, slot);
        }
    }

    pub fn stats(&self) -> Stats {
        let table = lock(&self.table);
        let (reused, renewed, made) = *lock(&self.counts);
        let taken = table.taken.iter().filter(|t| **t).count();
        Stats {
            prepared: table.prepared(),
            taken,
            reused,
            renewed,
            made,
        }
    }
}

fn wanted(table: &Table) -> Option<Key> {
    // Making slots in the middle of a burst takes the CPU from it, and those in use come back: with enough in being, what is
    // made on top would be thrown away at their return.
    let busy = table
        .pools
        .values()
        .any(|pool| pool.used.is_some_and(|t| t.elapsed() < BUSY));
    if busy && table.taken.iter().filter(|taken| **taken).count() >= MAX_PREPARED {
        return None;
    }
    let short = table
        .pools
        .iter()
        .filter(|(_, pool)| pool.ready.len() < pool.target);
    short
        .min_by_key(|(_, pool)| pool.ready.len())
        .map(|(key, _)| key.clone())
}

fn drain_idle(table: &mut Table) -> Vec<Slot> {
    let idle: Vec<Key> = table
        .pools
        .iter()
        .filter(|(_, pool)| !pool.asked && pool.used.is_none_or(|t| t.elapsed() > IDLE))
        .map(|(key, _)| key.clone())
        .collect();
    idle.iter()
        .filter_map(|key| table.pools.remove(key))
        .flat_map(|pool| pool.ready)
        .collect()
}

/// Reads /proc/key-users: `uid: usage nkeys/nikeys qnkeys/maxkeys qnbytes/maxbytes`.
fn no_keys_of(text: &str, ours: impl Fn(u32) -> bool) -> bool {
    text.lines().all(|line| match line.split_once(':') {
        Some((id, _)) => !id.trim().parse().is_ok_and(&ours),
        None => true,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn key_owners_are_found() {
        let text = "    0:    63 62/62 2/1000000 82/25000000\n70000:     1 1/1 1/200 9/20000\n";
        assert!(!no_keys_of(text, |id| (65_536..131_072).contains(&id)));
        assert!(no_keys_of(text, |id| (131_072..196_608).contains(&id)));
    }
}
