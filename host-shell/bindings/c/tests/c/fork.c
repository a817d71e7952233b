/* A child of fork(): every call on a handle of its parent is refused, closing does nothing, and the parent's store works
   on. A store that the child opens itself works. */
#include "nvme_gpu_compat.h"
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"
#include "histogram.h"
#include <errno.h>
#include <sys/wait.h>
#include <unistd.h>

static nvme_gpu_t *store;
static nvme_gpu_table_t *table;
static nvme_gpu_pending_t *running, *ended;
static nvme_gpu_device_t *device;
static gpunvme_layer_loader_t loader;
static unsigned char out[8192], in[8192];

#define FORKED(call)                                                                              \
    do {                                                                                          \
        USAGE(call);                                                                              \
        CHECK(strstr(nvme_gpu_last_error(), "fork"));                                             \
    } while (0)
/* Of functions that return 0 for a bad handle. */
#define NOTHING(call)                                                                             \
    do {                                                                                          \
        CHECK((call) == 0);                                                                       \
        CHECK(strstr(nvme_gpu_last_error(), "fork"));                                             \
    } while (0)
#define REFUSED(call)                                                                             \
    do {                                                                                          \
        errno = 0;                                                                                \
        CHECK((call) == -1);                                                                      \
        CHECK(errno == EINVAL && strstr(nvme_gpu_last_error(), "fork"));                          \
    } while (0)

static void of_store(void)
{
    nvme_gpu_path_info path = { .size = sizeof path };
    nvme_gpu_statistics counts = { .size = sizeof counts };
    nvme_gpu_io io = { NVME_GPU_READ, 0, 0, 512, in };
    nvme_gpu_pending_t *pending;
    nvme_gpu_table_t *other;

    NOTHING(nvme_gpu_len(store));
    NOTHING(nvme_gpu_block_size(store));
    FORKED(nvme_gpu_path(store, &path));
    FORKED(nvme_gpu_stats(store, &counts));
    FORKED(nvme_gpu_flush(store));
    FORKED(nvme_gpu_register(store, in, sizeof in));
    FORKED(nvme_gpu_unregister(store, in));
    FORKED(nvme_gpu_pread(store, in, 512, 0));
    FORKED(nvme_gpu_pwrite(store, in, 512, 0));
    FORKED(nvme_gpu_pread_async(store, in, 512, 0, NULL, &pending));
    FORKED(nvme_gpu_pwrite_async(store, in, 512, 0, NULL, &pending));
    FORKED(nvme_gpu_batch(store, &io, 1));
    FORKED(nvme_gpu_batch_async(store, &io, 1, NULL, &pending));
    FORKED(nvme_gpu_table_open(store, 0, 4, 512, &other));
    FORKED(nvme_gpu_pending_poll(running));
    FORKED(nvme_gpu_pending_wait(running, UINT64_MAX));
    FORKED(nvme_gpu_pending_wait(ended, 0));
}

static void of_table(void)
{
    nvme_gpu_report report = { .size = sizeof report };
    nvme_gpu_pending_t *pending;
    int64_t id = 0;

    NOTHING(nvme_gpu_table_rows(table));
    NOTHING(nvme_gpu_table_row_bytes(table));
    NOTHING(nvme_gpu_table_row_bytes_as(table, "float16", "float32"));
    FORKED(nvme_gpu_gather(table, GATHER(&id, NVME_GPU_I64, 1, in, 0, NULL, NULL), NULL));
    FORKED(nvme_gpu_gather_async(table, GATHER(&id, NVME_GPU_I64, 1, in, 0, NULL, NULL), &pending));
    FORKED(nvme_gpu_gather(table, GATHER_AS("float16", "float32", &id, NVME_GPU_I64, 1, in, 0, NULL, NULL), NULL));
    FORKED(nvme_gpu_gather_async(table, GATHER_AS("float16", "float32", &id, NVME_GPU_I64, 1, in, 0, NULL, NULL),
          &pending));
    FORKED(nvme_gpu_scatter(table, SCATTER(&id, NVME_GPU_I64, 1, in, 0, NVME_GPU_DUPLICATES_LAST, NULL, NULL), NULL));
    FORKED(nvme_gpu_scatter_async(table, SCATTER(&id, NVME_GPU_I64, 1, in, 0, NVME_GPU_DUPLICATES_LAST, NULL, NULL),
          &pending));
    FORKED(nvme_gpu_scatter_add(table, ADD(&id, NVME_GPU_I64, 1, in, 0, NVME_GPU_ADD_F32, NULL, NULL), NULL));
    FORKED(nvme_gpu_scatter_add_async(table, ADD(&id, NVME_GPU_I64, 1, in, 0, NVME_GPU_ADD_F32, NULL, NULL), &pending));
    FORKED(nvme_gpu_pending_report(ended, &report));
}

static void of_device(void)
{
    nvme_gpu_device_setup setup = { .size = sizeof setup, .layout = NVME_GPU_DEVICE_LAYOUT, .buffer_bytes = 4096 };
    uint32_t over;
    nvme_gpu_device_t *other;
    nvme_gpu_queues queues;
    nvme_gpu_rows rows;

    FORKED(nvme_gpu_device_queues(store, &setup, &queues, &other));
    FORKED(nvme_gpu_device_begin(device));
    FORKED(nvme_gpu_device_end(device, &over));
    FORKED(nvme_gpu_device_rows(table, NVME_GPU_DEVICE_LAYOUT, &rows));
    FORKED(nvme_gpu_device_check(store, NULL));
}

/* The layer under other projects' names: what was opened by a path is the parent's as well. */
static void of_paths(const char *path, SPDKContext *context)
{
    CHECK(spdk_ctx() == NULL);
    REFUSED(init_spdk_nvme());
    REFUSED(create_io_qpair());
    REFUSED(gpu_queue_init());
    REFUSED(submit_gpu_read(context, 0, 1, in));
    REFUSED(poll_completions(context));
    REFUSED(nvme_gpu_init());
    REFUSED(nvme_gpu_read(0, 512, in));
    REFUSED(nvme_gpu_read_async(0, 512, in, NULL));
    REFUSED(read_nvme_to_gpu(path, 0, 512, in));
    REFUSED(write_gpu_to_nvme(path, 0, 512, in));
    REFUSED(gpunvme_load_layer(&loader, 0, 512, in));
    CHECK(gpunvme_layer_loader_block_size(&loader) == 0 && gpunvme_layer_loader_ns_blocks(&loader) == 0);
    gpunvme_layer_loader_destroy(&loader);
    cleanup_gds();
    CHECK(write_gpu_to_nvme(path, 0, 512, in) == 512);
    cleanup_gds();
}

/* A store that the child opens for itself works; it is returned closed. NULL with sanitizers: the allocator of GCC 12's
   does not know of fork(), so a lock of it that a thread of the parent holds stays held in the child, and the thread of
   the child's simulated drive waits for it. Programs without sanitizers show this part. */
static nvme_gpu_t *own_store(void)
{
#ifdef __SANITIZE_ADDRESS__
    return NULL;
#else
    nvme_gpu_t *own;

    OK(nvme_gpu_open("sim:mem?size=1MiB", -1, NULL, &own));
    OK(nvme_gpu_pwrite(own, out, 512, 0));
    OK(nvme_gpu_pread(own, in, 512, 0));
    CHECK(memcmp(in, out, 512) == 0);
    nvme_gpu_close(own);
    CLOSED(nvme_gpu_flush(own));
    return own;
#endif
}

static int child(const char *path, SPDKContext *context)
{
    nvme_gpu_t *own;

    of_store();
    of_table();
    if (device) of_device();
    of_paths(path, context);
    nvme_gpu_pending_free(running);
    nvme_gpu_pending_free(ended);
    nvme_gpu_table_close(table);
    nvme_gpu_device_close(device);
    nvme_gpu_close(store);
    FORKED(nvme_gpu_pread(store, in, 512, 0));
    own = own_store();
    /* A grandchild is refused as well. */
    pid_t next = fork();
    if (next == 0) {
        FORKED(nvme_gpu_flush(store));
        if (own) FORKED(nvme_gpu_flush(own));
        exit(0);
    }
    int status;
    CHECK(waitpid(next, &status, 0) == next && status == 0);
    return 0;
}

int main(int count, char **arguments)
{
    if (count != 3) return 2;
    int has_gpu = strncmp(arguments[1], "sim:", 4) == 0;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_device_setup setup = { .size = sizeof setup, .layout = NVME_GPU_DEVICE_LAYOUT, .buffer_bytes = 4096 };
    nvme_gpu_queues queues;
    SPDKContext *context;

    options.gpu_queues = has_gpu ? 2 : 0;
    options.gpu_kernel_queues = has_gpu ? 2 : 0;
    memset(out, 7, sizeof out);
    OK(nvme_gpu_open(arguments[1], has_gpu ? 0 : -1, &options, &store));
    OK(nvme_gpu_pwrite(store, out, sizeof out, 0));
    OK(nvme_gpu_table_open(store, 0, 16, 512, &table));
    OK(nvme_gpu_pread_async(store, in, 512, 0, NULL, &ended));
    OK(nvme_gpu_pending_wait(ended, UINT64_MAX));
    if (has_gpu) OK(nvme_gpu_device_queues(store, &setup, &queues, &device));
    CHECK(setenv("NVME_GPU_DEVICE", arguments[2], 1) == 0 && setenv("NVME_GPU_INDEX", "-1", 1) == 0);
    CHECK(init_spdk_nvme() == 0 && create_io_qpair() == 0 && (context = spdk_ctx()) != NULL);
    CHECK(gpunvme_layer_loader_init(&loader, arguments[2], 4096, 2) == 0);
    for (int pass = 0; pass < 2; ++pass)
        for (unsigned layer = 0; layer < 3; ++layer) CHECK(gpunvme_load_layer(&loader, layer, 512, in) == 0);

    for (int round = 0; round < 3; ++round) {
        /* Under way when the child is made, or ended: its handle is the parent's in both cases. */
        OK(nvme_gpu_pread_async(store, in, 512, 512, NULL, &running));
#ifdef __SANITIZE_ADDRESS__
        /* As little as can be runs at the fork: see own_store(). */
        OK(nvme_gpu_pending_wait(running, UINT64_MAX));
#endif
        fflush(NULL);
        pid_t made = fork();
        CHECK(made >= 0);
        /* exit() runs what is to run at the end of the program in the child, too. */
        if (made == 0) exit(child(arguments[2], context));
        int status;
        CHECK(waitpid(made, &status, 0) == made && status == 0);
        OK(nvme_gpu_pending_wait(running, UINT64_MAX));
        nvme_gpu_pending_free(running);
        memset(in, 0, sizeof in);
        OK(nvme_gpu_pread(store, in, sizeof in, 0));
        CHECK(memcmp(in, out, sizeof in) == 0);
        CHECK(gpunvme_load_layer(&loader, 1, 512, in) == 0);
        CHECK(nvme_gpu_read(0, 512, in) == 512);
    }
    nvme_gpu_statistics counts = { .size = sizeof counts };
    OK(nvme_gpu_stats(store, &counts));
    CHECK(counts.retries == 0);
    gpunvme_layer_loader_destroy(&loader);
    cleanup_gds();
    nvme_gpu_close(store);
    puts("fork: ok");
    return 0;
}
