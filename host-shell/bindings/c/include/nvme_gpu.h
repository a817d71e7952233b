/* nvme_gpu.h: reads and writes of NVMe drives and files, rows of tables by ids, gathers by a GPU.
 *
 * Made from host-shell/bindings/c/src by `UPDATE_HEADER=1 cargo test -p nvme-gpu-capi --test header`, not by hand.
 * Guide: docs/guide/c.md.
 *
 * Errors: functions return 0 or a status: see nvme_gpu_status. nvme_gpu_last_error() and nvme_gpu_last_remedy() say
 * in words what went wrong in this thread and what to do. No function ends the process or throws.
 * Threads: every function may be called by any thread, several at once, also on one handle. A signal handler may
 * call none. After fork() the child may use what it opens itself, and nothing of its parent.
 * Handles: nvme_gpu_t, nvme_gpu_table_t and nvme_gpu_pending_t are numbers that are looked up. One that was closed,
 * and NULL, ends with NVME_GPU_ERROR_CLOSED; closing it again does nothing.
 * Pointers: point to as much memory as the function says, for the time that it says; NULL where nothing else is
 * said is NVME_GPU_ERROR_USAGE. Texts end with a 0. Sizes and offsets are in bytes.
 * Structures: begin with their size, which the caller sets. Fields that a smaller size lacks have their default;
 * of a larger one the fields that the library does not know have to be 0.
 */

#ifndef NVME_GPU_H
#define NVME_GPU_H

#include <stddef.h>
#include <stdint.h>

/*
 Success.
 */
#define NVME_GPU_OK 0

/*
 Status of a row: the id is negative, or not below the number of rows.
 */
#define NVME_GPU_ROW_OUT_OF_RANGE -1

/*
 Status of a row: a command that the row needed was not answered in time.
 */
#define NVME_GPU_ROW_TIMED_OUT -2

/*
 Status of a row: the device, or the member of a stripe that holds the row, is gone.
 */
#define NVME_GPU_ROW_GONE -3

/*
 Status of a row: a file or the system failed.
 */
#define NVME_GPU_ROW_IO -4

/*
 Status of a row: the operation ended before a command for the row was sent.
 */
#define NVME_GPU_ROW_NOT_RUN -5

/*
 An argument that cannot be obeyed; nothing was sent to the device.
 */
#define NVME_GPU_ERROR_USAGE -101

/*
 A file operation failed.
 */
#define NVME_GPU_ERROR_FILE -102

/*
 A system call that is not about a file failed.
 */
#define NVME_GPU_ERROR_SYSTEM -103

/*
 The device could not be opened or brought up, or rows of it failed.
 */
#define NVME_GPU_ERROR_DEVICE -104

/*
 This machine lacks something: a permission, a driver, an IOMMU, a GPU.
 */
#define NVME_GPU_ERROR_ENVIRONMENT -105

/*
 A fault of this library.
 */
#define NVME_GPU_ERROR_INTERNAL -106

/*
 The controller cannot do this.
 */
#define NVME_GPU_ERROR_UNSUPPORTED -107

/*
 The operation has not ended yet: it continues in the background.
 */
#define NVME_GPU_ERROR_UNFINISHED -108

/*
 Data differ from the data that they were compared with.
 */
#define NVME_GPU_ERROR_MISMATCH -109

/*
 A command was not answered in time.
 */
#define NVME_GPU_ERROR_TIMEOUT -110

/*
 The device is gone: open it again.
 */
#define NVME_GPU_ERROR_GONE -111

/*
 The call was interrupted.
 */
#define NVME_GPU_ERROR_INTERRUPTED -112

/*
 Header and library are of versions that do not fit.
 */
#define NVME_GPU_ERROR_VERSION -113

/*
 The handle is NULL, was closed, or is none of this library.
 */
#define NVME_GPU_ERROR_CLOSED -114

/*
 The device has changed since it was opened: another host formatted a namespace, it became smaller, was
 deleted, write protected or sanitized, or another drive answers. Nothing was sent: open it again.
 */
#define NVME_GPU_ERROR_CHANGED -115

/*
 No page has this key: it was never stored, or made room for another one. Compute it.
 */
#define NVME_GPU_ERROR_PAGE_MISSING -121

/*
 The page is not what was stored, and was dropped. Compute it again.
 */
#define NVME_GPU_ERROR_PAGE_LOST -122

/*
 Another call is storing this page.
 */
#define NVME_GPU_ERROR_PAGE_IN_PROGRESS -123

/*
 Every page of the area is in use, so that none can make room.
 */
#define NVME_GPU_ERROR_PAGE_NO_ROOM -124

/*
 The version of this header: (major << 16) | (minor << 8) | patch.
 */
#define NVME_GPU_VERSION 256

/*
 nvme_gpu_features(): simulated drives, `sim:`.
 */
#define NVME_GPU_HAS_SIM 1

/*
 nvme_gpu_features(): drives behind VFIO, `vfio:`.
 */
#define NVME_GPU_HAS_VFIO 2

/*
 nvme_gpu_features(): controllers of other processes, `vfio-user:`.
 */
#define NVME_GPU_HAS_VFIO_USER 4

/*
 nvme_gpu_features(): GPUs. libcuda.so.1 is looked up when a store is opened with one.
 */
#define NVME_GPU_HAS_CUDA 8

/*
 nvme_gpu_options.flags: allows writes to a real device (a function behind VFIO, a block device).
 */
#define NVME_GPU_ALLOW_WRITE 1

/*
 nvme_gpu_options.flags: allows no writes at all. An image of the simulator is then shared with other readers.
 */
#define NVME_GPU_READ_ONLY 2

/*
 nvme_gpu_options.flags: files by io_uring, or not at all.
 */
#define NVME_GPU_FILE_URING 4

/*
 nvme_gpu_options.flags: files by pread and pwrite.
 */
#define NVME_GPU_FILE_PREAD 8

/*
 Flag of nvme_gpu_options, for files with a GPU: nvme_gpu_pread() into its memory uses NVIDIA's cuFile where
 that accepts the file, else host threads. libcufile.so.0 is looked up when the file is opened;
 nvme_gpu_path() shows the outcome.
 */
#define NVME_GPU_GDS 16

/*
 nvme_gpu_options.flags: as NVME_GPU_GDS, and the file is not opened, or not read, where cuFile refuses.
 */
#define NVME_GPU_GDS_REQUIRE 32

/*
 Level of an event: something does not work any more.
 */
#define NVME_GPU_LOG_ERROR 1

/*
 Level of an event: something needed a recovery, or took long.
 */
#define NVME_GPU_LOG_WARNING 2

/*
 Level of an event: something began or ended as it should.
 */
#define NVME_GPU_LOG_INFO 3

/*
 nvme_gpu_io.operation: read.
 */
#define NVME_GPU_READ 0

/*
 nvme_gpu_io.operation: write.
 */
#define NVME_GPU_WRITE 1

/*
 nvme_gpu_row_request.id_type: int32_t.
 */
#define NVME_GPU_I32 4

/*
 nvme_gpu_row_request.id_type: int64_t.
 */
#define NVME_GPU_I64 8

/*
 nvme_gpu_row_request.element: IEEE 754 binary32.
 */
#define NVME_GPU_ADD_F32 1

/*
 nvme_gpu_row_request.element: IEEE 754 binary16, summed as binary32.
 */
#define NVME_GPU_ADD_F16 2

/*
 nvme_gpu_row_request.element: bfloat16, summed as binary32.
 */
#define NVME_GPU_ADD_BF16 3

/*
 nvme_gpu_row_request.element: int32_t; sums wrap.
 */
#define NVME_GPU_ADD_I32 4

/*
 nvme_gpu_row_request.duplicates: the last of several rows with the same id is written.
 */
#define NVME_GPU_DUPLICATES_LAST 0

/*
 nvme_gpu_row_request.duplicates: an id that comes twice is NVME_GPU_ERROR_USAGE, and nothing is written.
 */
#define NVME_GPU_DUPLICATES_ERROR 1

/*
 Bytes of a key.
 */
#define NVME_GPU_PAGE_KEY_BYTES 16

/*
 nvme_gpu_pages_options.create: an area that is blank, damaged or of another model is formatted.
 */
#define NVME_GPU_PAGES_AUTO 0

/*
 nvme_gpu_pages_options.create: such an area is an error.
 */
#define NVME_GPU_PAGES_NEVER 1

/*
 nvme_gpu_pages_options.create: the area is formatted, and its pages are gone.
 */
#define NVME_GPU_PAGES_ALWAYS 2

/*
 A gather whose second half is to come. Opaque; independent of the handles of its table and store.
 */
typedef struct nvme_gpu_begun_t nvme_gpu_begun_t;

/*
 Queues, result cells and a buffer for kernels of a program. Opaque; closed with its store.
 */
typedef struct nvme_gpu_device_t nvme_gpu_device_t;

/*
 Pages in an area of a store. Opaque; closed with its store.
 */
typedef struct nvme_gpu_pages_t nvme_gpu_pages_t;

/*
 An operation under way, or ended. Opaque; independent of the store's handle.
 */
typedef struct nvme_gpu_pending_t nvme_gpu_pending_t;

/*
 `struct nvme_gpu_queues` of nvme_gpu_device.cuh, which a kernel takes by value.
 */
typedef struct nvme_gpu_queues nvme_gpu_queues;

/*
 `struct nvme_gpu_rows` of nvme_gpu_device.cuh, which a kernel takes by value.
 */
typedef struct nvme_gpu_rows nvme_gpu_rows;

/*
 A store: a drive, a file, or several in stripes. Opaque.
 */
typedef struct nvme_gpu_t nvme_gpu_t;

/*
 Rows of one size in a store. Opaque; closed with its store.
 */
typedef struct nvme_gpu_table_t nvme_gpu_table_t;

/*
 Result of a call: 0 is success; above 0 is the controller's status (SCT << 8 | SC, as in NVMe Base 2.0c,
 "Status Field Definition"); -1 to -99 is the status of a row; -100 and below is an error of this library.
 */
typedef int32_t nvme_gpu_status;

/*
 nvme_gpu_version(): set `size` to sizeof(nvme_gpu_versions) before the call. Numbers are as in NVME_GPU_VERSION.
 */
typedef struct nvme_gpu_versions {
  size_t size;
  /*
   Of the library that is loaded.
   */
  uint32_t library;
  /*
   Of the GPU kernels inside; 0 without CUDA.
   */
  uint32_t ptx;
} nvme_gpu_versions;

/*
 Options of nvme_gpu_open(). Begin with NVME_GPU_OPTIONS_INIT, then set fields; 0 selects the default of a
 field.
 */
typedef struct nvme_gpu_options {
  /*
   sizeof(nvme_gpu_options).
   */
  size_t size;
  /*
   NVME_GPU_VERSION: compared with the version of the library.
   */
  uint32_t version;
  /*
   NVME_GPU_ALLOW_WRITE and so on, or-ed.
   */
  uint32_t flags;
  /*
   Namespace of a controller, from 1 on. Default 1.
   */
  uint32_t nsid;
  /*
   Queue pairs, or rings of io_uring, that all calls share: 1 to 4095. Default 8. A controller may grant fewer.
   */
  uint32_t queues;
  /*
   Commands in flight of each: 1 to 4095. Default 64.
   */
  uint32_t depth;
  /*
   Deadline of a controller's command, after which it is aborted, in ms. Default 5000. Files have no limit.
   */
  uint32_t timeout_ms;
  /*
   With a GPU: queue pairs that the GPU drives, besides those of the CPU. Default 16.
   */
  uint32_t gpu_queues;
  /*
   With a GPU: entries of each, 65536 at most, rounded up to a power of two. Default 1024. A controller may have
   fewer.
   */
  uint32_t gpu_entries;
  /*
   With a GPU: blocks of a launch that run at a time, each with 1 MiB of slot memory. Default 32.
   */
  uint32_t gpu_stations;
  /*
   With a GPU: queue pairs that are kept for kernels of your own, nvme_gpu_device_queues(). Default none.
   */
  uint32_t gpu_kernel_queues;
  /*
   With a GPU: 1 for data in host memory, 2 for data in its memory, 3 for its queues' rings there, too; where that
   does not work, the store is not opened. Default: 1 or 2, the highest that works without a thread of the CPU, or
   else 0, a thread that rings doorbells.
   */
  uint32_t gpu_tier;
} nvme_gpu_options;

/*
 nvme_gpu_path(): set `size` to sizeof(nvme_gpu_path_info) before the call. Texts end with a 0; those that are too
 long are cut.
 */
typedef struct nvme_gpu_path_info {
  size_t size;
  /*
   -1 without a GPU, else how the GPU reaches the device: 0 relayed, 1 its own doorbells, 2 data in its memory,
   3 rings of its queues there, too.
   */
  int32_t tier;
  /*
   0.
   */
  int32_t reserved;
  /*
   Memory that rows are read into: `host`, or `gpu` where a GPU gathers.
   */
  char data[16];
  /*
   The device as it was named.
   */
  char device[1024];
  /*
   Mover of the data: as in `io_uring`.
   */
  char path[512];
  /*
   Reason why no faster path is used.
   */
  char why[1024];
} nvme_gpu_path_info;

/*
 nvme_gpu_stats(): set `size` to sizeof(nvme_gpu_statistics) before the call. Counts since the store was opened.
 */
typedef struct nvme_gpu_statistics {
  size_t size;
  /*
   Commands sent by the CPU, or system calls to a file.
   */
  uint64_t commands;
  /*
   Bytes that they moved.
   */
  uint64_t bytes;
  /*
   Commands that were sent again.
   */
  uint64_t retries;
  /*
   Operations in the background that failed, whether or not they were waited for.
   */
  uint64_t background_failures;
  /*
   Calls into this library since the process began, this one included: a graph that is launched again adds none.
   */
  uint64_t calls;
  /*
   Gathers of a drive's rows or of stripes, launched on a GPU or captured in a graph, whose blocks own their queues.
   */
  uint64_t owned_gathers;
  /*
   Gathers of a drive's rows or of stripes, launched or captured, whose blocks share their queues.
   */
  uint64_t shared_gathers;
  /*
   Gathers of one drive's rows, launched or captured, whose reads nvme_gpu_gather_begin() submits.
   */
  uint64_t begun_gathers;
  /*
   Rows of those that nvme_gpu_gather_finish() had to read: other gathers held the queues when they were begun.
   */
  uint64_t late_rows;
  /*
   Rows that gathers left without data and scatters did not write, by the CPU and by a GPU, each run of a graph included.
   Of bytes that a GPU moves, they are parts of 64 KiB.
   */
  uint64_t failed_rows;
  /*
   Rows of gathers on a GPU that read each distinct row once: those of 4,096 rows and more of a drive or of
   stripes, without a cache, each run of a graph included.
   */
  uint64_t unique_asked;
  /*
   Those of them that were read.
   */
  uint64_t unique_read;
  /*
   Rows of gathers that have ended, failed ones and each run of a graph included. When a GPU reads bytes, each part
   that it reads counts as a row.
   */
  uint64_t rows_read;
  /*
   Rows of scatters that have ended, failed ones and each run of a graph included.
   */
  uint64_t rows_written;
  /*
   Bytes that commands of the CPU read, and bytes of the rows that a GPU read.
   */
  uint64_t bytes_read;
  /*
   Bytes that commands of the CPU wrote, and bytes of the rows that a GPU wrote.
   */
  uint64_t bytes_written;
  /*
   Rows of gathers of the CPU that were copies of another row of the same gather, and were read once.
   */
  uint64_t duplicates_saved;
  /*
   Recoveries of the store's controllers: commands that were aborted, and controller resets.
   */
  uint64_t recoveries;
  /*
   Time that threads spent in reads and writes of the CPU and in waits for a GPU's rows, in nanoseconds, of all
   threads together.
   */
  uint64_t waited_ns;
  /*
   Sum of the latencies of commands of the CPU, in nanoseconds.
   */
  uint64_t latency_ns;
  /*
   Commands of the CPU that are under way.
   */
  uint64_t commands_under_way;
  /*
   Launches on a GPU that have not ended, without those of graphs.
   */
  uint64_t launches_under_way;
  /*
   Blocks of the last launch on a GPU.
   */
  uint64_t launch_blocks;
  /*
   Registers that these blocks hold on the GPU together.
   */
  uint64_t launch_registers;
  /*
   Number of commands of the CPU by their latency: element 0 counts those below 1 us, element n those from 2^(n-1) to
   2^n us, the last one all that took longer, too.
   */
  uint64_t latency_us[32];
  /*
   Rows of gathers on a GPU through a cache of rows that have ended, each run of a graph included.
   */
  uint64_t cache_asked;
  /*
   Number of these rows that were in the cache, and not read from the drive.
   */
  uint64_t cache_hits;
  /*
   Launches that write one drive's rows, by a GPU or captured in a graph, whose blocks own their queues.
   */
  uint64_t owned_scatters;
  /*
   Launches that write one drive's rows, by a GPU or captured in a graph, whose blocks share their queues.
   */
  uint64_t shared_scatters;
} nvme_gpu_statistics;

/*
 nvme_gpu_explain(): set `size` to sizeof(nvme_gpu_advice) before the call. Texts end with a 0; those that are too long
 are cut. They are those of `nvme-gpu why`.
 */
typedef struct nvme_gpu_advice {
  size_t size;
  /*
   The device as it was named.
   */
  char device[1024];
  /*
   What moves the bytes now.
   */
  char now[640];
  /*
   The next better way; empty if there is none.
   */
  char better[256];
  /*
   What stands between; empty if there is no better way.
   */
  char between[1536];
} nvme_gpu_advice;

/*
 A stream of the GPU: a CUstream or cudaStream_t, or NULL for the default stream. Ignored for host memory.
 */
typedef void *nvme_gpu_stream;

/*
 One read or write of a batch.
 */
typedef struct nvme_gpu_io {
  /*
   NVME_GPU_READ or NVME_GPU_WRITE.
   */
  uint32_t operation;
  /*
   Written at the end: NVME_GPU_OK, or why it failed.
   */
  nvme_gpu_status status;
  /*
   First byte in the store.
   */
  uint64_t offset;
  /*
   Length in bytes.
   */
  size_t bytes;
  /*
   Not changed by a write. Host memory; of a read by nvme_gpu_batch() also memory of the store's GPU.
   */
  void *data;
} nvme_gpu_io;

/*
 A range of bytes of a store.
 */
typedef struct nvme_gpu_range {
  /*
   First byte in the store.
   */
  uint64_t offset;
  /*
   Length in bytes.
   */
  uint64_t bytes;
} nvme_gpu_range;

/*
 Rows by ids for nvme_gpu_gather(), nvme_gpu_scatter(), nvme_gpu_scatter_add(), their forms with _async, and for
 nvme_gpu_gather_begin() and nvme_gpu_gather_finish(). Set `size`, the fields that the function uses, and all others to
 0: `nvme_gpu_row_request request = { .size = sizeof request, .ids = ... }`. A field that the function does not use is
 NVME_GPU_ERROR_USAGE.
 */
typedef struct nvme_gpu_row_request {
  /*
   sizeof(nvme_gpu_row_request).
   */
  size_t size;
  /*
   `count` ids, counted from 0; they may repeat.
   */
  const void *ids;
  /*
   Number of ids.
   */
  uint64_t count;
  /*
   NVME_GPU_I32 or NVME_GPU_I64.
   */
  uint32_t id_type;
  /*
   Scatters of host memory: NVME_GPU_DUPLICATES_LAST or NVME_GPU_DUPLICATES_ERROR.
   */
  uint32_t duplicates;
  /*
   Gathers: the places of the rows.
   */
  void *out;
  /*
   Scatters and additions: the rows.
   */
  const void *rows;
  /*
   Distance of two rows in `out` or `rows` in bytes; 0 selects rows without gaps.
   */
  uint64_t stride;
  /*
   NULL, or `count` elements that become 0, the controller's status, or NVME_GPU_ROW_...
   */
  int32_t *row_status;
  /*
   The stream, with memory of a GPU.
   */
  nvme_gpu_stream stream;
  /*
   Gathers: NULL, or the stored elements, which become those of `dtype`: "float16", "bfloat16", "float8_e4m3fn",
   "float8_e5m2", "float4_e2m1fn_x2" (two in a byte), "float8_scaled" (256 E4M3 and their 8 E8M0 scales), or GGUF's
   blocks: "q8_0", "q4_0", "q4_1", "q2_k" to "q6_k", "iq4_nl", "iq4_xs", "mxfp4". The row has to be whole blocks.
   */
  const char *stored;
  /*
   Gathers: NULL, or "float16", "bfloat16" or "float32". In memory of a GPU `out` and `stride` are multiples of its bytes.
   */
  const char *dtype;
  /*
   Additions: NVME_GPU_ADD_F32, _F16, _BF16 or _I32.
   */
  uint32_t element;
  /*
   0.
   */
  uint32_t reserved;
} nvme_gpu_row_request;

/*
 Outcome of rows. Set `size` to sizeof(nvme_gpu_report) before the call.
 */
typedef struct nvme_gpu_report {
  size_t size;
  /*
   Rows asked for; 0 where they were not counted: reads and writes, and gathers of a GPU.
   */
  uint64_t rows;
  /*
   Rows whose status is not 0.
   */
  uint64_t failed;
  /*
   Place in the request of the first of them; 0 without one.
   */
  uint64_t first_row;
  /*
   Status of the first of them; 0 without one.
   */
  int32_t first_status;
  /*
   errno of the first command of a file that failed; 0 without one.
   */
  int32_t error_number;
} nvme_gpu_report;

/*
 Scales of a table's elements, for nvme_gpu_table_scaled(). Set `size`, the fields that are needed, and all others to 0.
 */
typedef struct nvme_gpu_row_scales {
  /*
   sizeof(nvme_gpu_row_scales).
   */
  size_t size;
  /*
   "float32", "bfloat16", "float8_e8m0fnu" or "float8_e4m3fn"; NULL if no scales are stored.
   */
  const char *format;
  /*
   The stored scales of row 0, then those of row 1, and so on: in memory of the host for rows that the CPU gathers, in
   memory of the store's GPU for rows that the GPU gathers.
   */
  const void *data;
  /*
   Bytes of all stored scales.
   */
  uint64_t bytes;
  /*
   Number of elements of a row that share a scale: a power of two up to 65,536. 0 without stored scales.
   */
  uint32_t columns;
  /*
   By which all scales are multiplied; without stored scales, the scale of all elements. 0 selects 1.
   */
  float factor;
  /*
   1 if the scales are divided by `factor`, as by `weight_global_scale` of compressed-tensors; else 0.
   */
  uint32_t divides;
  /*
   0.
   */
  uint32_t reserved;
} nvme_gpu_row_scales;

/*
 Parameters of nvme_gpu_device_queues(), and its results that the kernels need. Set `size` to
 sizeof(nvme_gpu_device_setup); 0 selects the default of a field.
 */
typedef struct nvme_gpu_device_setup {
  size_t size;
  /*
   NVME_GPU_DEVICE_LAYOUT of the nvme_gpu_device.cuh that the program is compiled with.
   */
  uint32_t layout;
  /*
   Queue pairs. Default nvme_gpu_options.gpu_kernel_queues, which is also the most.
   */
  uint32_t queues;
  /*
   Entries of each, rounded up to a power of two. Default 256.
   */
  uint32_t entries;
  /*
   Result cells: one for each command that may be in flight or not waited for yet. Default 65536.
   */
  uint32_t cells;
  /*
   Bytes of a buffer that the controller and the kernels reach, in host memory. Default none.
   */
  uint64_t buffer_bytes;
  /*
   Written: the address of the buffer for kernels.
   */
  uint64_t buffer;
  /*
   Written: the address of the buffer for nvme_gpu_command.data.
   */
  uint64_t buffer_iova;
  /*
   Written: blocks of the namespace.
   */
  uint64_t blocks;
  /*
   Written: for nvme_gpu_command.nsid.
   */
  uint32_t nsid;
  /*
   Written: bytes of a block.
   */
  uint32_t block_bytes;
  /*
   Written: the most bytes of one command.
   */
  uint32_t most_bytes;
  /*
   0.
   */
  uint32_t reserved;
} nvme_gpu_device_setup;

/*
 The place of pages, and what they depend on beside their keys: pages of other values are never found. A text that is NULL
 is empty; none has more than 255 bytes.
 */
typedef struct nvme_gpu_pages_options {
  /*
   sizeof(nvme_gpu_pages_options).
   */
  size_t size;
  /*
   First byte of the area in the store, a multiple of 4,096.
   */
  uint64_t offset;
  /*
   Bytes of the area; 0 for all up to the end of the store.
   */
  uint64_t bytes;
  /*
   Limit of the bytes of a page.
   */
  uint32_t page_bytes;
  /*
   NVME_GPU_PAGES_AUTO, NVME_GPU_PAGES_NEVER or NVME_GPU_PAGES_ALWAYS.
   */
  uint32_t create;
  /*
   Tokens of a page.
   */
  uint32_t block_tokens;
  /*
   Number of the cache group of a hybrid model.
   */
  uint32_t group;
  /*
   Name of the model; not NULL.
   */
  const char *model;
  /*
   Revision of its weights.
   */
  const char *revision;
  /*
   Element type, as "bfloat16".
   */
  const char *dtype;
  /*
   Order of a page's dimensions, and version of the program that has it.
   */
  const char *layout;
  /*
   Ranks and sizes of the parallelism, as "tp 0 of 8".
   */
  const char *parallel_rank;
  /*
   Algorithm of the caller's hashes.
   */
  const char *hash_algorithm;
  /*
   Root of the caller's hashes.
   */
  const char *seed;
} nvme_gpu_pages_options;

/*
 Counts since pages were opened.
 */
typedef struct nvme_gpu_pages_statistics {
  /*
   sizeof(nvme_gpu_pages_statistics).
   */
  size_t size;
  /*
   Pages that are found.
   */
  uint64_t pages;
  /*
   Pages that fit.
   */
  uint64_t slots;
  /*
   Pages that were loaded and checked.
   */
  uint64_t loaded;
  /*
   Loads of keys without a page.
   */
  uint64_t missed;
  /*
   Pages that were stored durably.
   */
  uint64_t stored;
  /*
   Pages that made room for others.
   */
  uint64_t evicted;
  /*
   Pages that were dropped because what was read is not what was stored.
   */
  uint64_t lost;
  /*
   Pages that were not stored because the drive failed.
   */
  uint64_t failed;
  /*
   Pages that the GPU has read and checked itself; the CPU moves those of files and stripes.
   */
  uint64_t loaded_by_gpu;
  /*
   Pages that the GPU has written itself.
   */
  uint64_t stored_by_gpu;
} nvme_gpu_pages_statistics;

/*
 One page of a call.
 */
typedef struct nvme_gpu_page {
  /*
   Key by nvme_gpu_pages_key().
   */
  uint8_t key[NVME_GPU_PAGE_KEY_BYTES];
  /*
   Memory of the page, of the host or of the GPU that the store was opened with.
   */
  void *data;
  /*
   Bytes of the page, or of the room for it.
   */
  size_t bytes;
  /*
   Written by nvme_gpu_pages_get(): bytes of the page that was loaded.
   */
  size_t length;
  /*
   Written at the end: NVME_GPU_OK, NVME_GPU_ERROR_PAGE_MISSING and so on, or why it failed.
   */
  nvme_gpu_status status;
  /*
   0.
   */
  uint32_t reserved;
} nvme_gpu_page;



#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/*
 Returns the message of the last call of this thread that failed: one line of UTF-8, never NULL, empty before
 the first failure. Valid until the next failure of this thread. Failures of operations in the background are
 not here before nvme_gpu_pending_poll() or nvme_gpu_pending_wait() returned them.
 */
const char *nvme_gpu_last_error(void);

/*
 Returns the remedy for the failure of nvme_gpu_last_error(): one clause, valid as long as that is.
 */
const char *nvme_gpu_last_remedy(void);

/*
 Returns the name of a status of a call or of a row, as in `Success`, `Unrecovered Read Error`, `Id Out of
 Range`. Never NULL, valid for good.
 */
const char *nvme_gpu_status_text(nvme_gpu_status status);

/*
 Returns the remedy for a status of a call or of a row: one clause. Never NULL, valid for good.
 */
const char *nvme_gpu_status_remedy(nvme_gpu_status status);

/*
 Returns the versions of the library and of the GPU kernels in it. nvme_gpu_open() compares that of the
 header, which NVME_GPU_OPTIONS_INIT puts into the options, and refuses another minor version (from 1.0 on:
 major version) with NVME_GPU_ERROR_VERSION.
 */
nvme_gpu_status nvme_gpu_version(struct nvme_gpu_versions *versions);

/*
 Returns the features that this library was built with: NVME_GPU_HAS_... or-ed.
 */
uint32_t nvme_gpu_features(void);

/*
 Opens a device: `sim:PATH`, `sim:mem?size=1GiB`, `vfio:BDF`, `vfio-user:SOCKET`, `file:PATH`, a path with
 a slash, the name of a file in the current folder, or `stripe:DEVICE|DEVICE?stripe=128KiB`. UTF-8.

 `gpu` is the number of a GPU, which submits the reads of rows itself (drives only), or -1. `options` may be
 NULL: defaults, and versions are not compared. On success `*store` is a handle for nvme_gpu_close(), else
 NULL.

 Errors: NVME_GPU_ERROR_VERSION; NVME_GPU_ERROR_USAGE for invalid names and options, for a block device that
 is in use, and for a drive that has a store already; NVME_GPU_ERROR_FILE, _DEVICE, _ENVIRONMENT, _TIMEOUT.
 */
nvme_gpu_status nvme_gpu_open(const char *device,
                              int32_t gpu,
                              const struct nvme_gpu_options *options,
                              struct nvme_gpu_t **store);

/*
 Closes a store, its tables, and its queues for kernels. NULL and a closed handle are ignored.

 Does not wait for the operations of the store: those that were started run to their end, their memory must
 stay valid, and nvme_gpu_pending_t handles stay valid. The device is free when the last of them has ended.
 Calls that other threads have begun end as if the store were open. A captured graph may be launched
 afterwards: its gathers zero each row, with status NVME_GPU_ROW_GONE. Registered memory is unregistered, at the
 latest by the first call of these after every operation has ended and every graph with one was destroyed:
 nvme_gpu_register(), nvme_gpu_unregister() and nvme_gpu_close() of any store. It must stay valid until then.
 With no operation under way the controller is shut down here, which takes the time that the drive needs for
 it.
 */
void nvme_gpu_close(struct nvme_gpu_t *store);

/*
 Returns the size of a store in bytes; 0 for a closed handle, with nvme_gpu_last_error().
 */
uint64_t nvme_gpu_len(const struct nvme_gpu_t *store);

/*
 Returns a number that changes with each write through the store that has ended, and with writes to its file
 by other programs, as exactly as the file's timestamps show them: data read before the change may be stale.
 Writes of kernels of your own are not seen. 0 for a closed handle, with nvme_gpu_last_error().
 */
uint64_t nvme_gpu_write_mark(const struct nvme_gpu_t *store);

/*
 Returns the unit that the device writes, in bytes: writes of whole blocks need no read before them. 1 for a
 file, 0 for a closed handle, with nvme_gpu_last_error().
 */
uint32_t nvme_gpu_block_size(const struct nvme_gpu_t *store);

/*
 Writes the data path of a store, with the reason for it.
 */
nvme_gpu_status nvme_gpu_path(const struct nvme_gpu_t *store, struct nvme_gpu_path_info *info);

/*
 Counts of a store.
 */
nvme_gpu_status nvme_gpu_stats(const struct nvme_gpu_t *store, struct nvme_gpu_statistics *statistics);

/*
 Makes everything durable that was written before by calls that have returned and by operations that have ended.
 */
nvme_gpu_status nvme_gpu_flush(struct nvme_gpu_t *store);

/*
 Lets the GPU of a store reach `bytes` bytes of host memory at `memory`, until nvme_gpu_unregister() or
 nvme_gpu_close(): gathers on a stream may then have ids and row status there. The pages are pinned. Without a GPU,
 and for GPU memory, it is recorded and changes nothing.

 The memory must not be freed, nor a stream use it, before it is unregistered, nor be registered twice.
 Errors: NVME_GPU_ERROR_USAGE; NVME_GPU_ERROR_ENVIRONMENT with the driver's answer.
 */
nvme_gpu_status nvme_gpu_register(struct nvme_gpu_t *store, void *memory, size_t bytes);

/*
 Ends the registration of the memory that begins at `memory`. Nothing may use it on the GPU any more.
 Errors: NVME_GPU_ERROR_USAGE when none begins there.
 */
nvme_gpu_status nvme_gpu_unregister(struct nvme_gpu_t *store, void *memory);

/*
 Writes what moves the bytes of member `member` of a store now, the next better way, and what stands between. A store
 that is no stripe has member 0 alone.
 Errors: NVME_GPU_ERROR_USAGE for a member that is not there.
 */
nvme_gpu_status nvme_gpu_explain(const struct nvme_gpu_t *store, size_t member, struct nvme_gpu_advice *advice);

/*
 Calls `callback` with each event of the library up to `level`: bring-ups, resets, commands that were aborted or took
 long. It gets the level, a line of text that ends with a 0 and is valid during the call, and `context`. NULL for no function, which is the default. Replaces the earlier function, which does not run any more when this
 returns.

 The function is called from any thread, with locks held: it must not call this library, and must be quick.
 Errors: NVME_GPU_ERROR_USAGE for an unknown level, and in a program whose Rust part has a subscriber of `tracing`.
 */
nvme_gpu_status nvme_gpu_set_log(void (*callback)(int32_t level, const char *message, void *context),
                                 void *context,
                                 int32_t level);

/*
 Reads `bytes` bytes from byte `offset` on to `data`, in host memory or in memory of the store's GPU, and waits. Any
 offset, length and alignment. With GPU memory it is ordered after the default stream.

 Errors: NVME_GPU_ERROR_USAGE for a range past the end, before anything is sent. After another error `data` may have
 changed in part. A read to GPU memory returns the status of its first part of 64 KiB that failed.
 */
nvme_gpu_status nvme_gpu_pread(struct nvme_gpu_t *store, void *data, size_t bytes, uint64_t offset);

/*
 Writes `bytes` bytes at `data`, in host memory or in memory of the store's GPU, from byte `offset` on, and waits.
 Durable after nvme_gpu_flush().

 Errors: as nvme_gpu_pread(), and NVME_GPU_ERROR_USAGE for a store that is for reading only. After another error
 some blocks may have been written; bytes outside the range have not changed.
 */
nvme_gpu_status nvme_gpu_pwrite(struct nvme_gpu_t *store, const void *data, size_t bytes, uint64_t offset);

/*
 As nvme_gpu_pread(), and returns at once. With host memory threads of the library read, up to 16 operations
 of a store at a time; with GPU memory it is a part of `stream`. `data` must stay valid, unused, until the
 operation has ended.

 `*pending` is a handle for nvme_gpu_pending_wait() and nvme_gpu_pending_free(); with NULL the operation has
 no handle, and a failure is only counted (nvme_gpu_statistics.background_failures; host memory). An error
 that is found before the start is returned here, and `*pending` is not written.
 */
nvme_gpu_status nvme_gpu_pread_async(struct nvme_gpu_t *store,
                                     void *data,
                                     size_t bytes,
                                     uint64_t offset,
                                     nvme_gpu_stream stream,
                                     struct nvme_gpu_pending_t **pending);

/*
 As nvme_gpu_pwrite(), and returns at once: see nvme_gpu_pread_async(). Operations on host memory are not ordered:
 wait for one before another that shall see its bytes. Those of one stream are.
 */
nvme_gpu_status nvme_gpu_pwrite_async(struct nvme_gpu_t *store,
                                      const void *data,
                                      size_t bytes,
                                      uint64_t offset,
                                      nvme_gpu_stream stream,
                                      struct nvme_gpu_pending_t **pending);

/*
 Carries out `count` reads and writes, with many commands in flight, and waits for all. Those of one batch are not
 ordered: none may write bytes that another one reads or writes.

 Each entry gets its status. Returns that of the first one that failed; the others were carried out all the same.
 NVME_GPU_ERROR_UNFINISHED comes before any other failure: reads with that status continue, and their memory is in use.
 An entry that cannot be obeyed is refused with NVME_GPU_ERROR_USAGE before anything is sent or written.

 Reads may go to memory of the store's GPU, ordered after the default stream: up to 96 of one drive are one launch.
 If one of them fails, each is read once more for its status.
 */
nvme_gpu_status nvme_gpu_batch(struct nvme_gpu_t *store, struct nvme_gpu_io *ios, size_t count);

/*
 As nvme_gpu_batch() in host memory, and returns at once: see nvme_gpu_pread_async(). `ios` must stay until the end; its statuses
 are written before that.
 */
nvme_gpu_status nvme_gpu_batch_async(struct nvme_gpu_t *store,
                                     struct nvme_gpu_io *ios,
                                     size_t count,
                                     nvme_gpu_stream stream,
                                     struct nvme_gpu_pending_t **pending);

/*
 Opens a table: `rows` rows of `row_bytes` bytes (1 and more), from byte `offset` of the store on. On success
 `*table` is a handle for nvme_gpu_table_close(), else NULL. Errors: NVME_GPU_ERROR_USAGE.
 */
nvme_gpu_status nvme_gpu_table_open(struct nvme_gpu_t *store,
                                    uint64_t offset,
                                    uint64_t rows,
                                    uint64_t row_bytes,
                                    struct nvme_gpu_table_t **table);

/*
 Opens a table whose rows of `row_bytes` bytes lie in `count` ranges, one range after the other: tensors of several
 files, files in several extents. Rows begin at any byte, and may lie in several ranges; they are not written. `ranges`
 is not used after the call. On success `*table` is a handle for nvme_gpu_table_close(), else NULL. Errors:
 NVME_GPU_ERROR_USAGE for ranges that are not whole rows together, that overlap or that end past the store.
 */
nvme_gpu_status nvme_gpu_table_open_ranges(struct nvme_gpu_t *store,
                                           const struct nvme_gpu_range *ranges,
                                           size_t count,
                                           uint64_t row_bytes,
                                           struct nvme_gpu_table_t **table);

/*
 Closes a table; its operations continue. NULL and a closed handle are ignored.
 */
void nvme_gpu_table_close(struct nvme_gpu_table_t *table);

/*
 Returns the number of rows; 0 for a closed handle, with nvme_gpu_last_error().
 */
uint64_t nvme_gpu_table_rows(const struct nvme_gpu_table_t *table);

/*
 Returns the number of bytes of a row; 0 for a closed handle, with nvme_gpu_last_error().
 */
uint64_t nvme_gpu_table_row_bytes(const struct nvme_gpu_table_t *table);

/*
 Returns the number of bytes of a row of the table that nvme_gpu_gather() makes with these names: the row
 has elements of `stored`, which come out as `dtype`. 0 after an error, with nvme_gpu_last_error().
 */
uint64_t nvme_gpu_table_row_bytes_as(const struct nvme_gpu_table_t *table, const char *stored, const char *dtype);

/*
 Copies row `ids[i]` of the table to place `i` of `out`, for every `i`, and waits. With `stored` and `dtype` the elements
 of the rows become wider on the way, and a place has nvme_gpu_table_row_bytes_as() bytes; only stored bytes are read.
 `report` is NULL or written.

 All memory of the request lies in host memory, or all in memory of the store's GPU: then the gather runs in `stream`
 after the work before it, and the GPU itself submits the reads of a drive; a host thread reads rows of a file or a
 stripe. Ids and row status may also be in registered host memory.

 A row that was not read is zero in `out`, and has its status; the others are right. Returns the status of
 the first row that failed. Errors: NVME_GPU_ERROR_USAGE before anything is read.
 */
nvme_gpu_status nvme_gpu_gather(struct nvme_gpu_table_t *table,
                                const struct nvme_gpu_row_request *request,
                                struct nvme_gpu_report *report);

/*
 As nvme_gpu_gather(), and returns at once. With GPU memory it is a part of `stream`, which may be captured:
 a graph gathers by the contents of `ids` at the time of its launch. No call is made that waits for the GPU.
 With host memory threads of the library gather. The request and the names in it are copied; the memory that it names
 must stay valid until the end; `pending` is as in nvme_gpu_pread_async().
 */
nvme_gpu_status nvme_gpu_gather_async(struct nvme_gpu_table_t *table,
                                      const struct nvme_gpu_row_request *request,
                                      struct nvme_gpu_pending_t **pending);

/*
 Writes place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. Bytes beside the rows do not
 change. The rest is as in nvme_gpu_gather().

 Rows in GPU memory are written in the order of the stream: by the GPU itself where offset and length of the table's
 rows are multiples of a block of one drive, else by a host thread. The GPU takes no lock: two writers of one row
 are ordered by a stream or by waiting. A call on host memory that writes a part of such a row at the same time, or
 adds to it, may put the rest of the row back to what it was.

 With host memory all ids are judged first: with one out of range nothing is written, and the other rows have the
 status NVME_GPU_ROW_NOT_RUN. A row that failed later may have been written in part. Durable after nvme_gpu_flush().
 Errors: NVME_GPU_ERROR_USAGE, also for a store that is for reading only, before anything is written.
 */
nvme_gpu_status nvme_gpu_scatter(struct nvme_gpu_table_t *table,
                                 const struct nvme_gpu_row_request *request,
                                 struct nvme_gpu_report *report);

/*
 As nvme_gpu_scatter(), and returns at once: see nvme_gpu_gather_async().
 */
nvme_gpu_status nvme_gpu_scatter_async(struct nvme_gpu_table_t *table,
                                       const struct nvme_gpu_row_request *request,
                                       struct nvme_gpu_pending_t **pending);

/*
 Adds place `i` of `rows` to row `ids[i]` of the table, for every `i`, and waits. The elements are `element`,
 little-endian. Rows with the same id are summed in the order of `ids`; additions of several threads through one store
 are all counted. The rest is as in nvme_gpu_scatter().
 */
nvme_gpu_status nvme_gpu_scatter_add(struct nvme_gpu_table_t *table,
                                     const struct nvme_gpu_row_request *request,
                                     struct nvme_gpu_report *report);

/*
 As nvme_gpu_scatter_add(), and returns at once: see nvme_gpu_gather_async().
 */
nvme_gpu_status nvme_gpu_scatter_add_async(struct nvme_gpu_table_t *table,
                                           const struct nvme_gpu_row_request *request,
                                           struct nvme_gpu_pending_t **pending);

/*
 Opens the rows of `table` once more, with `scales`: gathers with nvme_gpu_row_request.stored and .dtype multiply each
 element by its scale. Scales in memory of the host are copied; those in memory of a GPU stay there, unchanged, until
 the last gather has ended. On success `*scaled` is a handle for nvme_gpu_table_close(), else NULL. Errors:
 NVME_GPU_ERROR_USAGE; a gather whose rows have another number of scales is one, too.
 */
nvme_gpu_status nvme_gpu_table_scaled(struct nvme_gpu_table_t *table,
                                      const struct nvme_gpu_row_scales *scales,
                                      struct nvme_gpu_table_t **scaled);

/*
 Returns the status of an operation that has ended, or NVME_GPU_ERROR_UNFINISHED, also while it is not known
 whether the drive has changed. Does not wait, nor for the drive. May be called again, and by several
 threads. The status of a gather or scatter is that of the first row that failed.
 */
nvme_gpu_status nvme_gpu_pending_poll(struct nvme_gpu_pending_t *pending);

/*
 Waits until an operation has ended, `timeout_ms` at most (UINT64_MAX: without limit): as nvme_gpu_pending_poll(). A
 gather that was captured ends when its graph was launched and ran.
 */
nvme_gpu_status nvme_gpu_pending_wait(struct nvme_gpu_pending_t *pending, uint64_t timeout_ms);

/*
 Writes the outcome of an operation that has ended, row by row. Returns NVME_GPU_OK also where rows failed;
 NVME_GPU_ERROR_UNFINISHED before the end.
 */
nvme_gpu_status nvme_gpu_pending_report(struct nvme_gpu_pending_t *pending, struct nvme_gpu_report *report);

/*
 Frees the handle of an operation, which continues: its memory must stay valid until it has ended, and no eventfd
 learns of that. NULL and a handle that was freed are ignored.
 */
void nvme_gpu_pending_free(struct nvme_gpu_pending_t *pending);

/*
 Adds 1 to `eventfd` when the operation has ended, once; at once if it has ended. Its status is then known from
 nvme_gpu_pending_poll(). Any number of operations may name one eventfd, and an operation several. The library keeps a
 descriptor of its own, so that the caller may close its one at any time.

 An operation that has no end, as that of a graph that is never launched, leaves the eventfd as it is: give poll(2) and
 epoll_wait(2) a limit. nvme_gpu_pending_free() takes the operation's eventfds away.
 Errors: NVME_GPU_ERROR_USAGE for a descriptor that is no eventfd; NVME_GPU_ERROR_CLOSED; NVME_GPU_ERROR_SYSTEM.
 */
nvme_gpu_status nvme_gpu_pending_notify(struct nvme_gpu_pending_t *pending, int eventfd);

/*
 Waits until one of `count` operations has ended, `timeout_ms` at most (UINT64_MAX: without limit), and writes the
 first place of one that has to `*index`. Its status is then known from nvme_gpu_pending_poll(). Places with NULL are
 skipped: an operation that was seen is replaced by NULL, or it is found again.

 Returns NVME_GPU_OK also where that operation failed. Errors: NVME_GPU_ERROR_UNFINISHED past the limit, and `*index` is
 not written; NVME_GPU_ERROR_USAGE without an operation and for more than 1,048,576; NVME_GPU_ERROR_CLOSED for a handle
 that is none, and nothing was waited for.
 */
nvme_gpu_status nvme_gpu_pending_wait_any(struct nvme_gpu_pending_t *const *pending,
                                          size_t count,
                                          uint64_t timeout_ms,
                                          size_t *index);

/*
 Begins a gather of rows on the store's GPU: puts a launch into the stream that submits the reads and leaves the GPU.
 Work that comes after it in the stream has the GPU to itself while the drive works; nvme_gpu_gather_finish() waits for
 the reads and copies the rows. Of the request `ids`, `count`, `id_type` and `stream` are used. On success `*begun` is
 a handle for nvme_gpu_begun_free(), else NULL.

 This is for few rows of one drive in units of 4 bytes (768 rows of 256 bytes, by default): the second half reads all
 other rows by itself, and those that are begun while other gathers hold the queues. The ids stay as they are until the
 second half has ended. The stream may be captured; then both halves have to be in one capture.
 Errors: NVME_GPU_ERROR_USAGE, also for a store without a GPU; NVME_GPU_ERROR_ENVIRONMENT.
 */
nvme_gpu_status nvme_gpu_gather_begin(struct nvme_gpu_table_t *table,
                                      const struct nvme_gpu_row_request *request,
                                      struct nvme_gpu_begun_t **begun);

/*
 Finishes a gather: puts a launch into a stream that waits for the reads, copies the rows and stores their status. It
 comes after the first half, whichever stream that is in. Of the request `out`, `stride`, `row_status` and `stream` are
 used; `out` and `stride` are multiples of 4 in memory of the store's GPU. Returns at once; `pending` is as in
 nvme_gpu_gather_async().

 A read has its deadline from the time when it was submitted. A recovery, or nvme_gpu_close(), between the halves fails
 the rows: they are zero, with the status NVME_GPU_ROW_GONE. The handle stays open; it is finished once.
 Errors: NVME_GPU_ERROR_USAGE, also for a second call, and where one half is captured in a graph and the other is not in
 the same capture; the gather can be finished still, except for the first of these.
 */
nvme_gpu_status nvme_gpu_gather_finish(struct nvme_gpu_begun_t *begun,
                                       const struct nvme_gpu_row_request *request,
                                       struct nvme_gpu_pending_t **pending);

/*
 Frees the handle of a gather. One that was not finished releases what it holds, and the program does not wait for it.
 NULL and a handle that was freed are ignored.
 */
void nvme_gpu_begun_free(struct nvme_gpu_begun_t *begun);

/*
 Lends queue pairs of a drive to kernels of your own: nvme_gpu_submit() and the other functions of
 nvme_gpu_device.cuh. The store was opened with a GPU and with nvme_gpu_options.gpu_kernel_queues. Writes `*queues`,
 which a kernel takes by value, the fields of `*setup` that say so, and on success a handle for
 nvme_gpu_device_close() to `*device`, else NULL.

 Kernels use the queues between nvme_gpu_device_begin() and nvme_gpu_device_end(). They may send any command: what
 they write is not ordered with calls of the store.

 Errors: NVME_GPU_ERROR_VERSION for another layout; NVME_GPU_ERROR_USAGE for a file, a stripe, a store for reading
 only or without a GPU, and for more queue pairs than are left; NVME_GPU_ERROR_ENVIRONMENT without memory.
 */
nvme_gpu_status nvme_gpu_device_queues(struct nvme_gpu_t *store,
                                       struct nvme_gpu_device_setup *setup,
                                       struct nvme_gpu_queues *queues,
                                       struct nvme_gpu_device_t **device);

/*
 Begins the use of the queues by kernels; call it before their launch. Until
 nvme_gpu_device_end() the library leaves the queues alone. Result cells are zeroed. May be
 called several times, also by several threads; each call needs its own end. Waits while the
 controller is being reset. Errors: NVME_GPU_ERROR_GONE.
 */
nvme_gpu_status nvme_gpu_device_begin(struct nvme_gpu_device_t *device);

/*
 Ends a nvme_gpu_device_begin(), after those kernels have ended: synchronise their streams
 before. The last end ends commands that kernels gave up: it reaps late completions, aborts, and
 resets the controller when that does not help. `*ended` receives their number, unless `ended` is
 NULL.

 A reset that the controller needs for another reason waits for the end, 3 time-outs and 2 s; then the queues are of
 no use any more. Errors: NVME_GPU_ERROR_USAGE without a begin; NVME_GPU_ERROR_GONE.
 */
nvme_gpu_status nvme_gpu_device_end(struct nvme_gpu_device_t *device, uint32_t *ended);

/*
 Deletes the queues, and frees cells and buffer. NULL and a closed handle are ignored. Between a begin and its end
 all of it stays for ever, as kernels may use it, and the device with it.
 */
void nvme_gpu_device_close(struct nvme_gpu_device_t *device);

/*
 Writes `*rows`, by which kernels of your own read rows of a table: nvme_gpu_rows_enter(), nvme_gpu_row() and
 nvme_gpu_rows_leave() of nvme_gpu_device.cuh. `layout` is NVME_GPU_DEVICE_LAYOUT. No begin is needed; kernels that
 run after the store was closed get NVME_GPU_ROW_GONE.

 Errors: NVME_GPU_ERROR_VERSION for another layout; NVME_GPU_ERROR_USAGE for a file, a stripe, rows above 124 KiB,
 and a store without a GPU.
 */
nvme_gpu_status nvme_gpu_device_rows(struct nvme_gpu_table_t *table, uint32_t layout, struct nvme_gpu_rows *rows);

/*
 Compares what a kernel was linked with: the layout that its nvme_gpu_device.ptx carries. `kernel` is a CUfunction,
 from cuModuleGetFunction() or cudaGetFuncBySymbol(), loaded on the GPU of the store.

 Errors: NVME_GPU_ERROR_VERSION for another layout and for a kernel without the device library;
 NVME_GPU_ERROR_USAGE for NULL and for a store without a GPU; NVME_GPU_ERROR_ENVIRONMENT with the driver's answer.
 */
nvme_gpu_status nvme_gpu_device_check(struct nvme_gpu_t *store, void *kernel);

/*
 Opens the pages of an area of a store, which this process alone may have open. On success `*pages` is a handle for
 nvme_gpu_pages_close(), else NULL. Errors: NVME_GPU_ERROR_USAGE; NVME_GPU_ERROR_MISMATCH for an area of other pages that
 `create` keeps; those of the device.
 */
nvme_gpu_status nvme_gpu_pages_open(struct nvme_gpu_t *store,
                                    const struct nvme_gpu_pages_options *options,
                                    struct nvme_gpu_pages_t **pages);

/*
 Closes pages; calls under way continue. NULL and a closed handle are ignored.
 */
void nvme_gpu_pages_close(struct nvme_gpu_pages_t *pages);

/*
 Makes the key of part `part` of the block that the caller knows by the `bytes` bytes at `hash`. It names the options
 with which the pages were opened, too. `key` has NVME_GPU_PAGE_KEY_BYTES bytes.
 */
nvme_gpu_status nvme_gpu_pages_key(const struct nvme_gpu_pages_t *pages,
                                   const void *hash,
                                   size_t bytes,
                                   uint32_t part,
                                   uint8_t *key);

/*
 Writes to `*found` how many of `count` keys, from the first one on, have a page without a gap. A page may make room for
 another one before it is loaded. `keys` has NVME_GPU_PAGE_KEY_BYTES bytes for each.
 */
nvme_gpu_status nvme_gpu_pages_find(const struct nvme_gpu_pages_t *pages,
                                    const uint8_t *keys,
                                    size_t count,
                                    size_t *found);

/*
 Removes the pages of `count` keys, as nvme_gpu_pages_find() takes them; keys without a page are skipped. They are not
 found again, also after a power cut.
 */
nvme_gpu_status nvme_gpu_pages_remove(struct nvme_gpu_pages_t *pages, const uint8_t *keys, size_t count);

/*
 Writes the counts to `statistics`, whose size the caller sets.
 */
nvme_gpu_status nvme_gpu_pages_stats(const struct nvme_gpu_pages_t *pages,
                                     struct nvme_gpu_pages_statistics *statistics);

/*
 Opens the pages of an area of `device` that processes share, as ranks of an inference server do. The first process owns
 the area: it opens the device with `open`, as nvme_gpu_open() does (NULL for defaults; no GPU), and serves the others
 over a socket in `directory` (NULL: a folder of the user). When it ends, the process that calls next replaces it, and
 nothing that was committed is lost. Pages lie in host memory. `options` as for nvme_gpu_pages_open(), without
 NVME_GPU_PAGES_ALWAYS. Errors: those of nvme_gpu_pages_open(); NVME_GPU_ERROR_TIMEOUT if no owner answers;
 NVME_GPU_ERROR_MISMATCH for an owner with pages of another model or size.
 */
nvme_gpu_status nvme_gpu_pages_share(const char *device,
                                     const struct nvme_gpu_options *open,
                                     const struct nvme_gpu_pages_options *options,
                                     const char *directory,
                                     struct nvme_gpu_pages_t **pages);

/*
 Stores `count` pages. A page whose status is NVME_GPU_OK is found from now on, also after a power cut; one of the same
 key that was there stays. Each entry gets its status; returns that of the first one that failed, the others were carried
 out all the same. Pages of one call lie in host memory, or all in memory of the GPU that the store was opened with: they
 are taken when the work before them in `stream` has ended, and this call waits. NVME_GPU_ERROR_UNFINISHED: it has not
 ended in time, and its memory must stay valid. `stream` is NULL for the default stream, and unused for host memory.
 Errors of an entry: NVME_GPU_ERROR_PAGE_IN_PROGRESS, NVME_GPU_ERROR_PAGE_NO_ROOM, those of the device.
 */
nvme_gpu_status nvme_gpu_pages_put(struct nvme_gpu_pages_t *pages,
                                   struct nvme_gpu_page *entries,
                                   size_t count,
                                   nvme_gpu_stream stream);

/*
 Loads `count` pages. `length` of each entry is the bytes of its page, which is what was stored; memory of an entry
 that failed has no page. Each entry gets its status, as in nvme_gpu_pages_put(). Errors of an entry:
 NVME_GPU_ERROR_PAGE_MISSING and NVME_GPU_ERROR_PAGE_LOST, where the page should be computed; NVME_GPU_ERROR_USAGE for too
 little room; those of the device. Memory of two entries may not overlap. Memory of a GPU and `stream` as for
 nvme_gpu_pages_put(): pages are read and checked on the GPU, and memory of an entry that failed is zeros.
 */
nvme_gpu_status nvme_gpu_pages_get(struct nvme_gpu_pages_t *pages,
                                   struct nvme_gpu_page *entries,
                                   size_t count,
                                   nvme_gpu_stream stream);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* NVME_GPU_H */

/* nvme_gpu_options options = NVME_GPU_OPTIONS_INIT; */
#define NVME_GPU_OPTIONS_INIT { sizeof(nvme_gpu_options), NVME_GPU_VERSION, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }
