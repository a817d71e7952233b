//! Errors of a configuration, a tokenizer or a token.

/// Fault of a configuration, a tokenizer or a token. Nothing was hashed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LookupError {
    /// The configuration is no JSON object.
    #[error("the configuration is no JSON object: {0}")]
    NotAnObject(String),
    /// The configuration lacks a key.
    #[error("the configuration has no key {0}")]
    MissingKey(String),
    /// A key of the configuration has an impossible value.
    #[error("{key} of the configuration is {value}, and has to be {rule}")]
    BadValue {
        /// The key.
        key: String,
        /// Value of the key, as JSON.
        value: String,
        /// The rule that the value has to meet.
        rule: String,
    },
    /// The number of rows that follows from the hashes is not the number in the configuration.
    #[error(
        "the table of layer {layer} has {stated} rows by the configuration and {computed} by its hashes"
    )]
    OtherRows {
        /// The layer.
        layer: u64,
        /// Number of rows that the configuration states.
        stated: u64,
        /// Sum of the primes of the table's hashes.
        computed: u64,
    },
    /// The model has no such table at this layer.
    #[error("layer {layer} has no lookup table; layers with one: {known}")]
    NoSuchLayer {
        /// The layer that was asked for.
        layer: u64,
        /// The layers that have a table.
        known: String,
    },
    /// A token that the model does not have.
    #[error("token {token} at position {position} is not in 0..{tokens}")]
    TokenOutOfRange {
        /// The token.
        token: i64,
        /// Position of the token among the tokens of the call.
        position: usize,
        /// Number of tokens of the model.
        tokens: u64,
    },
    /// The output has another length than tokens times hashes.
    #[error("{given} row ids were asked for {tokens} tokens of {heads} hashes each")]
    OtherLength {
        /// Places of the output.
        given: usize,
        /// Number of tokens.
        tokens: usize,
        /// Hashes of a token.
        heads: usize,
    },
    /// The tokenizer cannot be read, or decodes no token.
    #[error("the tokenizer cannot be used: {0}")]
    Tokenizer(String),
    /// The tokenizer's tokens have another number of classes than the configuration says.
    #[error(
        "the tokenizer's {tokens} tokens become {computed} classes, the configuration says {stated}"
    )]
    OtherClasses {
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Classes that they become.
        computed: usize,
        /// Number of classes that the configuration states.
        stated: u64,
    },
}
