// SPDX-License-Identifier: GPL-2.0-only
/*
 * An external engine for fio over the C interface of nvme-gpu: README.md here says how it is built and run.
 *
 * fio's reads and writes are collected and go to the drive in batches: at once while few are under way, else when one
 * of them has ended. fio compares FIO_IOOPS_VERSION of the headers that this was compiled with when it loads it, and
 * refuses another one.
 */
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fio.h"
#include "optgroup.h"
#include "verify.h"

#include "nvme_gpu.h"

/* Batches under way of one job. */
#define BATCHES 4

enum { DATA_HOST, DATA_GPU };
enum { BY_CPU, BY_GPU };

struct nvme_gpu_job_options {
	void *pad; /* fio takes offset 0 for none */
	char *device;
	unsigned int gpu;
	unsigned int data;
	unsigned int initiator;
	unsigned int queues;
	unsigned int timeout_ms;
	unsigned int allow_write;
};

#define AT(field) offsetof(struct nvme_gpu_job_options, field)

static struct fio_option options[] = {
	{
		.name = "device",
		.lname = "device of nvme-gpu",
		.type = FIO_OPT_STR_STORE,
		.off1 = AT(device),
		.help = "sim:PATH?size=1GiB, vfio:BDF, vfio-user:SOCKET, file:PATH, stripe:DEVICE|DEVICE",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "data",
		.lname = "memory of the data",
		.type = FIO_OPT_STR,
		.off1 = AT(data),
		.help = "Where reads end and writes begin: memory of the host or of the GPU. fio fills and verifies memory of "
			"the host; with data=gpu each write is copied to the GPU first, and each read back from it where it is "
			"verified",
		.def = "host",
		.posval = {
			{ .ival = "host", .oval = DATA_HOST, .help = "fio's own buffers" },
			{ .ival = "gpu", .oval = DATA_GPU, .help = "memory of the GPU" },
		},
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "initiator",
		.lname = "who submits",
		.type = FIO_OPT_STR,
		.off1 = AT(initiator),
		.help = "Who submits commands. cpu: threads of the host; with data=gpu they read into host memory, and copy. "
			"gpu: a kernel, one gather for each batch; reads of one size into memory of the GPU alone, as the C "
			"interface lets a host thread send writes",
		.def = "cpu",
		.posval = {
			{ .ival = "cpu", .oval = BY_CPU, .help = "threads of the host" },
			{ .ival = "gpu", .oval = BY_GPU, .help = "kernels; needs data=gpu, and reads" },
		},
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "gpu",
		.lname = "GPU",
		.type = FIO_OPT_INT,
		.off1 = AT(gpu),
		.help = "Which GPU, as CUDA counts them, with data=gpu",
		.def = "0",
		.maxval = 1023,
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "queues",
		.lname = "queue pairs",
		.type = FIO_OPT_INT,
		.off1 = AT(queues),
		.help = "Queue pairs of the CPU, which all jobs on the device share",
		.def = "8",
		.minval = 1,
		.maxval = 4095,
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "timeout_ms",
		.lname = "time-out of a command",
		.type = FIO_OPT_INT,
		.off1 = AT(timeout_ms),
		.help = "Time limit of a command, after which it is aborted",
		.def = "5000",
		.minval = 1,
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{
		.name = "allow_write",
		.lname = "allow writes to a real device",
		.type = FIO_OPT_STR_SET,
		.off1 = AT(allow_write),
		.help = "Real devices (vfio:, a block device) are opened for reading only without it",
		.category = FIO_OPT_C_ENGINE,
		.group = FIO_OPT_G_INVALID,
	},
	{ .name = NULL },
};

/* What of the CUDA driver is used; looked up when a job asks for memory of the GPU. */
struct cuda {
	int (*init)(unsigned int);
	int (*retain)(void **, int);
	int (*push)(void *);
	int (*pop)(void **);
	int (*alloc)(uint64_t *, size_t);
	int (*free)(uint64_t);
	int (*to_gpu)(uint64_t, const void *, size_t);
	int (*to_host)(void *, uint64_t, size_t);
	void *context;
};

/* A store, which the jobs on its device share: they are threads of one process. */
struct shared {
	struct shared *next;
	char *device;
	int gpu;
	unsigned int allow_write;
	unsigned int users;
	nvme_gpu_t *store;
};

struct batch {
	nvme_gpu_pending_t *pending;
	unsigned int count;
	struct io_u **io_us;
	nvme_gpu_io *ios; /* of the CPU */
	int64_t *ids; /* of the GPU: registered memory of the host, as is the next */
	int32_t *status;
	uint64_t memory; /* of the GPU: room for all */
};

struct job {
	struct shared *shared;
	struct cuda cuda;
	nvme_gpu_table_t *table;
	uint64_t memory;
	unsigned int depth;
	unsigned long long most;
	int said;
	struct io_u **waiting; /* not sent yet */
	unsigned int waiting_count;
	struct batch batches[BATCHES]; /* a ring, the oldest first */
	unsigned int oldest, running;
	struct io_u **ended; /* not given to fio yet, the oldest first */
	unsigned int ended_count;
	struct io_u **given;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct shared *stores;

static void say(const char *what)
{
	log_err("nvme_gpu: %s: %s: %s\n", what, nvme_gpu_last_error(), nvme_gpu_last_remedy());
}

/* The store of the job's device, opened by the first job that asks. */
static struct shared *take(const struct nvme_gpu_job_options *o)
{
	nvme_gpu_options how = NVME_GPU_OPTIONS_INIT;
	int gpu = o->data == DATA_GPU ? (int)o->gpu : -1;
	struct shared *one;

	pthread_mutex_lock(&lock);
	for (one = stores; one; one = one->next)
		if (!strcmp(one->device, o->device) && one->gpu == gpu)
			break;
	if (one && one->allow_write != o->allow_write) {
		log_err("nvme_gpu: %s: another job opened the device %s allow_write: give the option to all jobs on a "
			"device, or to none\n", o->device, one->allow_write ? "with" : "without");
		pthread_mutex_unlock(&lock);
		return NULL;
	}
	if (one)
		goto found;
	one = calloc(1, sizeof(*one));
	if (!one || !(one->device = strdup(o->device)))
		goto failed;
	how.queues = o->queues;
	how.timeout_ms = o->timeout_ms;
	how.flags = o->allow_write ? NVME_GPU_ALLOW_WRITE : 0;
	if (nvme_gpu_open(o->device, gpu, &how, &one->store)) {
		say(o->device);
		goto failed;
	}
	one->gpu = gpu;
	one->allow_write = o->allow_write;
	one->next = stores;
	stores = one;
found:
	one->users++;
	pthread_mutex_unlock(&lock);
	return one;
failed:
	if (one)
		free(one->device);
	free(one);
	pthread_mutex_unlock(&lock);
	return NULL;
}

static void release(struct shared *one)
{
	struct shared **at = &stores;

	pthread_mutex_lock(&lock);
	if (--one->users == 0) {
		while (*at != one)
			at = &(*at)->next;
		*at = one->next;
		nvme_gpu_close(one->store);
		free(one->device);
		free(one);
	}
	pthread_mutex_unlock(&lock);
}

/* Whether both paths name one file that is yet to be created: by one name in one folder. */
static int is_same_new(const char *path, const char *other)
{
	const char *paths[] = { path, other }, *names[2];
	char folders[2][PATH_MAX];
	int i;

	for (i = 0; i < 2; i++) {
		char folder[PATH_MAX];
		const char *slash = strrchr(paths[i], '/');

		names[i] = slash ? slash + 1 : paths[i];
		if (names[i] - paths[i] >= PATH_MAX - 1)
			return 0;
		memcpy(folder, paths[i], names[i] - paths[i]);
		folder[names[i] - paths[i]] = 0;
		if (!realpath(*folder ? folder : ".", folders[i]))
			return 0;
	}
	return !strcmp(names[0], names[1]) && !strcmp(folders[0], folders[1]);
}

/* Whether both paths name one file or one block device, or one file that is yet to be created. */
static int is_same(const char *path, const char *other)
{
	struct stat of_path, of_other;

	if (!strcmp(path, other))
		return 1;
	if (stat(path, &of_path) || stat(other, &of_other))
		return is_same_new(path, other);
	if (S_ISBLK(of_path.st_mode) && S_ISBLK(of_other.st_mode))
		return of_path.st_rdev == of_other.st_rdev;
	return of_path.st_dev == of_other.st_dev && of_path.st_ino == of_other.st_ino;
}

/* The images of a simulated drive are the path with %3F and %25 decoded, and for ns=N those with .2 to .N behind it. */
static int is_image(const char *path, char *image)
{
	char *options = strchr(image, '?'), *to = image, *from;
	unsigned long count = 1, i;
	char *name;
	int found;

	if (options)
		*options++ = 0;
	for (from = image; *from; to++) {
		int is_mark = !strncasecmp(from, "%3F", 3);

		if (is_mark || !strncmp(from, "%25", 3)) {
			*to = is_mark ? '?' : '%';
			from += 3;
		} else {
			*to = *from++;
		}
	}
	*to = 0;
	found = is_same(path, image);
	while (!found && options && (name = strsep(&options, "&")))
		if (!strncmp(name, "ns=", 3))
			count = strtoul(name + 3, NULL, strncasecmp(name + 3, "0x", 2) ? 10 : 16);
	/* No drive has more namespaces. */
	for (i = 2; !found && i <= count && i <= 256; i++) {
		if (asprintf(&name, "%s.%lu", image, i) < 0)
			return 1;
		found = is_same(path, name);
		free(name);
	}
	return found;
}

/* Whether the path names a file that the device lies in, or one that it is yet to create. */
static int is_in_device(const char *path, const char *device)
{
	int is_stripe = !strncmp(device, "stripe:", 7);
	int is_joined = !strncmp(device, "joined:", 7);
	char *all = strdup(device), *rest = all, *part, *next;
	int found = !all;

	if (rest && (is_stripe || is_joined))
		rest += 7;
	if (rest && is_stripe) {
		/* The last one is the stripe's: those before it belong to a member. */
		for (part = NULL, next = rest; (next = strstr(next, "?stripe=")); next++)
			part = next;
		if (part)
			*part = 0;
	}
	while (!found && rest) {
		part = is_stripe || is_joined ? strsep(&rest, "|") : strsep(&rest, "");
		if (!strncmp(part, "sim:", 4))
			found = is_image(path, part + 4);
		else
			found = is_same(path, strncmp(part, "file:", 5) ? part : part + 5);
	}
	free(all);
	return found;
}

/* Whether a file that fio itself reads or writes for the job is the device: fio replays a log over itself, or empties
 * the device when it begins to write one. */
static int uses_its_device(const struct thread_data *td, const char *device)
{
	const struct {
		const char *option;
		const char *paths;
	} all[] = {
		{ "read_iolog", td->o.read_iolog_file },
		{ "merge_blktrace_file", td->o.merge_blktrace_file },
		{ "write_iolog", td->o.write_iolog_file },
	};
	unsigned int i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		char *paths = strdup(all[i].paths ?: ""), *rest = paths, *path;
		int found = all[i].paths && is_in_device(all[i].paths, device);

		/* fio takes several logs, with colons between them. */
		while (!found && (path = strsep(&rest, ":")))
			found = *path && is_in_device(path, device);
		free(paths);
		if (found) {
			log_err("nvme_gpu: %s=%s is a file of device=%s: name another file\n", all[i].option,
				all[i].paths, device);
			return 1;
		}
	}
	return 0;
}

/* Before any job runs: jobs become threads, which share stores, and fio learns the size. */
static int engine_setup(struct thread_data *td)
{
	struct nvme_gpu_job_options *o = td->eo;
	struct job *job;
	struct fio_file *f;
	unsigned int i;

	if (!o->device) {
		log_err("nvme_gpu: no device: write device=sim:PATH?size=1GiB or device=vfio:BDF\n");
		return 1;
	}
	if (uses_its_device(td, o->device))
		return 1;
	if (o->initiator == BY_GPU && (o->data != DATA_GPU || td_write(td) || td_trim(td) ||
				       td->o.min_bs[DDIR_READ] != td->o.max_bs[DDIR_READ])) {
		log_err("nvme_gpu: initiator=gpu: kernels submit reads of one size into memory of the GPU alone: use "
			"data=gpu, rw=read or randread and one bs; or initiator=cpu\n");
		return 1;
	}
	/* All files of a job would be the same bytes of the device. */
	if (td->o.nr_files > 1 || td->files_index > 1) {
		log_err("nvme_gpu: %u files in one job: a device is one file: leave out nrfiles, and write one filename\n",
			td->o.nr_files > td->files_index ? td->o.nr_files : td->files_index);
		return 1;
	}
	job = calloc(1, sizeof(*job));
	if (!job)
		return 1;
	td->o.use_thread = 1;
	job->shared = take(o);
	if (!job->shared) {
		free(job);
		return 1;
	}
	td->io_ops_data = job;
	if (td->o.start_offset >= nvme_gpu_len(job->shared->store)) {
		log_err("nvme_gpu: offset=%llu is not on the device, which has %llu bytes: use a smaller one\n",
			(unsigned long long)td->o.start_offset,
			(unsigned long long)nvme_gpu_len(job->shared->store));
		return 1;
	}
	if (!td->files_index) {
		add_file(td, "nvme_gpu", 0, 0);
		td->o.nr_files = td->o.nr_files ?: 1;
		td->o.open_files++;
	}
	for_each_file(td, f, i) {
		f->filetype = FIO_TYPE_FILE;
		f->real_file_size = nvme_gpu_len(job->shared->store);
		fio_file_set_size_known(f);
	}
	return 0;
}

static int find_cuda(struct cuda *cuda, unsigned int gpu)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	const struct {
		const char *name;
		void **to;
	} all[] = {
		{ "cuInit", (void **)&cuda->init },
		{ "cuDevicePrimaryCtxRetain", (void **)&cuda->retain },
		{ "cuCtxPushCurrent_v2", (void **)&cuda->push },
		{ "cuCtxPopCurrent_v2", (void **)&cuda->pop },
		{ "cuMemAlloc_v2", (void **)&cuda->alloc },
		{ "cuMemFree_v2", (void **)&cuda->free },
		{ "cuMemcpyHtoD_v2", (void **)&cuda->to_gpu },
		{ "cuMemcpyDtoH_v2", (void **)&cuda->to_host },
	};
	unsigned int i;

	for (i = 0; i < sizeof(all) / sizeof(all[0]); i++)
		if (!library || !(*all[i].to = dlsym(library, all[i].name)))
			return -1;
	return cuda->init(0) || cuda->retain(&cuda->context, (int)gpu) ? -1 : 0;
}

static void engine_cleanup(struct thread_data *td)
{
	struct job *job = td->io_ops_data;
	void *context;
	unsigned int i;

	if (!job)
		return;
	/* fio has taken every event before, unless it was stopped: nothing is freed under an operation. */
	for (; job->running; job->running--) {
		nvme_gpu_pending_wait(job->batches[job->oldest].pending, UINT64_MAX);
		nvme_gpu_pending_free(job->batches[job->oldest].pending);
		job->oldest = (job->oldest + 1) % BATCHES;
	}
	for (i = 0; i < BATCHES; i++) {
		if (job->batches[i].ids) {
			nvme_gpu_unregister(job->shared->store, job->batches[i].ids);
			nvme_gpu_unregister(job->shared->store, job->batches[i].status);
		}
		free(job->batches[i].ids);
		free(job->batches[i].status);
		free(job->batches[i].io_us);
		free(job->batches[i].ios);
	}
	if (job->memory && !job->cuda.push(job->cuda.context)) {
		job->cuda.free(job->memory);
		job->cuda.pop(&context);
	}
	nvme_gpu_table_close(job->table);
	release(job->shared);
	free(job->waiting);
	free(job->ended);
	free(job->given);
	free(job);
	td->io_ops_data = NULL;
}

/* Memory of the GPU, and what gathers need. */
static int init_gpu(struct thread_data *td, struct job *job)
{
	const struct nvme_gpu_job_options *o = td->eo;
	nvme_gpu_t *store = job->shared->store;
	size_t batch = job->depth * job->most;
	void *context;
	unsigned int i;
	int failed;

	if (find_cuda(&job->cuda, o->gpu) || job->cuda.push(job->cuda.context)) {
		log_err("nvme_gpu: data=gpu: GPU %u cannot be used: see `nvme-gpu doctor`\n", o->gpu);
		return 1;
	}
	failed = job->cuda.alloc(&job->memory, BATCHES * batch);
	job->cuda.pop(&context);
	if (failed) {
		log_err("nvme_gpu: the GPU has no %zu bytes: use a smaller bs or iodepth\n", BATCHES * batch);
		job->memory = 0;
		return 1;
	}
	for (i = 0; i < BATCHES; i++)
		job->batches[i].memory = job->memory + i * batch;
	if (o->initiator == BY_CPU)
		return 0;
	if (nvme_gpu_table_open(store, 0, nvme_gpu_len(store) / job->most, job->most, &job->table)) {
		say("initiator=gpu");
		return 1;
	}
	for (i = 0; i < BATCHES; i++) {
		struct batch *one = &job->batches[i];
		/* Pages of the machine, of 4 to 64 KiB: the GPU's driver registers each once. */
		size_t page = sysconf(_SC_PAGESIZE);
		size_t ids = (job->depth * sizeof(*one->ids) + page - 1) / page * page;

		one->ids = aligned_alloc(page, ids);
		one->status = aligned_alloc(page, ids);
		if (!one->ids || !one->status || nvme_gpu_register(store, one->ids, ids) ||
		    nvme_gpu_register(store, one->status, ids)) {
			say("initiator=gpu");
			return 1;
		}
	}
	return 0;
}

static int engine_init(struct thread_data *td)
{
	const struct nvme_gpu_job_options *o = td->eo;
	struct job *job = td->io_ops_data;
	unsigned int i;

	job->depth = td->o.iodepth;
	job->most = td_max_bs(td);
	job->waiting = calloc(job->depth, sizeof(*job->waiting));
	job->ended = calloc(job->depth, sizeof(*job->ended));
	job->given = calloc(job->depth, sizeof(*job->given));
	for (i = 0; i < BATCHES; i++) {
		job->batches[i].io_us = calloc(job->depth, sizeof(struct io_u *));
		job->batches[i].ios = calloc(job->depth, sizeof(nvme_gpu_io));
		if (!job->batches[i].io_us || !job->batches[i].ios)
			return 1;
	}
	if (!job->waiting || !job->ended || !job->given)
		return 1;
	return o->data == DATA_GPU ? init_gpu(td, job) : 0;
}

static int number_of(nvme_gpu_status status)
{
	switch (status) {
	case NVME_GPU_OK:
		return 0;
	case NVME_GPU_ERROR_TIMEOUT:
	case NVME_GPU_ROW_TIMED_OUT:
		return ETIMEDOUT;
	case NVME_GPU_ERROR_GONE:
	case NVME_GPU_ROW_GONE:
		return ENODEV;
	case NVME_GPU_ERROR_USAGE:
		return EINVAL;
	default:
		return EIO;
	}
}

/* One read or write has ended. The first failure of a job is said. */
static void end(struct job *job, struct io_u *io_u, nvme_gpu_status status)
{
	io_u->error = number_of(status);
	io_u->resid = status ? io_u->xfer_buflen : 0;
	if (status && !job->said) {
		log_err("nvme_gpu: %s of %llu bytes at %llu: %s: %s\n", io_ddir_name(io_u->ddir), io_u->xfer_buflen,
			io_u->offset, nvme_gpu_status_text(status), nvme_gpu_status_remedy(status));
		job->said = 1;
	}
	job->ended[job->ended_count++] = io_u;
}

/* With data=gpu: a write's bytes come from the GPU, a read's bytes go there, and back for fio to verify. */
static int by_way_of_gpu(struct thread_data *td, struct job *job, struct io_u *io_u, uint64_t memory)
{
	const struct nvme_gpu_job_options *o = td->eo;
	int has_copied = io_u->ddir == DDIR_READ && o->initiator == BY_GPU;
	int wants_back = io_u->ddir == DDIR_WRITE || td->o.verify != VERIFY_NONE;
	void *context;
	int failed;

	if (job->cuda.push(job->cuda.context))
		return -1;
	failed = !has_copied && job->cuda.to_gpu(memory, io_u->xfer_buf, io_u->xfer_buflen);
	if (wants_back && !failed) {
		memset(io_u->xfer_buf, 0xA5, io_u->xfer_buflen);
		failed = job->cuda.to_host(io_u->xfer_buf, memory, io_u->xfer_buflen);
	}
	job->cuda.pop(&context);
	return failed ? -1 : 0;
}

/* Sends what is waiting as one batch. */
static void start(struct thread_data *td, struct job *job)
{
	const struct nvme_gpu_job_options *o = td->eo;
	struct batch *batch = &job->batches[(job->oldest + job->running) % BATCHES];
	nvme_gpu_status status;
	unsigned int i;

	if (!job->waiting_count || job->running == BATCHES)
		return;
	batch->count = job->waiting_count;
	memcpy(batch->io_us, job->waiting, batch->count * sizeof(*batch->io_us));
	job->waiting_count = 0;
	for (i = 0; i < batch->count; i++) {
		struct io_u *io_u = batch->io_us[i];

		batch->ios[i] = (nvme_gpu_io){
			.operation = io_u->ddir == DDIR_WRITE ? NVME_GPU_WRITE : NVME_GPU_READ,
			.offset = io_u->offset,
			.bytes = io_u->xfer_buflen,
			.data = io_u->xfer_buf,
		};
		/* What nobody carries out, as in a child of fork, is not taken for done. */
		batch->ios[i].status = NVME_GPU_ERROR_UNFINISHED;
		if (job->table) {
			batch->ids[i] = (int64_t)(io_u->offset / job->most);
			batch->status[i] = NVME_GPU_ERROR_UNFINISHED;
		}
		/* A copy that fails leaves 0xA5 bytes behind, or the memory as it was: the write is not sent. */
		if (job->memory && io_u->ddir == DDIR_WRITE &&
		    by_way_of_gpu(td, job, io_u, batch->memory + i * job->most))
			batch->ios[i].operation = ~0u;
	}
	if (o->initiator == BY_GPU) {
		const nvme_gpu_row_request request = {
			.size = sizeof(request),
			.ids = batch->ids,
			.id_type = NVME_GPU_I64,
			.count = batch->count,
			.out = (void *)(uintptr_t)batch->memory,
			.row_status = batch->status,
		};
		status = nvme_gpu_gather_async(job->table, &request, &batch->pending);
	} else
		status = nvme_gpu_batch_async(job->shared->store, batch->ios, batch->count, NULL, &batch->pending);
	if (!status) {
		job->running++;
		return;
	}
	for (i = 0; i < batch->count; i++)
		end(job, batch->io_us[i], status);
}

/* Whether the oldest batch has ended, and its events are taken; waits for it. */
static int finish(struct thread_data *td, struct job *job, uint64_t timeout_ms)
{
	struct batch *batch = &job->batches[job->oldest];
	nvme_gpu_status status = nvme_gpu_pending_wait(batch->pending, timeout_ms);
	unsigned int i;

	if (status == NVME_GPU_ERROR_UNFINISHED)
		return 0;
	for (i = 0; i < batch->count; i++) {
		struct io_u *io_u = batch->io_us[i];

		status = job->table ? batch->status[i] : batch->ios[i].status;
		if (!status && job->memory && io_u->ddir == DDIR_READ &&
		    by_way_of_gpu(td, job, io_u, batch->memory + i * job->most))
			status = NVME_GPU_ERROR_ENVIRONMENT;
		end(job, io_u, status);
	}
	nvme_gpu_pending_free(batch->pending);
	job->oldest = (job->oldest + 1) % BATCHES;
	job->running--;
	return 1;
}

static enum fio_q_status engine_queue(struct thread_data *td, struct io_u *io_u)
{
	struct job *job = td->io_ops_data;
	nvme_gpu_status status;

	fio_ro_check(td, io_u);
	switch (io_u->ddir) {
	case DDIR_READ:
	case DDIR_WRITE:
		if (job->waiting_count == job->depth)
			return FIO_Q_BUSY;
		if (job->table && (io_u->offset % job->most || io_u->xfer_buflen != job->most)) {
			log_err("nvme_gpu: initiator=gpu: a read at %llu: use offsets that are multiples of bs\n",
				io_u->offset);
			io_u->error = EINVAL;
			return FIO_Q_COMPLETED;
		}
		job->waiting[job->waiting_count++] = io_u;
		return FIO_Q_QUEUED;
	case DDIR_SYNC:
	case DDIR_DATASYNC:
		/* What was written before has to be at the drive. */
		if (job->waiting_count || job->running)
			return FIO_Q_BUSY;
		status = nvme_gpu_flush(job->shared->store);
		if (status)
			say("flush");
		io_u->error = number_of(status);
		return FIO_Q_COMPLETED;
	default:
		io_u->error = EOPNOTSUPP;
		return FIO_Q_COMPLETED;
	}
}

static int engine_commit(struct thread_data *td)
{
	start(td, td->io_ops_data);
	return 0;
}

static int engine_getevents(struct thread_data *td, unsigned int min, unsigned int max, const struct timespec *t)
{
	struct job *job = td->io_ops_data;
	unsigned int count;

	(void)t;
	start(td, job);
	while (job->running && finish(td, job, job->ended_count < min ? UINT64_MAX : 0))
		start(td, job);
	count = job->ended_count < max ? job->ended_count : max;
	memcpy(job->given, job->ended, count * sizeof(*job->given));
	job->ended_count -= count;
	memmove(job->ended, job->ended + count, job->ended_count * sizeof(*job->ended));
	return (int)count;
}

static struct io_u *engine_event(struct thread_data *td, int event)
{
	struct job *job = td->io_ops_data;

	return job->given[event];
}

/* The device is open as long as its jobs: files are names alone. */
static int engine_file(struct thread_data *td, struct fio_file *f)
{
	(void)td;
	(void)f;
	return 0;
}

struct ioengine_ops ioengine = {
	.name = "nvme_gpu",
	.version = FIO_IOOPS_VERSION,
	.flags = FIO_DISKLESSIO | FIO_NOEXTEND | FIO_NODISKUTIL | FIO_MEMALIGN,
	.setup = engine_setup,
	.init = engine_init,
	.cleanup = engine_cleanup,
	.queue = engine_queue,
	.commit = engine_commit,
	.getevents = engine_getevents,
	.event = engine_event,
	.open_file = engine_file,
	.close_file = engine_file,
	.invalidate = engine_file,
	.options = options,
	.option_struct_size = sizeof(struct nvme_gpu_job_options),
};
