//! The control flow of one function of a PTX file: its instructions and which may follow which.

use super::text::{Function, opcode, unpredicated};
use std::collections::HashMap;

/// A function's instructions with their successors and predecessors.
pub struct Flow<'a> {
    /// The instructions without predicates.
    pub code: Vec<&'a str>,
    pub after: Vec<Vec<usize>>,
    pub before: Vec<Vec<usize>>,
}

impl<'a> Flow<'a> {
    /// # Errors
    /// The name of a label that is not there.
    pub fn of(function: &Function<'a>) -> Result<Self, String> {
        let mut labels: HashMap<&str, usize> = HashMap::new();
        let mut tables: HashMap<&str, Vec<&str>> = HashMap::new();
        let mut code: Vec<(&str, bool)> = Vec::new();
        let mut table = None;
        for statement in &function.code {
            let mut rest = *statement;
            if let Some((label, more)) = rest.split_once(':').filter(|_| rest.starts_with('$')) {
                labels.insert(label, code.len());
                table = more.contains(".branchtargets").then_some(label);
                rest = more.trim();
            }
            if let Some(name) = table {
                let targets = rest.trim_start_matches(".branchtargets");
                let targets = targets.split(',').map(str::trim);
                let targets = targets.filter(|target| target.starts_with('$'));
                let is_list = rest.starts_with(['.', '$']) || rest.is_empty();
                tables.entry(name).or_default().extend(targets);
                if is_list {
                    continue;
                }
                table = None;
            }
            if rest.is_empty() || rest.starts_with('.') {
                continue;
            }
            code.push((unpredicated(rest), rest.starts_with('@')));
        }
        let target = |label: &str| {
            let found = labels.get(label).copied();
            found.ok_or_else(|| format!("{}: no label {label}", function.name))
        };
        let mut after = Vec::new();
        for (at, (instruction, predicated)) in code.iter().enumerate() {
            let name = instruction.rsplit([' ', '\t', ',']).next().unwrap_or("");
            let mut next = Vec::new();
            let falls_through = match opcode(instruction).split('.').next().unwrap_or("") {
                "bra" => {
                    next.push(target(name)?);
                    *predicated
                }
                "brx" => {
                    for label in tables.get(name).into_iter().flatten() {
                        next.push(target(label)?);
                    }
                    false
                }
                "ret" | "exit" | "trap" => *predicated,
                _ => true,
            };
            if falls_through {
                next.push(at + 1);
            }
            next.retain(|at| *at < code.len());
            next.dedup();
            after.push(next);
        }
        let mut before = vec![Vec::new(); code.len()];
        for (at, next) in after.iter().enumerate() {
            for to in next {
                before[*to].push(at);
            }
        }
        Ok(Self {
            code: code
                .into_iter()
                .map(|(instruction, _)| instruction)
                .collect(),
            after,
            before,
        })
    }

    /// Returns the instructions with this opcode, or one that begins with it and a dot.
    pub fn all<'f>(&'f self, begin: &'f str) -> impl Iterator<Item = usize> + 'f {
        (0..self.code.len()).filter(move |at| self.is(*at, begin))
    }

    /// Returns whether the instruction's opcode is `begin` or begins with `begin` and a dot.
    pub fn is(&self, at: usize, begin: &str) -> bool {
        let rest = opcode(self.code[at]).strip_prefix(begin);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    }

    /// Returns the instructions from which `from` can be reached without passing one for which `stop` holds. The
    /// instructions that stop the search are among them.
    pub fn back(&self, from: usize, stop: impl Fn(usize) -> bool) -> Vec<usize> {
        let mut seen = vec![false; self.code.len()];
        let mut work = self.before[from].clone();
        let mut found = Vec::new();
        while let Some(at) = work.pop() {
            if std::mem::replace(&mut seen[at], true) {
                continue;
            }
            found.push(at);
            if !stop(at) {
                work.extend(&self.before[at]);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::functions;
    use super::*;

    #[test]
    fn branches_and_tables_are_followed() {
        let ptx = ".visible .entry f()\n{\n\tld.u32 \t%r1, [a];\n$L_1:\n\t$L_brx_0: .branchtargets\n\t\t$L_1,\n\t\t$L_2;\n\t@%p1 bra \t$L_2;\n\tbrx.idx \t%r1, $L_brx_0;\n$L_2:\n\t@%p1 ret;\n\tbra.uni \t$L_1;\n}\n";
        let all = functions(ptx);
        let flow = Flow::of(&all[0]).unwrap();
        assert_eq!(flow.code.len(), 5);
        assert_eq!(
            flow.after,
            [vec![1], vec![3, 2], vec![1, 3], vec![4], vec![1]]
        );
        let mut back = flow.back(3, |at| flow.is(at, "bra"));
        back.sort_unstable();
        assert_eq!(back, [1, 2]);
        let lost = ptx.replace("$L_2:", "$L_3:");
        assert!(Flow::of(&functions(&lost)[0]).is_err());
    }
}
