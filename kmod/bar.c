// SPDX-License-Identifier: GPL-2.0-only
/*
 * BAR 0 in the memory of a program, and who may touch it when.
 *
 * Pages are put in by faults, under the lock under which they are taken out:
 * during a reset, when memory decoding is off, and once and for all when the
 * driver leaves. What a GPU has mapped for itself cannot be taken from it.
 */
#include <linux/mm.h>
#include <linux/sched/signal.h>

#include "nvme_gpu.h"

/* How long a fault waits for the end of a reset. */
#define MOST_WAIT (10 * HZ)
/* How many pages of a BAR one fault puts in: CUDA registers what is there. */
#define AROUND (SZ_2M >> PAGE_SHIFT)

/*
 * Waits until none of @why blocks the BAR any longer. Returns the rest of
 * @left, or 0 if one of them still does.
 */
static long wait_free(struct nvme_gpu_function *of, unsigned int why, long left,
		      bool killable)
{
	if (!killable)
		return wait_event_timeout(of->bar_free,
					  READ_ONCE(of->bar_gone) ||
					  !(READ_ONCE(of->bar_blocked) & why),
					  left);
	return wait_event_killable_timeout(of->bar_free,
					   READ_ONCE(of->bar_gone) ||
					   !(READ_ONCE(of->bar_blocked) & why),
					   left);
}

/*
 * Waits until registers may be touched, and holds off who would block them.
 * With 0, nvme_gpu_bar_put() follows.
 */
int nvme_gpu_bar_get(struct nvme_gpu_function *of, bool killable)
{
	long left = MOST_WAIT;

	for (;;) {
		down_read(&of->bar_lock);
		if (!of->bar_gone && !of->bar_blocked)
			return 0;
		if (of->bar_gone)
			left = -ENODEV;
		up_read(&of->bar_lock);
		if (left <= 0)
			return left ? left : -ETIMEDOUT;
		left = wait_free(of, ~0u, left, killable);
	}
}

void nvme_gpu_bar_put(struct nvme_gpu_function *of)
{
	up_read(&of->bar_lock);
}

static vm_fault_t bar_fault(struct vm_fault *vmf)
{
	struct vm_area_struct *vma = vmf->vma;
	struct nvme_gpu_function *of = vma->vm_private_data;
	unsigned long address = vmf->address & PAGE_MASK;
	unsigned long window = address & ~(AROUND * PAGE_SIZE - 1);
	unsigned long at, end, bar;
	vm_fault_t result;

	if (nvme_gpu_bar_get(of, true))
		return VM_FAULT_SIGBUS;
	bar = (pci_resource_start(of->pdev, 0) >> PAGE_SHIFT) + vma->vm_pgoff;
	result = vmf_insert_pfn(vma, address,
				bar + ((address - vma->vm_start) >> PAGE_SHIFT));
	at = max(window, vma->vm_start);
	end = min(window + AROUND * PAGE_SIZE, vma->vm_end);
	for (; at < end && result == VM_FAULT_NOPAGE; at += PAGE_SIZE)
		if (at != address)
			result = vmf_insert_pfn(vma, at,
						bar + ((at - vma->vm_start) >> PAGE_SHIFT));
	nvme_gpu_bar_put(of);
	return result;
}

static const struct vm_operations_struct bar_ops = {
	.fault = bar_fault,
};

int nvme_gpu_bar_mmap(struct nvme_gpu_function *of, struct vm_area_struct *vma)
{
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 bytes = vma->vm_end - vma->vm_start;
	u64 bar;

	if (READ_ONCE(of->bar_gone))
		return -ENODEV;
	bar = pci_resource_len(of->pdev, 0);
	if (!(vma->vm_flags & VM_SHARED) || offset > bar || bytes > bar - offset)
		return -EINVAL;
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP |
			  VM_DONTCOPY);
	vma->vm_page_prot = pgprot_decrypted(pgprot_noncached(vma->vm_page_prot));
	vma->vm_private_data = of;
	vma->vm_ops = &bar_ops;
	return 0;
}

static void zap(struct nvme_gpu_function *of)
{
	if (of->bar_users)
		unmap_mapping_range(of->bar_users, 0, 0, 1);
}

void nvme_gpu_bar_open(struct nvme_gpu_function *of, struct address_space *users)
{
	down_write(&of->bar_lock);
	of->bar_users = users;
	up_write(&of->bar_lock);
}

void nvme_gpu_bar_close(struct nvme_gpu_function *of)
{
	nvme_gpu_bar_open(of, NULL);
}

/* Takes the BAR out of the program; who touches it waits for unblock(). */
void nvme_gpu_bar_block(struct nvme_gpu_function *of, unsigned int why)
{
	down_write(&of->bar_lock);
	WRITE_ONCE(of->bar_blocked, of->bar_blocked | why);
	zap(of);
	up_write(&of->bar_lock);
}

void nvme_gpu_bar_unblock(struct nvme_gpu_function *of, unsigned int why)
{
	down_write(&of->bar_lock);
	WRITE_ONCE(of->bar_blocked, of->bar_blocked & ~why);
	up_write(&of->bar_lock);
	wake_up_all(&of->bar_free);
}

/*
 * The function was reset since an error of the bus. Linux does not report a
 * failed recovery to drivers: after a while it counts as over.
 */
void nvme_gpu_bar_recover(struct nvme_gpu_function *of, bool killable)
{
	if (!wait_free(of, NVME_GPU_BLOCKED_ERROR, MOST_WAIT, killable))
		nvme_gpu_bar_unblock(of, NVME_GPU_BLOCKED_ERROR);
}

/* A program that still touches the BAR gets SIGBUS from here on. */
void nvme_gpu_bar_leave(struct nvme_gpu_function *of)
{
	down_write(&of->bar_lock);
	WRITE_ONCE(of->bar_gone, true);
	zap(of);
	of->bar_users = NULL;
	up_write(&of->bar_lock);
	wake_up_all(&of->bar_free);
}
