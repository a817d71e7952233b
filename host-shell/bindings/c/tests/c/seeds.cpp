// The test cases of the sketches by their names: GDS.DirectRead, Performance.Throughput, multi-stream, large file. The
// argument is a file that this program fills; a second one is the least GB/s of Performance.Throughput.
#include "nvme_gpu_compat.h"
#include "check.h"
#include <chrono>
#include <cuda.h>
#include <string>
#include <thread>
#include <vector>

namespace {

const char *path;
constexpr size_t SIZE_4MB = 4 << 20;
constexpr size_t LARGE = 48 << 20;

uint64_t word(uint64_t index) { return index * 0x9E3779B97F4A7C15ull ^ index >> 7; }

void *cuda_malloc(size_t bytes) {
    CUdeviceptr address;
    CHECK(cuMemAlloc(&address, bytes) == 0 && cuMemsetD8(address, 0xEE, bytes) == 0);
    return reinterpret_cast<void *>(static_cast<uintptr_t>(address));
}

void cuda_free(void *address) { CHECK(cuMemFree(reinterpret_cast<uintptr_t>(address)) == 0); }

// Whether GPU memory holds the file's words from byte `offset` on.
bool verify_pattern(void *gpu_buffer, size_t bytes, uint64_t offset = 0) {
    std::vector<uint64_t> back(bytes / 8);
    CHECK(cuMemcpyDtoH(back.data(), reinterpret_cast<uintptr_t>(gpu_buffer), bytes) == 0);
    for (size_t index = 0; index < back.size(); ++index)
        if (back[index] != word(offset / 8 + index)) return false;
    return true;
}

void fill() {
    FILE *file = fopen(path, "wb");
    CHECK(file != nullptr);
    std::vector<uint64_t> part(SIZE_4MB / 8);
    for (size_t at = 0; at < LARGE; at += SIZE_4MB) {
        for (size_t index = 0; index < part.size(); ++index) part[index] = word(at / 8 + index);
        CHECK(fwrite(part.data(), 8, part.size(), file) == part.size());
    }
    CHECK(fclose(file) == 0);
}

void direct_read() {
    void *gpu_buffer = cuda_malloc(SIZE_4MB);
    CHECK(!verify_pattern(gpu_buffer, SIZE_4MB));
    CHECK(gds_read_nvme_to_gpu(path, 0, SIZE_4MB, gpu_buffer) == static_cast<ssize_t>(SIZE_4MB));
    CHECK(verify_pattern(gpu_buffer, SIZE_4MB));
    cuda_free(gpu_buffer);
    puts("GDS.DirectRead");
}

void throughput(double least) {
    void *gpu_buffer = cuda_malloc(LARGE);
    double best = 0;
    for (int run = 0; run < 3; ++run) {
        auto start = std::chrono::steady_clock::now();
        CHECK(gds_read_nvme_to_gpu(path, 0, LARGE, gpu_buffer) == static_cast<ssize_t>(LARGE));
        std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
        best = std::max(best, static_cast<double>(LARGE) / took.count() / 1e9);
    }
    CHECK(verify_pattern(gpu_buffer, LARGE) && best > least);
    cuda_free(gpu_buffer);
    printf("Performance.Throughput %.2f GB/s\n", best);
}

// Threads with streams of their own, each a part of the file.
void multi_stream() {
    constexpr size_t streams = 4, part = LARGE / streams;
    nvme_gpu_t *store;
    OK(nvme_gpu_open(path, 0, nullptr, &store));
    CUcontext context = nullptr;
    CUdevice gpu;
    CHECK(cuDeviceGet(&gpu, 0) == 0 && cuDevicePrimaryCtxRetain(&context, gpu) == 0);
    std::vector<std::thread> threads;
    for (size_t index = 0; index < streams; ++index)
        threads.emplace_back([=] {
            CHECK(cuCtxSetCurrent(context) == 0);
            CUstream stream;
            nvme_gpu_pending_t *pending;
            CHECK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == 0);
            void *buffer = cuda_malloc(part);
            CHECK(cuStreamSynchronize(nullptr) == 0);
            OK(nvme_gpu_pread_async(store, buffer, part, index * part, reinterpret_cast<nvme_gpu_stream>(stream),
                                    &pending));
            OK(nvme_gpu_pending_wait(pending, 60000));
            nvme_gpu_pending_free(pending);
            CHECK(verify_pattern(buffer, part, index * part));
            cuda_free(buffer);
            CHECK(cuStreamDestroy(stream) == 0);
        });
    for (auto &thread : threads) thread.join();
    nvme_gpu_close(store);
    puts("multi-stream");
}

// More of a file than the buffer holds, in batches of the sketch's requests.
void large_file() {
    constexpr size_t each = 1 << 20;
    void *buffer = cuda_malloc(SIZE_4MB);
    for (size_t at = 0; at < LARGE; at += SIZE_4MB) {
        BatchReadRequest requests[SIZE_4MB / each];
        for (size_t index = 0; index < SIZE_4MB / each; ++index)
            requests[index] = {static_cast<off_t>(at + index * each), each,
                               static_cast<char *>(buffer) + index * each, 0};
        CHECK(async_batch_read(path, requests, SIZE_4MB / each) == 0);
        for (auto &request : requests) CHECK(request.result == static_cast<ssize_t>(each));
        CHECK(verify_pattern(buffer, SIZE_4MB, at));
    }
    cuda_free(buffer);
    puts("large file");
}

}  // namespace

int main(int count, char **arguments) {
    CHECK(count > 1);
    path = arguments[1];
    CUdevice gpu;
    CUcontext context;
    CHECK(cuInit(0) == 0 && cuDeviceGet(&gpu, 0) == 0 && cuDevicePrimaryCtxRetain(&context, gpu) == 0);
    CHECK(cuCtxSetCurrent(context) == 0);
    fill();
    CHECK(init_gds() == 0);
    direct_read();
    throughput(count > 2 ? atof(arguments[2]) : 0.0);
    multi_stream();
    large_file();
    cleanup_gds();
    puts("seeds: ok");
    return 0;
}
