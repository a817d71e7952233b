// The header in C++: linkage, types, initializer.
#include "nvme_gpu.h"
#include "check.h"
#include <cstdio>
#include <memory>
#include <vector>

int main() {
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.queues = 2;
    nvme_gpu_t *opened = nullptr;
    OK(nvme_gpu_open("sim:mem?size=4MiB", -1, &options, &opened));
    std::unique_ptr<nvme_gpu_t, void (*)(nvme_gpu_t *)> store(opened, nvme_gpu_close);
    std::vector<unsigned char> out(1000, 5), in(1000);
    OK(nvme_gpu_pwrite(store.get(), out.data(), out.size(), 123));
    OK(nvme_gpu_pread(store.get(), in.data(), in.size(), 123));
    CHECK(in == out);
    std::puts("plus: ok");
}
