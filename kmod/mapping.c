// SPDX-License-Identifier: GPL-2.0-only
/*
 * Memory that the function may reach: pages of the opener, and dma-bufs.
 *
 * A dma-buf is attached dynamically, so that an exporter moves nothing behind
 * our back, and its addresses are checked against the IOMMU's domain: some
 * exporters hand out physical addresses of a BAR under translation.
 */
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/iommu.h>
#include <linux/mm.h>
#include <linux/sched/mm.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "nvme_gpu.h"

/* The most bytes of one mapping of pages. */
#define MOST_BYTES SZ_4G

u32 nvme_gpu_iommu(struct pci_dev *pdev)
{
	struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);

	if (!domain)
		return NVME_GPU_IOMMU_NONE;
	if (!(domain->type & __IOMMU_DOMAIN_PAGING))
		return NVME_GPU_IOMMU_IDENTITY;
	if (domain->type == IOMMU_DOMAIN_DMA_FQ)
		return NVME_GPU_IOMMU_LAZY;
	return NVME_GPU_IOMMU_STRICT;
}

static int map_user(struct nvme_gpu_mapping *mapping,
		    const struct nvme_gpu_kmod_map *ask)
{
	struct device *dev = &mapping->of->pdev->dev;
	unsigned long count = ask->bytes >> PAGE_SHIFT;
	long pinned;
	int err;

	if (!ask->bytes || ask->bytes > MOST_BYTES ||
	    (ask->address | ask->bytes) & ~PAGE_MASK ||
	    ask->address + ask->bytes < ask->address)
		return -EINVAL;
	err = account_locked_vm(current->mm, count, true);
	if (err)
		return err;
	mapping->mm = current->mm;
	mmgrab(mapping->mm);
	mapping->page_count = count;
	mapping->pages = kvmalloc_array(count, sizeof(*mapping->pages),
					GFP_KERNEL_ACCOUNT);
	if (!mapping->pages)
		return -ENOMEM;
	pinned = pin_user_pages_fast(ask->address, count,
				     FOLL_WRITE | FOLL_LONGTERM,
				     mapping->pages);
	if (pinned != count) {
		if (pinned > 0)
			unpin_user_pages(mapping->pages, pinned);
		kvfree(mapping->pages);
		mapping->pages = NULL;
		return pinned < 0 ? pinned : -EFAULT;
	}
	err = sg_alloc_table_from_pages(&mapping->own, mapping->pages, count, 0,
					ask->bytes, GFP_KERNEL_ACCOUNT);
	if (err)
		return err;
	err = dma_map_sgtable(dev, &mapping->own, DMA_BIDIRECTIONAL, 0);
	if (err) {
		sg_free_table(&mapping->own);
		return err;
	}
	mapping->table = &mapping->own;
	return 0;
}

static void unmap_user(struct nvme_gpu_mapping *mapping)
{
	if (mapping->table) {
		dma_unmap_sgtable(&mapping->of->pdev->dev, mapping->table,
				  DMA_BIDIRECTIONAL, 0);
		sg_free_table(mapping->table);
	}
	if (mapping->pages)
		unpin_user_pages_dirty_lock(mapping->pages,
					    mapping->page_count, true);
	kvfree(mapping->pages);
	if (mapping->mm) {
		account_locked_vm(mapping->mm, mapping->page_count, false);
		mmdrop(mapping->mm);
	}
}

/* Whether the range lies in one memory BAR of another function. */
static bool in_peer(struct pci_dev *self, phys_addr_t at, u64 bytes)
{
	struct pci_dev *peer = NULL;
	int bar;

	for_each_pci_dev(peer) {
		if (peer == self)
			continue;
		for (bar = 0; bar < PCI_STD_NUM_BARS; bar++) {
			if (pci_resource_flags(peer, bar) & IORESOURCE_MEM &&
			    pci_resource_len(peer, bar) &&
			    at >= pci_resource_start(peer, bar) &&
			    at + bytes - 1 <= pci_resource_end(peer, bar)) {
				pci_dev_put(peer);
				return true;
			}
		}
	}
	return false;
}

/* Takes back what remap() mapped. */
static void unmap_remapped(struct nvme_gpu_mapping *mapping)
{
	struct scatterlist *segment;
	int at;

	if (mapping->remapped && mapping->table)
		for_each_sgtable_dma_sg(mapping->table, segment, at)
			if (at < mapping->remapped_count)
				dma_unmap_resource(&mapping->of->pdev->dev,
						   mapping->remapped[at],
						   sg_dma_len(segment),
						   DMA_BIDIRECTIONAL, 0);
	mapping->remapped_count = 0;
	kvfree(mapping->remapped);
	mapping->remapped = NULL;
}

/* Maps segments of a peer's BAR whose physical addresses the exporter gave. */
static int remap(struct nvme_gpu_mapping *mapping, u32 count)
{
	struct pci_dev *pdev = mapping->of->pdev;
	struct scatterlist *segment;
	int at;

	mapping->remapped = kvcalloc(count, sizeof(*mapping->remapped),
				     GFP_KERNEL_ACCOUNT);
	if (!mapping->remapped)
		return -ENOMEM;
	for_each_sgtable_dma_sg(mapping->table, segment, at) {
		phys_addr_t from = sg_dma_address(segment);
		dma_addr_t to;

		if (!in_peer(pdev, from, sg_dma_len(segment)))
			return -EREMOTEIO;
		to = dma_map_resource(&pdev->dev, from, sg_dma_len(segment),
				      DMA_BIDIRECTIONAL, 0);
		if (dma_mapping_error(&pdev->dev, to))
			return -EREMOTEIO;
		mapping->remapped[at] = to;
		mapping->remapped_count++;
	}
	pci_info(pdev, "the exporter's addresses were not mapped: mapped them\n");
	return 0;
}

/* Whether the exporter's addresses are in the domain of the function. */
static int check_addresses(struct nvme_gpu_mapping *mapping)
{
	struct pci_dev *pdev = mapping->of->pdev;
	struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);
	struct scatterlist *segment;
	u32 missing = 0, count = 0;
	int at;

	if (!domain || !(domain->type & __IOMMU_DOMAIN_PAGING))
		return 0;
	for_each_sgtable_dma_sg(mapping->table, segment, at) {
		dma_addr_t first = sg_dma_address(segment);

		count++;
		if (!iommu_iova_to_phys(domain, first) ||
		    !iommu_iova_to_phys(domain,
					first + sg_dma_len(segment) - 1))
			missing++;
	}
	if (!missing)
		return 0;
	if (missing != count)
		return -EREMOTEIO;
	return remap(mapping, count);
}

/*
 * The exporter takes the memory back, and may wait for us: the function is
 * stopped and the mapping dropped here, under the reservation lock.
 */
static void invalidate(struct dma_buf_attachment *attachment)
{
	struct nvme_gpu_mapping *mapping = attachment->importer_priv;
	struct pci_dev *pdev = mapping->of->pdev;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (!mapping->table)
		return;
	/* Before the program can see the controller fail for it, and once more
	 * below: it may have reset the function in between.
	 */
	nvme_gpu_signal(mapping->of, NVME_GPU_INFO_REVOKED);
	nvme_gpu_stop_dma(pdev);
	unmap_remapped(mapping);
	dma_buf_unmap_attachment(attachment, mapping->table, DMA_BIDIRECTIONAL);
	mapping->table = NULL;
	nvme_gpu_signal(mapping->of, NVME_GPU_INFO_REVOKED);
}

static const struct dma_buf_attach_ops attach_ops = {
	.allow_peer2peer = true,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 1, 0)
	.invalidate_mappings = invalidate,
#else
	.move_notify = invalidate,
#endif
};

static int map_buffer(struct nvme_gpu_mapping *mapping,
		      struct nvme_gpu_kmod_map *ask)
{
	struct dma_buf_attachment *attachment;
	struct sg_table *table;
	struct dma_buf *buffer;
	int err;

	buffer = dma_buf_get(ask->fd);
	if (IS_ERR(buffer))
		return PTR_ERR(buffer);
	mapping->buffer = buffer;
	attachment = dma_buf_dynamic_attach(buffer, &mapping->of->pdev->dev,
					    &attach_ops, mapping);
	if (IS_ERR(attachment))
		return PTR_ERR(attachment);
	mapping->attachment = attachment;
	dma_resv_lock(buffer->resv, NULL);
	err = dma_buf_pin(attachment);
	if (err)
		goto unlock;
	mapping->pinned = true;
	table = dma_buf_map_attachment(attachment, DMA_BIDIRECTIONAL);
	if (IS_ERR(table)) {
		err = PTR_ERR(table);
		goto unlock;
	}
	mapping->table = table;
	ask->bytes = buffer->size;
	err = check_addresses(mapping);
unlock:
	dma_resv_unlock(buffer->resv);
	return err;
}

static void unmap_buffer(struct nvme_gpu_mapping *mapping)
{
	if (mapping->attachment) {
		dma_resv_lock(mapping->buffer->resv, NULL);
		unmap_remapped(mapping);
		if (mapping->table)
			dma_buf_unmap_attachment(mapping->attachment,
						 mapping->table,
						 DMA_BIDIRECTIONAL);
		mapping->table = NULL;
		if (mapping->pinned)
			dma_buf_unpin(mapping->attachment);
		dma_resv_unlock(mapping->buffer->resv);
		dma_buf_detach(mapping->buffer, mapping->attachment);
	}
	if (mapping->buffer)
		dma_buf_put(mapping->buffer);
}

void nvme_gpu_unmap(struct nvme_gpu_mapping *mapping)
{
	if (mapping->kind == NVME_GPU_MAP_USER)
		unmap_user(mapping);
	else
		unmap_buffer(mapping);
	kfree(mapping);
}

static struct nvme_gpu_kmod_segment describe(struct nvme_gpu_mapping *mapping,
					     struct scatterlist *segment, int at)
{
	struct pci_dev *pdev = mapping->of->pdev;
	struct iommu_domain *domain = iommu_get_domain_for_dev(&pdev->dev);
	dma_addr_t iova = sg_dma_address(segment);
	struct nvme_gpu_kmod_segment told = {
		.iova = iova,
		.bytes = sg_dma_len(segment),
	};
	phys_addr_t phys = iova;

	if (mapping->remapped) {
		told.iova = mapping->remapped[at];
		told.flags = NVME_GPU_SEGMENT_REMAPPED;
	} else if (domain && domain->type & __IOMMU_DOMAIN_PAGING) {
		phys = iommu_iova_to_phys(domain, iova);
	}
	/* The start decides: no exporter joins RAM and a BAR. */
	if (mapping->kind == NVME_GPU_MAP_DMABUF && in_peer(pdev, phys, 1))
		told.place = NVME_GPU_PLACE_PEER;
	return told;
}

/* The segments as the caller sees them; kvfree() them. */
static struct nvme_gpu_kmod_segment *
collect(struct nvme_gpu_mapping *mapping, const struct nvme_gpu_kmod_map *ask,
	u32 *count)
{
	struct nvme_gpu_kmod_segment *list;
	struct scatterlist *segment;
	int at;

	/* Taken back between the mapping and here. */
	if (!mapping->table)
		return ERR_PTR(-EAGAIN);
	list = kvcalloc(mapping->table->nents, sizeof(*list), GFP_KERNEL_ACCOUNT);
	if (!list)
		return ERR_PTR(-ENOMEM);
	for_each_sgtable_dma_sg(mapping->table, segment, at) {
		list[at] = describe(mapping, segment, at);
		if (ask->flags & NVME_GPU_MAP_REQUIRE_PEER &&
		    list[at].place != NVME_GPU_PLACE_PEER) {
			kvfree(list);
			return ERR_PTR(-EREMOTE);
		}
	}
	*count = at;
	return list;
}

/*
 * Maps what is asked for. With an error nothing stays mapped; with -ENOSPC the
 * number of segments is in @ask.
 */
int nvme_gpu_map(struct nvme_gpu_function *of, struct nvme_gpu_kmod_map *ask,
		 struct nvme_gpu_mapping **made)
{
	struct nvme_gpu_kmod_segment *list;
	struct nvme_gpu_mapping *mapping;
	u32 places = ask->segments;
	int err;

	mapping = kzalloc(sizeof(*mapping), GFP_KERNEL_ACCOUNT);
	if (!mapping)
		return -ENOMEM;
	mapping->of = of;
	mapping->kind = ask->kind;
	if (ask->kind == NVME_GPU_MAP_USER)
		err = map_user(mapping, ask);
	else
		err = map_buffer(mapping, ask);
	if (err)
		goto undo;
	/* A revocation frees the table; user memory is written without the lock. */
	if (mapping->buffer)
		dma_resv_lock(mapping->buffer->resv, NULL);
	list = collect(mapping, ask, &ask->segments);
	if (mapping->buffer)
		dma_resv_unlock(mapping->buffer->resv);
	if (IS_ERR(list)) {
		err = PTR_ERR(list);
		goto undo;
	}
	if (ask->segments > places)
		err = -ENOSPC;
	else if (copy_to_user(u64_to_user_ptr(ask->list), list,
			      array_size(ask->segments, sizeof(*list))))
		err = -EFAULT;
	kvfree(list);
	if (err)
		goto undo;
	*made = mapping;
	return 0;
undo:
	nvme_gpu_unmap(mapping);
	return err;
}
