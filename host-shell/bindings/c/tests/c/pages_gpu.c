/* Pages by key in memory of a GPU: moved by the GPU itself, or by the CPU for a file; what is not right is zeros and an
 * error. On a GPU, and over the stand-in. */
#include "nvme_gpu.h"
#include "check.h"
#include "context.h"

enum { PAGE = 6000, ROOM = 6144, COUNT = 5, KEY = NVME_GPU_PAGE_KEY_BYTES };

static unsigned char data[COUNT][ROOM], back[COUNT][ROOM];
static nvme_gpu_page entries[COUNT];
static CUdeviceptr memory;

static void *at(int number)
{
    return (void *)(uintptr_t)(memory + (size_t)number * ROOM);
}

static int is_zero(const unsigned char *bytes, size_t count)
{
    for (size_t i = 0; i < count; ++i)
        if (bytes[i]) return 0;
    return 1;
}

/* Loads all pages over other bytes; returns the status. */
static nvme_gpu_status load(nvme_gpu_pages_t *pages, CUstream stream)
{
    for (int i = 0; i < COUNT; ++i) {
        entries[i].data = at(i);
        entries[i].bytes = ROOM;
    }
    CUDA(cuMemsetD8(memory, 0xEE, sizeof(back)));
    CUDA(cuStreamSynchronize(NULL));
    nvme_gpu_status status = nvme_gpu_pages_get(pages, entries, COUNT, stream);
    CUDA(cuMemcpyDtoH(back, memory, sizeof(back)));
    return status;
}

static void check_page(int number)
{
    size_t length = number == 2 ? 777 : PAGE;
    CHECK(entries[number].status == NVME_GPU_OK && entries[number].length == length);
    CHECK(memcmp(back[number], data[number], length) == 0);
}

static void check_zeros(int number, nvme_gpu_status status)
{
    CHECK(entries[number].status == status && entries[number].length == 0);
    CHECK(is_zero(back[number], ROOM));
}

/* Changes a byte of page 0 on the drive. */
static void spoil(nvme_gpu_t *store)
{
    static unsigned char block[512];
    for (uint64_t from = 0; from + sizeof(block) <= nvme_gpu_len(store); from += sizeof(block)) {
        OK(nvme_gpu_pread(store, block, sizeof(block), from));
        if (memcmp(block, data[0] + 1024, sizeof(block)) == 0) {
            block[100] ^= 1;
            OK(nvme_gpu_pwrite(store, block, sizeof(block), from));
            return;
        }
    }
    CHECK(!"the page is not on the drive");
}

int main(int count, char **arguments)
{
    if (count != 3) return 2;
    int by_gpu = strcmp(arguments[2], "gpu") == 0;
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_pages_options of_pages = { .size = sizeof(of_pages), .page_bytes = PAGE };
    nvme_gpu_pages_t *pages;
    nvme_gpu_t *store;
    CUstream stream;
    of_pages.model = "a model";
    of_pages.create = NVME_GPU_PAGES_ALWAYS;
    options.flags = NVME_GPU_ALLOW_WRITE;
    options.timeout_ms = 120000;
    OK(nvme_gpu_open(arguments[1], 0, &options, &store));
    use_context_of_gpu();
    CUDA(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    CUDA(cuMemAlloc(&memory, sizeof(data)));
    OK(nvme_gpu_pages_open(store, &of_pages, &pages));

    for (int i = 0; i < COUNT; ++i) {
        for (int byte = 0; byte < ROOM; ++byte) data[i][byte] = (unsigned char)(byte * 31 + i * 101 + byte / 256);
        OK(nvme_gpu_pages_key(pages, &i, sizeof(i), 0, entries[i].key));
        entries[i].data = at(i);
        entries[i].bytes = i == 2 ? 777 : PAGE;
    }
    /* The stream writes the pages first: the call takes what is there then. */
    CUDA(cuMemcpyHtoDAsync(memory, data, sizeof(data), stream));
    OK(nvme_gpu_pages_put(pages, entries, COUNT - 1, stream));
    FAILS(NVME_GPU_ERROR_PAGE_MISSING, load(pages, stream));
    for (int i = 0; i < COUNT - 1; ++i) check_page(i);
    check_zeros(COUNT - 1, NVME_GPU_ERROR_PAGE_MISSING);

    spoil(store);
    FAILS(NVME_GPU_ERROR_PAGE_LOST, load(pages, stream));
    check_zeros(0, NVME_GPU_ERROR_PAGE_LOST);
    check_page(1);
    nvme_gpu_pages_statistics counts = { .size = sizeof(counts) };
    OK(nvme_gpu_pages_stats(pages, &counts));
    CHECK(counts.stored == COUNT - 1 && counts.lost == 1);
    CHECK(counts.stored_by_gpu == (by_gpu ? COUNT - 1 : 0) && counts.loaded_by_gpu == (by_gpu ? 7 : 0));

    /* What the GPU stored is what the CPU loads, and the other way round. */
    entries[1].data = back[1];
    entries[1].bytes = ROOM;
    memset(back, 0, sizeof(back));
    OK(nvme_gpu_pages_get(pages, entries + 1, 1, NULL));
    check_page(1);
    entries[0].data = data[0];
    entries[0].bytes = PAGE;
    OK(nvme_gpu_pages_put(pages, entries, 1, NULL));
    FAILS(NVME_GPU_ERROR_PAGE_MISSING, load(pages, NULL));
    check_page(0);

    /* Refused as a whole. */
    entries[1].data = back[1];
    USAGE(nvme_gpu_pages_get(pages, entries, 2, stream));
    CHECK(strstr(nvme_gpu_last_error(), "host and of a GPU") && entries[0].status == NVME_GPU_OK);
    entries[1].data = at(0);
    USAGE(nvme_gpu_pages_get(pages, entries, 2, stream));
    CHECK(strstr(nvme_gpu_last_error(), "share memory"));
    CUgraph graph;
    CUDA(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    USAGE(nvme_gpu_pages_get(pages, entries, 1, stream));
    CUDA(cuStreamEndCapture(stream, &graph));
    CUDA(cuGraphDestroy(graph));

    nvme_gpu_close(store);
    CLOSED(nvme_gpu_pages_get(pages, entries, 1, stream));
    puts("pages of a GPU: ok");
    return 0;
}
