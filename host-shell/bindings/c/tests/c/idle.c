/* A launch whose end never comes (FAKE_CUDA=idle): calls that wait end in time, and the operation stays under way. */
#include "nvme_gpu.h"
#include "check.h"
#include "requests.h"
#include <dlfcn.h>
#include <sys/eventfd.h>
#include <unistd.h>

typedef int (*alloc_t)(uint64_t *, size_t);

int main(void)
{
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    nvme_gpu_t *store;
    nvme_gpu_table_t *table;
    nvme_gpu_pending_t *pending;
    uint64_t ids = 0, out = 0, told;
    size_t index;
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    alloc_t alloc;
    CHECK(library != NULL);
    *(void **)&alloc = dlsym(library, "cuMemAlloc_v2");
    options.timeout_ms = 2000;
    OK(nvme_gpu_open("sim:mem?size=1MiB&queues=32", 0, &options, &store));
    OK(nvme_gpu_table_open(store, 0, 100, 512, &table));
    CHECK(alloc(&ids, 8) == 0 && alloc(&out, 4096) == 0);
    memset((void *)(uintptr_t)ids, 0, 8);
    OK(nvme_gpu_gather_async(table, GATHER((void *)(uintptr_t)ids, NVME_GPU_I64, 1, (void *)(uintptr_t)out, 0, NULL,
          NULL), &pending));
    OK(nvme_gpu_pending_notify(pending, fd));
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_pending_wait_any(&pending, 1, 100, &index));
    CHECK(read(fd, &told, sizeof told) < 0);
    nvme_gpu_pending_free(pending);
    FAILS(NVME_GPU_ERROR_UNFINISHED,
          nvme_gpu_gather(table, GATHER((void *)(uintptr_t)ids, NVME_GPU_I64, 1, (void *)(uintptr_t)out, 0, NULL,
                NULL), NULL));
    CHECK(strstr(nvme_gpu_last_error(), "has not ended within 30"));
    /* Of a batch the entries in memory of the GPU are under way, and its failure does not hide that. */
    nvme_gpu_t *other;
    char on_host[16];
    options.timeout_ms = 1000;
    OK(nvme_gpu_open("sim:mem?size=1MiB&queues=32&fault=status:0x281@op=read,every=1", 0, &options, &other));
    nvme_gpu_io ios[] = {
        { NVME_GPU_READ, 1, 0, sizeof on_host, on_host },
        { NVME_GPU_READ, 1, 4096, 512, (void *)(uintptr_t)out },
    };
    FAILS(NVME_GPU_ERROR_UNFINISHED, nvme_gpu_batch(other, ios, 2));
    CHECK(ios[0].status == 0x281 && ios[1].status == NVME_GPU_ERROR_UNFINISHED);
    printf("idle: ok\n");
    return 0;
}
