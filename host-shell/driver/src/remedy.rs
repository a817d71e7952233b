//! Remedies for error statuses, by their meaning and by the Do Not Retry bit.

use nvme_core::spec::Status;
use nvme_core::spec::status::sct;

/// Returns the remedy for a status: one clause without a full stop. It advises a retry only where
/// time alone may help, and never against Do Not Retry.
pub fn of_status(status: Status) -> &'static str {
    match Status(status.code()) {
        Status::COMPARE_FAILURE => "the blocks differ from the input; read them and look",
        Status::LBA_OUT_OF_RANGE | Status::CAPACITY_EXCEEDED => {
            "ask for a range inside the namespace (`nvme-gpu identify ns` prints its size)"
        }
        Status::INVALID_NAMESPACE | Status::NAMESPACE_NOT_ATTACHED => {
            "choose a namespace that `nvme-gpu list-ns` prints, in a format that it supports"
        }
        Status::INVALID_OPCODE => {
            "the controller does not have this command (see `nvme-gpu identify ctrl`, ONCS and OACS)"
        }
        Status::INVALID_FIELD
        | Status::INVALID_FORMAT
        | Status::INVALID_QUEUE_SIZE
        | Status::INVALID_FIRMWARE_SLOT
        | Status::INVALID_CONTROLLER_ID
        | Status::CONFLICTING_ATTRIBUTES
        | Status::OVERLAPPING_RANGE
        | Status::COMMAND_SIZE_LIMIT_EXCEEDED
        | Status::ATOMIC_WRITE_UNIT_EXCEEDED => {
            "the controller does not accept these values; check the options"
        }
        Status::INVALID_LOG_PAGE => {
            "the controller does not have this log page; choose one that log page 0 names"
        }
        Status::FEATURE_NOT_CHANGEABLE => {
            "the feature is read-only here; `nvme-gpu get-feature -s capabilities` says what can be changed"
        }
        Status::FEATURE_NOT_SAVEABLE => "leave out the request to save the value",
        Status::FEATURE_NOT_NAMESPACE_SPECIFIC => {
            "leave the namespace out: the feature belongs to the controller"
        }
        Status::WRITE_FAULT | Status::UNRECOVERED_READ_ERROR | Status::UNRECOVERED_ERROR => {
            "check the medium (for sim: the image file and its disk space)"
        }
        Status::DEALLOCATED_BLOCK => "write the blocks before they are read",
        Status::WRITE_TO_READ_ONLY | Status::NAMESPACE_WRITE_PROTECTED => {
            "remove the write protection of the namespace or image"
        }
        Status::ACCESS_DENIED | Status::OPERATION_DENIED | Status::PROHIBITED_BY_LOCKDOWN => {
            "the controller denies this; unlock it first"
        }
        Status::RESERVATION_CONFLICT => "another host holds a reservation; release it there",
        Status::GUARD_CHECK_ERROR
        | Status::APPLICATION_TAG_CHECK_ERROR
        | Status::REFERENCE_TAG_CHECK_ERROR
        | Status::STORAGE_TAG_CHECK_ERROR
        | Status::INVALID_PROTECTION_INFORMATION => {
            "the protection information does not fit the data; write the blocks anew"
        }
        Status::SANITIZE_FAILED => {
            "carry out a sanitize that succeeds; the medium is locked until then"
        }
        _ if status.dnr() => {
            "a retry will not help, the controller says (Do Not Retry): change the command"
        }
        Status::SANITIZE_IN_PROGRESS => {
            "wait until it has ended (`nvme-gpu sanitize-log` shows how far it is), then try again"
        }
        Status::FORMAT_IN_PROGRESS | Status::SELF_TEST_IN_PROGRESS => {
            "wait until it has ended, then try again"
        }
        Status::NAMESPACE_NOT_READY | Status::ADMIN_MEDIA_NOT_READY | Status::ANA_TRANSITION => {
            "wait a little, then try again"
        }
        Status::INTERNAL_ERROR
        | Status::DATA_TRANSFER_ERROR
        | Status::ABORT_REQUESTED
        | Status::ABORTED_SQ_DELETION
        | Status::ABORTED_PREEMPT
        | Status::ABORTED_BY_HOST
        | Status::COMMAND_INTERRUPTED
        | Status::TRANSIENT_TRANSPORT_ERROR
        | Status::INTERNAL_PATH_ERROR
        | Status::CONTROLLER_PATHING_ERROR
        | Status::HOST_PATHING_ERROR
        | Status::ABORT_LIMIT_EXCEEDED => "try again",
        // Vendor's and reserved values: the meaning is not known, and the controller allows a retry.
        other if other.name().is_none() && other.sct() != sct::MEDIA => {
            "try again, and see the manual of the controller"
        }
        other if other.sct() == sct::MEDIA => "check the medium",
        _ => "the command cannot succeed as it is: change it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn advises_a_retry(status: Status) -> bool {
        of_status(status).contains("try again")
    }

    #[test]
    fn nothing_is_tried_again_against_do_not_retry() {
        for code in 1..0x800 {
            assert!(!advises_a_retry(Status(code).with_dnr()), "{code:#x}");
        }
    }

    #[test]
    fn what_stays_wrong_is_not_tried_again() {
        for status in [
            Status::FEATURE_NOT_CHANGEABLE,
            Status::FEATURE_NOT_SAVEABLE,
            Status::INVALID_FIELD,
            Status::INVALID_LOG_PAGE,
            Status::INVALID_QID,
            Status::INVALID_CQ,
            Status::INVALID_QUEUE_DELETION,
            Status::NAMESPACE_WRITE_PROTECTED,
            Status::ACCESS_DENIED,
            Status::SANITIZE_FAILED,
            Status::COMMAND_SET_NOT_SUPPORTED,
            Status::ZONE_IS_FULL,
            Status::UNRECOVERED_READ_ERROR,
        ] {
            assert!(!advises_a_retry(status), "{status}");
        }
    }

    #[test]
    fn what_passes_by_itself_is_tried_again() {
        for status in [
            Status::INTERNAL_ERROR,
            Status::COMMAND_INTERRUPTED,
            Status::NAMESPACE_NOT_READY,
            Status::SANITIZE_IN_PROGRESS,
            Status::FORMAT_IN_PROGRESS,
            Status::ABORT_REQUESTED,
        ] {
            assert!(advises_a_retry(status), "{status}");
        }
    }
}
