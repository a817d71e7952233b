// A whole program: opens a drive by nvme_gpu.h, lends its queues to the kernel histogram, and rows of a table to the
// kernel walk, launches both by the CUDA driver API, and checks what they found by reading the drive itself.
//
//     NVME_GPU=/usr/local ./build.sh sm_90           (a prefix of `cargo xtask install-c`)
//     ./histogram histogram.cubin                    a simulated drive, filled first
//     ./histogram histogram.cubin vfio:0000:01:00.0  a drive; nothing is written to it

#include "histogram.h"

#include <cuda.h>
#include <nvme_gpu.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

constexpr uint64_t image_bytes = 8 << 20;
constexpr uint32_t grid = 8, threads = 128;
constexpr uint32_t unit_bytes = 4096;
constexpr uint32_t row_bytes = 1536, walks = 256, steps = 40;

void nvme(nvme_gpu_status status, const char* what) {
    if (status != NVME_GPU_OK) {
        std::fprintf(stderr, "%s: %s: %s\n", what, nvme_gpu_last_error(), nvme_gpu_last_remedy());
        std::exit(1);
    }
}

void cuda(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) {
        std::fprintf(stderr, "%s: CUDA error %d\n", what, static_cast<int>(result));
        std::exit(1);
    }
}

CUfunction kernel(nvme_gpu_t* store, CUmodule module, const char* name) {
    CUfunction function;
    cuda(cuModuleGetFunction(&function, module, name), name);
    // What is linked into the image has to be of the library's version.
    nvme(nvme_gpu_device_check(store, reinterpret_cast<void*>(function)), name);
    return function;
}

// Memory of the GPU, zeroed, and freed at the end.
struct gpu_memory {
    CUdeviceptr address = 0;
    explicit gpu_memory(size_t bytes) {
        cuda(cuMemAlloc(&address, bytes), "cuMemAlloc");
        cuda(cuMemsetD8(address, 0, bytes), "cuMemsetD8");
    }
    ~gpu_memory() { cuMemFree(address); }
    gpu_memory(const gpu_memory&) = delete;
    gpu_memory& operator=(const gpu_memory&) = delete;
};

template <typename Args>
void launch(CUfunction function, Args args) {
    void* parameters[] = {&args};
    cuda(cuLaunchKernel(function, grid, 1, 1, threads, 1, 1, 0, nullptr, parameters, nullptr), "cuLaunchKernel");
    cuda(cuStreamSynchronize(nullptr), "the kernel");
}

std::vector<unsigned char> fill(nvme_gpu_t* store, bool is_ours) {
    std::vector<unsigned char> image(image_bytes);
    if (is_ours) {
        uint64_t word = 1;
        for (auto& byte : image) {
            word = word * 6364136223846793005ull + 1442695040888963407ull;
            byte = static_cast<unsigned char>(word >> 56);
        }
        nvme(nvme_gpu_pwrite(store, image.data(), image.size(), 0), "write");
        nvme(nvme_gpu_flush(store), "flush");
    } else {
        nvme(nvme_gpu_pread(store, image.data(), image.size(), 0), "read");
    }
    return image;
}

// The kernel counts each byte of the image by reads of its own.
bool count(nvme_gpu_t* store, CUfunction function, const std::vector<unsigned char>& image) {
    nvme_gpu_device_setup setup = {};
    setup.size = sizeof setup;
    setup.layout = NVME_GPU_DEVICE_LAYOUT;
    setup.cells = 2 * grid * threads;
    setup.buffer_bytes = uint64_t(2) * grid * threads * unit_bytes;
    nvme_gpu_device_t* device;
    histogram_args args = {};
    nvme(nvme_gpu_device_queues(store, &setup, &args.queues, &device), "queues");
    gpu_memory counts(257 * 8);
    args.buffers = setup.buffer;
    args.buffers_iova = setup.buffer_iova;
    args.units = image_bytes / unit_bytes;
    args.unit_bytes = unit_bytes;
    args.blocks = unit_bytes / setup.block_bytes;
    args.nsid = setup.nsid;
    args.bins = counts.address;
    args.failed = counts.address + 256 * 8;
    args.timeout_ns = 4000000000;

    nvme(nvme_gpu_device_begin(device), "begin");
    launch(function, args);
    uint32_t ended = 0;
    nvme(nvme_gpu_device_end(device, &ended), "end");

    uint64_t have[257], expected[257] = {};
    cuda(cuMemcpyDtoH(have, counts.address, sizeof have), "cuMemcpyDtoH");
    nvme_gpu_device_close(device);
    for (unsigned char byte : image) ++expected[byte];
    if (ended != 0 || std::memcmp(have, expected, sizeof have) != 0) {
        std::fprintf(stderr, "histogram: %u commands left, %llu units failed, or other counts\n", ended,
                     static_cast<unsigned long long>(have[256]));
        return false;
    }
    std::printf("histogram: %u queues, %llu bytes counted\n", setup.queues,
                static_cast<unsigned long long>(image_bytes));
    return true;
}

// Each thread follows ids from row to row.
bool follow(nvme_gpu_t* store, CUfunction function, const std::vector<unsigned char>& image) {
    const uint64_t rows = image_bytes / row_bytes;
    nvme_gpu_table_t* table;
    nvme(nvme_gpu_table_open(store, 0, rows, row_bytes, &table), "table");
    walk_args args = {};
    nvme(nvme_gpu_device_rows(table, NVME_GPU_DEVICE_LAYOUT, &args.table), "rows");
    gpu_memory memory(2 * walks * 8);
    int64_t starts[walks], ends[walks];
    for (uint32_t walk = 0; walk < walks; ++walk) starts[walk] = walk == 7 ? -1 : int64_t(walk);
    cuda(cuMemcpyHtoD(memory.address, starts, sizeof starts), "cuMemcpyHtoD");
    args.starts = memory.address;
    args.ends = memory.address + walks * 8;
    args.walks = walks;
    args.steps = steps;
    launch(function, args);
    cuda(cuMemcpyDtoH(ends, args.ends, sizeof ends), "cuMemcpyDtoH");
    nvme_gpu_table_close(table);
    for (uint32_t walk = 0; walk < walks; ++walk) {
        int64_t id = starts[walk];
        for (uint32_t step = 0; step < steps && id >= 0; ++step) {
            uint64_t word;
            std::memcpy(&word, &image[uint64_t(id) * row_bytes], sizeof word);
            id = int64_t(word % rows);
        }
        if (id < 0) id = NVME_GPU_ROW_OUT_OF_RANGE - (int64_t(1) << 32);
        if (id != ends[walk]) {
            std::fprintf(stderr, "walk %u ends at %lld, not at %lld\n", walk, static_cast<long long>(ends[walk]),
                         static_cast<long long>(id));
            return false;
        }
    }
    std::printf("walk: %u walks of %u rows\n", walks, steps);
    return true;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc < 2) {
        std::fprintf(stderr, "usage: histogram IMAGE [DEVICE]\n");
        return 2;
    }
    const char* device = argc > 2 ? argv[2] : "sim:mem?size=16MiB&queues=32";
    nvme_gpu_options options = NVME_GPU_OPTIONS_INIT;
    options.gpu_kernel_queues = 4;
    options.flags = argc > 2 ? NVME_GPU_ALLOW_WRITE : 0;  // queues of a kernel can write
    nvme_gpu_t* store;
    nvme(nvme_gpu_open(device, 0, &options, &store), device);

    CUdevice gpu;
    CUcontext context;
    cuda(cuInit(0), "cuInit");
    cuda(cuDeviceGet(&gpu, 0), "cuDeviceGet");
    cuda(cuDevicePrimaryCtxRetain(&context, gpu), "cuDevicePrimaryCtxRetain");
    cuda(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    std::ifstream file(argv[1], std::ios::binary);
    std::vector<char> code((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (code.empty()) {
        std::fprintf(stderr, "%s cannot be read\n", argv[1]);
        return 1;
    }
    code.push_back(0);
    CUmodule module;
    cuda(cuModuleLoadData(&module, code.data()), argv[1]);

    const auto image = fill(store, argc <= 2);
    const bool is_right = count(store, kernel(store, module, "histogram"), image) &&
                          follow(store, kernel(store, module, "walk"), image);
    nvme_gpu_close(store);
    std::puts(is_right ? "histogram: ok" : "histogram: FAILED");
    return is_right ? 0 : 1;
}
