//! The requests of the launch protocol: parsed here, carried out by the server.

use std::os::fd::OwnedFd;

use rmpv::Value;

use crate::error::{Error, Result};
use crate::msg::{self, map, Map};
use crate::reply;
use crate::server::{Phase, Server};
use crate::slot::SLOTS;
use crate::spec::Spec;

const PROTO: u64 = 1;
/// Most sandboxes one request may start or end.
const MAX_ITEMS: usize = 4096;

impl Server {
    /// Anything malformed is answered with an error, never with silence or an end.
    pub(crate) fn request(&mut self, data: &[u8], fds: Vec<OwnedFd>) {
        let decoded = msg::decode(data);
        let seq = decoded
            .as_ref()
            .ok()
            .and_then(|m| m.uint("seq").ok().flatten())
            .unwrap_or(0);
        if let Err(error) = decoded.and_then(|m| self.dispatch(seq, &m, fds)) {
            self.error(seq, &error);
        }
    }

    fn dispatch(&mut self, seq: u64, m: &Map, fds: Vec<OwnedFd>) -> Result<()> {
        match m.need_text("t")?.as_str() {
            "hello" => self.on_hello(seq),
            "layer" => self
                .engine
                .layers
                .add(&m.need_text("name")?, &m.need_text("path")?)?,
            "unlayer" => self.engine.layers.remove(&m.need_text("name")?)?,
            "spawn" => return self.on_spawn(seq, m),
            "kill" => return self.on_kill(seq, m),
            "list" => return self.on_list(seq),
            "adopt" => self.on_adopt(m, fds)?,
            "pool" => {
                let target = m.uint("target")?.unwrap_or(0) as usize;
                self.engine
                    .slots
                    .set_target(&m.need_text("project")?, target);
            }
            "stats" => return self.on_stats(seq),
            "shutdown" => {
                self.shutdown(seq, m.boolean("kill")?.unwrap_or(false));
                return Ok(());
            }
            kind => return Err(Error::Invalid(format!("unknown request {kind}"))),
        }
        if m.get("t").and_then(Value::as_str) != Some("hello") {
            self.answer(seq, "ok", vec![]);
        }
        Ok(())
    }

    fn on_hello(&mut self, seq: u64) {
        let fields = vec![
            ("proto", PROTO.into()),
            ("version", env!("CARGO_PKG_VERSION").into()),
            ("pid", std::process::id().into()),
            ("instance", self.instance.as_str().into()),
            ("slots", SLOTS.into()),
            ("sandboxes", self.entries.len().into()),
        ];
        self.answer(seq, "hello", fields);
    }

    fn on_spawn(&mut self, seq: u64, m: &Map) -> Result<()> {
        let common = m.sub("common")?.unwrap_or(Map(Vec::new()));
        let items = m.list("items")?;
        if items.is_empty() || items.len() > MAX_ITEMS {
            return Err(Error::Invalid(format!("items must be 1 to {MAX_ITEMS}")));
        }
        for (index, item) in items.iter().enumerate() {
            let id = msg::as_map(item.clone(), "item")
                .ok()
                .and_then(|i| i.text("id").ok().flatten());
            self.spawn(
                seq,
                index as u64,
                Spec::merged(&common, item.clone()),
                &id.unwrap_or_default(),
            );
        }
        Ok(())
    }

    fn on_kill(&mut self, seq: u64, m: &Map) -> Result<()> {
        let ids = m.texts("ids")?;
        if ids.is_empty() || ids.len() > MAX_ITEMS {
            return Err(Error::Invalid(format!("ids must be 1 to {MAX_ITEMS}")));
        }
        ids.iter().for_each(|id| self.kill(seq, id));
        Ok(())
    }

    fn on_list(&mut self, seq: u64) -> Result<()> {
        let mut rows = Vec::new();
        for (token, entry) in &self.entries {
            let (Phase::Running, Some(sandbox)) = (&entry.phase, &entry.sandbox) else {
                continue;
            };
            let row = map(vec![
                ("id", entry.id.as_str().into()),
                ("pid", sandbox.pid.into()),
                ("slot", sandbox.slot().into()),
                ("spec_tag", Value::Binary(entry.tag.clone())),
            ]);
            rows.push((row, Some(*token)));
        }
        let mut groups = reply::split(rows);
        if groups.is_empty() {
            groups.push((vec![], vec![]));
        }
        let count = groups.len();
        for (i, (rows, tokens)) in groups.into_iter().enumerate() {
            let fds: Vec<_> = tokens
                .iter()
                .flat_map(|token| self.descriptors(*token))
                .collect();
            let fields = vec![
                ("t", Value::from("listed")),
                ("seq", seq.into()),
                ("more", (i + 1 < count).into()),
                ("sandboxes", Value::Array(rows)),
            ];
            self.send(msg::encode(fields), &fds);
        }
        Ok(())
    }

    fn on_adopt(&mut self, m: &Map, fds: Vec<OwnedFd>) -> Result<()> {
        let rows = m.maps("sandboxes")?;
        if fds.len() != rows.len() * 2 {
            return Err(Error::Invalid(format!(
                "{} sandboxes need twice as many descriptors, not {}",
                rows.len(),
                fds.len()
            )));
        }
        let mut fds = fds.into_iter();
        for row in rows {
            let (Some(pidfd), Some(channel)) = (fds.next(), fds.next()) else {
                break;
            };
            let number = |key: &str| {
                row.uint32(key)?
                    .ok_or_else(|| Error::Invalid(format!("{key} is missing")))
            };
            let id = row.need_text("id")?;
            if self.ids.contains_key(&id) {
                continue;
            }
            let sandbox =
                self.engine
                    .adopt(number("pid")? as i32, number("slot")?, pidfd, channel)?;
            self.adopt(id, row.bytes("spec_tag")?.unwrap_or_default(), sandbox)?;
        }
        Ok(())
    }

    fn on_stats(&mut self, seq: u64) -> Result<()> {
        let slots = self.engine.slots.stats();
        let fields = vec![
            ("sandboxes", self.entries.len().into()),
            ("started", self.started.into()),
            ("failed", self.failed.into()),
            ("ended", self.ended.into()),
            ("prepared", slots.prepared.into()),
            ("slots_taken", slots.taken.into()),
            ("slots_reused", slots.reused.into()),
            ("slots_renewed", slots.renewed.into()),
            ("slots_made", slots.made.into()),
            ("reuses", self.engine.slots.reuses().into()),
        ];
        self.answer(seq, "stats", fields);
        Ok(())
    }
}
