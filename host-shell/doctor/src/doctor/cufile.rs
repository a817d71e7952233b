//! Findings about cuFile: whether the library can be loaded, and its answer.

use super::finding::{DoctorFinding, FindingSeverity, MACHINE, SubjectFindings};
use nvme_driver::error::{Error, Result};

/// Translates the result of [`probe_cufile`](nvme_cuda::probe_cufile) into a finding.
pub fn examine(found: Result<(String, Result<()>)>) -> DoctorFinding {
    const CHECK: &str = "cuFile";
    let mut notes = SubjectFindings::about(MACHINE);
    let remedy = |error: &Error| format!("{}; gds=auto and gds=off need no cuFile", error.remedy());
    match found {
        Err(error) => notes.add(CHECK, FindingSeverity::Note, error.to_string(), remedy(&error)),
        Ok((file, Ok(()))) => notes.add(
            CHECK,
            FindingSeverity::Ok,
            format!("{file}: cuFileDriverOpen answered 0"),
            "a file may still be refused when it is opened (5008, 5027): the path of its store says so",
        ),
        Ok((file, Err(error))) => {
            let text = format!("{file} was not opened: {error}");
            notes.add(CHECK, FindingSeverity::Warning, text, remedy(&error));
        }
    }
    notes.all.remove(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_library_is_missing_refused_or_open() {
        let refused = || Error::environment("cuFileDriverOpen: 5001", "load nvidia-fs");
        let library = || "/usr/lib/libcufile.so.0".to_owned();
        for (found, status, text, remedy) in [
            (
                Err(refused()),
                FindingSeverity::Note,
                "cuFileDriverOpen: 5001",
                "gds=off",
            ),
            (
                Ok((library(), Ok(()))),
                FindingSeverity::Ok,
                "answered 0",
                "5027",
            ),
            (
                Ok((library(), Err(refused()))),
                FindingSeverity::Warning,
                "not opened: cuFileDriverOpen: 5001",
                "load nvidia-fs; ",
            ),
        ] {
            let one = examine(found);
            assert_eq!((one.subject.as_str(), one.status), (MACHINE, status));
            assert!(one.text.contains(text), "{}", one.text);
            assert!(one.remedy.unwrap().contains(remedy));
        }
    }
}
