/* Every function of nvme_gpu_compat.h, on a file that this program fills. */
#include "nvme_gpu_compat.h"
#include "check.h"
#include <errno.h>

#define FAILED(wanted, call)                                                                      \
    do {                                                                                          \
        errno = 0;                                                                                \
        CHECK((call) == -1);                                                                      \
        CHECK(errno == (wanted));                                                                 \
        CHECK(nvme_gpu_last_error()[0] && nvme_gpu_last_remedy()[0]);                             \
    } while (0)

struct counted {
    GpuSgl sgl;
    int calls;
    uint16_t status;
};

static void ended(void *context, const struct spdk_nvme_cpl *completion)
{
    struct counted *counted = context;
    counted->calls += 1;
    counted->status = completion->status;
}

int main(int count, char **arguments)
{
    if (count != 2) return 2;
    const char *path = arguments[1];
    static unsigned char out[65536], in[65536];
    for (size_t i = 0; i < sizeof(out); ++i) out[i] = (unsigned char)(i / 512 + i);

    FAILED(EINVAL, init_spdk_nvme());
    CHECK(spdk_ctx() == NULL && nvme_gpu_init() == -1);
    CHECK(setenv("NVME_GPU_INDEX", "x", 1) == 0);
    FAILED(EINVAL, read_nvme_to_gpu(path, 0, 1, in));
    CHECK(setenv("NVME_GPU_INDEX", "-1", 1) == 0 && setenv("NVME_GPU_DEVICE", path, 1) == 0);
    static const char *const no_flags[] = { "yes", "true", "no", "2", "01", " 1" };
    for (size_t i = 0; i < sizeof(no_flags) / sizeof(no_flags[0]); ++i) {
        CHECK(setenv("NVME_GPU_ALLOW_WRITE", no_flags[i], 1) == 0);
        FAILED(EINVAL, read_nvme_to_gpu(path, 0, 1, in));
        FAILED(EINVAL, init_spdk_nvme());
    }
    CHECK(setenv("NVME_GPU_ALLOW_WRITE", "0", 1) == 0);

    CHECK(init_gds() == 0);
    CHECK(write_gpu_to_nvme(path, 0, sizeof(out), out) == (ssize_t)sizeof(out));
    CHECK(read_nvme_to_gpu(path, 1, 1000, in) == 1000 && memcmp(in, out + 1, 1000) == 0);
    CHECK(gds_read_nvme_to_gpu(path, 0, 4096, in) == 4096 && memcmp(in, out, 4096) == 0);
    BatchReadRequest requests[3] = { { 0, 100, in, 7 }, { 512, 100, in + 100, 7 }, { 1 << 30, 100, in + 200, 7 } };
    CHECK(async_batch_read(path, requests, 2) == 0 && requests[1].result == 100);
    CHECK(memcmp(in, out, 100) == 0 && memcmp(in + 100, out + 512, 100) == 0);
    FAILED(EINVAL, async_batch_read(path, requests, 3));
    CHECK(requests[0].result == 100 && requests[2].result == -1);
    FAILED(EINVAL, async_batch_read(path, requests, -1));
    FAILED(EINVAL, async_batch_read(path, NULL, 1));
    FAILED(EINVAL, read_nvme_to_gpu(path, -1, 1, in));
    FAILED(EINVAL, read_nvme_to_gpu(path, 0, 1, NULL));
    FAILED(EINVAL, read_nvme_to_gpu(NULL, 0, 1, in));
    FAILED(EINVAL, write_gpu_to_nvme(path, 0, SIZE_MAX, out));
    FAILED(EIO, read_nvme_to_gpu("/no/such/file", 0, 1, in));
    cleanup_gds();

    CHECK(init_spdk_nvme() == 0);
    SPDKContext *ctx = spdk_ctx();
    CHECK(ctx != NULL && ctx->ns != NULL && ctx->qpair == NULL);
    FAILED(EINVAL, submit_gpu_read(ctx, 0, 1, in));
    CHECK(create_io_qpair() == 0);
    CHECK(submit_gpu_read(ctx, 3, 2, in) == 1024 && submit_gpu_read(ctx, 0, 1, in + 1024) == 512);
    int done = 0;
    while (done < 2) {
        int more = poll_completions(ctx);
        CHECK(more >= 0);
        done += more;
    }
    CHECK(memcmp(in, out + 3 * 512, 1024) == 0 && memcmp(in + 1024, out, 512) == 0);
    FAILED(EINVAL, submit_gpu_read(ctx, UINT64_MAX, 1, in));
    FAILED(EINVAL, submit_gpu_read(NULL, 0, 1, in));
    FAILED(EINVAL, poll_completions(NULL));
    FAILED(EINVAL, gpu_queue_init());
    GpuSegment segments[2] = { { in, 700 }, { in + 1000, 2000 } };
    struct counted counted = { { segments, 2, 0, 0, 0 }, 0, 9 };
    CHECK(spdk_nvme_ns_cmd_readv_ext(ctx->ns, ctx->qpair, 8, 3, ended, &counted, gpu_reset_sgl_fn, gpu_next_sge_fn,
                                     NULL) == 0);
    while (counted.calls == 0) CHECK(poll_completions(ctx) >= 0);
    CHECK(counted.calls == 1 && counted.status == 0);
    CHECK(memcmp(in, out + 8 * 512, 700) == 0 && memcmp(in + 1000, out + 8 * 512 + 700, 836) == 0);
    FAILED(EINVAL, spdk_nvme_ns_cmd_readv_ext(ctx->ns, ctx->qpair, 0, 100, ended, &counted, gpu_reset_sgl_fn,
                                              gpu_next_sge_fn, NULL));
    FAILED(EINVAL, spdk_nvme_ns_cmd_readv_ext(ctx->ns, ctx->qpair, 0, 1, ended, &counted, NULL, gpu_next_sge_fn,
                                              NULL));
    gpu_reset_sgl_fn(&counted, 800);
    void *address;
    uint32_t length;
    CHECK(gpu_next_sge_fn(&counted, &address, &length) == 0 && address == in + 1100 && length == 1900);
    CHECK(gpu_next_sge_fn(&counted, &address, &length) == -1 && gpu_next_sge_fn(NULL, &address, &length) == -1);

    CHECK(nvme_gpu_init() == 0);
    CHECK(nvme_gpu_read(7, 100, in) == 100 && memcmp(in, out + 7, 100) == 0);
    /* Nothing says when it ends: it has memory of its own. */
    static unsigned char aside[100];
    CHECK(nvme_gpu_read_async(0, 100, aside, NULL) == 0);
    FAILED(EINVAL, nvme_gpu_read_async(UINT64_MAX, 100, in, NULL));
    static unsigned char buffer[2048];
    int request = nvme_gpu_create_request(buffer, sizeof(buffer));
    CHECK(request > 0);
    CHECK(nvme_gpu_add_kind(request, 1, 4, 2, 512) == 0 && nvme_gpu_add_kind(request, 2, 10, 8, 256) == 0);
    FAILED(EINVAL, nvme_gpu_add_kind(request, 3, UINT64_MAX, 1, 512));
    FAILED(EINVAL, nvme_gpu_add_kind(request, 3, 0, 1, 0));
    FAILED(EINVAL, nvme_gpu_add_kind(request + 1, 1, 0, 1, 512));
    CHECK(read_nvme_kind(request, 1, 1, 1, in) == 512 && memcmp(in, out + 5 * 512, 512) == 0);
    FAILED(EINVAL, read_nvme_kind(request, 1, 1, 2, in));
    FAILED(EINVAL, read_nvme_kind(request, 1, UINT64_MAX, 2, in));
    FAILED(EINVAL, read_nvme_kind(request, 9, 0, 1, in));
    int kinds[2] = { 2, 1 };
    FAILED(EINVAL, nvme_gpu_batch_read(request, kinds, 2));
    CHECK(nvme_gpu_batch_read(request, kinds, 1) == 2048 && memcmp(buffer, out + 2560, 2048) == 0);
    CHECK(nvme_gpu_batch_read(request, kinds + 1, 1) == 1024 && memcmp(buffer, out + 2048, 1024) == 0);
    FAILED(EINVAL, nvme_gpu_batch_read(request, NULL, 1));
    nvme_gpu_release_request(request);
    FAILED(EINVAL, nvme_gpu_batch_read(request, kinds, 1));
    nvme_gpu_cleanup();

    gpunvme_layer_loader_t loader;
    CHECK(gpunvme_layer_loader_init(&loader, path, 4096, 1) == 0);
    CHECK(gpunvme_layer_loader_block_size(&loader) == 512 && gpunvme_layer_loader_max_transfer(&loader) >= 4096);
    CHECK(gpunvme_layer_loader_ns_blocks(&loader) >= 2048);
    CHECK(gpunvme_load_layer(&loader, 2, 3000, in) == 0 && memcmp(in, out + 1024, 3000) == 0);
    CHECK(gpunvme_layer_loader_load_layer(&loader, 3, 512, in) == 0 && memcmp(in, out + 1536, 512) == 0);
    CHECK(gpunvme_load_layer_vram(&loader, 4, 512, in) == 0 && memcmp(in, out + 2048, 512) == 0);
    FAILED(EINVAL, gpunvme_load_layer(&loader, 0, 4097, in));
    FAILED(EINVAL, gpunvme_load_layer(&loader, UINT64_MAX, 1, in));
    gpunvme_layer_loader_destroy(&loader);
    FAILED(EBADF, gpunvme_load_layer(&loader, 0, 1, in));
    CHECK(gpunvme_layer_loader_block_size(&loader) == 0);
    FAILED(EINVAL, gpunvme_layer_loader_init(NULL, path, 1, 1));
    FAILED(EINVAL, gpunvme_layer_loader_init(&loader, path, 1, 0));
    CHECK(gpunvme_layer_loader_init(&loader, "ffff:ff:1f.7", 1, 1) == -1 && errno != 0);
    // With a depth, passes after the first one are read ahead; lengths and places are odd, and one comes out of turn.
    CHECK(gpunvme_layer_loader_init(&loader, path, 4096, 2) == 0);
    for (int pass = 0; pass < 4; ++pass) {
        for (int layer = 0; layer < 5; ++layer) {
            memset(in, 0xEE, sizeof in);
            size_t bytes = 700 + 13 * layer;
            CHECK(gpunvme_load_layer(&loader, 2 * layer, bytes, in) == 0);
            CHECK(memcmp(in, out + 1024 * layer, bytes) == 0 && (unsigned char)in[bytes] == 0xEE);
            if (pass == 2) CHECK(gpunvme_load_layer(&loader, 1, 512, in) == 0 && memcmp(in, out + 512, 512) == 0);
        }
    }
    // A write while layers are read ahead: a layer asked for after the write has the written bytes.
    for (int pass = 0; pass < 3; ++pass) {
        for (int layer = 0; layer < 5; ++layer) {
            size_t bytes = 700 + 13 * layer;
            for (size_t i = 0; i < 700; ++i) out[1024 * layer + i] ^= (unsigned char)(layer + pass + 1);
            CHECK(write_gpu_to_nvme(path, 1024 * layer, 700, out + 1024 * layer) == 700);
            CHECK(gpunvme_load_layer(&loader, 2 * layer, bytes, in) == 0 && memcmp(in, out + 1024 * layer, bytes) == 0);
        }
    }
    FAILED(EINVAL, gpunvme_load_layer(&loader, UINT64_MAX / 512, 512, in));
    gpunvme_layer_loader_destroy(&loader);
    FAILED(EBADF, gpunvme_load_layer(&loader, 0, 700, in));
    CHECK(gpunvme_layer_loader_init(&loader, "sim:mem?size=4MiB&block=4096", 1 << 20, 2) == 0);
    CHECK(gpunvme_layer_loader_block_size(&loader) == 4096 && gpunvme_layer_loader_ns_blocks(&loader) == 1024);
    gpunvme_layer_loader_destroy(&loader);
    /* A simulated drive fetches no entries from memory of a GPU: it stays open as it was. */
    CHECK(setenv("NVME_GPU_INDEX", "0", 1) == 0 && setenv("NVME_GPU_DEVICE", path, 1) == 0);
    FAILED(EINVAL, gpu_queue_init());
    CHECK(setenv("NVME_GPU_DEVICE", "sim:mem?size=1MiB&queues=32&block=512", 1) == 0);
    FAILED(ENOTSUP, gpu_queue_init());
    CHECK(create_io_qpair() == 0);
    FAILED(ENOTSUP, gpu_queue_init());
    CHECK(ctx->qpair != NULL && (void *)ctx->qpair == (void *)ctx->ns);
    memset(in, 1, 512);
    CHECK(submit_gpu_read(ctx, 5, 1, in) == 512);
    FAILED(EINVAL, gpu_queue_init());
    while ((done = poll_completions(ctx)) == 0) {}
    CHECK(done == 1 && in[0] == 0 && in[511] == 0);
    nvme_gpu_cleanup();
    puts("compat: ok");
    return 0;
}
