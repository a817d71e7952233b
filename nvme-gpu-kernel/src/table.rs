//! The list of the kernels of [`PTX`](crate::PTX), one line each, for the host to load and launch, and for
//! the stand-in of CUDA.

use core::ffi::CStr;

/// Declares the kernels, with documentation: `Variant "symbol" shares`.
macro_rules! kernels {
    ($($(#[$about:meta])+ $name:ident $symbol:literal $shares:literal;)+) => {
        /// An entry point of the kernels.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Kernel {
            $($(#[$about])+ $name,)+
        }

        impl Kernel {
            /// All kernels.
            pub const ALL: [Self; [$($symbol),+].len()] = [$(Self::$name),+];

            /// Returns the symbol in the PTX.
            pub const fn symbol(self) -> &'static CStr {
                match self {
                    $(Self::$name => match CStr::from_bytes_with_nul(concat!($symbol, "\0").as_bytes()) {
                        Ok(symbol) => symbol,
                        Err(_) => unreachable!(),
                    },)+
                }
            }

            /// Returns the symbol as text.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $symbol,)+
                }
            }

            /// True if all threads share its queues, so that results go to cells.
            pub const fn shares(self) -> bool {
                match self {
                    $(Self::$name => $shares,)+
                }
            }
        }
    };
}

kernels! {
    /// One thread drives each queue; each block has one such thread.
    Owner "nvme_owner" false;
    /// One warp a queue.
    Warp "nvme_warp" false;
    /// One block of 128 threads drives each queue.
    Block "nvme_block" false;
    /// Same as [`Owner`](Self::Owner), with a trace.
    OwnerTraced "nvme_owner_traced" false;
    /// Same as [`Warp`](Self::Warp), with a trace.
    WarpTraced "nvme_warp_traced" false;
    /// Same as [`Block`](Self::Block), with a trace.
    BlockTraced "nvme_block_traced" false;
    /// Same as [`Shared`](Self::Shared), with a trace.
    SharedTraced "nvme_shared_traced" true;
    /// Any thread on any queue.
    Shared "nvme_shared" true;
    /// Same with shorter passes, compiled for at most 64 registers a thread: more warps at once, each slower.
    SharedNarrow "nvme_shared_narrow" true;
    /// Any thread on any queue, several commands each, waited for in reverse.
    Tokens "nvme_tokens" true;
    /// Check of data that was read.
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
