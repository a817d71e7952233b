// SPDX-License-Identifier: GPL-2.0-only
/*
 * MAP and UNMAP, and the table of handles.
 *
 * What may wait for another program is done without a lock: reading the
 * arguments, pinning, and writing the address to the program. A mapping whose
 * handle could not be written is undone.
 */
#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "nvme_gpu.h"

/* What a MAP answers. */
struct answer {
	struct nvme_gpu_kmod_segment *list;
	u32 count;
};

/* With the lock of the function held, while somebody may still use it. */
static void unmap(struct nvme_gpu_mapping *mapping)
{
	if (mapping->kind == NVME_GPU_MAP_USER)
		nvme_gpu_unmap_pages(mapping);
	else
		nvme_gpu_unmap_buffer(mapping);
}

/* What is unmapped; no lock is needed. */
static void free_mapping(struct nvme_gpu_mapping *mapping)
{
	if (mapping->kind == NVME_GPU_MAP_USER)
		nvme_gpu_unpin(mapping);
	else
		nvme_gpu_put_buffer(mapping);
	kfree(mapping);
}

/* Where the mapping is, for kvfree(): one place, where there is an IOMMU. */
struct nvme_gpu_kmod_segment *nvme_gpu_segments(struct sg_table *table,
						struct nvme_gpu_mapping *mapping,
						u32 *count)
{
	u32 many = mapping->iova ? 1 : table->nents;
	struct nvme_gpu_kmod_segment *list;
	struct scatterlist *segment;
	int at;

	list = kvcalloc(many, sizeof(*list), GFP_KERNEL_ACCOUNT);
	if (!list)
		return NULL;
	*count = many;
	if (mapping->iova) {
		list->iova = (u64)mapping->iova->pfn_lo << PAGE_SHIFT;
		list->bytes = mapping->bytes;
		list->place = mapping->place;
		list->flags = mapping->flags;
		return list;
	}
	for_each_sgtable_dma_sg(table, segment, at) {
		list[at].iova = sg_dma_address(segment);
		list[at].bytes = sg_dma_len(segment);
		list[at].place = mapping->place;
	}
	return list;
}

/* With the lock held: maps, and gives it a handle that nobody knows yet. */
static int enter(struct nvme_gpu_mapping *mapping, struct nvme_gpu_kmod_map *ask,
		 struct answer *answer)
{
	struct nvme_gpu_opener *opener = mapping->opener;
	u32 places = ask->segments;
	int err;

	if (opener->of->gone)
		return -ENODEV;
	if (mapping->kind == NVME_GPU_MAP_USER) {
		err = nvme_gpu_map_pages(mapping);
		if (err)
			return err;
		answer->list = nvme_gpu_segments(&mapping->own, mapping,
						 &answer->count);
		if (!answer->list)
			err = -ENOMEM;
	} else {
		err = nvme_gpu_map_buffer(mapping, ask, &answer->list,
					  &answer->count);
	}
	if (!err && answer->count > places) {
		ask->segments = answer->count;
		err = -ENOSPC;
	}
	if (!err)
		err = xa_alloc(&opener->mappings, &ask->handle, mapping,
			       XA_LIMIT(1, U16_MAX), GFP_KERNEL_ACCOUNT);
	if (err) {
		unmap(mapping);
		return err;
	}
	ask->bytes = mapping->bytes;
	opener->count++;
	return 0;
}

/* Writes the answer; whatever the program's memory does, no lock waits. */
static int tell(void __user *at, struct nvme_gpu_kmod_map *ask,
		struct answer *answer)
{
	ask->segments = answer->count;
	if (copy_to_user(u64_to_user_ptr(ask->list), answer->list,
			 array_size(answer->count, sizeof(*answer->list))) ||
	    copy_to_user(at, ask, sizeof(*ask)))
		return -EFAULT;
	return 0;
}

/* Opens the handle for use, or undoes the mapping if @err says it was not told. */
static int settle(struct nvme_gpu_opener *opener, u32 handle, int err)
{
	struct nvme_gpu_mapping *mapping, *dropped = NULL;

	mutex_lock(&opener->of->lock);
	if (opener->of->gone) {
		/* remove() has dropped all there was. */
		err = -ENODEV;
	} else if (!err) {
		mapping = xa_load(&opener->mappings, handle);
		mapping->is_named = true;
	} else {
		dropped = xa_erase(&opener->mappings, handle);
		opener->count--;
		unmap(dropped);
	}
	mutex_unlock(&opener->of->lock);
	if (dropped)
		free_mapping(dropped);
	return err;
}

static int prepare(struct nvme_gpu_mapping *mapping,
		   const struct nvme_gpu_kmod_map *ask)
{
	if (ask->kind == NVME_GPU_MAP_USER && ask->flags & NVME_GPU_MAP_REQUIRE_PEER)
		return -EREMOTE;
	if (ask->kind == NVME_GPU_MAP_USER)
		return nvme_gpu_pin(mapping, ask);
	return nvme_gpu_get_buffer(mapping, ask->fd);
}

long nvme_gpu_do_map(struct nvme_gpu_opener *opener, void __user *at)
{
	struct nvme_gpu_mapping *mapping;
	struct nvme_gpu_kmod_map ask;
	struct answer answer = {};
	int err;

	if (copy_from_user(&ask, at, sizeof(ask)))
		return -EFAULT;
	if (ask.size != sizeof(ask) || ask.kind > NVME_GPU_MAP_DMABUF ||
	    ask.flags & ~NVME_GPU_MAP_REQUIRE_PEER)
		return -EINVAL;
	mapping = kzalloc(sizeof(*mapping), GFP_KERNEL_ACCOUNT);
	if (!mapping)
		return -ENOMEM;
	mapping->opener = opener;
	mapping->kind = ask.kind;
	err = prepare(mapping, &ask);
	if (!err)
		err = mutex_lock_killable(&opener->of->lock);
	if (!err) {
		err = enter(mapping, &ask, &answer);
		mutex_unlock(&opener->of->lock);
	}
	if (err) {
		free_mapping(mapping);
		/* How many places there must be. */
		if (err == -ENOSPC && copy_to_user(at, &ask, sizeof(ask)))
			err = -EFAULT;
	} else {
		/* From here on remove() may free it. */
		err = settle(opener, ask.handle, tell(at, &ask, &answer));
	}
	kvfree(answer.list);
	return err;
}

long nvme_gpu_do_unmap(struct nvme_gpu_opener *opener, void __user *at)
{
	struct nvme_gpu_function *of = opener->of;
	struct nvme_gpu_mapping *mapping = NULL;
	struct nvme_gpu_kmod_unmap ask;
	int err;

	if (copy_from_user(&ask, at, sizeof(ask)))
		return -EFAULT;
	if (ask.size != sizeof(ask))
		return -EINVAL;
	err = mutex_lock_killable(&of->lock);
	if (err)
		return err;
	if (of->gone) {
		err = -ENODEV;
	} else {
		mapping = xa_load(&opener->mappings, ask.handle);
		if (mapping && mapping->is_named) {
			xa_erase(&opener->mappings, ask.handle);
			opener->count--;
			unmap(mapping);
		} else {
			mapping = NULL;
			err = -ENOENT;
		}
	}
	mutex_unlock(&of->lock);
	if (mapping)
		free_mapping(mapping);
	return err;
}

/*
 * Drops all there is, with the function stopped and its domain blocked: by
 * release() with the lock held, or by remove(), when nobody else comes in.
 */
void nvme_gpu_drop_mappings(struct nvme_gpu_opener *opener)
{
	struct nvme_gpu_mapping *mapping;
	unsigned long handle;

	xa_for_each(&opener->mappings, handle, mapping) {
		unmap(mapping);
		free_mapping(mapping);
		cond_resched();
	}
	xa_destroy(&opener->mappings);
	opener->count = 0;
}
