//! The tensors of the experts of one layer, as the files have them.

use super::names::{ExpertMatrix, TensorRole};
use nvme_host::catalog::TensorEntry;

/// A tensor of one expert, or of all.
pub struct BankTensor {
    /// Number of the file in which it lies.
    pub file: usize,
    /// Its description, with its offset in the file.
    pub entry: TensorEntry,
    /// Number of the expert; none for a tensor of all.
    pub expert: Option<u32>,
    /// Matrix and role; none if they are not known.
    pub meaning: Option<(ExpertMatrix, TensorRole)>,
}

/// The experts of a layer.
pub struct ExpertBank {
    pub tensors: Vec<BankTensor>,
    /// Name of the router's matrix, and its rows, one for each expert.
    pub router: Option<(String, Option<u64>)>,
}
