// A histogram of the bytes on a drive: each thread reads its blocks by itself, one ahead of the one that
// it counts. The same kernel as nvme-gpu-kernel/examples/gpu-histogram, in CUDA C++.
//
//     ./build.sh sm_90     writes histogram.cubin; main.cpp runs it, and so does `gpu-test --image histogram.cubin`

#include "histogram.h"

struct reader {
    const histogram_args& args;
    uint32_t thread;
    uint32_t queue;

    // Starts reading `unit` into the thread's buffer `which`.
    __device__ int start(uint64_t unit, uint32_t which, nvme_gpu_token* token) const {
        nvme_gpu_command read = {};
        read.opcode = 2;
        read.nsid = args.nsid;
        read.lba = args.lba + unit * args.blocks;
        read.blocks = args.blocks;
        read.bytes = args.unit_bytes;
        read.data = args.buffers_iova + uint64_t(2 * thread + which) * args.unit_bytes;
        read.cell = 2 * thread + which;
        return nvme_gpu_submit(&args.queues, queue, &read, args.timeout_ns, token);
    }

    __device__ void count(uint32_t which) const {
        auto words = reinterpret_cast<const volatile uint32_t*>(
            args.buffers + uint64_t(2 * thread + which) * args.unit_bytes);
        auto bins = reinterpret_cast<unsigned long long*>(args.bins);
        for (uint32_t index = 0; index < args.unit_bytes / 4; ++index) {
            uint32_t word = words[index];
            for (int byte = 0; byte < 4; ++byte) {
                atomicAdd(&bins[(word >> (8 * byte)) & 0xFF], 1ull);
            }
        }
    }
};

extern "C" __global__ void histogram(const __grid_constant__ histogram_args args) {
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    const uint64_t threads = uint64_t(gridDim.x) * blockDim.x;
    const reader reader = {args, thread, (thread / 32) % args.queues.queue_count};
    auto failed = reinterpret_cast<unsigned long long*>(args.failed);
    nvme_gpu_token token = {};
    int started = 0;
    uint32_t which = 0;
    bool counts = false;
    for (uint64_t unit = thread;; unit += threads) {
        // The next read is in flight while the block before it is counted.
        const bool more = unit < args.units;
        nvme_gpu_token next = {};
        const int begun = more ? reader.start(unit, which, &next) : 0;
        if (counts) {
            const int status =
                started == 0 ? nvme_gpu_wait(&args.queues, &token, args.timeout_ns) : started;
            if (status == 0) {
                reader.count(which ^ 1);
            } else {
                atomicAdd(failed, 1ull);
            }
        }
        if (!more) {
            break;
        }
        token = next;
        started = begun;
        counts = true;
        which ^= 1;
    }
}
