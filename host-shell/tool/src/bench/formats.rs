//! Formats of weights on the command line.

use nvme_compute::random_weights::StoredFormat;

/// Parses, for clap, a format such as `bf16` or `q4_k`.
pub fn stored(text: &str) -> std::result::Result<StoredFormat, String> {
    let mut all = StoredFormat::ALL.into_iter();
    let text_name = text.to_lowercase().replace("_k", "k");
    all.find(|stored| stored.name() == text_name)
        .ok_or_else(|| {
            format!(
                "no format is called '{text}'; there are {}",
                StoredFormat::ALL.map(StoredFormat::name).join(", ")
            )
        })
}
