// NVMe queues inside CUDA C++ kernels: any thread submits and waits, from divergent code.
//
// The functions are in nvme_gpu_device.ptx (nvme-gpu-kernel/ptx/), compiled from the same Rust core that
// the host runs. Link them with relocatable device code:
//
//     nvcc -arch=native -rdc=true -dc kernel.cu -o kernel.o
//     nvcc -arch=native -dc nvme_gpu_device.ptx -o nvme_gpu_device.o
//     nvcc -arch=native -dlink -cubin kernel.o nvme_gpu_device.o -o kernel.cubin
//
// or at run time with nvJitLink or cuLink. docs/link-the-core.md has the whole way, and the host's side.
//
// Times are nanoseconds, sizes bytes, addresses of data the controller's (IOVA). Every wait ends by its
// time-out. A call never waits for another thread to act: a thread may wait for commands in any
// order, and need not stay with its warp.
//
// Buffers: load what a command has read through ordinary or volatile pointers after nvme_gpu_wait; never
// through `const __restrict__` or __ldg, whose loads may be older than the data. Until a command has ended
// its buffer, cell and page table belong to the controller.
#pragma once

#include <stdint.h>

// Compared with that of the library by nvme_gpu_device_queues and nvme_gpu_device_rows (nvme_gpu.h), as is that of the
// linked nvme_gpu_device.ptx by nvme_gpu_device_check: the structures below are filled by the host.
#define NVME_GPU_DEVICE_LAYOUT 4

// What the functions return: 0 is success; 1 to 0x7FFF is the controller's status field (status code
// 7:0, type 10:8, do not retry 14) as in NVMe Base 2.0c, "Status Field Definition"; less than 0 is:
enum {
    NVME_GPU_PENDING = -1,    // poll: not ended yet; drain: another thread is draining
    NVME_GPU_TIMED_OUT = -2,  // the command is still in flight: wait again, or let the host recover
    NVME_GPU_FULL = -3,       // no command slot became free in time; nothing was submitted
    NVME_GPU_BAD_DATA = -4,   // the buffer is misaligned or longer than a slot's lists can describe
    NVME_GPU_CELL_BUSY = -5,  // the cell is past the end or belongs to a command in flight
    NVME_GPU_REFUSED = -6,    // the controller posted nonsense; only the host can recover the queue
    NVME_GPU_ABORTED = -7,    // the host reset the controller while the command was in flight
    NVME_GPU_NO_QUEUE = -8,   // there is no such queue
};

// Queues and result cells, filled by the host: nvme_gpu_device_queues of nvme_gpu.h. Pass it to a kernel by value.
typedef struct nvme_gpu_queues {
    uint64_t queues;       // device address of the queues' words, 80 bytes each
    uint64_t cells;        // device address of the result cells, 8 bytes each, zeroed
    uint32_t queue_count;
    uint32_t cell_count;
} nvme_gpu_queues;

// A command. `cell` is the index of a result cell that no other command in flight uses; a simple choice
// is thread * (commands per thread) + k.
typedef struct nvme_gpu_command {
    uint64_t lba;       // first block
    uint64_t data;      // address of the data; with `pages`, its offset into the first page
    uint64_t pages;     // 0, or device address of a table of the pages' addresses, 8 bytes each
    uint64_t bytes;     // of data; 0 for a command that moves none
    uint32_t opcode;    // 0 flush, 1 write, 2 read, 5 compare, 8 write zeroes
    uint32_t nsid;      // namespace, from 1 on
    uint32_t blocks;    // 1 to 65536; 0 for flush
    uint32_t flags;     // or-ed into CDW12: 1 << 30 is force unit access
    uint32_t cell;
    uint32_t reserved;  // 0
} nvme_gpu_command;

// A command in flight: made by nvme_gpu_submit, ended by nvme_gpu_wait or nvme_gpu_poll.
typedef struct nvme_gpu_token {
    uint32_t words[3];
    uint32_t queue;
} nvme_gpu_token;

// A table's rows for kernels, filled by the host: nvme_gpu_device_rows of nvme_gpu.h. Pass it to a kernel by value; it
// may be used until the store is closed, and kernels that use it later get NVME_GPU_ROW_GONE.
typedef struct nvme_gpu_rows {
    nvme_gpu_queues queues;
    uint64_t internal[10];
    uint64_t first_byte;   // where row 0 begins in the namespace
    uint64_t rows;
    uint64_t internal_too;
    uint64_t timeout_ns;   // of each read
    uint32_t row_bytes;
    uint32_t slot_bytes;
    uint32_t internal_words[8];
} nvme_gpu_rows;

// What a thread holds between nvme_gpu_rows_enter and nvme_gpu_rows_leave.
typedef struct nvme_gpu_rows_here {
    uint64_t words[3];
} nvme_gpu_rows_here;

// Why a row was not read, beside the controller's status (SCT << 8 | SC, above 0); 0 is success. As in nvme_gpu.h.
#ifndef NVME_GPU_ROW_OUT_OF_RANGE
enum {
    NVME_GPU_ROW_OUT_OF_RANGE = -1,  // the table has no such row
    NVME_GPU_ROW_TIMED_OUT = -2,     // the read got no answer; the host recovers the controller
    NVME_GPU_ROW_GONE = -3,          // the controller is being recovered, or the store was closed
    NVME_GPU_ROW_NOT_RUN = -5,       // no station was free in time, or a read of this thread was given up before
};
#endif

#ifdef __cplusplus
static_assert(sizeof(nvme_gpu_rows) == 176, "as in Rust");
static_assert(sizeof(nvme_gpu_rows_here) == 24, "as in Rust");
static_assert(sizeof(nvme_gpu_queues) == 24, "as in Rust");
static_assert(sizeof(nvme_gpu_command) == 56, "as in Rust");
static_assert(sizeof(nvme_gpu_token) == 16, "as in Rust");
#endif

// Host code includes this file for the structures alone: in C, C++ or CUDA C++.
#ifdef __CUDACC__
extern "C" {

// Submits on queue `queue` (from 0) and rings; threads of a warp that call it together share the work.
// Drains while every slot is taken, up to `timeout_ns`; 0 never waits.
// Returns 0 and writes `token`, or FULL, CELL_BUSY, BAD_DATA, REFUSED, NO_QUEUE.
__device__ int nvme_gpu_submit(const nvme_gpu_queues* queues, uint32_t queue,
                               const nvme_gpu_command* command, uint64_t timeout_ns,
                               nvme_gpu_token* token);

// Waits for this command's own end, and helps everyone meanwhile. What it read is visible afterwards.
// Returns its status, TIMED_OUT (the token stays good), REFUSED, ABORTED or NO_QUEUE.
__device__ int nvme_gpu_wait(const nvme_gpu_queues* queues, const nvme_gpu_token* token,
                             uint64_t timeout_ns);

// Returns the command's status when it has been drained, by whomever, else PENDING. Does not drain.
__device__ int nvme_gpu_poll(const nvme_gpu_queues* queues, const nvme_gpu_token* token);

// Rings for everyone and takes completions for everyone, without waiting: how many, or PENDING.
__device__ int nvme_gpu_drain(const nvme_gpu_queues* queues, uint32_t queue);

// Lets the threads of a block read rows; waits while all stations are in use by other blocks. Every thread of the
// block calls it: whole warps, and as many threads as 1 MiB / slot_bytes, 256 at most. Returns 0, NVME_GPU_ROW_GONE or
// NVME_GPU_ROW_NOT_RUN; nvme_gpu_row then gives the same, and nvme_gpu_rows_leave is called all the same.
__device__ int nvme_gpu_rows_enter(const nvme_gpu_rows* rows, nvme_gpu_rows_here* here);

// Reads row `id` and gives the address of its bytes, which lie in memory of the host and stay until the thread's next
// call: load each once, through a volatile pointer. Any thread calls it, from divergent code too. Returns 0, the
// controller's status, or a NVME_GPU_ROW_ code.
__device__ int nvme_gpu_row(nvme_gpu_rows_here* here, int64_t id, const volatile void** bytes);

// Lets another block read rows. Every thread of the block calls it.
__device__ void nvme_gpu_rows_leave(nvme_gpu_rows_here* here);

}  // extern "C"
#endif
