//! Headers and nodes of indices of vectors.

use nvme_compute_kernel::search::walk::{IndexQuantisation, NodeWords, sum_of};
use nvme_compute_kernel::search::{MOST_DEGREE, NODE_BLOCK, word};
use nvme_search::{HEADER_BYTES, IndexHeader};

/// Offset of a header's checksum, which covers the bytes before it.
const SUM: usize = 72;

/// A byte of choices, then a header, or from byte 4096 on a node.
///
/// Bit 0 of the choice corrects the checksum of the header, bit 1 the node's, bit 2 its id and tag.
pub fn search_index(bytes: &[u8]) {
    let (choice, bytes) = bytes.split_first().unwrap_or((&0, &[]));
    let mut head = [0; HEADER_BYTES];
    let length = bytes.len().min(HEADER_BYTES);
    head[..length].copy_from_slice(&bytes[..length]);
    if choice & 1 != 0 {
        let sum = nvme_search::checksum(&head[..SUM]);
        head[SUM..SUM + 8].copy_from_slice(&sum.to_le_bytes());
    }
    let Ok(header) = IndexHeader::parse(&head) else {
        return;
    };
    assert_eq!(header.bytes(), head, "a header is written as it was read");
    let places = [
        0,
        header.centroids_at(),
        header.codes_at(),
        header.nodes_at(),
        header.bytes_of_index(),
    ];
    assert!(places.is_sorted_by(|a, b| a < b));
    assert!(places.iter().all(|place| place.is_multiple_of(NODE_BLOCK)));
    node(*choice, &bytes[length..], &header);
}

fn node(choice: u8, bytes: &[u8], header: &IndexHeader) {
    let elements = header.elements() as usize;
    let mut words = vec![0; header.node_bytes() as usize / 4];
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    if choice & 4 != 0 {
        (words[word::ID], words[word::TAG]) = (header.entry, header.tag);
    }
    if choice & 2 != 0 {
        words[word::SUM] = sum_of(&words, elements);
    }
    let index = IndexQuantisation {
        centroids: &[],
        codes: &[],
        elements,
        sub_elements: header.sub_elements as usize,
        code_bytes: header.code_bytes() as usize,
        nodes: header.source.count,
        tag: header.tag,
    };
    if let Some(node) = NodeWords::of(&words, header.entry, &index) {
        assert!(node.neighbours().len() <= MOST_DEGREE as usize);
        assert!(node.neighbours().iter().all(|id| *id < index.nodes));
        assert_eq!(node.vector().len(), elements);
        assert_eq!(words[word::ID], header.entry);
    }
}
