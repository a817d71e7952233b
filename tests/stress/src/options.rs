//! The options of `nvme-stress`.

/// The words of `--help`.
pub const USAGE: &str = "\
usage: nvme-stress [--commands N] [--seconds S] [--seed N] [--cores N] [plain | sim]

  sim           against the simulator's threads (the default)
  plain         against a controller by hand, with data that is no atomic
  --commands N  end after so many commands; 2000000 without it and without --seconds
  --seconds S   end after so many seconds
  --seed N      draw the rounds from N, 1 without
  --cores N     threads, all together; as many as there are processors without

Exit status: 0 every command ended once with its own result, 1 something else, 2 usage.";

/// The user's options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub plain: bool,
    /// Number of commands after which the run ends.
    pub commands: u64,
    /// Seconds after which the run ends.
    pub seconds: u64,
    pub seed: u64,
    pub cores: usize,
}

/// Returns the options, or `None` for help.
pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Options>, String> {
    let (mut plain, mut seed) = (false, 1);
    let (mut commands, mut seconds, mut cores) = (None, None, None);
    while let Some(word) = words.next() {
        let mut number = |most: u64| {
            let text = words.next().ok_or(format!("{word} needs a number"))?;
            let number = text.parse().ok().filter(|n| (1..=most).contains(n));
            number.ok_or(format!("{word} {text}: give a number from 1 to {most}"))
        };
        match word.as_str() {
            "--commands" => commands = Some(number(u64::MAX)?),
            "--seconds" => seconds = Some(number(10_000_000)?),
            "--seed" => seed = number(u64::MAX)?,
            "--cores" => cores = Some(number(1024)? as usize),
            "plain" => plain = true,
            "sim" => plain = false,
            "--help" | "-h" => return Ok(None),
            other => return Err(format!("unknown word {other}\n\n{USAGE}")),
        }
    }
    let here = || std::thread::available_parallelism().map_or(2, usize::from);
    Ok(Some(Options {
        plain,
        commands: commands.unwrap_or(if seconds.is_some() {
            u64::MAX
        } else {
            2_000_000
        }),
        seconds: seconds.unwrap_or(u64::MAX),
        seed,
        cores: cores.unwrap_or_else(here).max(2),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> Result<Option<Options>, String> {
        parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn seconds_alone_set_no_number_of_commands() {
        let options = of("--seconds 120 plain --cores 7").unwrap().unwrap();
        assert_eq!((options.commands, options.seconds), (u64::MAX, 120));
        assert!(options.plain && options.cores == 7);
        let options = of("").unwrap().unwrap();
        assert_eq!((options.commands, options.plain), (2_000_000, false));
        assert_eq!(of("--help"), Ok(None));
    }

    #[test]
    fn violations_is_refused_by_name() {
        for (text, part) in [
            ("--commands", "--commands needs a number"),
            ("--commands none", "--commands none: give a number"),
            ("--seconds 0", "--seconds 0: give a number"),
            ("hand", "unknown word hand"),
        ] {
            let error = of(text).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
    }
}
