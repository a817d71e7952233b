// demo_spdk: reads blocks of the device that NVME_GPU_DEVICE names into GPU memory by the names of SPDK, several at a
// time, and compares them with what the host reads.
//
//     c++ demo_spdk.cpp -lnvme_gpu_compat -lcuda -o demo_spdk
//     NVME_GPU_DEVICE=vfio:0000:01:00.0 ./demo_spdk

#include <cuda.h>
#include <nvme_gpu_compat.h>

#include <cstdio>
#include <vector>

int main() {
    constexpr uint32_t reads = 16, blocks = 8;
    auto failed = [](const char* what) {
        std::fprintf(stderr, "%s: %s: %s\n", what, nvme_gpu_last_error(), nvme_gpu_last_remedy());
        return 1;
    };
    if (init_spdk_nvme() != 0) return failed("init_spdk_nvme");
    if (create_io_qpair() != 0) return failed("create_io_qpair");
    SPDKContext* ctx = spdk_ctx();
    CUdevice gpu;
    CUcontext context;
    CUdeviceptr buffer;
    constexpr size_t room = reads * blocks * 4096;
    if (cuInit(0) || cuDeviceGet(&gpu, 0) || cuDevicePrimaryCtxRetain(&context, gpu) || cuCtxSetCurrent(context) ||
        cuMemAlloc(&buffer, room)) {
        std::fprintf(stderr, "no GPU\n");
        return 1;
    }
    size_t bytes = 0;
    for (uint32_t read = 0; read < reads; ++read) {
        // Each read has the bytes that it is long: LBAs are in blocks of the device.
        void* to = reinterpret_cast<void*>(static_cast<uintptr_t>(buffer + bytes));
        const ssize_t one = submit_gpu_read(ctx, uint64_t(read) * blocks, blocks, to);
        if (one < 0) return failed("submit_gpu_read");
        bytes += static_cast<size_t>(one);
    }
    for (uint32_t done = 0; done < reads;) {
        const int more = poll_completions(ctx);
        if (more < 0) return failed("poll_completions");
        done += static_cast<uint32_t>(more);
    }
    std::vector<unsigned char> here(bytes), back(bytes);
    if (cuMemcpyDtoH(back.data(), buffer, bytes)) return 1;
    if (nvme_gpu_read(0, bytes, here.data()) != static_cast<ssize_t>(bytes)) return failed("nvme_gpu_read");
    cuMemFree(buffer);
    nvme_gpu_cleanup();
    if (back != here) {
        std::fprintf(stderr, "the bytes differ\n");
        return 1;
    }
    std::printf("demo_spdk: ok: %u reads of %u blocks, %zu bytes\n", reads, blocks, bytes);
    return 0;
}
