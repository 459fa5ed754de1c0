//! `dsec-bench`: the bare loops that the `dsec bench` commands compare with. Each prints one JSON object.

mod launch;
mod report;
mod spawn;

use std::process::ExitCode;

const USAGE: &str = "usage: dsec-bench launch [--seconds N] [--workers N] [--alive N] --layer PATH --guest PATH [--seccomp PATH]
         [--upper tmpfs|image] [--template PATH --dir PATH] [--standing N]
       dsec-bench spawn [--n N] [--program PATH]";

/// `--name value` pairs after the command.
pub struct Options(Vec<(String, String)>);

impl Options {
    fn parse(words: impl Iterator<Item = String>) -> Result<Self, String> {
        let words: Vec<String> = words.collect();
        let pair = |pair: &[String]| match pair {
            [name, value] if name.starts_with("--") => Ok((name[2..].to_owned(), value.clone())),
            _ => Err(USAGE.to_owned()),
        };
        words
            .chunks(2)
            .map(pair)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    pub fn text(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .rev()
            .find(|(n, _)| n == name)
            .map(|(_, v)| v.as_str())
    }

    pub fn need(&self, name: &str) -> Result<&str, String> {
        self.text(name)
            .ok_or_else(|| format!("--{name} is missing\n{USAGE}"))
    }

    pub fn number(&self, name: &str, default: u64) -> Result<u64, String> {
        self.text(name).map_or(Ok(default), |v| {
            v.parse()
                .map_err(|_| format!("--{name} needs a number, not {v}"))
        })
    }
}

fn run() -> Result<String, String> {
    let mut words = std::env::args().skip(1);
    let command = words.next().unwrap_or_default();
    let options = Options::parse(words)?;
    match command.as_str() {
        "launch" => launch::run(&options),
        "spawn" => spawn::run(&options),
        _ => Err(USAGE.to_owned()),
    }
}

fn main() -> ExitCode {
    match run() {
        Ok(json) => {
            println!("{json}");
            ExitCode::SUCCESS
        }
        Err(text) => {
            eprintln!("dsec-bench: {text}");
            ExitCode::FAILURE
        }
    }
}
