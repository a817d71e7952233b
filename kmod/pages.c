// SPDX-License-Identifier: GPL-2.0-only
/* Pages of a program: counted against its user, pinned, mapped. */
#include <linux/cred.h>
#include <linux/dma-mapping.h>
#include <linux/iommu.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/sched/signal.h>
#include <linux/sched/user.h>
#include <linux/slab.h>

#include "nvme_gpu.h"

/* The most bytes of one mapping of pages. */
#define MOST_BYTES SZ_4G
/* Pages that are pinned between two looks at signals. */
#define MOST_AT_ONCE (SZ_64M >> PAGE_SHIFT)

/*
 * Counts pages as iommufd and io_uring do, against the user: counted against
 * the process, each one that gets the descriptor would have a new limit.
 */
static int account(struct nvme_gpu_mapping *mapping)
{
	unsigned long limit = rlimit(RLIMIT_MEMLOCK) >> PAGE_SHIFT;
	struct user_struct *user = get_uid(current_user());
	unsigned long count = mapping->page_count;
	long before = atomic_long_read(&user->locked_vm);

	do {
		if (before + count > limit && !capable(CAP_IPC_LOCK)) {
			free_uid(user);
			return -ENOMEM;
		}
	} while (!atomic_long_try_cmpxchg(&user->locked_vm, &before,
					  before + count));
	mapping->user = user;
	mapping->mm = current->mm;
	mmgrab(mapping->mm);
	atomic64_add(count, &mapping->mm->pinned_vm);
	return 0;
}

static void give_back(struct nvme_gpu_mapping *mapping)
{
	if (!mapping->user)
		return;
	atomic64_sub(mapping->page_count, &mapping->mm->pinned_vm);
	mmdrop(mapping->mm);
	atomic_long_sub(mapping->page_count, &mapping->user->locked_vm);
	free_uid(mapping->user);
}

/*
 * Pins what @ask names, without any lock: a page may be one whose content
 * another program provides when it likes. nvme_gpu_unpin() follows, also with
 * an error.
 */
int nvme_gpu_pin(struct nvme_gpu_mapping *mapping,
		 const struct nvme_gpu_kmod_map *ask)
{
	unsigned long count = ask->bytes >> PAGE_SHIFT;
	unsigned long done = 0;
	int pinned, err;

	if (!ask->bytes || ask->bytes > MOST_BYTES ||
	    (ask->address | ask->bytes) & ~PAGE_MASK ||
	    ask->address + ask->bytes < ask->address)
		return -EINVAL;
	mapping->bytes = ask->bytes;
	mapping->page_count = count;
	err = account(mapping);
	if (err)
		return err;
	mapping->pages = kvmalloc_array(count, sizeof(*mapping->pages),
					GFP_KERNEL_ACCOUNT);
	if (!mapping->pages)
		return -ENOMEM;
	/* One that ends early is asked again: it says why then, a signal or EFAULT. */
	while (done < count) {
		pinned = pin_user_pages_fast(ask->address + (done << PAGE_SHIFT),
					     min(count - done, MOST_AT_ONCE),
					     FOLL_WRITE | FOLL_LONGTERM,
					     mapping->pages + done);
		if (pinned <= 0) {
			unpin_user_pages(mapping->pages, done);
			return pinned ? pinned : -EFAULT;
		}
		done += pinned;
	}
	mapping->is_pinned = true;
	return 0;
}

/* With the pages unmapped. */
void nvme_gpu_unpin(struct nvme_gpu_mapping *mapping)
{
	if (mapping->is_pinned)
		unpin_user_pages_dirty_lock(mapping->pages,
					    mapping->page_count, true);
	kvfree(mapping->pages);
	give_back(mapping);
}

/* Maps pages of the scatter list at new addresses of the domain. */
static int map_in_domain(struct nvme_gpu_mapping *mapping)
{
	struct nvme_gpu_domain *domain = &mapping->opener->domain;
	struct sg_table *table = &mapping->own;
	struct iova *iova = nvme_gpu_iova_alloc(domain, mapping->bytes);
	ssize_t done;

	if (!iova)
		return -ENOMEM;
	done = iommu_map_sg(domain->own, (u64)iova->pfn_lo << PAGE_SHIFT,
			    table->sgl, table->orig_nents,
			    IOMMU_READ | IOMMU_WRITE | IOMMU_CACHE,
			    GFP_KERNEL_ACCOUNT);
	if (done == mapping->bytes) {
		mapping->iova = iova;
		return 0;
	}
	nvme_gpu_iova_undo(domain, iova, mapping->bytes);
	return done < 0 ? done : -ENOMEM;
}

/* With the function's lock held. */
int nvme_gpu_map_pages(struct nvme_gpu_mapping *mapping)
{
	struct nvme_gpu_opener *opener = mapping->opener;
	int err;

	err = sg_alloc_table_from_pages(&mapping->own, mapping->pages,
					mapping->page_count, 0, mapping->bytes,
					GFP_KERNEL_ACCOUNT);
	if (err)
		return err;
	if (opener->domain.own) {
		err = map_in_domain(mapping);
		/* The domain knows all that an unmapping needs. */
		sg_free_table(&mapping->own);
		return err;
	}
	err = dma_map_sgtable(&opener->of->pdev->dev, &mapping->own,
			      DMA_BIDIRECTIONAL, 0);
	mapping->own_is_mapped = !err;
	if (err)
		sg_free_table(&mapping->own);
	return err;
}

void nvme_gpu_unmap_pages(struct nvme_gpu_mapping *mapping)
{
	struct nvme_gpu_opener *opener = mapping->opener;

	if (mapping->iova)
		nvme_gpu_iova_unmap(&opener->domain, mapping->iova,
				    mapping->bytes);
	mapping->iova = NULL;
	if (mapping->own_is_mapped) {
		dma_unmap_sgtable(&opener->of->pdev->dev, &mapping->own,
				  DMA_BIDIRECTIONAL, 0);
		sg_free_table(&mapping->own);
	}
	mapping->own_is_mapped = false;
}
