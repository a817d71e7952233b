/* SPDX-License-Identifier: GPL-2.0-only */
/* What the files of the module share. */
#ifndef NVME_GPU_H
#define NVME_GPU_H

#include <linux/atomic.h>
#include <linux/cdev.h>
#include <linux/device.h>
#include <linux/iova.h>
#include <linux/kref.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/rwsem.h>
#include <linux/wait.h>
#include <linux/xarray.h>

#include "nvme_gpu_uapi.h"

struct address_space;
struct dma_buf;
struct dma_buf_attachment;
struct eventfd_ctx;
struct iommu_domain;
struct iommu_group;
struct mm_struct;
struct user_struct;
struct vm_area_struct;

/*
 * One function. Order of locks: the device lock of the function, @lock, the
 * reservation lock of a dma-buf, @bar_lock, @event_lock. No lock is held while
 * memory of a program is read, written or pinned.
 */
struct nvme_gpu_function {
	/* The node; its last reference frees this. */
	struct device dev;
	struct cdev cdev;
	struct pci_dev *pdev;
	/* The first page of BAR 0. */
	void __iomem *registers;

	/* Guards the three below and what an opener has mapped. */
	struct mutex lock;
	/* The driver has left the function. */
	bool gone;
	struct nvme_gpu_opener *opener;

	/* Guards the three below: readers touch the BAR, a writer blocks it. */
	struct rw_semaphore bar_lock;
	/* Why the BAR is out of reach: NVME_GPU_BLOCKED_*. */
	unsigned int bar_blocked;
	bool bar_gone;
	/* Where the opener's mappings of the BAR are found. */
	struct address_space *bar_users;
	wait_queue_head_t bar_free;

	/*
	 * Guards what an opener is told, and the bus master bit, which change
	 * together. Taken where nothing may sleep, too.
	 */
	spinlock_t event_lock;

	/* Resets that the opener has asked for and that are under way. */
	atomic_t asked;
	/* remove() has begun: it holds the device lock and waits. */
	bool wanted;
	/* Nobody has the function open, or who had it has left it to remove().
	 * Written with @lock held; what wait_event() looks at takes no lock.
	 */
	bool is_free;
	wait_queue_head_t closed;
};

/* Why a BAR is out of reach: each reason comes and goes by itself. */
#define NVME_GPU_BLOCKED_RESET (1u << 0)
#define NVME_GPU_BLOCKED_SLEEP (1u << 1)
/* An error of the bus, until the system has recovered from it. */
#define NVME_GPU_BLOCKED_ERROR (1u << 2)

/* The addresses of one opener. */
struct nvme_gpu_domain {
	struct iommu_group *group;
	/* NULL: there is no IOMMU, and addresses are those of the bus. */
	struct iommu_domain *own;
	/* The group's own, in which exporters of dma-bufs map. */
	struct iommu_domain *exporters;
	struct iova_domain iovas;
	/* The last page that may be given out. */
	unsigned long last_page;
};

/* One open file. */
struct nvme_gpu_opener {
	struct kref ref;
	struct nvme_gpu_function *of;

	/* Guarded by the function's lock. */
	struct nvme_gpu_domain domain;
	struct xarray mappings;
	u32 count;

	/* Guarded by the function's event_lock. */
	struct eventfd_ctx *event;
	/* Bits of struct nvme_gpu_kmod_info. */
	u32 events;
};

/* Memory that the function reaches. */
struct nvme_gpu_mapping {
	struct nvme_gpu_opener *opener;
	u32 kind;
	/* The program has been told its handle. */
	bool is_named;
	u64 bytes;
	/* Where the whole of it is, in a domain of our own. */
	struct iova *iova;
	u32 place;
	u32 flags;

	/* NVME_GPU_MAP_USER */
	struct sg_table own;
	bool own_is_mapped;
	struct page **pages;
	unsigned long page_count;
	bool is_pinned;
	struct mm_struct *mm;
	struct user_struct *user;

	/* NVME_GPU_MAP_DMABUF: @table is NULL after a revocation. */
	struct dma_buf *buffer;
	struct dma_buf_attachment *attachment;
	bool buffer_is_pinned;
	struct sg_table *table;
};

/* main.c */
bool nvme_gpu_unsafe(void);

/* event.c */
void nvme_gpu_raise(struct nvme_gpu_opener *opener, u32 event);
void nvme_gpu_signal(struct nvme_gpu_opener *opener, u32 event);
void nvme_gpu_tell(struct nvme_gpu_function *of, u32 event);
void nvme_gpu_watch(struct nvme_gpu_opener *opener, struct eventfd_ctx *by);

/* bar.c */
int nvme_gpu_bar_mmap(struct nvme_gpu_function *of, struct vm_area_struct *vma);
void nvme_gpu_bar_open(struct nvme_gpu_function *of, struct address_space *users);
void nvme_gpu_bar_close(struct nvme_gpu_function *of);
void nvme_gpu_bar_block(struct nvme_gpu_function *of, unsigned int why);
void nvme_gpu_bar_unblock(struct nvme_gpu_function *of, unsigned int why);
void nvme_gpu_bar_recover(struct nvme_gpu_function *of, bool killable);
void nvme_gpu_bar_leave(struct nvme_gpu_function *of);
int nvme_gpu_bar_get(struct nvme_gpu_function *of, bool killable);
void nvme_gpu_bar_put(struct nvme_gpu_function *of);

/* reset.c */
void nvme_gpu_start_dma(struct nvme_gpu_opener *opener, u32 answered);
void nvme_gpu_stop_dma(struct nvme_gpu_function *of);
void nvme_gpu_revoke(struct nvme_gpu_opener *opener);
int nvme_gpu_disable(struct nvme_gpu_function *of, bool killable);
void nvme_gpu_power_down(struct nvme_gpu_function *of);
int nvme_gpu_reset(struct nvme_gpu_opener *opener);
int nvme_gpu_quiesce(struct nvme_gpu_function *of);
void nvme_gpu_quiesce_locked(struct nvme_gpu_function *of);
extern const struct pci_error_handlers nvme_gpu_errors;
extern const struct dev_pm_ops nvme_gpu_pm;

/* domain.c */
int nvme_gpu_domain_open(struct nvme_gpu_domain *domain, struct pci_dev *pdev);
void nvme_gpu_domain_block(struct nvme_gpu_domain *domain);
void nvme_gpu_domain_close(struct nvme_gpu_domain *domain, struct pci_dev *pdev);
struct iova *nvme_gpu_iova_alloc(struct nvme_gpu_domain *domain, u64 bytes);
void nvme_gpu_iova_unmap(struct nvme_gpu_domain *domain, struct iova *iova,
			 u64 bytes);
void nvme_gpu_iova_undo(struct nvme_gpu_domain *domain, struct iova *iova,
			u64 bytes);

/* pages.c */
int nvme_gpu_pin(struct nvme_gpu_mapping *mapping,
		 const struct nvme_gpu_kmod_map *ask);
int nvme_gpu_map_pages(struct nvme_gpu_mapping *mapping);
void nvme_gpu_unmap_pages(struct nvme_gpu_mapping *mapping);
void nvme_gpu_unpin(struct nvme_gpu_mapping *mapping);

/* buffer.c */
int nvme_gpu_get_buffer(struct nvme_gpu_mapping *mapping, int fd);
int nvme_gpu_map_buffer(struct nvme_gpu_mapping *mapping,
			const struct nvme_gpu_kmod_map *ask,
			struct nvme_gpu_kmod_segment **list, u32 *count);
void nvme_gpu_unmap_buffer(struct nvme_gpu_mapping *mapping);
void nvme_gpu_put_buffer(struct nvme_gpu_mapping *mapping);

/* peer.c */
struct nvme_gpu_extent {
	phys_addr_t first, last;
	u32 place;
};

int nvme_gpu_extent_of(struct pci_dev *self, phys_addr_t at,
		       struct nvme_gpu_extent *found);

/* mapping.c */
long nvme_gpu_do_map(struct nvme_gpu_opener *opener, void __user *at);
long nvme_gpu_do_unmap(struct nvme_gpu_opener *opener, void __user *at);
void nvme_gpu_drop_mappings(struct nvme_gpu_opener *opener);
struct nvme_gpu_kmod_segment *nvme_gpu_segments(struct sg_table *table,
						struct nvme_gpu_mapping *mapping,
						u32 *count);

/* node.c */
extern const struct file_operations nvme_gpu_node;
void nvme_gpu_opener_put(struct nvme_gpu_opener *opener);
void nvme_gpu_end(struct nvme_gpu_opener *opener);

#endif
