//! The configuration that the edge sends in HELLO or by the method `config`.

use alloc::string::String;
use alloc::vec::Vec;
use dsec_wire::Value;

/// The 14 capabilities of the OCI default.
const OCI_CAPS: u64 = 0xa804_25fb;
const MIB: u64 = 1 << 20;

#[derive(Clone, Debug)]
pub struct Config {
    /// Default environment of every command, as `KEY=value` without the closing zero.
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub user: Option<String>,
    pub cwd: Option<Vec<u8>>,
    pub run_pids: Option<u64>,
    pub nofile: Option<[u64; 2]>,
    pub oom_score_adj: i64,
    pub keep_caps: u64,
    retain_bytes: Option<u64>,
    memory: Option<u64>,
    pub max_processes: usize,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            env: Vec::new(),
            user: None,
            cwd: None,
            run_pids: None,
            nofile: None,
            oom_score_adj: 500,
            keep_caps: OCI_CAPS,
            retain_bytes: None,
            memory: None,
            max_processes: 512,
        }
    }
}

impl Config {
    /// Lays the keys present in `map` over this configuration.
    pub fn update(&mut self, map: &Value<'_>) {
        if let Some(env) = map.get("env").and_then(pairs) {
            self.env = env;
        }
        if let Some(user) = map.get("user").and_then(Value::as_str) {
            self.user = Some(user.into());
        }
        if let Some(cwd) = map.get("cwd").and_then(Value::as_bytes) {
            self.cwd = Some(cwd.into());
        }
        if let Some([soft, hard]) = map.get("nofile").and_then(Value::as_array) {
            if let (Some(soft), Some(hard)) = (soft.as_u64(), hard.as_u64()) {
                self.nofile = Some([soft.min(hard), hard]);
            }
        }
        let number = |key| map.get(key).and_then(Value::as_u64);
        self.run_pids = number("run_pids").or(self.run_pids);
        self.retain_bytes = number("retain_bytes").or(self.retain_bytes);
        self.memory = number("memory").or(self.memory);
        self.keep_caps = number("keep_caps").unwrap_or(self.keep_caps);
        if let Some(adj) = map.get("oom_score_adj").and_then(Value::as_i64) {
            self.oom_score_adj = adj.clamp(-1000, 1000);
        }
        if let Some(n) = number("max_processes") {
            self.max_processes = (n as usize).clamp(1, 65_536);
        }
    }

    /// Bytes of output of all commands together, above which rings stop growing: the sandbox's own memory holds them.
    pub fn output_budget(&self) -> u64 {
        self.memory.map_or(256 * MIB, |memory| memory / 4)
    }

    /// Bytes of retained output at most.
    pub fn retain_limit(&self) -> u64 {
        let eighth = self.memory.map_or(u64::MAX, |memory| memory / 8);
        self.retain_bytes.unwrap_or((16 * MIB).min(eighth))
    }
}

/// A map of texts or bytes as pairs; entries of other types, with `=` in the key or with a zero byte are left out.
pub fn pairs(value: &Value<'_>) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut out = Vec::new();
    for (key, value) in value.as_map()? {
        if let (Some(key), Some(value)) = (key.as_bytes(), value.as_bytes()) {
            if !key.is_empty() && !key.contains(&b'=') && !key.contains(&0) && !value.contains(&0) {
                out.push((key.to_vec(), value.to_vec()));
            }
        }
    }
    Some(out)
}
