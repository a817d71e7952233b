//! The names of the kernels.

/// Takes a [`GemvParameters`](crate::GemvParameters).
pub const GEMV: &str = "nvme_gemv";
/// Takes a [`GemvParameters`](crate::GemvParameters) that [is wide](crate::GemvParameters::is_wide), and as many
/// blocks as it has [tiles](crate::GemvParameters::tiles), or fewer.
pub const GEMV_WIDE: &str = "nvme_gemv_wide";
/// Takes a [`GemvParameters`](crate::GemvParameters) that [is quantised](crate::GemvParameters::is_quantised), and
/// as many blocks as it has [`items`](crate::GemvParameters::items), or fewer, with
/// [`QUANTISED_SHARED`](crate::GemvParameters::QUANTISED_SHARED) bytes each.
pub const GEMV_QUANTISED: &str = "nvme_gemv_quantised";
/// Takes a [`RmsNorm`](crate::RmsNorm).
pub const RMS_NORM: &str = "nvme_rms_norm";
/// Takes a [`RopeParameters`](crate::RopeParameters).
pub const ROPE: &str = "nvme_rope";
/// Takes an [`AttentionParameters`](crate::AttentionParameters).
pub const ATTENTION: &str = "nvme_attention";
/// Takes a [`SiluMul`](crate::SiluMul).
pub const SILU_MUL: &str = "nvme_silu_mul";
/// Takes an [`AddBias`](crate::AddBias).
pub const ADD_BIAS: &str = "nvme_add_bias";
/// Takes an [`ArgmaxParameters`](crate::ArgmaxParameters).
pub const ARGMAX: &str = "nvme_argmax";
/// Takes an [`ArgmaxParameters`](crate::ArgmaxParameters).
pub const TAKE_TOKEN: &str = "nvme_take_token";
/// Takes an [`UnpackParameters`](crate::UnpackParameters).
pub const UNPACK: &str = "nvme_unpack";
/// Takes a [`experts::RouteParameters`](crate::experts::RouteParameters). Of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_ROUTE: &str = "nvme_moe_route";
/// Takes an [`experts::AdmitParameters`](crate::experts::AdmitParameters). Of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_ADMIT: &str = "nvme_moe_admit";
/// Takes a [`experts::published::AdmitPublished`](crate::experts::published::AdmitPublished). Of
/// [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_ADMIT_PUBLISHED: &str = "nvme_moe_admit_published";
/// Takes a [`experts::published::ArrangeParameters`](crate::experts::published::ArrangeParameters). Of
/// [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_ARRANGE: &str = "nvme_moe_arrange";
/// Takes a [`experts::SettleParameters`](crate::experts::SettleParameters). Of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_SETTLE: &str = "nvme_moe_settle";
/// Takes a [`experts::ProductParameters`](crate::experts::ProductParameters). Of
/// [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_PRODUCT: &str = "nvme_moe_product";
/// Takes a [`experts::ProductParameters`](crate::experts::ProductParameters) whose products [are
/// wide](crate::GemvParameters::is_wide). Of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_PRODUCT_WIDE: &str = "nvme_moe_product_wide";
/// Takes a [`experts::ProductParameters`](crate::experts::ProductParameters) whose products
/// [are quantised](crate::GemvParameters::is_quantised), and blocks as [`GEMV_QUANTISED`]. Of
/// [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_PRODUCT_QUANTISED: &str = "nvme_moe_product_quantised";
/// Takes what [`MOE_PRODUCT_QUANTISED`] does, with as many blocks as
/// [`batched_blocks`](crate::experts::ProductParameters::batched_blocks) says. Of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_PRODUCT_BATCHED: &str = "nvme_moe_product_batched";
/// Takes an [`experts::ActivateParameters`](crate::experts::ActivateParameters). Of
/// [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_ACTIVATE: &str = "nvme_moe_activate";
/// Takes a [`experts::JoinParameters`](crate::experts::JoinParameters). Of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const MOE_JOIN: &str = "nvme_moe_join";

/// Takes a [`GemvStreamed`](crate::GemvStreamed). Of [`STREAMED_PTX`](crate::STREAMED_PTX).
pub const GEMV_STREAMED: &str = "nvme_gemv_streamed";
/// Takes a [`GemvGathered`](crate::GemvGathered). Of [`STREAMED_PTX`](crate::STREAMED_PTX).
pub const GEMV_GATHERED: &str = "nvme_gemv_gathered";

/// Takes a [`gemm::GemmStreamed`](crate::gemm::GemmStreamed). Of [`GEMM_PTX`](crate::GEMM_PTX).
pub const GEMM_STREAMED: &str = "nvme_gemm_streamed";
/// Takes a [`gemm::GemmParameters`](crate::gemm::GemmParameters). Of [`GEMM_PTX`](crate::GEMM_PTX).
pub const GEMM: &str = "nvme_gemm";
/// Takes a [`gemm::GemmParameters`](crate::gemm::GemmParameters). Of [`GEMM_PTX`](crate::GEMM_PTX).
pub const GEMM_CLEAR: &str = "nvme_gemm_clear";
/// All kernels of [`GEMM_PTX`](crate::GEMM_PTX).
pub const GEMMS: [&str; 3] = [GEMM_STREAMED, GEMM, GEMM_CLEAR];

/// Takes a [`PagedAttention`](crate::PagedAttention). Of [`PAGED_PTX`](crate::PAGED_PTX).
pub const ATTENTION_PAGED: &str = "nvme_attention_paged";
/// Takes a [`PagedAttention`](crate::PagedAttention). Of [`PAGED_PTX`](crate::PAGED_PTX).
pub const ATTENTION_JOIN: &str = "nvme_attention_join";
/// Takes a [`SummarisePages`](crate::choose::SummarisePages). Of [`CHOOSE_PTX`](crate::CHOOSE_PTX).
pub const PAGE_SUMMARIES: &str = "nvme_page_summaries";
/// Takes a [`ChoosePages`](crate::choose::ChoosePages). Of [`CHOOSE_PTX`](crate::CHOOSE_PTX).
pub const SCORE_PAGES: &str = "nvme_score_pages";
/// Takes a [`ChoosePages`](crate::choose::ChoosePages). Of [`CHOOSE_PTX`](crate::CHOOSE_PTX).
pub const CHOOSE_PAGES: &str = "nvme_choose_pages";
/// Takes a [`SearchLaunch`](crate::search::SearchLaunch). Of [`SEARCH_PTX`](crate::SEARCH_PTX).
pub const SEARCH: &str = "nvme_search";
/// Takes a [`NgramLaunch`](crate::ngrams::NgramLaunch). Of [`NGRAMS_PTX`](crate::NGRAMS_PTX).
pub const NGRAM_ROWS: &str = "nvme_ngram_rows";
/// Takes a [`NgramLaunch`](crate::ngrams::NgramLaunch). Of [`NGRAMS_PTX`](crate::NGRAMS_PTX).
pub const NGRAM_COMMIT: &str = "nvme_ngram_commit";

/// All kernels of [`PTX`](crate::PTX).
pub const ALL: [&str; 11] = [
    GEMV,
    GEMV_WIDE,
    GEMV_QUANTISED,
    RMS_NORM,
    ROPE,
    ATTENTION,
    SILU_MUL,
    ADD_BIAS,
    ARGMAX,
    TAKE_TOKEN,
    UNPACK,
];

/// All kernels of [`EXPERTS_PTX`](crate::EXPERTS_PTX).
pub const EXPERTS: [&str; 11] = [
    MOE_ROUTE,
    MOE_ADMIT,
    MOE_ADMIT_PUBLISHED,
    MOE_ARRANGE,
    MOE_SETTLE,
    MOE_PRODUCT,
    MOE_PRODUCT_WIDE,
    MOE_PRODUCT_QUANTISED,
    MOE_PRODUCT_BATCHED,
    MOE_ACTIVATE,
    MOE_JOIN,
];
