// SPDX-License-Identifier: GPL-2.0-only
/*
 * The node /dev/nvme-gpu-BDF: who opens it, its calls, its end.
 *
 * Nothing waits in open but for the controller to be disabled, which a signal
 * that kills ends; who comes second is refused at once.
 */
#include <linux/compat.h>
#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/sched.h>
#include <linux/slab.h>
#include <linux/uaccess.h>

#include "nvme_gpu.h"

static void free_opener(struct kref *ref)
{
	struct nvme_gpu_opener *opener =
		container_of(ref, struct nvme_gpu_opener, ref);

	nvme_gpu_watch(opener, NULL);
	put_device(&opener->of->dev);
	kfree(opener);
}

void nvme_gpu_opener_put(struct nvme_gpu_opener *opener)
{
	kref_put(&opener->ref, free_opener);
}

/* With the function stopped: nothing of the opener's stays. */
void nvme_gpu_end(struct nvme_gpu_opener *opener)
{
	nvme_gpu_domain_block(&opener->domain);
	nvme_gpu_drop_mappings(opener);
	nvme_gpu_domain_close(&opener->domain, opener->of->pdev);
}

/* Takes the function for @opener, if it is free and the IOMMU is as it must be. */
static int take(struct nvme_gpu_function *of, struct nvme_gpu_opener *opener,
		struct file *file)
{
	int err;

	if (!mutex_trylock(&of->lock))
		return -EBUSY;
	if (of->gone || READ_ONCE(of->wanted))
		err = -ENODEV;
	else if (of->opener)
		err = -EBUSY;
	else
		err = nvme_gpu_domain_open(&opener->domain, of->pdev);
	if (!err) {
		nvme_gpu_bar_open(of, file->f_mapping);
		kref_get(&opener->ref);
		of->opener = opener;
		WRITE_ONCE(of->is_free, false);
	}
	mutex_unlock(&of->lock);
	return err;
}

/* Lets go of it, with the function stopped: once, here or in remove(). */
static void let_go(struct nvme_gpu_opener *opener, bool is_quiet)
{
	struct nvme_gpu_function *of = opener->of;
	bool was_ours = false;

	mutex_lock(&of->lock);
	if (of->opener == opener) {
		/* The file ends, and with it every mapping of the BAR. */
		nvme_gpu_bar_close(of);
		was_ours = is_quiet;
	}
	if (was_ours) {
		/* A reset by the system may have set bus mastering meanwhile. */
		nvme_gpu_stop_dma(of);
		nvme_gpu_end(opener);
		of->opener = NULL;
	}
	/* Nothing of it is left, or remove() ends it: that waits no longer. */
	smp_store_release(&of->is_free, true);
	mutex_unlock(&of->lock);
	wake_up_all(&of->closed);
	if (was_ours)
		nvme_gpu_opener_put(opener);
}

/* The last opener's queues are gone before the function is a master. */
static int start(struct nvme_gpu_opener *opener)
{
	struct nvme_gpu_function *of = opener->of;
	int err = nvme_gpu_disable(of, true);

	if (err)
		return err;
	err = mutex_lock_killable(&of->lock);
	if (err)
		return err;
	if (of->gone)
		err = -ENODEV;
	else
		nvme_gpu_start_dma(opener, 0);
	mutex_unlock(&of->lock);
	return err;
}

static int nvme_gpu_open(struct inode *inode, struct file *file)
{
	struct nvme_gpu_function *of = container_of(inode->i_cdev,
						    struct nvme_gpu_function,
						    cdev);
	struct nvme_gpu_opener *opener;
	int err;

	if (!capable(CAP_SYS_RAWIO))
		return -EPERM;
	opener = kzalloc(sizeof(*opener), GFP_KERNEL_ACCOUNT);
	if (!opener)
		return -ENOMEM;
	kref_init(&opener->ref);
	xa_init_flags(&opener->mappings, XA_FLAGS_ALLOC1);
	get_device(&of->dev);
	opener->of = of;
	err = take(of, opener, file);
	if (!err) {
		err = start(opener);
		if (err)
			let_go(opener, !nvme_gpu_quiesce(of));
	}
	if (err) {
		nvme_gpu_opener_put(opener);
		return err;
	}
	file->private_data = opener;
	return nonseekable_open(inode, file);
}

static int nvme_gpu_release(struct inode *inode, struct file *file)
{
	struct nvme_gpu_opener *opener = file->private_data;

	let_go(opener, !nvme_gpu_quiesce(opener->of));
	nvme_gpu_opener_put(opener);
	return 0;
}

static u32 info_flags(struct nvme_gpu_opener *opener)
{
	u32 flags = NVME_GPU_INFO_MAY_MAP;
	unsigned long irq;

	if (nvme_gpu_unsafe())
		flags |= NVME_GPU_INFO_UNSAFE;
	if (opener->domain.group &&
	    iommu_group_has_isolated_msi(opener->domain.group))
		flags |= NVME_GPU_INFO_ISOLATED_MSI;
	if (opener->of->pdev->reset_methods[0])
		flags |= NVME_GPU_INFO_RESET;
	if (READ_ONCE(opener->of->wanted))
		flags |= NVME_GPU_INFO_WANTED;
	spin_lock_irqsave(&opener->of->event_lock, irq);
	flags |= opener->events;
	spin_unlock_irqrestore(&opener->of->event_lock, irq);
	return flags;
}

static long do_info(struct nvme_gpu_opener *opener, void __user *at)
{
	struct nvme_gpu_function *of = opener->of;
	struct nvme_gpu_kmod_info info;
	int err;

	if (copy_from_user(&info, at, sizeof(info)))
		return -EFAULT;
	if (info.size != sizeof(info))
		return -EINVAL;
	memset(&info, 0, sizeof(info));
	err = mutex_lock_killable(&of->lock);
	if (err)
		return err;
	if (of->gone) {
		err = -ENODEV;
	} else {
		info.size = sizeof(info);
		info.abi = NVME_GPU_KMOD_ABI;
		info.bar0_bytes = pci_resource_len(of->pdev, 0);
		info.iommu = opener->domain.own ? NVME_GPU_IOMMU_STRICT :
						  NVME_GPU_IOMMU_NONE;
		info.flags = info_flags(opener);
		info.mappings = opener->count;
	}
	mutex_unlock(&of->lock);
	if (err)
		return err;
	return copy_to_user(at, &info, sizeof(info)) ? -EFAULT : 0;
}

static long do_event(struct nvme_gpu_opener *opener, void __user *at)
{
	struct nvme_gpu_kmod_event ask;
	struct eventfd_ctx *event = NULL;

	if (copy_from_user(&ask, at, sizeof(ask)))
		return -EFAULT;
	if (ask.size != sizeof(ask))
		return -EINVAL;
	if (READ_ONCE(opener->of->gone))
		return -ENODEV;
	if (ask.fd >= 0) {
		event = eventfd_ctx_fdget(ask.fd);
		if (IS_ERR(event))
			return PTR_ERR(event);
	}
	nvme_gpu_watch(opener, event);
	return 0;
}

static long nvme_gpu_ioctl(struct file *file, unsigned int command,
			   unsigned long argument)
{
	struct nvme_gpu_opener *opener = file->private_data;
	void __user *at = (void __user *)argument;

	/* Each takes the locks it needs, none over memory of the program. */
	switch (command) {
	case NVME_GPU_KMOD_INFO:
		return do_info(opener, at);
	case NVME_GPU_KMOD_MAP:
		return nvme_gpu_do_map(opener, at);
	case NVME_GPU_KMOD_UNMAP:
		return nvme_gpu_do_unmap(opener, at);
	case NVME_GPU_KMOD_RESET:
		return nvme_gpu_reset(opener);
	case NVME_GPU_KMOD_EVENT:
		return do_event(opener, at);
	default:
		return -ENOTTY;
	}
}

static int nvme_gpu_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct nvme_gpu_opener *opener = file->private_data;

	return nvme_gpu_bar_mmap(opener->of, vma);
}

const struct file_operations nvme_gpu_node = {
	.owner = THIS_MODULE,
	.open = nvme_gpu_open,
	.release = nvme_gpu_release,
	.unlocked_ioctl = nvme_gpu_ioctl,
	.compat_ioctl = compat_ptr_ioctl,
	.mmap = nvme_gpu_mmap,
};
