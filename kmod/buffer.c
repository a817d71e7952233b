// SPDX-License-Identifier: GPL-2.0-only
/*
 * dma-bufs: memory of a GPU or of any other exporter.
 *
 * An exporter maps by the kernel's DMA interface, which knows the IOMMU
 * group's own domain. Each of its addresses is looked up there, page by page,
 * and what it is of, RAM or a BAR of another function, is mapped in the domain
 * of the opener. Some exporters return addresses of a BAR itself: those are
 * not mapped in that domain, and are used as they are.
 */
#include <linux/dma-buf.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "nvme_gpu.h"

/* How long the exporter may take until the memory holds its content. */
#define MOST_WAIT (5 * HZ)

/* One run of pages that lie one after the other. */
struct run {
	phys_addr_t first;
	u64 bytes;
	u32 place;
};

/* What the segments of a table are, while they are mapped. */
struct walk {
	struct nvme_gpu_mapping *mapping;
	struct nvme_gpu_extent extent;
	struct run run;
	/* Bytes that are mapped, from the first address on. */
	u64 done;
	bool has_resolved, has_raw, has_ram;
	bool wants_peer;
};

static int flush(struct walk *walk)
{
	struct nvme_gpu_mapping *mapping = walk->mapping;
	int prot = IOMMU_READ | IOMMU_WRITE;
	int err;

	if (!walk->run.bytes)
		return 0;
	prot |= walk->run.place == NVME_GPU_PLACE_PEER ? IOMMU_MMIO : IOMMU_CACHE;
	err = iommu_map(mapping->opener->domain.own,
			((u64)mapping->iova->pfn_lo << PAGE_SHIFT) + walk->done,
			walk->run.first, walk->run.bytes, prot,
			GFP_KERNEL_ACCOUNT);
	if (err)
		return err;
	walk->done += walk->run.bytes;
	walk->run.bytes = 0;
	return 0;
}

/*
 * Finds what the page at @at is of, before the function can reach it: what is
 * raw lies in a BAR; and an exporter does the one thing or the other.
 */
static int judge(struct walk *walk, phys_addr_t at, bool is_raw)
{
	struct nvme_gpu_extent *extent = &walk->extent;
	int err;

	if (!extent->last || at < extent->first || at > extent->last) {
		err = nvme_gpu_extent_of(walk->mapping->opener->of->pdev, at,
					 extent);
		if (err)
			return err;
	}
	if (extent->last - at < PAGE_SIZE - 1)
		return -EREMOTEIO;
	if (extent->place == NVME_GPU_PLACE_RAM && (is_raw || walk->wants_peer))
		return is_raw ? -EREMOTEIO : -EREMOTE;
	if (is_raw ? walk->has_resolved : walk->has_raw)
		return -EREMOTEIO;
	walk->has_raw |= is_raw;
	walk->has_resolved |= !is_raw;
	walk->has_ram |= extent->place == NVME_GPU_PLACE_RAM;
	return 0;
}

/* Adds the page at @at, which was judged, to the run that will be mapped. */
static int add_page(struct walk *walk, phys_addr_t at)
{
	struct nvme_gpu_extent *extent = &walk->extent;
	int err;

	if (walk->run.bytes && walk->run.place == extent->place &&
	    at == walk->run.first + walk->run.bytes) {
		walk->run.bytes += PAGE_SIZE;
		return 0;
	}
	err = flush(walk);
	walk->run = (struct run){ at, PAGE_SIZE, extent->place };
	return err;
}

static int add_segment(struct walk *walk, dma_addr_t at, u64 bytes)
{
	struct iommu_domain *of = walk->mapping->opener->domain.exporters;
	bool translates = of && of->type & __IOMMU_DOMAIN_PAGING;
	bool is_raw;
	u64 done;
	int err;

	for (done = 0; done < bytes; done += PAGE_SIZE) {
		phys_addr_t found = at + done;

		if (translates)
			found = iommu_iova_to_phys(of, at + done);
		is_raw = translates && !found;
		if (is_raw)
			found = at + done;
		err = judge(walk, found, is_raw);
		if (!err)
			err = add_page(walk, found);
		if (err)
			return err;
		if (!(done & (SZ_4M - 1)))
			cond_resched();
	}
	return 0;
}

/* Maps all that the exporter's table names, one after the other. */
static int map_in_domain(struct nvme_gpu_mapping *mapping, bool wants_peer)
{
	struct nvme_gpu_domain *domain = &mapping->opener->domain;
	struct walk walk = { .mapping = mapping, .wants_peer = wants_peer };
	struct scatterlist *segment;
	int at, err = 0;

	mapping->iova = nvme_gpu_iova_alloc(domain, mapping->bytes);
	if (!mapping->iova)
		return -ENOMEM;
	for_each_sgtable_dma_sg(mapping->table, segment, at) {
		err = add_segment(&walk, sg_dma_address(segment),
				  sg_dma_len(segment));
		if (err)
			break;
	}
	if (!err)
		err = flush(&walk);
	if (err) {
		nvme_gpu_iova_undo(domain, mapping->iova, mapping->bytes);
		mapping->iova = NULL;
		return err;
	}
	if (walk.has_raw)
		mapping->flags |= NVME_GPU_SEGMENT_REMAPPED;
	mapping->place = walk.has_ram ? NVME_GPU_PLACE_RAM : NVME_GPU_PLACE_PEER;
	return 0;
}

/* The table has the whole of the buffer, in pages, by addresses for an IOMMU. */
static int check_table(struct nvme_gpu_mapping *mapping)
{
	struct scatterlist *segment;
	u64 bytes = 0;
	int at;

	for_each_sgtable_dma_sg(mapping->table, segment, at) {
		if ((sg_dma_address(segment) | sg_dma_len(segment)) & ~PAGE_MASK ||
		    sg_dma_is_bus_address(segment))
			return -EREMOTEIO;
		bytes += sg_dma_len(segment);
	}
	return bytes && bytes == mapping->buffer->size ? 0 : -EREMOTEIO;
}

/* Where there is no IOMMU: what a segment is of. */
static int place_directly(struct nvme_gpu_mapping *mapping, bool wants_peer)
{
	struct nvme_gpu_extent extent;
	struct scatterlist *segment;
	int at, err;

	mapping->place = NVME_GPU_PLACE_PEER;
	for_each_sgtable_dma_sg(mapping->table, segment, at) {
		err = nvme_gpu_extent_of(mapping->opener->of->pdev,
					 sg_dma_address(segment), &extent);
		if (err)
			return err;
		if (extent.place == NVME_GPU_PLACE_RAM && wants_peer)
			return -EREMOTE;
		if (extent.place == NVME_GPU_PLACE_RAM)
			mapping->place = NVME_GPU_PLACE_RAM;
	}
	return 0;
}

static void unmap_table(struct nvme_gpu_mapping *mapping)
{
	if (mapping->iova)
		nvme_gpu_iova_unmap(&mapping->opener->domain, mapping->iova,
				    mapping->bytes);
	mapping->iova = NULL;
	if (mapping->table)
		dma_buf_unmap_attachment(mapping->attachment, mapping->table,
					 DMA_BIDIRECTIONAL);
	mapping->table = NULL;
}

/*
 * The exporter takes the memory back, and may wait for us: the function is
 * stopped and the mapping dropped here, under the reservation lock.
 */
static void invalidate(struct dma_buf_attachment *attachment)
{
	struct nvme_gpu_mapping *mapping = attachment->importer_priv;
	struct nvme_gpu_opener *opener = mapping->opener;

	dma_resv_assert_held(attachment->dmabuf->resv);
	if (!mapping->table)
		return;
	nvme_gpu_revoke(opener);
	unmap_table(mapping);
	/* The program may have reset the function in between. */
	nvme_gpu_revoke(opener);
}

static const struct dma_buf_attach_ops attach_ops = {
	.allow_peer2peer = true,
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 1, 0)
	.invalidate_mappings = invalidate,
#else
	.move_notify = invalidate,
#endif
};

/* The buffer of a descriptor that lets its holder write. */
int nvme_gpu_get_buffer(struct nvme_gpu_mapping *mapping, int fd)
{
	struct dma_buf *buffer = dma_buf_get(fd);

	if (IS_ERR(buffer))
		return PTR_ERR(buffer);
	mapping->buffer = buffer;
	mapping->bytes = buffer->size;
	if (!(buffer->file->f_mode & FMODE_WRITE))
		return -EACCES;
	return PAGE_ALIGNED(buffer->size) ? 0 : -EREMOTEIO;
}

void nvme_gpu_put_buffer(struct nvme_gpu_mapping *mapping)
{
	if (mapping->buffer)
		dma_buf_put(mapping->buffer);
}

/* The content may still be on its way to where the addresses point. */
static int wait_content(struct dma_buf *buffer)
{
	long left = dma_resv_wait_timeout(buffer->resv, DMA_RESV_USAGE_KERNEL,
					  true, MOST_WAIT);

	if (left < 0)
		return left;
	return left ? 0 : -ETIMEDOUT;
}

/* With the reservation lock held; what an error leaves, unmap_buffer() takes. */
static int map_locked(struct nvme_gpu_mapping *mapping,
		      const struct nvme_gpu_kmod_map *ask)
{
	bool wants_peer = ask->flags & NVME_GPU_MAP_REQUIRE_PEER;
	struct sg_table *table;
	int err;

	/*
	 * Memory that must be a peer's is not pinned: some exporters pin in
	 * RAM. They may take it back instead.
	 */
	if (!wants_peer) {
		err = dma_buf_pin(mapping->attachment);
		if (err)
			return err;
		mapping->buffer_is_pinned = true;
	}
	table = dma_buf_map_attachment(mapping->attachment, DMA_BIDIRECTIONAL);
	if (IS_ERR(table))
		return PTR_ERR(table);
	mapping->table = table;
	err = check_table(mapping);
	if (!err)
		err = wait_content(mapping->buffer);
	if (err)
		return err;
	if (mapping->opener->domain.own)
		return map_in_domain(mapping, wants_peer);
	return place_directly(mapping, wants_peer);
}

/*
 * With the function's lock held: maps the buffer and describes where it is, in
 * @list for kvfree().
 */
int nvme_gpu_map_buffer(struct nvme_gpu_mapping *mapping,
			const struct nvme_gpu_kmod_map *ask,
			struct nvme_gpu_kmod_segment **list, u32 *count)
{
	struct dma_buf *buffer = mapping->buffer;
	struct dma_buf_attachment *attachment;
	int err;

	attachment = dma_buf_dynamic_attach(buffer,
					    &mapping->opener->of->pdev->dev,
					    &attach_ops, mapping);
	if (IS_ERR(attachment))
		return PTR_ERR(attachment);
	mapping->attachment = attachment;
	err = dma_resv_lock_interruptible(buffer->resv, NULL);
	if (err)
		return err;
	err = map_locked(mapping, ask);
	if (!err) {
		/* A revocation frees the table. */
		*list = nvme_gpu_segments(mapping->table, mapping, count);
		if (!*list)
			err = -ENOMEM;
	}
	dma_resv_unlock(buffer->resv);
	return err;
}

void nvme_gpu_unmap_buffer(struct nvme_gpu_mapping *mapping)
{
	if (!mapping->attachment)
		return;
	dma_resv_lock(mapping->buffer->resv, NULL);
	unmap_table(mapping);
	if (mapping->buffer_is_pinned)
		dma_buf_unpin(mapping->attachment);
	mapping->buffer_is_pinned = false;
	dma_resv_unlock(mapping->buffer->resv);
	dma_buf_detach(mapping->buffer, mapping->attachment);
	mapping->attachment = NULL;
}
