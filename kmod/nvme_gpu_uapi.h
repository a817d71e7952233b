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
#define NVME_GPU_KMOD_ABI 2

/*
 * open() ends with
 *   EPERM       the caller lacks CAP_SYS_RAWIO
 *   EBUSY       another has the function open, or is closing it
 *   ENODEV      the function is being given back, or is gone, or its BAR 0 is
 *               no longer where it was
 *   EOPNOTSUPP  no IOMMU translates for the function, or not coherently, or
 *               firmware has memory of its own for it
 *   EACCES      its interrupts are not isolated
 *   EXDEV       another function of its IOMMU group is in use
 *   ETIMEDOUT   its controller does not become disabled
 * and only then may the function reach memory.
 */

/* What lies between the function and memory: struct nvme_gpu_kmod_info.iommu. */
#define NVME_GPU_IOMMU_NONE 0
/* Addresses of this opener's own, forgotten before UNMAP returns. */
#define NVME_GPU_IOMMU_STRICT 3

/* The module was loaded with unsafe=1, and the kernel is not locked down. */
#define NVME_GPU_INFO_UNSAFE (1u << 0)
/* The function cannot raise interrupts that are not its own. */
#define NVME_GPU_INFO_ISOLATED_MSI (1u << 1)
/* MAP is allowed: always, as open() refuses where it is not. */
#define NVME_GPU_INFO_MAY_MAP (1u << 2)
/* The function is to be given back: close the file. */
#define NVME_GPU_INFO_WANTED (1u << 3)
/* An exporter took memory back; bus mastering is off until a reset. */
#define NVME_GPU_INFO_REVOKED (1u << 4)
/* The function has a reset of its own. */
#define NVME_GPU_INFO_RESET (1u << 5)
/* The system has reset it, had it sleep, or met an error of the bus: its
 * controller is disabled, and commands that were sent are lost. Until a reset.
 */
#define NVME_GPU_INFO_STOPPED (1u << 6)

struct nvme_gpu_kmod_info {
	__u32 size;
	__u32 abi;
	__aligned_u64 bar0_bytes;
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

/* Refuse memory of which a part is not in another PCI function (EREMOTE), and
 * do not pin: some exporters pin in RAM. They may take the memory back. Pages
 * of a process are in no other function.
 */
#define NVME_GPU_MAP_REQUIRE_PEER (1u << 0)

#define NVME_GPU_PLACE_RAM 0
#define NVME_GPU_PLACE_PEER 1

/* The exporter gave addresses that were not mapped; the module mapped them. */
#define NVME_GPU_SEGMENT_REMAPPED (1u << 0)

struct nvme_gpu_kmod_segment {
	__aligned_u64 iova;
	__aligned_u64 bytes;
	__u32 place;
	__u32 flags;
};

struct nvme_gpu_kmod_map {
	__u32 size;
	__u32 kind;
	__aligned_u64 address;
	/* Of a dma-buf: written by the module. */
	__aligned_u64 bytes;
	__s32 fd;
	__u32 flags;
	/* Written by the module. */
	__u32 handle;
	/* Places in list; the module writes how many there are. With ENOSPC
	 * there are more than places, and nothing stays mapped.
	 */
	__u32 segments;
	/* Address of struct nvme_gpu_kmod_segment[]. */
	__aligned_u64 list;
};

struct nvme_gpu_kmod_unmap {
	__u32 size;
	__u32 handle;
};

/* An eventfd that is signalled when WANTED, REVOKED or STOPPED is set; -1: none. */
struct nvme_gpu_kmod_event {
	__u32 size;
	__s32 fd;
};

#define NVME_GPU_KMOD_INFO _IOWR('N', 0xe0, struct nvme_gpu_kmod_info)
#define NVME_GPU_KMOD_MAP _IOWR('N', 0xe1, struct nvme_gpu_kmod_map)
#define NVME_GPU_KMOD_UNMAP _IOW('N', 0xe2, struct nvme_gpu_kmod_unmap)
/* Stops the function, resets it, and lets it reach memory again once its
 * controller is disabled. EOPNOTSUPP: there is no reset of its own, and the
 * controller was disabled instead; it may reach memory. With another error it
 * may not: ENODEV when it is to be given back or cannot be reached, ETIMEDOUT
 * when the controller does not become disabled, what the reset ended with.
 */
#define NVME_GPU_KMOD_RESET _IO('N', 0xe3)
#define NVME_GPU_KMOD_EVENT _IOW('N', 0xe4, struct nvme_gpu_kmod_event)

/* mmap of offset 0: BAR 0, uncached. */

#endif
