/* SPDX-License-Identifier: GPL-2.0-only */
/* What the files of the module share. */
#ifndef NVME_GPU_H
#define NVME_GPU_H

#include <linux/kref.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/wait.h>
#include <linux/xarray.h>

#include "nvme_gpu_uapi.h"

struct dma_buf;
struct dma_buf_attachment;
struct eventfd_ctx;
struct file;
struct mm_struct;

/*
 * One function. Order of locks: the device lock of the function, @lock, the
 * lock of a memory map, the reservation lock of a dma-buf or @bar_lock,
 * @event_lock.
 */
struct nvme_gpu_function {
	struct kref ref;
	struct pci_dev *pdev;
	struct miscdevice misc;
	char name[32];

	/* Guards the fields down to @bar_lock. */
	struct mutex lock;
	/* The driver has left the function. */
	bool gone;
	struct file *owner;
	struct address_space *mapped_by;
	struct xarray mappings;
	u32 count;
	/* The owner has left while remove() held the device lock. */
	bool left_to_remove;

	/* BAR 0 is not mapped any more. */
	struct mutex bar_lock;
	bool bar_gone;

	/* Guards the two below, also where nothing may sleep. */
	spinlock_t event_lock;
	struct eventfd_ctx *event;
	/* Bits of struct nvme_gpu_kmod_info. */
	u32 events;

	/* remove() holds the device lock and waits for the owner. */
	bool wanted;
	wait_queue_head_t closed;
};

/* Memory that the function reaches. */
struct nvme_gpu_mapping {
	struct nvme_gpu_function *of;
	u32 kind;
	/* What is mapped; NULL after a revocation. */
	struct sg_table *table;

	/* NVME_GPU_MAP_USER */
	struct sg_table own;
	struct page **pages;
	unsigned long page_count;
	struct mm_struct *mm;

	/* NVME_GPU_MAP_DMABUF */
	struct dma_buf *buffer;
	struct dma_buf_attachment *attachment;
	bool pinned;
	/* Addresses that the module mapped itself, one for each segment. */
	dma_addr_t *remapped;
	u32 remapped_count;
};

u32 nvme_gpu_iommu(struct pci_dev *pdev);
int nvme_gpu_map(struct nvme_gpu_function *of, struct nvme_gpu_kmod_map *ask,
		 struct nvme_gpu_mapping **made);
void nvme_gpu_unmap(struct nvme_gpu_mapping *mapping);
void nvme_gpu_stop_dma(struct pci_dev *pdev);
void nvme_gpu_signal(struct nvme_gpu_function *of, u32 event);

#endif
