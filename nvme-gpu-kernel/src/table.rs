//! The kernels of [`PTX`](crate::PTX), one line each: what the host loads, launches and imitates.

use core::ffi::CStr;

/// Declares the kernels: `Variant "symbol" shares` with its documentation.
macro_rules! kernels {
    ($($(#[$about:meta])+ $name:ident $symbol:literal $shares:literal;)+) => {
        /// An entry point of the kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kernel {
            $($(#[$about])+ $name,)+
        }

        impl Kernel {
            /// Every one.
            pub const ALL: [Self; [$($symbol),+].len()] = [$(Self::$name),+];

            /// The symbol in the PTX.
            pub const fn symbol(self) -> &'static CStr {
                match self {
                    $(Self::$name => match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                        Ok(symbol) => symbol,
                        Err(_) => unreachable!(),
                    },)+
                }
            }

            /// As [`symbol`](Self::symbol), as text.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $symbol,)+
                }
            }

            /// Whether its queues are shared by all threads: results go to cells.
            pub const fn shares(self) -> bool {
                match self {
                    $(Self::$name => $shares,)+
                }
            }
        }
    };
}

kernels! {
    /// One thread per queue: one thread in each block.
    Owner "nvme_owner" false;
    /// One warp per queue.
    Warp "nvme_warp" false;
    /// One block of 128 threads per queue.
    Block "nvme_block" false;
    /// As [`Owner`](Self::Owner), recording what it does.
    OwnerTraced "nvme_owner_traced" false;
    /// As [`Warp`](Self::Warp), recording what it does.
    WarpTraced "nvme_warp_traced" false;
    /// As [`Block`](Self::Block), recording what it does.
    BlockTraced "nvme_block_traced" false;
    /// As [`Shared`](Self::Shared), recording what it does.
    SharedTraced "nvme_shared_traced" true;
    /// Any thread on any queue.
    Shared "nvme_shared" true;
    /// The same with shorter passes, compiled for no more than 64 registers per thread: more warps at a
    /// time, each slower.
    SharedNarrow "nvme_shared_narrow" true;
    /// Any thread on any queue, several commands each, waited for in reverse.
    Tokens "nvme_tokens" true;
    /// Checks data that was read.
    Verify "nvme_verify" false;
    /// Bare limit: 64 bytes, a fence, a flag, an answer of 16 bytes.
    PingPong "nvme_pingpong" false;
    /// Bare limit: submission queue entries as fast as the link takes them.
    SqeWrites "nvme_sqe_writes" false;
}

#[cfg(test)]
mod tests {
    use super::Kernel;

    #[test]
    fn the_table_names_every_entry_of_the_ptx_and_no_other() {
        let entries = crate::PTX.split(".visible .entry ").skip(1);
        let mut found: Vec<_> = entries
            .map(|rest| rest.split('(').next().unwrap_or("").trim())
            .collect();
        let mut named = Kernel::ALL.map(Kernel::name);
        found.sort_unstable();
        named.sort_unstable();
        assert_eq!(found, named);
        for kernel in Kernel::ALL {
            assert_eq!(kernel.symbol().to_str(), Ok(kernel.name()));
        }
    }
}
