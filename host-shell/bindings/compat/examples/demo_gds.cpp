// demo_gds PATH OFFSET BYTES: reads a range of a device or file into GPU memory by the names of GPUDirect Storage, and
// compares it with what the host reads.
//
//     c++ demo_gds.cpp -lnvme_gpu_compat -lcuda -o demo_gds
//     ./demo_gds /dev/nvme0n1 0 4194304

#include <cuda.h>
#include <nvme_gpu_compat.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: demo_gds PATH OFFSET BYTES\n");
        return 2;
    }
    const off_t offset = std::strtoll(argv[2], nullptr, 0);
    const size_t bytes = std::strtoull(argv[3], nullptr, 0);
    auto failed = [](const char* what) {
        std::fprintf(stderr, "%s: %s: %s\n", what, nvme_gpu_last_error(), nvme_gpu_last_remedy());
        return 1;
    };
    if (init_gds() != 0) return failed("init_gds");
    CUdevice gpu;
    CUcontext context;
    CUdeviceptr buffer;
    if (cuInit(0) || cuDeviceGet(&gpu, 0) || cuDevicePrimaryCtxRetain(&context, gpu) || cuCtxSetCurrent(context) ||
        cuMemAlloc(&buffer, bytes)) {
        std::fprintf(stderr, "no GPU, or not as much memory on it\n");
        return 1;
    }
    void* gpu_buffer = reinterpret_cast<void*>(static_cast<uintptr_t>(buffer));
    const auto start = std::chrono::steady_clock::now();
    if (gds_read_nvme_to_gpu(argv[1], offset, bytes, gpu_buffer) != static_cast<ssize_t>(bytes)) return failed(argv[1]);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::vector<unsigned char> here(bytes), back(bytes);
    if (cuMemcpyDtoH(back.data(), buffer, bytes)) return 1;
    if (read_nvme_to_gpu(argv[1], offset, bytes, here.data()) != static_cast<ssize_t>(bytes)) return failed(argv[1]);
    cuMemFree(buffer);
    cleanup_gds();
    if (back != here) {
        std::fprintf(stderr, "the bytes differ\n");
        return 1;
    }
    std::printf("demo_gds: ok: %zu bytes in %.2f ms, opening included: %.2f GB/s\n", bytes, took.count() * 1e3,
                static_cast<double>(bytes) / took.count() / 1e9);
    return 0;
}
