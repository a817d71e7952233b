/* Gathers on a stream: captured into a graph and launched again with other ids, what a call costs beside a bare launch,
 * queues lent to kernels, and a graph that outlives its store. On a GPU, and over the stand-in. */
#include "nvme_gpu.h"
#include "nvme_gpu_device.cuh"
#include "check.h"
#include "context.h"
#include "requests.h"
#include <time.h>

enum { ROWS = 4000, ROW = 512, MANY = 300, FIRST = 96 };

static const char NOTHING[] = ".version 8.2\n.target sm_80\n.address_size 64\n"
                              ".visible .entry nothing(.param .align 8 .b8 p[176]) { ret; }\n";

static CUdeviceptr ids_at, out_at, status_at;
static int64_t ids[MANY];
static unsigned char out[MANY * ROW];
static int32_t row_status[MANY];

static void fetch(void)
{
    CUDA(cuMemcpyDtoH(out, out_at, sizeof(out)));
    CUDA(cuMemcpyDtoH(row_status, status_at, sizeof(row_status)));
}

static void choose(unsigned round)
{
    for (unsigned i = 0; i < MANY; ++i) ids[i] = (i * 37 + round * 101) % ROWS;
    CUDA(cuMemcpyHtoD(ids_at, ids, sizeof(ids)));
    CUDA(cuMemsetD8(out_at, 0xEE, sizeof(out)));
    /* The stream of the graph does not wait for the default one. */
    CUDA(cuStreamSynchronize(NULL));
}

static void check_rows(void)
{
    fetch();
    for (int i = 0; i < MANY; ++i)
        for (int at = 0; at < ROW; ++at)
            CHECK(row_status[i] == 0 && out[i * ROW + at] == (unsigned char)(ids[i] % 251 + at));
}

static nvme_gpu_statistics stats(nvme_gpu_t *store)
{
    nvme_gpu_statistics now = { .size = sizeof(now) };
    OK(nvme_gpu_stats(store, &now));
    return now;
}

static void replay(nvme_gpu_t *store, CUgraphExec graph, CUstream stream, int replays)
{
    nvme_gpu_statistics before = stats(store);
    for (unsigned round = 0; round < (unsigned)replays; ++round) {
        choose(round);
        CUDA(cuGraphLaunch(graph, stream));
        CUDA(cuStreamSynchronize(stream));
        check_rows();
    }
    nvme_gpu_statistics after = stats(store);
    CHECK(after.calls == before.calls + 1);
    CHECK(after.commands == before.commands && after.background_failures == before.background_failures);
    printf("%d launches of a graph with other ids: %llu calls into the library, %llu commands of the CPU\n", replays,
           (unsigned long long)(after.calls - before.calls - 1),
           (unsigned long long)(after.commands - before.commands));
}

/* Halves become float32 on the way to the GPU's memory, into places with gaps. */
static void widened(nvme_gpu_t *store, CUstream stream)
{
    enum { COUNT = 64, STRIDE = 4 * COUNT + 8, FROM = 3 << 20, IN = 500 };
    static uint16_t halves[IN][COUNT];
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    void *ids_gpu = (void *)(uintptr_t)ids_at, *out_gpu = (void *)(uintptr_t)out_at;
    for (int row = 0; row < IN; ++row)
        for (int at = 0; at < COUNT; ++at) halves[row][at] = (uint16_t)((row * COUNT + at) & 0x7EFF);
    OK(nvme_gpu_pwrite(store, halves, sizeof(halves), FROM + 1));
    OK(nvme_gpu_table_open(store, FROM + 1, IN, sizeof(*halves), &table));
    CHECK(nvme_gpu_table_row_bytes_as(table, "bfloat16", "float32") == 4 * COUNT);
    choose(3);
    for (int i = 0; i < MANY; ++i) ids[i] %= IN;
    ids[5] = IN;
    CUDA(cuMemcpyHtoD(ids_at, ids, sizeof(ids)));
    CUDA(cuStreamSynchronize(NULL));
    OK(nvme_gpu_gather_async(table, GATHER_AS("bfloat16", "float32", ids_gpu, NVME_GPU_I64, MANY, out_gpu, STRIDE,
          (int32_t *)(uintptr_t)status_at, (nvme_gpu_stream)stream), &pending));
    FAILS(NVME_GPU_ROW_OUT_OF_RANGE, nvme_gpu_pending_wait(pending, 60000));
    nvme_gpu_pending_free(pending);
    fetch();
    for (int i = 0; i < MANY; ++i) {
        CHECK(row_status[i] == (i == 5 ? NVME_GPU_ROW_OUT_OF_RANGE : 0));
        for (int at = 0; at < COUNT; ++at) {
            uint32_t found;
            memcpy(&found, out + i * STRIDE + at * 4, 4);
            CHECK(found == (i == 5 ? 0 : (uint32_t)halves[ids[i]][at] << 16));
        }
        CHECK(out[i * STRIDE + 4 * COUNT] == 0xEE);
    }
    /* Elements lie at multiples of their size. */
    USAGE(nvme_gpu_gather_async(table, GATHER_AS("bfloat16", "float32", ids_gpu, NVME_GPU_I64, 1,
          (char *)out_gpu + 2, 0, NULL, (nvme_gpu_stream)stream), NULL));
    nvme_gpu_table_close(table);
}

static double now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

/* Each call alone, on an idle stream, in turns. */
static void cost(nvme_gpu_table_t *table, CUfunction nothing, CUstream stream, int rounds)
{
    double *calls = malloc((size_t)rounds * sizeof(double)), *bare = malloc((size_t)rounds * sizeof(double));
    unsigned char argument[176] = { 0 };
    void *parameters[] = { argument };
    CHECK(calls && bare);
    for (int round = -rounds / 10; round < rounds; ++round) {
        double start = now_us();
        CUDA(cuLaunchKernel(nothing, 1, 1, 1, 256, 1, 1, 0, stream, parameters, NULL));
        double launched = now_us();
        CUDA(cuStreamSynchronize(stream));
        double begin = now_us();
        OK(nvme_gpu_gather_async(table, GATHER((void *)(uintptr_t)ids_at, NVME_GPU_I64, 1, (void *)(uintptr_t)out_at,
              0, NULL, (nvme_gpu_stream)stream), NULL));
        double end = now_us();
        CUDA(cuStreamSynchronize(stream));
        if (round >= 0) bare[round] = launched - start, calls[round] = end - begin;
    }
    qsort(calls, (size_t)rounds, sizeof(double), by_value);
    qsort(bare, (size_t)rounds, sizeof(double), by_value);
    printf("nvme_gpu_gather_async p50 %.2f us p99 %.2f us; cuLaunchKernel of nothing p50 %.2f us p99 %.2f us; "
           "difference of the medians %.2f us (%d calls each)\n",
           calls[rounds / 2], calls[rounds * 99 / 100], bare[rounds / 2], bare[rounds * 99 / 100],
           calls[rounds / 2] - bare[rounds / 2], rounds);
    free(calls);
    free(bare);
}

static void queues(nvme_gpu_t *store, nvme_gpu_table_t *table, CUfunction nothing)
{
    nvme_gpu_device_setup setup = { .size = sizeof(setup), .layout = NVME_GPU_DEVICE_LAYOUT, .buffer_bytes = 65536 };
    nvme_gpu_device_setup other = setup;
    nvme_gpu_queues words;
    nvme_gpu_rows rows;
    nvme_gpu_device_t *device, *second = (nvme_gpu_device_t *)1;
    uint32_t ended = 7;
    OK(nvme_gpu_device_queues(store, &setup, &words, &device));
    CHECK(words.queue_count == 2 && words.cell_count == 65536 && words.queues && words.cells);
    CHECK(setup.queues == 2 && setup.entries == 256 && setup.cells == 65536 && setup.buffer_bytes == 65536);
    CHECK(setup.buffer && setup.nsid == 1 && setup.block_bytes >= 512 && setup.most_bytes >= 4096);
    CHECK(setup.blocks * setup.block_bytes == nvme_gpu_len(store));
    /* They are lent once. */
    USAGE(nvme_gpu_device_queues(store, &other, &words, &second));
    CHECK(second == NULL);
    OK(nvme_gpu_device_begin(device));
    OK(nvme_gpu_device_begin(device));
    OK(nvme_gpu_device_end(device, &ended));
    OK(nvme_gpu_device_end(device, NULL));
    CHECK(ended == 0);
    USAGE(nvme_gpu_device_end(device, NULL));
    /* Another layout, of the program or of what the kernel links. */
    other.layout = NVME_GPU_DEVICE_LAYOUT + 1;
    FAILS(NVME_GPU_ERROR_VERSION, nvme_gpu_device_queues(store, &other, &words, &second));
    FAILS(NVME_GPU_ERROR_VERSION, nvme_gpu_device_rows(table, NVME_GPU_DEVICE_LAYOUT + 1, &rows));
    FAILS(NVME_GPU_ERROR_VERSION, nvme_gpu_device_check(store, (void *)nothing));
    OK(nvme_gpu_device_rows(table, NVME_GPU_DEVICE_LAYOUT, &rows));
    CHECK(rows.rows == ROWS && rows.row_bytes == ROW && rows.first_byte == FIRST);
    nvme_gpu_device_close(device);
    nvme_gpu_device_close(device);
    CLOSED(nvme_gpu_device_begin(device));
    /* Queues that were closed are free again; those of a store end with it. */
    OK(nvme_gpu_device_queues(store, &setup, &words, &device));
    nvme_gpu_device_close(device);
}

/* Gathers in halves, with another gather between them; finished once, in either stream, and never. */
static void halves(nvme_gpu_t *store, nvme_gpu_table_t *table, CUstream stream)
{
    void *out_gpu = (void *)(uintptr_t)out_at, *ids_gpu = (void *)(uintptr_t)ids_at;
    nvme_gpu_row_request begin = { .size = sizeof(begin), .ids = ids_gpu, .count = MANY, .id_type = NVME_GPU_I64,
                                     .stream = (nvme_gpu_stream)stream };
    nvme_gpu_row_request finish = { .size = sizeof(finish), .out = out_gpu,
                                       .row_status = (int32_t *)(uintptr_t)status_at,
                                       .stream = (nvme_gpu_stream)stream };
    nvme_gpu_begun_t *begun;
    nvme_gpu_pending_t *pending, *between;
    CUdeviceptr elsewhere;
    CUstream other;
    nvme_gpu_statistics before = stats(store);
    CUDA(cuMemAlloc(&elsewhere, sizeof(out)));
    CUDA(cuStreamCreate(&other, CU_STREAM_NON_BLOCKING));
    for (unsigned round = 0; round < 4; ++round) {
        choose(2000 + round);
        OK(nvme_gpu_gather_begin(table, &begin, &begun));
        OK(nvme_gpu_gather_async(table, GATHER(ids_gpu, NVME_GPU_I64, 20, (void *)(uintptr_t)elsewhere, 0, NULL,
                                               (nvme_gpu_stream)stream), &between));
        finish.stream = (nvme_gpu_stream)(round % 2 ? other : stream);
        finish.out = (char *)out_gpu + 8;
        USAGE(nvme_gpu_gather_finish(begun, &finish, &pending));
        finish.out = out_gpu;
        OK(nvme_gpu_gather_finish(begun, &finish, &pending));
        USAGE(nvme_gpu_gather_finish(begun, &finish, NULL));
        CHECK(strstr(nvme_gpu_last_error(), "finished before"));
        OK(nvme_gpu_pending_wait(pending, 60000));
        OK(nvme_gpu_pending_wait(between, 60000));
        check_rows();
        nvme_gpu_pending_free(pending);
        nvme_gpu_pending_free(between);
        nvme_gpu_begun_free(begun);
        CLOSED(nvme_gpu_gather_finish(begun, &finish, NULL));
        OK(nvme_gpu_gather_begin(table, &begin, &begun));
        nvme_gpu_begun_free(begun);
    }
    nvme_gpu_statistics after = stats(store);
    CHECK(after.begun_gathers == before.begun_gathers + 8);
    CUDA(cuStreamSynchronize(stream));
    CUDA(cuStreamSynchronize(other));
    CUDA(cuStreamDestroy(other));
    CUDA(cuMemFree(elsewhere));
}

int main(int count, char **arguments)
{
    int rounds = count > 1 ? atoi(arguments[1]) : 200;
    if (rounds < 10) rounds = 10;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    options.gpu_queues = 8;
    options.gpu_entries = 256;
    options.gpu_kernel_queues = 2;
    OK(nvme_gpu_open("sim:mem?size=4MiB&queues=32", 0, &options, &store));
    CUcontext context = use_context_of_gpu();
    CUdevice gpu;
    CUDA(cuDeviceGet(&gpu, 0));
    CUmodule module;
    CUfunction nothing;
    CUDA(cuModuleLoadData(&module, NOTHING));
    CUDA(cuModuleGetFunction(&nothing, module, "nothing"));

    OK(nvme_gpu_table_open(store, FIRST, ROWS, ROW, &table));
    static unsigned char all[ROWS * ROW];
    for (int row = 0; row < ROWS; ++row)
        for (int at = 0; at < ROW; ++at) all[row * ROW + at] = (unsigned char)(row % 251 + at);
    OK(nvme_gpu_pwrite(store, all, sizeof(all), FIRST));
    CUDA(cuMemAlloc(&ids_at, sizeof(ids)));
    CUDA(cuMemAlloc(&out_at, sizeof(out)));
    CUDA(cuMemAlloc(&status_at, sizeof(row_status)));

    CUstream stream;
    CUgraph graph;
    CUgraphExec exec;
    CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    void *ids_gpu = (void *)(uintptr_t)ids_at, *out_gpu = (void *)(uintptr_t)out_at;
    int32_t *status_gpu = (int32_t *)(uintptr_t)status_at;
    choose(1000);
    OK(nvme_gpu_gather_async(table, GATHER(ids_gpu, NVME_GPU_I64, MANY, out_gpu, 0, status_gpu,
          (nvme_gpu_stream)stream), &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    check_rows();
    nvme_gpu_pending_free(pending);

    // A stream of another context: nothing is launched, and the next gather is as before.
    CUcontext other;
    CUstream foreign;
    CUDA(cuCtxCreate(&other, 0, gpu));
    CUDA(cuStreamCreate(&foreign, CU_STREAM_NON_BLOCKING));
    CUDA(cuCtxSetCurrent(context));
    USAGE(nvme_gpu_gather_async(table, GATHER(ids_gpu, NVME_GPU_I64, MANY, out_gpu, 0, status_gpu,
          (nvme_gpu_stream)foreign), &pending));
    CHECK(strstr(nvme_gpu_last_error(), "primary context"));
    USAGE(nvme_gpu_pread_async(store, out_gpu, ROW, FIRST, (nvme_gpu_stream)foreign, &pending));
    CUDA(cuStreamDestroy(foreign));
    CUDA(cuCtxDestroy(other));
    choose(1001);
    OK(nvme_gpu_gather_async(table, GATHER(ids_gpu, NVME_GPU_I64, MANY, out_gpu, 0, status_gpu,
          (nvme_gpu_stream)stream), &pending));
    OK(nvme_gpu_pending_wait(pending, 60000));
    check_rows();
    nvme_gpu_pending_free(pending);

    widened(store, stream);
    halves(store, table, stream);
    choose(1002);
    CUDA(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    OK(nvme_gpu_gather_async(table, GATHER(ids_gpu, NVME_GPU_I64, MANY, out_gpu, 0, status_gpu,
          (nvme_gpu_stream)stream), &pending));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_poll(pending));
    CUDA(cuStreamEndCapture(stream, &graph));
    CUDA(cuGraphInstantiateWithFlags(&exec, graph, 0));
    replay(store, exec, stream, rounds / 4);
    OK(nvme_gpu_pending_poll(pending));

    queues(store, table, nothing);
    choose(7);
    cost(table, nothing, stream, rounds);

    nvme_gpu_close(store);
    choose(8);
    CUDA(cuGraphLaunch(exec, stream));
    CUDA(cuStreamSynchronize(stream));
    fetch();
    for (int i = 0; i < MANY; ++i) CHECK(row_status[i] == NVME_GPU_ROW_GONE && out[i * ROW] == 0);
    FAILS(NVME_GPU_ROW_GONE, nvme_gpu_pending_poll(pending));
    nvme_gpu_pending_free(pending);
    CUDA(cuGraphExecDestroy(exec));
    CUDA(cuGraphDestroy(graph));
    CUDA(cuStreamDestroy(stream));
    puts("stream: ok");
    return 0;
}
