//! Runs NVIDIA's assembler over a PTX file: whether it accepts the file, and what each function costs.

use chores::process::{Failure, shown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Registers and memory that one function needs on one GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    pub name: String,
    /// Registers of each thread; 0 for a function that is only called.
    pub registers: u32,
    /// Bytes of stack.
    pub stack: u32,
    /// Bytes of registers that were spilled to memory.
    pub spills: u32,
}

/// Assembles `ptx` for `gpu`. A library keeps functions that are never called; a program may not name
/// functions that it lacks.
pub fn assemble(ptxas: &Path, gpu: &str, ptx: &Path, library: bool) -> Result<Vec<Cost>, Failure> {
    let mut command = Command::new(ptxas);
    command.arg(format!("-arch={gpu}")).args(["-v", "-O3"]);
    if library {
        command.arg("--compile-only");
    }
    command.arg(ptx).arg("-o").arg(assembled(ptx, gpu));
    println!("$ {}", shown(&command));
    let report = command.stdin(Stdio::null()).output();
    let report = report.map_err(|error| Failure::new(format!("{}: {error}", ptxas.display())))?;
    let text = String::from_utf8_lossy(&report.stderr).into_owned();
    if !report.status.success() {
        let status = report.status;
        return Err(Failure::new(format!("ptxas -arch={gpu}: {status}\n{text}")));
    }
    if let Some(line) = text.lines().find(|line| line.contains("Performance")) {
        return Err(Failure::new(format!("ptxas -arch={gpu}: {line}")));
    }
    Ok(costs(&text))
}

/// Returns the path of the machine code of `ptx` for `gpu`.
pub fn assembled(ptx: &Path, gpu: &str) -> PathBuf {
    ptx.with_extension(format!("{gpu}.cubin"))
}

/// Returns the costs in a report of `ptxas -v`.
fn costs(report: &str) -> Vec<Cost> {
    let mut found: Vec<Cost> = Vec::new();
    for line in report.lines() {
        if let Some((_, name)) = line.split_once("Function properties for ") {
            found.push(Cost {
                name: name.trim().to_string(),
                ..Cost::default()
            });
        }
        let Some(cost) = found.last_mut() else {
            continue;
        };
        for part in line.split(',').map(str::trim) {
            let number = |suffix| {
                let rest = part.strip_suffix(suffix)?;
                rest.rsplit(' ').next()?.parse::<u32>().ok()
            };
            if let Some(bytes) = number(" bytes stack frame") {
                cost.stack = bytes;
            }
            if let Some(bytes) = number(" bytes spill stores") {
                cost.spills = bytes;
            }
            if let Some(registers) = number(" registers") {
                cost.registers = registers;
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::{Cost, costs};

    #[test]
    fn the_report_is_read_by_function() {
        let report = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
    0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 18 registers, used 0 barriers, 488 bytes cmem[0]
ptxas info    : Function properties for memcmp
    24 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";
        let cost = |name: &str, registers, stack, spills| Cost {
            name: name.to_string(),
            registers,
            stack,
            spills,
        };
        assert_eq!(
            costs(report),
            [cost("a", 18, 0, 16), cost("memcmp", 0, 24, 0)]
        );
    }
}
