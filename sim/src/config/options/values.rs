//! Parsers for the values of options: numbers, switches, sizes, times and opcodes. Each error is a
//! clause that the caller puts behind the option's name.

use nvme_spec::{admin, nvm};
use std::format;
use std::string::{String, ToString};

/// Returns the opcode of that name or number, and true for an admin command.
pub(super) fn opcode(text: &str) -> Result<(u8, bool), String> {
    let named: [(&str, u8, bool); 19] = [
        ("identify", admin::opcode::IDENTIFY, true),
        ("create-cq", admin::opcode::CREATE_IO_CQ, true),
        ("create-sq", admin::opcode::CREATE_IO_SQ, true),
        ("delete-cq", admin::opcode::DELETE_IO_CQ, true),
        ("delete-sq", admin::opcode::DELETE_IO_SQ, true),
        ("abort", admin::opcode::ABORT, true),
        ("get-features", admin::opcode::GET_FEATURES, true),
        ("set-features", admin::opcode::SET_FEATURES, true),
        ("get-log-page", admin::opcode::GET_LOG_PAGE, true),
        ("format", admin::opcode::FORMAT_NVM, true),
        ("sanitize", admin::opcode::SANITIZE, true),
        ("flush", nvm::opcode::FLUSH, false),
        ("write", nvm::opcode::WRITE, false),
        ("read", nvm::opcode::READ, false),
        ("compare", nvm::opcode::COMPARE, false),
        ("write-zeroes", nvm::opcode::WRITE_ZEROES, false),
        (
            "write-uncorrectable",
            nvm::opcode::WRITE_UNCORRECTABLE,
            false,
        ),
        ("dsm", nvm::opcode::DATASET_MANAGEMENT, false),
        ("verify", nvm::opcode::VERIFY, false),
    ];
    if let Some((_, code, is_admin)) = named.into_iter().find(|(name, ..)| *name == text) {
        return Ok((code, is_admin));
    }
    let names = named.map(|(name, ..)| name).join(", ");
    match number(text) {
        Ok(code) => Ok((code, false)),
        Err(_) => Err(format!("'{text}' is not 0 to 255 nor one of {names}")),
    }
}

pub(super) fn number<T: TryFrom<u64>>(text: &str) -> Result<T, String> {
    let value = nvme_units::parse_number(text)?;
    T::try_from(value).map_err(|_| format!("{text} is too large"))
}

pub(super) fn switch(text: &str) -> Result<bool, String> {
    match text {
        "on" | "1" | "yes" | "true" => Ok(true),
        "off" | "0" | "no" | "false" => Ok(false),
        _ => Err("must be on or off".to_string()),
    }
}

/// Parses a number of bytes with an optional unit.
pub(super) fn size(text: &str) -> Result<u64, String> {
    nvme_units::parse_bytes(text)
}

/// Parses a time with its unit, as nanoseconds.
pub(super) fn time(text: &str) -> Result<u64, String> {
    nvme_units::parse_nanoseconds(text)
}
