/* SPDX-License-Identifier: (GPL-2.0-only WITH Linux-syscall-note) OR MIT */
/*
 * What /dev/nvme-gpu-BDF takes: the interface of the kernel module nvme_gpu.
 *
 * Each structure begins with its size in bytes. A size that the module does not
 * know, and a flag or kind that it does not know, end with EINVAL.
 */
#ifndef NVME_GPU_UAPI_H
#define NVME_GPU_UAPI_H

#include <linux/ioctl.h>
#include <linux/types.h>

/* Raised when a structure changes its meaning. */
#define NVME_GPU_KMOD_ABI 1

/* What lies between the function and memory: struct nvme_gpu_kmod_info.iommu. */
#define NVME_GPU_IOMMU_NONE 0
/* An IOMMU that lets every address through. */
#define NVME_GPU_IOMMU_IDENTITY 1
/* Translation whose unmapped addresses stay reachable for a while (DMA-FQ). */
#define NVME_GPU_IOMMU_LAZY 2
#define NVME_GPU_IOMMU_STRICT 3

/* The module was loaded with unsafe=1. */
#define NVME_GPU_INFO_UNSAFE (1u << 0)
/* The function cannot raise interrupts that are not its own. */
#define NVME_GPU_INFO_ISOLATED_MSI (1u << 1)
/* MAP is allowed: strict translation and isolated interrupts, or unsafe=1. */
#define NVME_GPU_INFO_MAY_MAP (1u << 2)
/* The function is to be given back: close the file. */
#define NVME_GPU_INFO_WANTED (1u << 3)
/* An exporter took memory back; bus mastering is off until a reset. */
#define NVME_GPU_INFO_REVOKED (1u << 4)
/* The function has a reset of its own. */
#define NVME_GPU_INFO_RESET (1u << 5)

struct nvme_gpu_kmod_info {
	__u32 size;
	__u32 abi;
	__u64 bar0_bytes;
	__u32 iommu;
	__u32 flags;
	/* Mappings of this opener. */
	__u32 mappings;
	__u32 reserved;
};

/* Memory of this process: address and bytes are whole pages. */
#define NVME_GPU_MAP_USER 0
/* A dma-buf: fd. */
#define NVME_GPU_MAP_DMABUF 1

/* Refuse memory of which a part is not in another PCI function (EREMOTE). */
#define NVME_GPU_MAP_REQUIRE_PEER (1u << 0)

#define NVME_GPU_PLACE_RAM 0
#define NVME_GPU_PLACE_PEER 1

/* The exporter gave addresses that were not mapped; the module mapped them. */
#define NVME_GPU_SEGMENT_REMAPPED (1u << 0)

struct nvme_gpu_kmod_segment {
	__u64 iova;
	__u64 bytes;
	__u32 place;
	__u32 flags;
};

struct nvme_gpu_kmod_map {
	__u32 size;
	__u32 kind;
	__u64 address;
	/* Of a dma-buf: written by the module. */
	__u64 bytes;
	__s32 fd;
	__u32 flags;
	/* Written by the module. */
	__u32 handle;
	/* Places in list; the module writes how many there are. With ENOSPC
	 * there are more than places, and nothing stays mapped.
	 */
	__u32 segments;
	/* Address of struct nvme_gpu_kmod_segment[]. */
	__u64 list;
};

struct nvme_gpu_kmod_unmap {
	__u32 size;
	__u32 handle;
};

/* An eventfd that is signalled when WANTED or REVOKED is set; -1: none. */
struct nvme_gpu_kmod_event {
	__u32 size;
	__s32 fd;
};

#define NVME_GPU_KMOD_INFO _IOWR('N', 0xe0, struct nvme_gpu_kmod_info)
#define NVME_GPU_KMOD_MAP _IOWR('N', 0xe1, struct nvme_gpu_kmod_map)
#define NVME_GPU_KMOD_UNMAP _IOW('N', 0xe2, struct nvme_gpu_kmod_unmap)
/* Stops the function, resets it, and lets it reach memory again; ENODEV when it
 * is to be given back.
 */
#define NVME_GPU_KMOD_RESET _IO('N', 0xe3)
#define NVME_GPU_KMOD_EVENT _IOW('N', 0xe4, struct nvme_gpu_kmod_event)

/* mmap of offset 0: BAR 0, uncached. */

#endif
