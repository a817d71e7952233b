//! Reads facts from PTX without an assembler: forbidden instructions, and what each function does.

/// One function or kernel of a PTX file.
pub struct Function<'a> {
    pub name: &'a str,
    /// True for a kernel, which the host launches.
    pub entry: bool,
    /// The function's instructions, trimmed, without predicates.
    pub body: Vec<&'a str>,
    /// The function's instructions with their predicates.
    pub code: Vec<&'a str>,
}

impl Function<'_> {
    /// Instructions that need the lanes of a warp or block to meet.
    pub fn sync_count(&self) -> usize {
        let named = |line: &&&str| opcode(line).split('.').any(|part| part == "sync");
        self.body.iter().filter(named).count()
    }

    /// Returns the opcodes that touch memory or order it, in program order; repeats are counted.
    pub fn memory_operations(&self) -> String {
        let touches = |line: &&&str| {
            let opcode = opcode(line);
            let kind = opcode.split('.').next().unwrap_or("");
            matches!(
                kind,
                "ld" | "st" | "atom" | "red" | "fence" | "membar" | "cp"
            ) && !opcode.contains(".param")
        };
        let mut runs: Vec<(&str, usize)> = Vec::new();
        for line in self.body.iter().filter(touches) {
            match runs.last_mut() {
                Some((last, count)) if *last == opcode(line) => *count += 1,
                _ => runs.push((opcode(line), 1)),
            }
        }
        let words = runs.into_iter().map(|(opcode, count)| match count {
            1 => opcode.to_string(),
            _ => format!("{count} x {opcode}"),
        });
        words.collect::<Vec<_>>().join("; ")
    }
}

/// Returns the functions that have a body, in the order of the file.
pub fn functions(ptx: &str) -> Vec<Function<'_>> {
    let mut found: Vec<Function<'_>> = Vec::new();
    let mut header: Option<(&str, bool)> = None;
    let mut depth = 0usize;
    for line in ptx.lines().map(str::trim) {
        if line.starts_with("//") || line.is_empty() {
            continue;
        }
        if depth == 0 {
            if let Some(name) = declared(line) {
                header = Some(name);
            }
            if line == "{" {
                let Some((name, entry)) = header.take() else {
                    continue;
                };
                found.push(Function {
                    name,
                    entry,
                    body: Vec::new(),
                    code: Vec::new(),
                });
                depth = 1;
            } else if line.ends_with(';') {
                header = None;
            }
            continue;
        }
        let code = line.split("//").next().unwrap_or("");
        // Calls and inline PTX have scopes of their own.
        depth = (depth + code.matches('{').count()).saturating_sub(code.matches('}').count());
        if let Some(function) = found.last_mut() {
            let statements = code
                .split(';')
                .map(|part| part.trim_matches(['{', '}', ' ', '\t']));
            let statements = statements.filter(|part| !part.is_empty());
            function.code.extend(statements.clone());
            function.body.extend(statements.map(unpredicated));
        }
    }
    found
}

/// Returns the name that a `.entry` or `.func` line declares.
fn declared(line: &str) -> Option<(&str, bool)> {
    let (rest, entry) = match line.split_once(".entry ") {
        Some((_, rest)) => (rest, true),
        None => (line.split_once(".func")?.1, false),
    };
    // A function may name its result first: `.func (.param .b32 func_retval0) name(`.
    let rest = rest.trim_start();
    let rest = match rest.strip_prefix('(') {
        Some(result) => result.split_once(')')?.1,
        None => rest,
    };
    let name = rest.trim_start().split(['(', ' ', '\t']).next()?;
    (!name.is_empty()).then_some((name, entry))
}

/// Returns `st.u32 ..` for `@%p1 st.u32 ..`: the instruction without its predicate.
pub fn unpredicated(line: &str) -> &str {
    match line.strip_prefix('@') {
        Some(rest) => rest
            .split_once(char::is_whitespace)
            .map_or("", |(_, code)| code.trim_start()),
        None => line,
    }
}

pub fn opcode(line: &str) -> &str {
    line.split(|c: char| c.is_whitespace() || c == ';')
        .next()
        .unwrap_or("")
}

/// Returns what the PTX must not contain, line by line. `.aligned` instructions may begin with one of `aligned`.
pub fn complaints(ptx: &str, aligned: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    if functions(ptx).is_empty() {
        found.push("neither a kernel nor a function is in the file".to_string());
    }
    let mut tables = Tables::default();
    for (number, line) in ptx.lines().enumerate() {
        tables.follow(line);
        let mut complain =
            |what: &str| found.push(format!("{}: {what}: {}", number + 1, line.trim()));
        if is_unordered_atomic(line) {
            complain("an atomic without an order (rustc drops it from fetch_* and swap)");
        }
        if line.contains("ld.global.nc") && !tables.reads(line) {
            complain("a non-coherent load, which misses what the device wrote");
        }
        if line.contains("4core3fmt") {
            complain("core::fmt in device code");
        }
        if has_aligned(line, aligned) {
            complain("an aligned barrier, which divergent code may not run");
        }
        if line.contains(".local ") {
            complain("local memory: a stack");
        }
    }
    found
}

/// Returns whether a statement of the line is `.aligned` although it is not one of `may_be`.
fn has_aligned(line: &str, may_be: &[&str]) -> bool {
    let words = line.split(|c: char| c.is_whitespace() || c == ';' || c == '{');
    let mut aligned = words.filter(|word| word.contains(".aligned"));
    aligned.any(|word| !may_be.iter().any(|begin| word.starts_with(begin)))
}

/// Registers that point into tables of constants, which the compiler makes of a `match` over numbers. These tables are
/// never written, so any load may read them.
#[derive(Default)]
struct Tables<'a>(Vec<&'a str>);

impl<'a> Tables<'a> {
    fn follow(&mut self, line: &'a str) {
        let words = || {
            line.split([' ', '\t', ',', ';'])
                .filter(|word| !word.is_empty())
        };
        let mut operands = words();
        let (Some(opcode), Some(target)) = (operands.next(), operands.next()) else {
            return;
        };
        let known = |word: &str| word.starts_with("switch_$_table") || self.0.contains(&word);
        let points = matches!(opcode, "mov.b64" | "add.s64") && operands.any(known);
        self.0.retain(|register| *register != target);
        if points {
            self.0.push(target);
        }
    }

    fn reads(&self, line: &str) -> bool {
        let address = line.split(['[', ']', '+']).nth(1);
        address.is_some_and(|register| self.0.contains(&register))
    }
}

/// Returns whether the line is an `atom` or `red` instruction that names no memory order: it is relaxed, whatever the
/// source said.
fn is_unordered_atomic(line: &str) -> bool {
    let ordered = [".relaxed.", ".acquire.", ".release.", ".acq_rel."];
    line.split(|c: char| c.is_whitespace() || c == ';' || c == '{')
        .any(|word| {
            (word.starts_with("atom.") || word.starts_with("red."))
                && !ordered.iter().any(|order| word.contains(order))
        })
}

/// Returns the lines with a call of `compiler_fence` in device sources: the compiler crashes on such a call, with a
/// message that does not name the line.
pub fn compiler_fences(path: &str, source: &str) -> Vec<String> {
    let code = |line: &str| {
        line.split("//")
            .next()
            .unwrap_or("")
            .contains("compiler_fence")
    };
    let lines = source.lines().enumerate().filter(|(_, line)| code(line));
    lines
        .map(|(number, line)| format!("{path}:{}: {}", number + 1, line.trim()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{compiler_fences, complaints, functions};

    const CLEAN: &str = "\
.version 8.2
.func _RNvNtC4core9panicking9panic_fmt
()
.noreturn;

.visible .entry k(
\t.param .u64 k_param_0
)
{
\t.reg .b32 %r<2>;
\tld.param.u64 %rd1, [k_param_0];
\tatom.add.acq_rel.sys.global.u32 %r1, [%rd1], 1;
$L__BB0_1:
\t@%p1 red.release.sys.global.add.u32 [%rd1], 1;
\tld.relaxed.sys.global.u64 %rd2, [%rd3];
\tld.relaxed.sys.global.u64 %rd2, [%rd3];
\t// begin inline asm
\t{ .reg .pred p; vote.sync.ballot.b32 %r1, p, %r2; }
\t// end inline asm
\t{ // callseq 0, 0
\t.param .b64 param0;
\t} // callseq 0
\tbar.warp.sync %r1;
\tret;
}
.visible .func  (.param .b32 func_retval0) f(
\t.param .b64 f_param_0
)
{
\tst.mmio.relaxed.sys.global.u32 [%rd1], %r1;
\tst.param.b32 [func_retval0], %r1;
\tret;
}
";

    #[test]
    fn clean_ptx_passes() {
        assert_eq!(complaints(CLEAN, &[]), Vec::<String>::new());
    }

    #[test]
    fn each_trap_is_found() {
        for bad in [
            " atom.global.add.u32 %r1, [%rd1], 1;",
            " @%p2 red.global.add.u32 [%rd1], 1;",
            " ld.global.nc.u64 %rd2, [%rd3];",
            " call.uni _ZN4core3fmt9Formatter3padE;",
            " barrier.sync.aligned 0;",
            " .local .align 8 .b8 __local_depot1[112];",
        ] {
            assert_eq!(
                complaints(&format!("{CLEAN}{bad}\n"), &[]).len(),
                1,
                "{bad}"
            );
        }
        assert_eq!(complaints("// an empty file", &[]).len(), 1);
    }

    #[test]
    fn products_of_warps_alone_may_be_aligned() {
        let mma =
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f1}, {%r1}, {%r2}, {%f1};\n";
        let ptx = |line: &str| format!("{CLEAN}{line}");
        assert!(complaints(&ptx(mma), &["mma.sync.aligned."]).is_empty());
        assert_eq!(complaints(&ptx(mma), &["ldmatrix."]).len(), 1);
        let both = format!("{{ {} barrier.sync.aligned 0; }}\n", mma.trim());
        assert_eq!(complaints(&ptx(&both), &["mma.sync.aligned."]).len(), 1);
    }

    #[test]
    fn tables_of_constants_may_be_read_by_any_path() {
        let table = "mov.b64 %rd1, switch_$_table_$_k;\nadd.s64 %rd2, %rd1, %rd3;\n";
        let load = "ld.global.nc.b32 %r1, [%rd2];\n";
        assert!(complaints(&format!("{CLEAN}{table}{load}"), &[]).is_empty());
        let behind = "ld.global.nc.b32 %r1, [%rd2+-8];\n";
        assert!(complaints(&format!("{CLEAN}{table}{behind}"), &[]).is_empty());
        let other = "add.s64 %rd2, %rd4, %rd3;\n";
        assert_eq!(
            complaints(&format!("{CLEAN}{table}{other}{load}"), &[]).len(),
            1
        );
    }

    #[test]
    fn functions_are_told_apart() {
        let functions = functions(CLEAN);
        let names: Vec<_> = functions.iter().map(|f| (f.name, f.entry)).collect();
        assert_eq!(names, [("k", true), ("f", false)]);
        assert_eq!(functions[0].sync_count(), 2);
        assert_eq!(functions[1].sync_count(), 0);
        assert_eq!(
            functions[0].memory_operations(),
            "atom.add.acq_rel.sys.global.u32; red.release.sys.global.add.u32; 2 x ld.relaxed.sys.global.u64"
        );
        assert_eq!(
            functions[1].memory_operations(),
            "st.mmio.relaxed.sys.global.u32"
        );
    }

    #[test]
    fn a_compiler_fence_is_found_in_code_and_not_in_comments() {
        let bad = "use core::sync::atomic;\n  atomic::compiler_fence(x);";
        assert_eq!(compiler_fences("a.rs", bad).len(), 1);
        assert!(compiler_fences("a.rs", "// no compiler_fence here").is_empty());
    }
}
