// SPDX-License-Identifier: GPL-2.0-only
/*
 * The driver of an NVMe function whose queues a program drives: gives the
 * program BAR 0 and the function memory, and takes both back whatever becomes
 * of the program.
 *
 * It binds to what driver_override names alone. Before any mapping is dropped
 * the function is stopped: bus mastering off, transactions drained, reset.
 */
#include <linux/delay.h>
#include <linux/eventfd.h>
#include <linux/fs.h>
#include <linux/iommu.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>

#include "nvme_gpu.h"

static bool unsafe_dma;
module_param_named(unsafe, unsafe_dma, bool, 0444);
MODULE_PARM_DESC(unsafe, "Map memory without strict translation of an IOMMU: the function then reaches all of it");

static unsigned int grace_ms = 2000;
module_param(grace_ms, uint, 0644);
MODULE_PARM_DESC(grace_ms, "How long an unbind waits for the program that has the function open");

void nvme_gpu_signal(struct nvme_gpu_function *of, u32 event)
{
	unsigned long flags;

	spin_lock_irqsave(&of->event_lock, flags);
	of->events |= event;
	if (of->event)
		eventfd_signal(of->event);
	spin_unlock_irqrestore(&of->event_lock, flags);
}

static void replace_event(struct nvme_gpu_function *of, struct eventfd_ctx *by)
{
	struct eventfd_ctx *old;
	unsigned long flags;

	spin_lock_irqsave(&of->event_lock, flags);
	old = of->event;
	of->event = by;
	/* Nothing that came before is lost. */
	if (by && of->events)
		eventfd_signal(by);
	spin_unlock_irqrestore(&of->event_lock, flags);
	if (old)
		eventfd_ctx_put(old);
}

static void free_function(struct kref *ref)
{
	struct nvme_gpu_function *of =
		container_of(ref, struct nvme_gpu_function, ref);

	pci_dev_put(of->pdev);
	kfree(of);
}

void nvme_gpu_stop_dma(struct pci_dev *pdev)
{
	pci_clear_master(pdev);
	if (!pci_wait_for_pending_transaction(pdev))
		pci_warn(pdev, "transactions are pending after bus mastering went off\n");
}

static void tell_reset(struct nvme_gpu_function *of, int err)
{
	if (err)
		pci_info(of->pdev, "no function reset (%d): bus mastering stays off\n", err);
}

/*
 * Stops the function and makes it forget addresses. False, and the function is
 * only stopped, when remove() holds the device lock: the reset is its own then.
 */
static bool quiesce(struct nvme_gpu_function *of)
{
	int err;

	nvme_gpu_stop_dma(of->pdev);
	do {
		if (READ_ONCE(of->wanted))
			return false;
		err = pci_try_reset_function(of->pdev);
		if (err == -EAGAIN)
			usleep_range(1000, 2000);
	} while (err == -EAGAIN);
	tell_reset(of, err);
	return true;
}

/* The same with the device lock held. */
static void quiesce_locked(struct nvme_gpu_function *of)
{
	nvme_gpu_stop_dma(of->pdev);
	tell_reset(of, pci_reset_function_locked(of->pdev));
}

/* With the lock held and the function stopped. */
static void drop_mappings(struct nvme_gpu_function *of)
{
	struct nvme_gpu_mapping *mapping;
	unsigned long handle;

	xa_for_each(&of->mappings, handle, mapping) {
		xa_erase(&of->mappings, handle);
		nvme_gpu_unmap(mapping);
	}
	of->count = 0;
}

static bool isolated_msi(struct pci_dev *pdev)
{
	struct iommu_group *group = iommu_group_get(&pdev->dev);
	bool isolated;

	if (!group)
		return false;
	isolated = iommu_group_has_isolated_msi(group);
	iommu_group_put(group);
	return isolated;
}

static u32 info_flags(struct nvme_gpu_function *of)
{
	bool strict = nvme_gpu_iommu(of->pdev) == NVME_GPU_IOMMU_STRICT;
	bool isolated = isolated_msi(of->pdev);
	u32 flags = 0;

	if (unsafe_dma)
		flags |= NVME_GPU_INFO_UNSAFE;
	if (isolated)
		flags |= NVME_GPU_INFO_ISOLATED_MSI;
	if (unsafe_dma || (strict && isolated))
		flags |= NVME_GPU_INFO_MAY_MAP;
	if (of->pdev->reset_methods[0])
		flags |= NVME_GPU_INFO_RESET;
	return flags;
}

static long do_info(struct nvme_gpu_function *of, void __user *at)
{
	struct nvme_gpu_kmod_info info;
	unsigned long flags;

	if (copy_from_user(&info, at, sizeof(info)))
		return -EFAULT;
	if (info.size != sizeof(info))
		return -EINVAL;
	memset(&info, 0, sizeof(info));
	info.size = sizeof(info);
	info.abi = NVME_GPU_KMOD_ABI;
	info.bar0_bytes = pci_resource_len(of->pdev, 0);
	info.iommu = nvme_gpu_iommu(of->pdev);
	info.flags = info_flags(of);
	info.mappings = of->count;
	spin_lock_irqsave(&of->event_lock, flags);
	info.flags |= of->events;
	spin_unlock_irqrestore(&of->event_lock, flags);
	return copy_to_user(at, &info, sizeof(info)) ? -EFAULT : 0;
}

static long do_map(struct nvme_gpu_function *of, void __user *at)
{
	struct nvme_gpu_mapping *mapping;
	struct nvme_gpu_kmod_map ask;
	u32 handle;
	int err;

	if (copy_from_user(&ask, at, sizeof(ask)))
		return -EFAULT;
	if (ask.size != sizeof(ask) || ask.kind > NVME_GPU_MAP_DMABUF ||
	    ask.flags & ~NVME_GPU_MAP_REQUIRE_PEER)
		return -EINVAL;
	if (!(info_flags(of) & NVME_GPU_INFO_MAY_MAP))
		return -EPERM;
	err = nvme_gpu_map(of, &ask, &mapping);
	if (err == -ENOSPC && copy_to_user(at, &ask, sizeof(ask)))
		err = -EFAULT;
	if (err)
		return err;
	err = xa_alloc(&of->mappings, &handle, mapping, XA_LIMIT(1, U16_MAX),
		       GFP_KERNEL_ACCOUNT);
	if (err) {
		nvme_gpu_unmap(mapping);
		return err;
	}
	of->count++;
	ask.handle = handle;
	/* What the caller cannot name stays mapped until it closes the file. */
	return copy_to_user(at, &ask, sizeof(ask)) ? -EFAULT : 0;
}

static long do_unmap(struct nvme_gpu_function *of, void __user *at)
{
	struct nvme_gpu_mapping *mapping;
	struct nvme_gpu_kmod_unmap ask;

	if (copy_from_user(&ask, at, sizeof(ask)))
		return -EFAULT;
	if (ask.size != sizeof(ask))
		return -EINVAL;
	mapping = xa_erase(&of->mappings, ask.handle);
	if (!mapping)
		return -ENOENT;
	of->count--;
	nvme_gpu_unmap(mapping);
	return 0;
}

static long do_reset(struct nvme_gpu_function *of)
{
	unsigned long flags;

	if (!quiesce(of))
		return -ENODEV;
	spin_lock_irqsave(&of->event_lock, flags);
	of->events &= ~NVME_GPU_INFO_REVOKED;
	spin_unlock_irqrestore(&of->event_lock, flags);
	pci_set_master(of->pdev);
	return 0;
}

static long do_event(struct nvme_gpu_function *of, void __user *at)
{
	struct nvme_gpu_kmod_event ask;
	struct eventfd_ctx *event = NULL;

	if (copy_from_user(&ask, at, sizeof(ask)))
		return -EFAULT;
	if (ask.size != sizeof(ask))
		return -EINVAL;
	if (ask.fd >= 0) {
		event = eventfd_ctx_fdget(ask.fd);
		if (IS_ERR(event))
			return PTR_ERR(event);
	}
	replace_event(of, event);
	return 0;
}

static long nvme_gpu_ioctl(struct file *file, unsigned int command,
			   unsigned long argument)
{
	struct nvme_gpu_function *of = file->private_data;
	void __user *at = (void __user *)argument;
	long result = -ENOTTY;

	mutex_lock(&of->lock);
	if (of->gone)
		result = -ENODEV;
	else if (command == NVME_GPU_KMOD_INFO)
		result = do_info(of, at);
	else if (command == NVME_GPU_KMOD_MAP)
		result = do_map(of, at);
	else if (command == NVME_GPU_KMOD_UNMAP)
		result = do_unmap(of, at);
	else if (command == NVME_GPU_KMOD_RESET)
		result = do_reset(of);
	else if (command == NVME_GPU_KMOD_EVENT)
		result = do_event(of, at);
	mutex_unlock(&of->lock);
	return result;
}

static int nvme_gpu_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct nvme_gpu_function *of = file->private_data;
	u64 offset = (u64)vma->vm_pgoff << PAGE_SHIFT;
	u64 bytes = vma->vm_end - vma->vm_start;
	u64 bar = pci_resource_len(of->pdev, 0);
	int err = -ENODEV;

	if (!(vma->vm_flags & VM_SHARED) || offset > bar || bytes > bar - offset)
		return -EINVAL;
	vm_flags_set(vma, VM_IO | VM_PFNMAP | VM_DONTEXPAND | VM_DONTDUMP |
			  VM_DONTCOPY);
	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	/* Not the lock: MAP holds it while it takes the lock of the memory map. */
	mutex_lock(&of->bar_lock);
	if (!of->bar_gone)
		err = io_remap_pfn_range(vma, vma->vm_start,
					 (pci_resource_start(of->pdev, 0) + offset) >> PAGE_SHIFT,
					 bytes, vma->vm_page_prot);
	mutex_unlock(&of->bar_lock);
	return err;
}

static int nvme_gpu_open(struct inode *inode, struct file *file)
{
	struct nvme_gpu_function *of = container_of(file->private_data,
						    struct nvme_gpu_function, misc);
	int err = 0;

	if (!capable(CAP_SYS_RAWIO))
		return -EPERM;
	mutex_lock(&of->lock);
	if (of->gone || READ_ONCE(of->wanted)) {
		err = -ENODEV;
	} else if (of->owner) {
		err = -EBUSY;
	} else {
		kref_get(&of->ref);
		of->owner = file;
		of->mapped_by = inode->i_mapping;
		of->events = 0;
		file->private_data = of;
		pci_set_master(of->pdev);
	}
	mutex_unlock(&of->lock);
	return err;
}

static int nvme_gpu_release(struct inode *inode, struct file *file)
{
	struct nvme_gpu_function *of = file->private_data;

	mutex_lock(&of->lock);
	if (!of->gone) {
		if (quiesce(of))
			drop_mappings(of);
		else
			of->left_to_remove = true;
	}
	WRITE_ONCE(of->owner, NULL);
	mutex_unlock(&of->lock);
	replace_event(of, NULL);
	wake_up_all(&of->closed);
	kref_put(&of->ref, free_function);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.open = nvme_gpu_open,
	.release = nvme_gpu_release,
	.unlocked_ioctl = nvme_gpu_ioctl,
	.mmap = nvme_gpu_mmap,
};

static int nvme_gpu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct nvme_gpu_function *of;
	int err;

	of = kzalloc(sizeof(*of), GFP_KERNEL);
	if (!of)
		return -ENOMEM;
	kref_init(&of->ref);
	mutex_init(&of->lock);
	mutex_init(&of->bar_lock);
	spin_lock_init(&of->event_lock);
	init_waitqueue_head(&of->closed);
	xa_init_flags(&of->mappings, XA_FLAGS_ALLOC1);
	of->pdev = pci_dev_get(pdev);
	err = pci_enable_device_mem(pdev);
	if (err)
		goto put;
	err = pci_request_selected_regions(pdev, 1, "nvme_gpu");
	if (err)
		goto disable;
	err = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (err)
		goto release;
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	pci_clear_master(pdev);
	snprintf(of->name, sizeof(of->name), "nvme-gpu-%s", pci_name(pdev));
	of->misc.minor = MISC_DYNAMIC_MINOR;
	of->misc.name = of->name;
	of->misc.fops = &operations;
	of->misc.mode = 0600;
	of->misc.parent = &pdev->dev;
	pci_set_drvdata(pdev, of);
	err = misc_register(&of->misc);
	if (err)
		goto release;
	return 0;
release:
	pci_release_selected_regions(pdev, 1);
disable:
	pci_disable_device(pdev);
put:
	kref_put(&of->ref, free_function);
	return err;
}

/* With the device lock held. */
static void nvme_gpu_remove(struct pci_dev *pdev)
{
	struct nvme_gpu_function *of = pci_get_drvdata(pdev);

	WRITE_ONCE(of->wanted, true);
	nvme_gpu_signal(of, NVME_GPU_INFO_WANTED);
	wait_event_timeout(of->closed, !READ_ONCE(of->owner),
			   msecs_to_jiffies(grace_ms));
	misc_deregister(&of->misc);
	mutex_lock(&of->bar_lock);
	of->bar_gone = true;
	mutex_unlock(&of->bar_lock);
	mutex_lock(&of->lock);
	of->gone = true;
	if (of->owner) {
		/* A program that still touches the BAR gets SIGBUS. */
		unmap_mapping_range(of->mapped_by, 0, 0, 1);
	}
	if (of->owner || of->left_to_remove) {
		quiesce_locked(of);
		drop_mappings(of);
	}
	mutex_unlock(&of->lock);
	pci_release_selected_regions(pdev, 1);
	pci_disable_device(pdev);
	kref_put(&of->ref, free_function);
}

static const struct pci_device_id functions[] = {
	{
		.vendor = PCI_ANY_ID,
		.device = PCI_ANY_ID,
		.subvendor = PCI_ANY_ID,
		.subdevice = PCI_ANY_ID,
		.class = PCI_CLASS_STORAGE_EXPRESS,
		.class_mask = ~0,
		.override_only = 1,
	},
	{}
};

static struct pci_driver nvme_gpu_driver = {
	.name = "nvme_gpu",
	.id_table = functions,
	.probe = nvme_gpu_probe,
	.remove = nvme_gpu_remove,
	.driver.probe_type = PROBE_FORCE_SYNCHRONOUS,
};
module_pci_driver(nvme_gpu_driver);

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
MODULE_AUTHOR("The nvme-gpu developers");
MODULE_DESCRIPTION("NVMe functions for drivers that run in GPU kernels");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
