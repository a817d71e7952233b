// Each thread walks from row to row of a table, by ids that only the row before it holds. The same kernel as `walk` of
// nvme-gpu-kernel/examples/gpu-histogram, in CUDA C++.

#include "histogram.h"

extern "C" __global__ void walk(const __grid_constant__ walk_args args) {
    const uint32_t thread = blockIdx.x * blockDim.x + threadIdx.x;
    nvme_gpu_rows_here here;
    nvme_gpu_rows_enter(&args.table, &here);
    if (thread < args.walks) {
        int64_t id = reinterpret_cast<const int64_t*>(args.starts)[thread];
        for (uint32_t step = 0; step < args.steps; ++step) {
            const volatile void* row;
            const int status = nvme_gpu_row(&here, id, &row);
            if (status != 0) {
                id = status - (int64_t(1) << 32);
                break;
            }
            const uint64_t word = *static_cast<const volatile uint64_t*>(row);
            id = int64_t(word % args.table.rows);
        }
        reinterpret_cast<int64_t*>(args.ends)[thread] = id;
    }
    nvme_gpu_rows_leave(&here);
}
