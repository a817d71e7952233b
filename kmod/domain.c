// SPDX-License-Identifier: GPL-2.0-only
/*
 * The addresses that the function may reach: a paging domain of its own while
 * it is open, as VFIO has one, and not that of the kernel's DMA interface,
 * which belongs to the whole IOMMU group.
 *
 * So it holds nothing but what this opener has mapped, whatever the group's
 * type is; an unmapping is flushed before it returns; and the kernel refuses
 * the claim where another function of the group has a driver, and where
 * firmware asks for memory of its own (RMRR).
 */
#include <linux/iommu.h>
#include <linux/list.h>

#include "nvme_gpu.h"

/* Some controllers ignore address bits above these. */
#define MOST_ADDRESS DMA_BIT_MASK(48)

/* Between the look at a group's domain and the claim of the group. */
static DEFINE_MUTEX(claim_lock);

/* What the IOMMU must do for the function, and does for it alone. */
static int check(struct nvme_gpu_domain *domain, struct pci_dev *pdev)
{
	if (!device_iommu_capable(&pdev->dev, IOMMU_CAP_CACHE_COHERENCY)) {
		pci_info(pdev, "refused: the IOMMU does not keep its memory coherent with caches\n");
		return -EOPNOTSUPP;
	}
	if (!iommu_group_has_isolated_msi(domain->group) && !nvme_gpu_unsafe()) {
		pci_info(pdev, "refused: interrupts are not isolated (interrupt remapping is off)\n");
		return -EACCES;
	}
	return 0;
}

static int claim(struct nvme_gpu_domain *domain, struct pci_dev *pdev)
{
	int err = -EPERM;

	mutex_lock(&claim_lock);
	/* The claim succeeds with the group's own domain in its place alone. */
	if (!iommu_group_dma_owner_claimed(domain->group)) {
		domain->exporters = iommu_get_domain_for_dev(&pdev->dev);
		err = iommu_device_claim_dma_owner(&pdev->dev, domain);
	}
	mutex_unlock(&claim_lock);
	if (err == -EPERM || err == -EBUSY) {
		pci_info(pdev, "refused: another function of IOMMU group %d is in use\n",
			 iommu_group_id(domain->group));
		return -EXDEV;
	}
	if (err)
		pci_info(pdev, "refused: the IOMMU group cannot be claimed (%d)\n", err);
	return err ? -EOPNOTSUPP : 0;
}

static int reserve(struct nvme_gpu_domain *domain, u64 first, u64 last)
{
	return reserve_iova(&domain->iovas, first >> PAGE_SHIFT,
			    last >> PAGE_SHIFT) ? 0 : -ENOMEM;
}

/*
 * Keeps addresses from being given out: interrupts, what firmware uses, and
 * windows of the host bridge, which a switch may take for another function.
 */
static int reserve_regions(struct nvme_gpu_domain *domain, struct pci_dev *pdev)
{
	struct pci_host_bridge *bridge = pci_find_host_bridge(pdev->bus);
	struct iommu_resv_region *region, *next;
	struct resource_entry *window;
	LIST_HEAD(regions);
	int err, full = 0;

	resource_list_for_each_entry(window, &bridge->windows)
		if (resource_type(window->res) == IORESOURCE_MEM)
			full |= reserve(domain,
					window->res->start - window->offset,
					window->res->end - window->offset);
	err = iommu_get_group_resv_regions(domain->group, &regions);
	list_for_each_entry_safe(region, next, &regions, list) {
		if (region->length)
			full |= reserve(domain, region->start,
					region->start + region->length - 1);
		list_del(&region->list);
		kfree(region);
	}
	return err ? err : full;
}

static int make_own(struct nvme_gpu_domain *domain, struct pci_dev *pdev)
{
	struct iommu_domain *own = iommu_paging_domain_alloc(&pdev->dev);
	u64 last;
	int err;

	if (IS_ERR(own))
		return -EOPNOTSUPP;
	last = min_t(u64, own->geometry.aperture_end, MOST_ADDRESS);
	err = -EOPNOTSUPP;
	if (1UL << __ffs(own->pgsize_bitmap) > PAGE_SIZE ||
	    own->geometry.aperture_start > PAGE_SIZE)
		goto free;
	err = iommu_attach_group(own, domain->group);
	if (err)
		goto free;
	/*
	 * Where the IOMMU can: a transaction that does not look into caches would
	 * read what memory held before the kernel cleared it for the program.
	 */
	if (own->ops->enforce_cache_coherency)
		own->ops->enforce_cache_coherency(own);
	/* From the second page on: an address of 0 is a mistake. */
	init_iova_domain(&domain->iovas, PAGE_SIZE, 1);
	err = reserve_regions(domain, pdev);
	if (err)
		goto detach;
	domain->last_page = last >> PAGE_SHIFT;
	domain->own = own;
	return 0;
detach:
	put_iova_domain(&domain->iovas);
	iommu_detach_group(own, domain->group);
free:
	iommu_domain_free(own);
	return err;
}

/*
 * Gives the function addresses of its own, or says why not:
 * -EOPNOTSUPP: no IOMMU translates for it, or not as it must,
 * -EACCES: its interrupts are not isolated,
 * -EXDEV: another function of its group is in use.
 */
int nvme_gpu_domain_open(struct nvme_gpu_domain *domain, struct pci_dev *pdev)
{
	int err;

	domain->group = iommu_group_get(&pdev->dev);
	if (!domain->group) {
		if (nvme_gpu_unsafe())
			return 0;
		pci_info(pdev, "refused: no IOMMU is between the function and memory\n");
		return -EOPNOTSUPP;
	}
	err = check(domain, pdev);
	if (!err)
		err = claim(domain, pdev);
	if (err)
		goto put;
	err = make_own(domain, pdev);
	if (err)
		goto release;
	return 0;
release:
	pci_info(pdev, "refused: no domain of its own is to be had (%d)\n", err);
	iommu_device_release_dma_owner(&pdev->dev);
put:
	iommu_group_put(domain->group);
	domain->group = NULL;
	return err;
}

/*
 * With the function stopped: it reaches nothing from here on, and what is
 * unmapped now needs no flush.
 */
void nvme_gpu_domain_block(struct nvme_gpu_domain *domain)
{
	if (domain->own)
		iommu_detach_group(domain->own, domain->group);
}

/* After nvme_gpu_domain_block(), with nothing mapped. */
void nvme_gpu_domain_close(struct nvme_gpu_domain *domain, struct pci_dev *pdev)
{
	if (!domain->own)
		return;
	put_iova_domain(&domain->iovas);
	iommu_domain_free(domain->own);
	domain->own = NULL;
	iommu_device_release_dma_owner(&pdev->dev);
	iommu_group_put(domain->group);
	domain->group = NULL;
}

/* Addresses for @bytes, whole pages. */
struct iova *nvme_gpu_iova_alloc(struct nvme_gpu_domain *domain, u64 bytes)
{
	unsigned long pages = bytes >> PAGE_SHIFT;
	unsigned long low = DMA_BIT_MASK(32) >> PAGE_SHIFT;
	struct iova *found;

	/* Low ones first, as the kernel's DMA interface gives them. */
	found = alloc_iova(&domain->iovas, pages, min(low, domain->last_page), true);
	if (!found && domain->last_page > low)
		found = alloc_iova(&domain->iovas, pages, domain->last_page, true);
	return found;
}

/* Takes @bytes out of the domain, flushed, and gives the addresses back. */
void nvme_gpu_iova_unmap(struct nvme_gpu_domain *domain, struct iova *iova,
			 u64 bytes)
{
	size_t gone = bytes ? iommu_unmap(domain->own,
					  (u64)iova->pfn_lo << PAGE_SHIFT, bytes) : 0;

	WARN_ON_ONCE(gone != bytes);
	__free_iova(&domain->iovas, iova);
}

/* Bytes from @first on, at most @most, that are mapped. */
static u64 mapped_run(struct iommu_domain *own, u64 first, u64 most)
{
	u64 run = 0;

	while (run < most && iommu_iova_to_phys(own, first + run)) {
		run += PAGE_SIZE;
		if (!(run & (SZ_4M - 1)))
			cond_resched();
	}
	return run;
}

/*
 * What nvme_gpu_iova_unmap() does, of a mapping that has failed half-way. Some
 * of it may be there that the failed call did not undo: Intel's driver leaves
 * the entries it had written when memory for a table is lacking. The function
 * would reach pages through them that are unpinned by then.
 */
void nvme_gpu_iova_undo(struct nvme_gpu_domain *domain, struct iova *iova,
			u64 bytes)
{
	u64 first = (u64)iova->pfn_lo << PAGE_SHIFT;
	u64 at, run;

	for (at = 0; at < bytes; at += run ? run : PAGE_SIZE) {
		/* A driver may take more than is asked for where nothing is. */
		run = mapped_run(domain->own, first + at, bytes - at);
		if (run)
			WARN_ON_ONCE(iommu_unmap(domain->own, first + at, run) != run);
		cond_resched();
	}
	iommu_flush_iotlb_all(domain->own);
	__free_iova(&domain->iovas, iova);
}
