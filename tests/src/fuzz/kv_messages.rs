//! Messages between the owner of a page store and its clients: whatever arrives is a message, or refused.

use nvme_kv::{AreaRequest, ModelFingerprint, PageKey};
use nvme_kv_server::message::{
    MOST_KEYS, MOST_MESSAGE, MOST_PAGES, MessageFault, PageReply, PageRequest, VERSION, decode,
    encode,
};

/// Bytes of a page of the area that is asked for.
const PAGE_BYTES: u32 = 4096;

/// The first byte is odd for a reply; the rest is the message.
pub fn kv_messages(bytes: &[u8]) {
    let Some((kind, message)) = bytes.split_first() else {
        return;
    };
    match kind % 2 {
        0 => request(message),
        _ => reply(message),
    }
}

fn refused(fault: MessageFault) {
    assert_ne!(fault, MessageFault::Version(VERSION));
}

fn request(message: &[u8]) {
    let (header, request) = match decode::<PageRequest>(message) {
        Ok(decoded) => decoded,
        Err(fault) => return refused(fault),
    };
    // Numbers may have several encodings, and the shortest says the same.
    let again = encode(header, &request);
    assert!(again.len() <= message.len() && message.len() <= MOST_MESSAGE);
    assert_eq!(decode(&again), Ok((header, request.clone())));
    if !request.is_sound(MOST_PAGES, PAGE_BYTES) {
        return;
    }
    match request {
        PageRequest::Lengths(keys) | PageRequest::Touch(keys) | PageRequest::Pin(keys) => {
            assert!(keys.len() <= MOST_KEYS);
        }
        PageRequest::Load(keys) => assert!(keys.len() <= MOST_PAGES),
        PageRequest::Store(pages) => assert!(pages.iter().all(|page| page.length <= PAGE_BYTES)),
        PageRequest::Hello(hello) => {
            let Some(fingerprint) = ModelFingerprint::decode(&hello.fingerprint) else {
                return;
            };
            let asked = AreaRequest {
                offset: 0,
                bytes: hello.bytes.unwrap_or(0),
                page_bytes: hello.page_bytes,
                fingerprint,
            };
            assert!(asked.check_same(&asked).is_ok());
            let other = AreaRequest {
                page_bytes: !hello.page_bytes,
                ..asked.clone()
            };
            assert!(asked.check_same(&other).is_err());
        }
        _ => {}
    }
}

fn reply(message: &[u8]) {
    let (header, reply) = match decode::<PageReply>(message) {
        Ok(decoded) => decoded,
        Err(fault) => return refused(fault),
    };
    let again = encode(header, &reply);
    assert!(again.len() <= message.len());
    assert_eq!(decode(&again), Ok((header, reply.clone())));
    let key = PageKey::of_bytes([7; PageKey::BYTES]);
    match reply {
        PageReply::Refused(error) => assert!(!error.to_error().code().is_empty()),
        // An outcome that refers to no error has none, and is no page either.
        PageReply::Loaded(outcomes, errors) => {
            for outcome in outcomes {
                let error = outcome.error(key, &errors);
                assert!(error.is_none_or(|error| !error.code().is_empty()));
            }
        }
        // No error of the owner is taken for a miss.
        PageReply::Stored(_, errors) => {
            assert!(errors.iter().all(|error| !error.to_error().is_miss()));
        }
        _ => {}
    }
}
