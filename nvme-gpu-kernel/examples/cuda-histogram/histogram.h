// What main.cpp passes to the kernels. As `Args` and `Walk` of nvme-gpu-kernel/examples/gpu-histogram.
#pragma once

#include "nvme_gpu_device.cuh"

struct histogram_args {
    nvme_gpu_queues queues;
    uint64_t lba;
    uint64_t units;
    uint64_t buffers;       // two for each thread, as the GPU finds them
    uint64_t buffers_iova;  // the same, as the controller finds them
    uint64_t bins;          // 256 counters of 8 bytes
    uint64_t failed;        // counts units that could not be read
    uint64_t timeout_ns;
    uint32_t nsid;
    uint32_t blocks;  // of a unit
    uint32_t unit_bytes;
    uint32_t reserved;
};

struct walk_args {
    nvme_gpu_rows table;
    uint64_t starts;
    uint64_t ends;
    uint32_t walks;
    uint32_t steps;
};
