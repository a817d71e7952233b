// SPDX-License-Identifier: GPL-2.0-only
/*
 * The calls of /dev/nvme-gpu-BDF, of which each is right or refused. The first
 * function that is bound to nvme_gpu is used; without one the tests are
 * skipped. No command is sent to its controller.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdint.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "../kselftest_harness.h"
#include "nvme_gpu_uapi.h"

#define PAGE 4096

FIXTURE(node)
{
	char path[64];
	int fd;
	void *page;
	struct nvme_gpu_kmod_segment segment;
	struct nvme_gpu_kmod_map map;
};

FIXTURE_SETUP(node)
{
	glob_t found;

	if (glob("/dev/nvme-gpu-*", 0, NULL, &found))
		SKIP(return, "no function is bound to nvme_gpu");
	snprintf(self->path, sizeof(self->path), "%s", found.gl_pathv[0]);
	globfree(&found);
	self->fd = open(self->path, O_RDWR | O_CLOEXEC);
	ASSERT_GE(self->fd, 0);
	self->page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	ASSERT_NE(self->page, MAP_FAILED);
	self->map = (struct nvme_gpu_kmod_map){
		.size = sizeof(self->map),
		.kind = NVME_GPU_MAP_USER,
		.address = (uintptr_t)self->page,
		.bytes = PAGE,
		.segments = 1,
		.list = (uintptr_t)&self->segment,
	};
}

FIXTURE_TEARDOWN(node)
{
	munmap(self->page, PAGE);
	close(self->fd);
}

/* The errno of a call, 0 when it succeeds. */
static int call(int fd, unsigned long number, void *argument)
{
	return ioctl(fd, number, argument) ? errno : 0;
}

TEST_F(node, info)
{
	struct nvme_gpu_kmod_info info = { .size = sizeof(info) };

	ASSERT_EQ(call(self->fd, NVME_GPU_KMOD_INFO, &info), 0);
	EXPECT_EQ(info.abi, NVME_GPU_KMOD_ABI);
	EXPECT_GE(info.bar0_bytes, PAGE);
	EXPECT_EQ(info.mappings, 0);
	EXPECT_TRUE(info.flags & NVME_GPU_INFO_MAY_MAP);
}

TEST_F(node, what_is_unknown_is_refused)
{
	struct nvme_gpu_kmod_info info = { .size = sizeof(info) + 8 };

	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_INFO, &info), EINVAL);
	EXPECT_EQ(call(self->fd, _IO('N', 0xef), NULL), ENOTTY);
	self->map.flags = 1u << 31;
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), EINVAL);
	self->map.flags = 0;
	self->map.kind = NVME_GPU_MAP_DMABUF + 1;
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), EINVAL);
}

TEST_F(node, map_and_unmap)
{
	struct nvme_gpu_kmod_info info = { .size = sizeof(info) };
	struct nvme_gpu_kmod_unmap unmap = { .size = sizeof(unmap) };

	ASSERT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), 0);
	EXPECT_EQ(self->map.segments, 1);
	EXPECT_EQ(self->segment.bytes, PAGE);
	EXPECT_EQ(self->segment.place, NVME_GPU_PLACE_RAM);
	ASSERT_EQ(call(self->fd, NVME_GPU_KMOD_INFO, &info), 0);
	EXPECT_EQ(info.mappings, 1);
	unmap.handle = self->map.handle;
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_UNMAP, &unmap), 0);
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_UNMAP, &unmap), ENOENT);
}

TEST_F(node, more_segments_than_places_leave_nothing)
{
	struct nvme_gpu_kmod_info info = { .size = sizeof(info) };

	self->map.segments = 0;
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), ENOSPC);
	EXPECT_EQ(self->map.segments, 1);
	ASSERT_EQ(call(self->fd, NVME_GPU_KMOD_INFO, &info), 0);
	EXPECT_EQ(info.mappings, 0);
}

TEST_F(node, memory_that_may_not_be_mapped)
{
	self->map.flags = NVME_GPU_MAP_REQUIRE_PEER;
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), EREMOTE);
	self->map.flags = 0;
	self->map.address++;
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), EINVAL);
	self->map.address--;
	ASSERT_EQ(mprotect(self->page, PAGE, PROT_READ), 0);
	EXPECT_EQ(call(self->fd, NVME_GPU_KMOD_MAP, &self->map), EFAULT);
}

TEST_F(node, a_second_opener_is_refused)
{
	EXPECT_EQ(open(self->path, O_RDWR), -1);
	EXPECT_EQ(errno, EBUSY);
}

TEST_F(node, registers)
{
	volatile __u32 *bar;

	bar = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, self->fd, 0);
	ASSERT_NE(bar, MAP_FAILED);
	/* VS: the version; CSTS: not ready. */
	EXPECT_NE(bar[2], 0);
	EXPECT_EQ(bar[7] & 1, 0);
	EXPECT_EQ(mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, self->fd, 0),
		  MAP_FAILED);
	munmap((void *)bar, PAGE);
}

TEST_F(node, reset)
{
	int ended = call(self->fd, NVME_GPU_KMOD_RESET, NULL);

	EXPECT_TRUE(!ended || ended == EOPNOTSUPP);
}

TEST_HARNESS_MAIN
