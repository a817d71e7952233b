//! The experts of a layer, once all rules hold: none is missing, each has the same tensors as the others, and gate, up
//! and down go together.

use super::bank::{BankTensor, ExpertBank};
use super::files::PlacedTensors;
use super::names::{ExpertMatrix, TensorRole, layer_of};
use super::reads::{ExpertPart, ExpertRanges, FilePart};
use super::stored::{ExpertFormat, check_bias, stored};
use nvme_host::catalog::Dtype;
use nvme_host::words::{listed, shortened};
use nvme_host::{Error, Result, Store};
use std::collections::BTreeMap;
use std::sync::Arc;

const REMEDY: &str = "name all files of one model, or get them again";

/// A matrix of an expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixLayout {
    /// The matrix.
    pub matrix: ExpertMatrix,
    /// Its stored form.
    pub format: ExpertFormat,
    /// Elements of the product.
    pub rows: u64,
    /// Elements of the vector; 0 if the format does not say how many.
    pub columns: u64,
    /// Rows of the file are columns of the matrix, as in Llama 4.
    pub is_transposed: bool,
    /// Rows of gate and up take turns, as in gpt-oss; else all of gate come before those of up.
    pub is_interleaved: bool,
}

/// The experts of a layer: where each lies, and what it holds.
#[derive(Clone, Debug)]
pub struct ExpertLayout {
    store: Arc<Store>,
    name: String,
    width: u64,
    hidden: u64,
    experts: Vec<ExpertRanges>,
    matrices: Vec<Vec<MatrixLayout>>,
}

impl ExpertLayout {
    /// Returns the store that reads the experts.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Returns the name under which the experts lie in the files.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of the layer; none for a draft block.
    pub fn layer(&self) -> Option<u32> {
        layer_of(&self.name)
    }

    /// Returns the elements of a token's vector: columns of gate and up, rows of down. 0 if no format says so.
    pub fn width(&self) -> u64 {
        self.width
    }

    /// Returns the rows of gate and up, the columns of down.
    pub fn hidden(&self) -> u64 {
        self.hidden
    }

    /// Returns the experts, in their order.
    pub fn experts(&self) -> &[ExpertRanges] {
        &self.experts
    }

    /// Returns the ranges of an expert.
    ///
    /// # Errors
    /// [`Error::Usage`] for an expert that the layer does not have.
    pub fn expert(&self, expert: u32) -> Result<&ExpertRanges> {
        self.experts
            .get(expert as usize)
            .ok_or_else(|| self.beyond(expert))
    }

    /// Returns the matrices of an expert: their formats may differ between experts.
    ///
    /// # Errors
    /// As [`expert`](Self::expert).
    pub fn matrices(&self, expert: u32) -> Result<&[MatrixLayout]> {
        // Those of merged tensors are alike, and there once.
        let at = match self.matrices.len() {
            1 => 0,
            _ => expert as usize,
        };
        let found = self.matrices.get(at).map(Vec::as_slice);
        found
            .filter(|_| (expert as usize) < self.experts.len())
            .ok_or_else(|| self.beyond(expert))
    }

    fn beyond(&self, expert: u32) -> Error {
        Error::usage(
            format!("{} has no expert {expert}", self.name),
            format!("use a number below {}", self.experts.len()),
        )
    }

    /// Returns the bytes of memory that hold any one of the experts.
    pub fn memory_bytes(&self) -> u64 {
        let each = self.experts.iter().map(ExpertRanges::memory_bytes);
        each.max().unwrap_or(0)
    }
}

/// Key of a tensor within an expert.
type PartKey = (ExpertMatrix, TensorRole);

/// Tensors of an expert, or those of all.
type PartMap<'a> = BTreeMap<PartKey, &'a BankTensor>;

/// Describes the experts of `bank`.
///
/// # Errors
/// [`Error::Usage`] for a rule that does not hold, with the names of the tensors.
pub(super) fn layout(
    store: &Arc<Store>,
    name: &str,
    bank: &ExpertBank,
    files: &[Arc<dyn PlacedTensors>],
) -> Result<ExpertLayout> {
    let fault = |what: String| Error::usage(format!("{}: {what}", shortened(name)), REMEDY);
    let grouped = grouped(bank).map_err(fault)?;
    let is_merged = matches!(grouped, GroupedTensors::Merged(_));
    let count = grouped.count().map_err(fault)?;
    if let Some((router, rows)) = &bank.router
        && *rows != Some(count)
    {
        return Err(fault(format!(
            "there are {count} experts, and {} has {} rows, one for each",
            shortened(router),
            rows.unwrap_or(0)
        )));
    }
    let mut layout = ExpertLayout {
        store: Arc::clone(store),
        name: name.to_owned(),
        width: 0,
        hidden: 0,
        experts: Vec::with_capacity(count as usize),
        matrices: Vec::new(),
    };
    for expert in 0..count {
        let parts = grouped.parts(expert, count).map_err(fault)?;
        if expert == 0 || !is_merged {
            let matrices = matrices_of(&parts, is_merged).map_err(fault)?;
            let sizes = sizes_of(&matrices).map_err(fault)?;
            if expert == 0 {
                (layout.width, layout.hidden) = sizes;
            } else if sizes != (layout.width, layout.hidden) {
                return Err(fault(format!(
                    "expert {expert} is of {} x {}, and expert 0 of {} x {}",
                    sizes.0, sizes.1, layout.width, layout.hidden
                )));
            }
            layout.matrices.push(matrices);
        }
        layout.experts.push(ExpertRanges::of(parts, files)?);
    }
    Ok(layout)
}

/// Tensors of a layer, by expert.
enum GroupedTensors<'a> {
    Merged(PartMap<'a>),
    Apart(Vec<PartMap<'a>>),
}

impl GroupedTensors<'_> {
    /// Returns the number of experts, if none is missing.
    fn count(&self) -> std::result::Result<u64, String> {
        match self {
            Self::Merged(parts) => merged_count(parts),
            Self::Apart(experts) => same_tensors(experts).map(|()| experts.len() as u64),
        }
    }

    /// Returns the parts of an expert, one of `count`.
    fn parts(&self, expert: u64, count: u64) -> std::result::Result<Vec<FilePart>, String> {
        match self {
            Self::Merged(parts) => file_parts(parts, Some((expert, count))),
            Self::Apart(experts) => file_parts(&experts[expert as usize], None),
        }
    }
}

fn grouped(bank: &ExpertBank) -> std::result::Result<GroupedTensors<'_>, String> {
    let mut apart = Vec::<PartMap<'_>>::new();
    let mut merged = PartMap::new();
    for tensor in &bank.tensors {
        let name = shortened(&tensor.entry.name);
        let Some(key) = tensor.meaning else {
            return Err(format!("the meaning of the tensor {name} is not known"));
        };
        let parts = match tensor.expert {
            None => &mut merged,
            Some(expert) => {
                // The number is below MOST_EXPERTS, so that a name cannot make this large.
                if apart.len() <= expert as usize {
                    apart.resize_with(expert as usize + 1, PartMap::new);
                }
                &mut apart[expert as usize]
            }
        };
        if let Some(other) = parts.insert(key, tensor) {
            let other_name = &other.entry.name;
            return Err(match *other_name == tensor.entry.name {
                true => format!("the tensor {name} is there twice"),
                false => format!("{name} and {} mean the same", shortened(other_name)),
            });
        }
    }
    match (apart.is_empty(), merged.is_empty()) {
        (true, _) => Ok(GroupedTensors::Merged(merged)),
        (false, true) => Ok(GroupedTensors::Apart(apart)),
        (false, false) => {
            let one = merged.values().next().map_or("", |one| &one.entry.name);
            Err(format!(
                "there are tensors of single experts, and {} of all of them",
                shortened(one)
            ))
        }
    }
}

/// Returns the number of experts of merged tensors, the first length of each.
fn merged_count(parts: &PartMap<'_>) -> std::result::Result<u64, String> {
    let mut count = None;
    for tensor in parts.values() {
        let entry = &tensor.entry;
        let name = shortened(&entry.name);
        let first = entry.shape.first().copied().unwrap_or(0);
        let most = u64::from(nvme_compute_kernel::experts::MOST_EXPERTS);
        if first == 0 || first > most {
            return Err(format!(
                "{name} has the shape {:?}, whose first length is not 1 to {most} experts",
                entry.shape
            ));
        }
        match count {
            None => count = Some((first, name)),
            Some((have, _)) if have == first => {}
            Some((have, other)) => {
                return Err(format!("{name} has {first} experts, and {other} {have}"));
            }
        }
    }
    count
        .map(|(count, _)| count)
        .ok_or_else(|| "there are no experts".to_owned())
}

/// Checks that no expert is missing, and that all have the same tensors.
fn same_tensors(experts: &[PartMap<'_>]) -> std::result::Result<(), String> {
    let missing = (0..experts.len()).filter(|one| experts[*one].is_empty());
    let missing: Vec<usize> = missing.collect();
    if !missing.is_empty() {
        return Err(format!(
            "{} of {} experts are missing: {}",
            missing.len(),
            experts.len(),
            listed(&missing)
        ));
    }
    let mut all = PartMap::new();
    for expert in experts {
        all.extend(expert);
    }
    for (number, expert) in experts.iter().enumerate() {
        let lacks = all.iter().find(|(key, _)| !expert.contains_key(key));
        if let Some(((matrix, role), other)) = lacks {
            return Err(format!(
                "expert {number} has no {} of {}, and another one has: {}",
                role.name(),
                matrix.name(),
                shortened(&other.entry.name)
            ));
        }
    }
    Ok(())
}

/// Returns the parts of an expert: whole tensors, or with `slab` its part of each of so many experts.
fn file_parts(
    parts: &PartMap<'_>,
    slab: Option<(u64, u64)>,
) -> std::result::Result<Vec<FilePart>, String> {
    let part = |((matrix, role), tensor): (&PartKey, &&BankTensor)| {
        let entry = &tensor.entry;
        let mut part = ExpertPart {
            matrix: *matrix,
            role: *role,
            tensor: entry.name.clone(),
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            bytes: entry.bytes,
            at: 0,
            is_scalar: false,
        };
        let mut offset = entry.offset;
        if let Some((expert, count)) = slab {
            part.shape.remove(0);
            let elements = part.shape.iter().product();
            let bytes = part.dtype.bytes(elements);
            let bytes = bytes.filter(|bytes| bytes.checked_mul(count) == Some(part.bytes));
            part.bytes = bytes.ok_or_else(|| {
                let name = shortened(&part.tensor);
                format!("{name} has {} bytes, not {count} equal parts", part.bytes)
            })?;
            offset += expert * part.bytes;
        }
        if part.bytes == 0 {
            return Err(format!("{} has no bytes", shortened(&part.tensor)));
        }
        part.is_scalar = part.shape.iter().product::<u64>() == 1;
        Ok(FilePart {
            part,
            file: tensor.file,
            offset,
        })
    };
    parts.iter().map(part).collect()
}

/// Returns how the matrices of an expert are stored.
fn matrices_of(
    parts: &[FilePart],
    is_merged: bool,
) -> std::result::Result<Vec<MatrixLayout>, String> {
    let mut by_matrix = BTreeMap::<ExpertMatrix, Vec<&ExpertPart>>::new();
    for one in parts {
        by_matrix
            .entry(one.part.matrix)
            .or_default()
            .push(&one.part);
    }
    let has = |matrix| by_matrix.contains_key(&matrix);
    let [gate, up, both, down] = [
        ExpertMatrix::Gate,
        ExpertMatrix::Up,
        ExpertMatrix::GateUp,
        ExpertMatrix::Down,
    ]
    .map(has);
    if !down || gate != up || gate == both {
        let names: Vec<&str> = by_matrix.keys().map(|matrix| matrix.name()).collect();
        return Err(format!(
            "the matrices of an expert are {}, not gate, up and down, or gate_up and down",
            listed(names)
        ));
    }
    let has_bias = |matrix: &ExpertMatrix| {
        let mut parts = by_matrix[matrix].iter();
        parts.any(|part| part.role == TensorRole::Bias)
    };
    let (with, without): (Vec<ExpertMatrix>, Vec<ExpertMatrix>) =
        by_matrix.keys().copied().partition(has_bias);
    if let ([with, ..], [without, ..]) = (&with[..], &without[..]) {
        return Err(format!(
            "{} has a bias, and {} has none",
            with.name(),
            without.name()
        ));
    }
    let mut matrices = Vec::new();
    for (matrix, parts) in &by_matrix {
        let (format, rows, columns) = stored(parts)?;
        // gpt-oss alone has biases beside merged tensors of safetensors, or blocks.
        let is_of_gpt_oss = |part: &&ExpertPart| {
            part.role == TensorRole::WeightBlocks
                || (part.role == TensorRole::Bias && part.tensor.ends_with("_bias"))
        };
        matrices.push(MatrixLayout {
            matrix: *matrix,
            format,
            rows,
            columns,
            is_transposed: false,
            is_interleaved: is_merged
                && *matrix == ExpertMatrix::GateUp
                && parts.iter().any(is_of_gpt_oss),
        });
    }
    if is_merged {
        transpose(&mut matrices);
    }
    // Which rows have a bias is known now: a transposed matrix has one for each column of the file.
    for one in &matrices {
        check_bias(&by_matrix[&one.matrix], one.rows)?;
    }
    Ok(matrices)
}

/// Turns merged matrices of plain numbers whose rows in the file are the columns of the matrix. Both orders never fit:
/// gate and up together have twice the rows that down has columns.
fn transpose(matrices: &mut [MatrixLayout]) {
    let is_plain = |one: &MatrixLayout| {
        matches!(
            one.format,
            ExpertFormat::Plain(Dtype::Bf16 | Dtype::F16 | Dtype::F32)
        )
    };
    if let [both, down] = matrices
        && both.matrix == ExpertMatrix::GateUp
        && is_plain(both)
        && is_plain(down)
        && both.rows == down.columns
        && down.rows.checked_mul(2) == Some(both.columns)
    {
        for one in [both, down] {
            (one.rows, one.columns) = (one.columns, one.rows);
            one.is_transposed = true;
        }
    }
}

/// Returns the width and the hidden size.
///
/// # Errors
/// The fault of matrices that do not go together, as a sentence.
fn sizes_of(matrices: &[MatrixLayout]) -> std::result::Result<(u64, u64), String> {
    let of = |matrix| matrices.iter().find(|one| one.matrix == matrix);
    let down = of(ExpertMatrix::Down).ok_or("there is no down")?;
    let (width, mut hidden) = (down.rows, down.columns);
    for (matrix, halves) in [
        (ExpertMatrix::Gate, 1),
        (ExpertMatrix::Up, 1),
        (ExpertMatrix::GateUp, 2),
    ] {
        let Some(one) = of(matrix) else { continue };
        if hidden == 0 && one.rows % halves == 0 {
            hidden = one.rows / halves;
        }
        let fits = hidden.checked_mul(halves) == Some(one.rows)
            && (one.columns == width || one.columns == 0);
        if !fits {
            return Err(format!(
                "{} is of {} x {}, and down of {} x {}",
                matrix.name(),
                one.rows,
                one.columns,
                down.rows,
                down.columns
            ));
        }
    }
    Ok((width, hidden))
}
