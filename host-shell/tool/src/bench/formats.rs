//! Formats of weights on the command line.

use nvme_compute::synthetic::Stored;

/// Parses, for clap, a format such as `bf16` or `q4_k`.
pub fn stored(text: &str) -> std::result::Result<Stored, String> {
    let name = |stored: &Stored| format!("{stored:?}").to_lowercase();
    let all = || Stored::ALL.iter();
    let found = all().find(|stored| name(stored) == text.to_lowercase().replace("_k", "k"));
    let names: Vec<String> = all().map(name).collect();
    found.copied().ok_or_else(|| {
        format!(
            "no format is called '{text}'; there are {}",
            names.join(", ")
        )
    })
}
