//! The figures and tables of nvme-gpu-kernel/ptx/tables.md, held against what was built.

use super::assemble::Cost;
use super::text::{Function, functions};
use std::fmt::Write;

/// Percentage by which a kernel's registers may exceed the documented number: another compiler or assembler gives
/// slightly different numbers.
const SLACK: u32 = 15;

/// The costs of a file on one GPU.
pub struct OnGpu {
    pub gpu: &'static str,
    pub costs: Vec<Cost>,
}

/// Returns the kernels that spill registers or use a stack, which no documented number allows.
pub fn excesses(assembled: &[OnGpu]) -> Vec<String> {
    let mut found = Vec::new();
    for OnGpu { gpu, costs } in assembled {
        for cost in costs {
            let name = &cost.name;
            if cost.spills > 0 {
                found.push(format!("{gpu}: {name} spills {} bytes", cost.spills));
            }
            if cost.stack > 0 {
                found.push(format!("{gpu}: {name} has a stack of {} bytes", cost.stack));
            }
        }
    }
    found
}

/// The table of kernels and library functions: registers, or bytes of stack, on each GPU, and `.sync`
/// instructions.
pub struct Table {
    gpus: Vec<&'static str>,
    text: String,
}

impl Table {
    /// Returns the head, for these GPUs.
    pub fn new(gpus: &[&'static str]) -> Self {
        let registers = gpus.iter().map(|gpu| format!(" registers {gpu} |"));
        let head = registers.collect::<String>();
        let rules = " --- |".repeat(gpus.len() + 2);
        Self {
            gpus: gpus.to_vec(),
            text: format!("| function |{head} `.sync` instructions |\n|{rules}\n"),
        }
    }

    /// Rows for the kernels and functions of a file, by name.
    pub fn add(&mut self, ptx: &str, assembled: &[OnGpu]) {
        let mut rows: Vec<Function<'_>> = functions(ptx).into_iter().filter(listed).collect();
        rows.sort_by_key(|row| row.name);
        for row in rows {
            let _ = write!(self.text, "| `{}` |", row.name);
            for gpu in &self.gpus {
                let on = assembled.iter().find(|on| column(on.gpu) == *gpu);
                let cost = on.and_then(|on| on.costs.iter().find(|cost| cost.name == row.name));
                let _ = match cost {
                    // A function to be called saves its caller's registers on the stack.
                    Some(cost) if cost.registers == 0 => {
                        write!(self.text, " {} bytes |", cost.stack)
                    }
                    Some(cost) => write!(self.text, " {} |", cost.registers),
                    None => write!(self.text, " |"),
                };
            }
            let _ = writeln!(self.text, " {} |", row.sync_count());
        }
    }

    pub fn text(self) -> String {
        self.text
    }
}

/// Returns the column of a GPU; sm_90a uses sm_90's.
fn column(gpu: &str) -> &str {
    gpu.trim_end_matches('a')
}

/// Returns whether a function has a row in the table: kernels have one, and functions that users call.
fn listed(function: &Function<'_>) -> bool {
    function.entry || function.name.starts_with("nvme_gpu_")
}

/// Kernels that need many more registers, and functions that need more stack, than documented.
pub fn growth(assembled: &[OnGpu], documented: &str) -> Vec<String> {
    let mut found = Vec::new();
    let head: Vec<&str> = documented.lines().next().map_or_else(Vec::new, cells);
    for OnGpu { gpu, costs } in assembled {
        let title = format!("registers {}", column(gpu));
        let Some(column) = head.iter().position(|cell| *cell == title) else {
            found.push(format!(
                "nvme-gpu-kernel/ptx/tables.md has no column {title}"
            ));
            continue;
        };
        for cost in costs {
            // Kernels are measured in registers, functions in bytes of stack.
            let row = row(documented, &cost.name);
            let pinned = row.and_then(|row| {
                let number = row.get(column)?.trim_end_matches(" bytes");
                number.parse::<u32>().ok()
            });
            let limit = pinned.map_or(0, |pinned| pinned * (100 + SLACK) / 100);
            let (needs, unit) = match cost.registers {
                0 => (cost.stack, "bytes of stack"),
                registers => (registers, "registers"),
            };
            if needs > limit {
                found.push(format!(
                    "{gpu}: {} needs {needs} {unit}, nvme-gpu-kernel/ptx/tables.md allows {limit}",
                    cost.name
                ));
            }
        }
    }
    found
}

/// Returns the row of function `name`.
fn row<'d>(documented: &'d str, name: &str) -> Option<Vec<&'d str>> {
    let key = format!("`{name}`");
    let mut rows = documented.lines().map(cells);
    rows.find(|cells| cells.first() == Some(&key.as_str()))
}

/// Kernels whose number of `.sync` instructions is not the documented one: a compiler that doubled
/// or moved a barrier.
pub fn sync_differences(ptx: &str, documented: &str) -> Vec<String> {
    let mut found = Vec::new();
    for kernel in functions(ptx).into_iter().filter(listed) {
        let (name, count) = (kernel.name, kernel.sync_count());
        let pinned = row(documented, name).and_then(|row| row.last()?.parse::<usize>().ok());
        match pinned {
            Some(pinned) if pinned == count => {}
            Some(pinned) => found.push(format!(
                "{name} has {count} .sync instructions, nvme-gpu-kernel/ptx/tables.md says {pinned}"
            )),
            None => found.push(format!("{name} is not in nvme-gpu-kernel/ptx/tables.md")),
        }
    }
    found
}

/// Rows of the table of memory operations that differ from what the probes became, and probes or
/// rows without a partner.
pub fn memory_differences(probes: &str, documented: &str) -> Vec<String> {
    let rows: Vec<Vec<&str>> = documented
        .lines()
        .map(cells)
        .filter(|cells| cells.len() == 3 && cells[0].starts_with("`probe_"))
        .collect();
    let mut found = Vec::new();
    let built = functions(probes);
    let probes = || built.iter().filter(|f| f.name.starts_with("probe_"));
    for probe in probes() {
        let key = format!("`{}`", probe.name);
        let operations = format!("`{}`", probe.memory_operations());
        match rows.iter().find(|cells| cells[0] == key) {
            Some(cells) if cells[2] == operations => {}
            Some(cells) => found.push(format!(
                "{key} became {operations}, nvme-gpu-kernel/ptx/tables.md says {}",
                cells[2]
            )),
            None => found.push(format!(
                "nvme-gpu-kernel/ptx/tables.md lacks the row | {key} | ? | {operations} |"
            )),
        }
    }
    for cells in rows {
        if !probes().any(|probe| cells[0] == format!("`{}`", probe.name)) {
            found.push(format!(
                "nvme-gpu-kernel/ptx/tables.md has {}, which was not built",
                cells[0]
            ));
        }
    }
    found
}

/// Returns the cells of a table's row.
fn cells(line: &str) -> Vec<&str> {
    let inner = line
        .trim()
        .strip_prefix('|')
        .and_then(|l| l.strip_suffix('|'));
    inner.map_or_else(Vec::new, |inner| inner.split('|').map(str::trim).collect())
}

/// Returns the part of a document between the lines `<!-- NAME -->` and `<!-- end NAME -->`.
pub fn section<'a>(document: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = document.split_once(&format!("<!-- {name} -->\n"))?;
    let (section, _) = rest.split_once(&format!("<!-- end {name} -->"))?;
    Some(section)
}

/// Returns the document with another text in that part.
pub fn with_section(document: &str, name: &str, text: &str) -> Option<String> {
    let (before, rest) = document.split_once(&format!("<!-- {name} -->\n"))?;
    let (_, after) = rest.split_once(&format!("<!-- end {name} -->"))?;
    Some(format!(
        "{before}<!-- {name} -->\n{text}<!-- end {name} -->{after}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PTX: &str =
        ".visible .entry k()\n{\n bar.warp.sync %r1;\n st.relaxed.sys.u64 [%rd1], 1;\n}\n";

    fn cost(registers: u32, stack: u32, spills: u32) -> Vec<OnGpu> {
        let name = "k".to_string();
        let cost = Cost {
            name,
            registers,
            stack,
            spills,
        };
        let gpu = "sm_80";
        vec![OnGpu {
            gpu,
            costs: vec![cost],
        }]
    }

    #[test]
    fn stack_and_spills_are_refused() {
        assert!(excesses(&cost(255, 0, 0)).is_empty());
        assert_eq!(excesses(&cost(32, 8, 0)).len(), 1);
        assert_eq!(excesses(&cost(32, 0, 4)).len(), 1);
    }

    #[test]
    fn the_table_is_the_pin() {
        let mut table = Table::new(&["sm_80"]);
        table.add(PTX, &cost(32, 0, 0));
        let table = table.text();
        assert!(table.ends_with("| `k` | 32 | 1 |\n"), "{table}");
        assert!(sync_differences(PTX, &table).is_empty());
        assert!(growth(&cost(36, 0, 0), &table).is_empty());
        assert_eq!(growth(&cost(37, 0, 0), &table).len(), 1);
        assert_eq!(growth(&cost(32, 0, 0), "").len(), 1);
        let function = table.replace("| 32 |", "| 100 bytes |");
        assert!(growth(&cost(0, 115, 0), &function).is_empty());
        assert_eq!(growth(&cost(0, 116, 0), &function).len(), 1);
        assert_eq!(
            sync_differences(PTX, &table.replace("| 1 |", "| 2 |")).len(),
            1
        );
        assert_eq!(sync_differences(PTX, "").len(), 1);
    }

    #[test]
    fn a_file_for_some_gpus_leaves_the_other_columns_empty() {
        let mut table = Table::new(&["sm_80", "sm_90"]);
        let mut assembled = cost(168, 0, 0);
        assembled[0].gpu = "sm_90a";
        table.add(PTX, &assembled);
        let table = table.text();
        assert!(table.ends_with("| `k` | | 168 | 1 |\n"), "{table}");
        assert!(growth(&assembled, &table).is_empty());
        assembled[0].costs[0].registers = 200;
        assert_eq!(growth(&assembled, &table).len(), 1);
    }

    #[test]
    fn memory_operations_are_held_against_the_docs() {
        let probes = PTX.replace(".entry k", ".func probe_store");
        let row = "| `probe_store` | a store | `st.relaxed.sys.u64` |\n";
        assert!(memory_differences(&probes, row).is_empty());
        assert_eq!(memory_differences(&probes, "").len(), 1);
        assert_eq!(
            memory_differences(&probes, &row.replace("relaxed", "release")).len(),
            1
        );
        assert_eq!(memory_differences("", row).len(), 1);
    }

    #[test]
    fn a_section_ends_at_its_marker() {
        let document = "a\n<!-- t -->\nrow\n<!-- end t -->\nb";
        assert_eq!(section(document, "t"), Some("row\n"));
        assert_eq!(section(document, "u"), None);
        let other = with_section(document, "t", "x\n").unwrap();
        assert_eq!(other, "a\n<!-- t -->\nx\n<!-- end t -->\nb");
    }
}
