//! Ten thousand texts from a seed, for comparison with llama.cpp: words and pieces of words, numbers, spaces of all
//! kinds, scripts, signs, and texts that look like tokens.

/// Number of texts.
pub const TEXTS: usize = 10_000;

const ODD: [&str; 76] = [
    " ",
    "  ",
    "   ",
    "\t",
    "\n",
    "\r",
    "\r\n",
    "\n\n",
    " \n",
    "\n ",
    "\t\t ",
    "\u{a0}",
    "\u{2003}",
    "\u{3000}",
    "\u{85}",
    "\u{2028}",
    "'s",
    "'S",
    "'LL",
    "'ll",
    "'re",
    "'VE",
    "'m",
    "'d",
    "'t",
    "\u{2019}s",
    "'x",
    "don't",
    "\u{bd}",
    "\u{b2}",
    "\u{216b}",
    "\u{664}\u{663}\u{665}",
    "<s>",
    "</s>",
    "<unk>",
    "<0x0A>",
    "<0xE2>",
    "<|im_start|>",
    "<|im_end|>",
    "<|im",
    "<|im_",
    "|>",
    "<|eot_id|>",
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "[INST]",
    "[/INST]",
    "\u{e9}",
    "e\u{301}",
    "\u{300}",
    "\u{17f}",
    "\u{130}",
    "\u{df}",
    "\u{1c5}",
    "\u{2b0}",
    "\u{aa}",
    "_",
    "__init__",
    "\u{200b}",
    "\u{200d}",
    "\u{feff}",
    "\u{2581}",
    "\u{2581}\u{2581}",
    "\u{0}",
    "\u{7f}",
    "\u{ffff}",
    "\u{fffd}",
    "\u{10ffff}",
    "\u{1f642}",
    "\u{1f469}\u{200d}\u{1f469}\u{200d}\u{1f467}",
    "\u{1f1e9}\u{1f1ea}",
    "\u{1d4b3}",
    "0x1F",
    "3.14",
    "...",
    "!?\n\n",
];

const WORDS: [&str; 64] = [
    "the",
    "controller",
    "queue",
    "queues",
    "command",
    "commands",
    "memory",
    "reset",
    "namespace",
    "GPU",
    "NVMe",
    "doorbell",
    "kernel",
    "kernels",
    "device",
    "read",
    "reads",
    "write",
    "written",
    "a",
    "of",
    "and",
    "in",
    "is",
    "that",
    "which",
    "before",
    "after",
    "Gr\u{fc}\u{df}e",
    "stra\u{df}e",
    "na\u{ef}ve",
    "caf\u{e9}",
    "\u{41f}\u{440}\u{438}\u{432}\u{435}\u{442}",
    "\u{43c}\u{438}\u{440}",
    "\u{3ba}\u{3cc}\u{3c3}\u{3bc}\u{3b5}",
    "\u{4e2d}\u{6587}",
    "\u{5b57}\u{7b26}",
    "\u{65e5}\u{672c}\u{8a9e}",
    "\u{30c6}\u{30ad}\u{30b9}\u{30c8}",
    "\u{d55c}\u{ad6d}\u{c5b4}",
    "\u{639}\u{631}\u{628}\u{64a}",
    "\u{5e9}\u{5dc}\u{5d5}\u{5dd}",
    "\u{939}\u{93f}\u{928}\u{94d}\u{926}\u{940}",
    "\u{e44}\u{e17}\u{e22}",
    "fn",
    "let",
    "mut",
    "self",
    "Vec<u8>",
    "u32::MAX",
    "->",
    "=>",
    "&&",
    "//",
    "/*",
    "*/",
    "{}",
    "();",
    "https://example.org/a?b=c#d",
    "name@host",
    "C++",
    "camelCase",
    "SHOUTING",
    "snake_case",
];

/// First and last characters of ranges: Latin, all of the basic plane below the surrogates, punctuation, letters
/// and marks of several scripts, numbers of several kinds, signs beyond the basic plane, private use.
const RANGES: [(u32, u32); 14] = [
    (0x20, 0x7E),
    (0x20, 0x24F),
    (0x20, 0xD7FF),
    (0x2000, 0x206F),
    (0x300, 0x36F),
    (0x370, 0x52F),
    (0x590, 0x6FF),
    (0x900, 0xDFF),
    (0x2150, 0x218F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0x1D400, 0x1D7FF),
    (0x1F000, 0x1FAFF),
    (0xE000, 0xFFFF),
];

/// Numbers of SplitMix64.
struct Dice(u64);

impl Dice {
    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ mixed >> 31) % end as u64) as usize
    }

    fn of<'a>(&mut self, all: &[&'a str]) -> &'a str {
        all[self.below(all.len())]
    }
}

/// Returns all texts: the same ones each time.
pub fn texts() -> Vec<String> {
    let mut dice = Dice(20_261_127);
    (0..TEXTS).map(|_| text(&mut dice)).collect()
}

fn text(dice: &mut Dice) -> String {
    let (kind, parts) = (dice.below(5), dice.below(14));
    let mut text = String::new();
    for _ in 0..=parts {
        match (kind, dice.below(10)) {
            (_, 0..=1) | (0, _) => text.push_str(dice.of(&ODD)),
            (1, _) => characters(dice, &mut text),
            (2, 2..=5) => digits(dice, &mut text),
            (3, 2..=4) => run(dice, &mut text),
            _ => words(dice, &mut text),
        }
    }
    text
}

fn characters(dice: &mut Dice, text: &mut String) {
    let (first, last) = RANGES[dice.below(RANGES.len())];
    for _ in 0..=dice.below(6) {
        let code = first + dice.below((last - first + 1) as usize) as u32;
        text.extend(char::from_u32(code));
    }
}

fn digits(dice: &mut Dice, text: &mut String) {
    for _ in 0..=dice.below(9) {
        text.extend(char::from_digit(dice.below(10) as u32, 10));
    }
    text.push_str(dice.of(&["", "", ".", ",", " ", "%", "e", "-", "/"]));
}

/// Appends one character many times.
fn run(dice: &mut Dice, text: &mut String) {
    let one = dice.of(&[
        " ", "\n", "\t", "a", "A", "ab", "=", "-", "#", "'", "\u{300}", "\u{2581}", "\u{4e2d}",
        "\u{e9}", "0", "\r\n", "\u{a0}", "<",
    ]);
    text.push_str(&one.repeat(1 + dice.below(40)));
}

/// Adds words, some of them cut, in capitals, or with a sign before or after them.
fn words(dice: &mut Dice, text: &mut String) {
    for _ in 0..=dice.below(6) {
        let word = dice.of(&WORDS);
        let word = match dice.below(8) {
            0 => word.to_uppercase(),
            1 => word.chars().skip(1 + dice.below(3)).collect(),
            2 => word.chars().take(1 + dice.below(3)).collect(),
            _ => word.to_owned(),
        };
        text.push_str(dice.of(&[" ", " ", " ", " ", "", "  ", "\n", "(", "\"", "-"]));
        text.push_str(&word);
        text.push_str(dice.of(&["", "", "", "", ".", ",", ":", ")", "!", "'s", ";\n"]));
    }
}
