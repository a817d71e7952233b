//! Pages of keys and values on a store.

use nvme_compute_kernel::pages::MOST_ELEMENTS;
use nvme_formats::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};
use nvme_host::{Error, Result, Store, Table};
use std::sync::Arc;

/// Shape of a page: for each head of keys and values `page_tokens` keys, then the same number of values, of 16 bits an
/// element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Heads of keys and values.
    pub kv_heads: u32,
    /// Elements of a head: a multiple of 8, 128 at most.
    pub head_elements: u32,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Elements are bf16; else f16.
    pub is_bf16: bool,
}

impl KvShape {
    /// Returns the number of bytes of a head's keys and values in a page; `u64::MAX` for more than that.
    pub fn piece_bytes(&self) -> u64 {
        (u64::from(self.page_tokens) * u64::from(self.head_elements)).saturating_mul(4)
    }

    /// Returns the number of bytes of a page; `u64::MAX` for more than that, which no [`KvStore`] has.
    pub fn page_bytes(&self) -> u64 {
        self.piece_bytes().saturating_mul(self.kv_heads.into())
    }

    /// Converts a number to the stored format.
    pub fn stored(&self, value: f32) -> u16 {
        match self.is_bf16 {
            true => bf16_of_f32(value),
            false => f16_of_f32(value),
        }
    }

    /// Converts a stored element to `f32`.
    pub fn value(&self, stored: u16) -> f32 {
        match self.is_bf16 {
            true => f32_of_bf16(stored),
            false => f32_of_f16(stored),
        }
    }
}

/// Pages on a store.
#[derive(Clone, Debug)]
pub struct KvStore {
    store: Arc<Store>,
    table: Table,
    shape: KvShape,
}

impl KvStore {
    /// Describes `pages` pages from byte `offset` of the store on.
    ///
    /// # Errors
    /// [`Error::Usage`] for an impossible shape, if the part of a head does not begin with a block, and for pages that
    /// end past the store.
    pub fn new(store: &Arc<Store>, offset: u64, pages: u64, shape: KvShape) -> Result<Self> {
        let elements = shape.head_elements;
        if elements == 0 || !elements.is_multiple_of(8) || elements > MOST_ELEMENTS {
            return Err(Error::usage(
                format!("{elements} is no possible number of elements of a head"),
                format!("use a multiple of 8, {MOST_ELEMENTS} at most"),
            ));
        }
        let block = u64::from(store.block_bytes());
        let piece = shape.piece_bytes();
        if piece == 0 || shape.kv_heads == 0 || !(piece | offset).is_multiple_of(block) {
            return Err(Error::usage(
                format!(
                    "the {} heads of {piece} bytes in a page at byte {offset} do not begin with blocks of {block} bytes",
                    shape.kv_heads
                ),
                "use as many tokens a page as make whole blocks of a head, and a multiple of a block as offset",
            ));
        }
        if shape.page_bytes() > u64::from(u32::MAX) || pages > u64::from(u32::MAX) {
            return Err(Error::usage(
                format!(
                    "{pages} pages of {} bytes exceed the 32 bits of a page's number or length",
                    shape.page_bytes()
                ),
                "use fewer than 2^32 of each",
            ));
        }
        Ok(Self {
            store: Arc::clone(store),
            table: store.table(offset, pages, shape.page_bytes())?,
            shape,
        })
    }

    /// Returns the shape of a page.
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Returns the pages as rows of a table, through which they are written; [`Table::scatter_on_gpu`] writes pages in
    /// memory of a GPU.
    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the store.
    pub fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// Computes attention of `queries`, one vector for each query head, over the pages `ids` of the head `kv_head` and
    /// the first `tail_tokens` tokens of `tail`, a whole page in memory: by the CPU, with the GPU's arithmetic. Without
    /// any token the result is zeros.
    ///
    /// # Errors
    /// [`Error::Usage`] for a head or a page that does not exist, a query of another length than a head, and more
    /// tokens of the tail than a page has, or than `tail` holds; the errors of [`Store::read_at`].
    pub fn attend(
        &self,
        queries: &[Vec<f32>],
        ids: &[u32],
        kv_head: u32,
        (tail, tail_tokens): (&[u8], u32),
        scale: f32,
    ) -> Result<Vec<Vec<f32>>> {
        let shape = self.shape;
        let piece = shape.piece_bytes() as usize;
        let first = u64::from(kv_head) * shape.piece_bytes();
        let missing = ids.iter().find(|id| u64::from(**id) >= self.table.rows());
        if kv_head >= shape.kv_heads || missing.is_some() {
            return Err(Error::usage(
                match missing {
                    Some(page) => format!("page {page} does not exist"),
                    None => format!("head {kv_head} does not exist"),
                },
                format!(
                    "there are {} heads and {} pages",
                    shape.kv_heads,
                    self.table.rows()
                ),
            ));
        }
        self.check_queries(queries)?;
        let of_tail = (tail_tokens > 0).then_some(shape.page_bytes());
        if tail_tokens > shape.page_tokens || of_tail.is_some_and(|all| tail.len() as u64 != all) {
            return Err(Error::usage(
                format!(
                    "{tail_tokens} tokens of a tail of {} bytes are not in a page of {} tokens and {} bytes",
                    tail.len(),
                    shape.page_tokens,
                    shape.page_bytes()
                ),
                format!("give a whole page and 0 to {} tokens", shape.page_tokens),
            ));
        }
        let mut sums: Vec<SoftmaxSum> = queries
            .iter()
            .map(|query| SoftmaxSum::new(query.len()))
            .collect();
        let mut bytes = vec![0; piece];
        for id in ids {
            let page = self.table.offset() + u64::from(*id) * shape.page_bytes();
            self.store.read_at(page + first, &mut bytes)?;
            self.add(&mut sums, queries, &bytes, shape.page_tokens, scale);
        }
        if tail_tokens > 0 {
            self.add(
                &mut sums,
                queries,
                &tail[first as usize..],
                tail_tokens,
                scale,
            );
        }
        Ok(sums.into_iter().map(SoftmaxSum::result).collect())
    }

    /// # Errors
    /// [`Error::Usage`] for a query that has not the elements of a head.
    pub(crate) fn check_queries(&self, queries: &[impl AsRef<[f32]>]) -> Result<()> {
        let elements = self.shape.head_elements as usize;
        let mut lengths = queries.iter().map(|query| query.as_ref().len());
        match lengths.find(|length| *length != elements) {
            None => Ok(()),
            Some(length) => Err(Error::usage(
                format!("a query has {length} elements, a head {elements}"),
                format!("use queries of {elements} elements"),
            )),
        }
    }

    fn add(
        &self,
        sums: &mut [SoftmaxSum],
        queries: &[Vec<f32>],
        piece: &[u8],
        tokens: u32,
        scale: f32,
    ) {
        let shape = self.shape;
        let elements = shape.head_elements as usize;
        let values = shape.page_tokens as usize * elements;
        let element = |at: usize| {
            let word = piece.get(at * 2..).and_then(|rest| rest.first_chunk());
            f64::from(shape.value(u16::from_le_bytes(*word.unwrap_or(&[0; 2]))))
        };
        for (sum, query) in sums.iter_mut().zip(queries) {
            for token in 0..tokens as usize {
                let at = token * elements;
                let product = query.iter().enumerate();
                let product: f64 = product.map(|(e, q)| f64::from(*q) * element(at + e)).sum();
                sum.add(product * f64::from(scale), |e| element(values + at + e));
            }
        }
    }
}

/// A softmax that is summed up token by token.
struct SoftmaxSum {
    largest: f64,
    total: f64,
    sums: Vec<f64>,
}

impl SoftmaxSum {
    fn new(elements: usize) -> Self {
        Self {
            largest: f64::NEG_INFINITY,
            total: 0.0,
            sums: vec![0.0; elements],
        }
    }

    fn add(&mut self, product: f64, value: impl Fn(usize) -> f64) {
        let next = self.largest.max(product);
        let (before, weight) = ((self.largest - next).exp(), (product - next).exp());
        self.largest = next;
        self.total = self.total * before + weight;
        for (element, sum) in self.sums.iter_mut().enumerate() {
            *sum = *sum * before + weight * value(element);
        }
    }

    fn result(self) -> Vec<f32> {
        let share = |sum: &f64| match self.total == 0.0 {
            true => 0.0,
            false => (sum / self.total) as f32,
        };
        self.sums.iter().map(share).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme_host::StoreOptions;

    fn store() -> Arc<Store> {
        let device = "sim:mem?size=4MiB&block=512";
        Arc::new(Store::open(device, &StoreOptions::default()).unwrap())
    }

    const SHAPE: KvShape = KvShape {
        kv_heads: 2,
        head_elements: 8,
        page_tokens: 16,
        is_bf16: false,
    };

    #[test]
    fn a_softmax_over_pages_is_that_of_all_tokens() {
        let store = store();
        let pages = KvStore::new(&store, 512, 4, SHAPE).unwrap();
        // Keys are zero but for one token, whose values are ones: its weight is e^4 among 47 of weight 1.
        let mut image = vec![0u8; SHAPE.page_bytes() as usize];
        let mut put = |at: usize, value: f32| {
            image[at * 2..][..2].copy_from_slice(&SHAPE.stored(value).to_le_bytes());
        };
        let head = SHAPE.piece_bytes() as usize / 2;
        for element in 0..8 {
            put(head + 3 * 8 + element, 1.0);
            put(head + 16 * 8 + 3 * 8 + element, 1.0);
        }
        store
            .write_at(512 + 2 * SHAPE.page_bytes(), &image)
            .unwrap();
        let query = vec![vec![1.0; 8]];
        let found = pages.attend(&query, &[0, 2, 1], 1, (&[], 0), 0.5).unwrap();
        let weight = 4.0f64.exp();
        let expected = (weight / (weight + 47.0)) as f32;
        assert!(
            found[0].iter().all(|y| (y - expected).abs() < 1e-6),
            "{found:?}"
        );
        // The same page is in memory, and four tokens of it count.
        let found = pages.attend(&query, &[], 1, (&image, 4), 0.5).unwrap();
        let expected = (weight / (weight + 3.0)) as f32;
        assert!(
            found[0].iter().all(|y| (y - expected).abs() < 1e-6),
            "{found:?}"
        );
        assert_eq!(
            pages.attend(&query, &[], 0, (&[], 0), 1.0).unwrap(),
            [vec![0.0; 8]]
        );
    }

    #[test]
    fn shapes_that_cannot_be_are_refused() {
        let store = store();
        let with = |change: fn(&mut KvShape)| {
            let mut shape = SHAPE;
            change(&mut shape);
            KvStore::new(&store, 0, 1, shape).map(drop)
        };
        assert!(with(|_| ()).is_ok());
        assert!(with(|shape| shape.head_elements = 12).is_err());
        assert!(with(|shape| shape.head_elements = 136).is_err());
        assert!(with(|shape| shape.page_tokens = 8).is_err());
        assert!(with(|shape| shape.page_tokens = 0).is_err());
        assert!(with(|shape| shape.kv_heads = 0).is_err());
        // Their product was computed in 64 bits, and so could be that of a small page.
        for (page_tokens, kv_heads) in [(1 << 31, u32::MAX), (1 << 30, 1 << 29)] {
            let shape = KvShape {
                page_tokens,
                kv_heads,
                ..SHAPE
            };
            let error = KvStore::new(&store, 0, 1, shape).unwrap_err().to_string();
            assert!(error.contains("exceed the 32 bits"), "{error}");
        }
        assert!(KvStore::new(&store, 256, 1, SHAPE).is_err());
        assert!(KvStore::new(&store, 0, 1 << 20, SHAPE).is_err());
        let pages = KvStore::new(&store, 0, 4, SHAPE).unwrap();
        assert!(pages.attend(&[], &[4], 0, (&[], 0), 1.0).is_err());
        assert!(pages.attend(&[], &[3], 2, (&[], 0), 1.0).is_err());
    }

    /// More tokens than there are, and shorter vectors, gave the attention of fewer.
    #[test]
    fn tails_and_queries_that_do_not_fit_are_refused() {
        let pages = KvStore::new(&store(), 0, 4, SHAPE).unwrap();
        let page = vec![0; SHAPE.page_bytes() as usize];
        let attend = |elements: usize, bytes: usize, tokens: u32| {
            let queries = [vec![1.0; elements]];
            let found = pages.attend(&queries, &[1], 1, (&page[..bytes], tokens), 1.0);
            found.map(drop).map_err(|error| error.to_string())
        };
        assert_eq!(attend(8, page.len(), 16), Ok(()));
        assert_eq!(attend(8, 0, 0), Ok(()));
        let sizes = "of 16 tokens and 1024 bytes";
        for (bytes, tokens) in [(page.len(), 17), (page.len(), u32::MAX), (512, 1), (0, 1)] {
            let error = attend(8, bytes, tokens).unwrap_err();
            let says = format!("{tokens} tokens of a tail of {bytes} bytes");
            assert!(error.contains(&says) && error.contains(sizes), "{error}");
        }
        for elements in [7, 9, 0] {
            let error = attend(elements, 0, 0).unwrap_err();
            let says = format!("a query has {elements} elements, a head 8");
            assert!(error.contains(&says), "{error}");
        }
    }
}
