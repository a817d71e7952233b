// SPDX-License-Identifier: GPL-2.0-only
/*
 * The driver of an NVMe function whose queues a program drives: gives the
 * program BAR 0 and the function memory, and takes both back whatever becomes
 * of the program.
 *
 * It binds to what driver_override names alone. Before any mapping is dropped
 * the function is stopped: bus mastering off, transactions drained, reset.
 */
#include <linux/idr.h>
#include <linux/module.h>
#include <linux/security.h>
#include <linux/slab.h>
#include <linux/version.h>

#include "nvme_gpu.h"

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 12, 0)
#error "nvme_gpu needs Linux 6.12 or newer (docs/kmod.md)"
#endif
#ifndef CONFIG_X86_64
#error "nvme_gpu is for x86-64 (Kconfig)"
#endif

/* How many functions there may be at a time. */
#define MOST_FUNCTIONS 256
/* An unbind waits no longer, whatever grace_ms says. */
#define MOST_GRACE_MS 60000

static bool unsafe_dma;
module_param_named_unsafe(unsafe, unsafe_dma, bool, 0444);
MODULE_PARM_DESC(unsafe, "Open functions without an IOMMU or without isolated interrupts: they then reach all memory");

static unsigned int grace_ms = 2000;
module_param(grace_ms, uint, 0644);
MODULE_PARM_DESC(grace_ms, "How long an unbind waits for the program that has the function open, at most 60000");

static dev_t first_node;
static DEFINE_IDA(nodes);

static const struct class nvme_gpu_class = {
	.name = "nvme_gpu",
};

/* A kernel that is locked down gives no program a way to all memory. */
bool nvme_gpu_unsafe(void)
{
	return unsafe_dma && !security_locked_down(LOCKDOWN_PCI_ACCESS);
}

static void free_function(struct device *dev)
{
	struct nvme_gpu_function *of =
		container_of(dev, struct nvme_gpu_function, dev);

	ida_free(&nodes, MINOR(dev->devt) - MINOR(first_node));
	pci_dev_put(of->pdev);
	kfree(of);
}

/* With a reference that put_device() drops. */
static struct nvme_gpu_function *make_function(struct pci_dev *pdev)
{
	struct nvme_gpu_function *of = kzalloc(sizeof(*of), GFP_KERNEL);
	int number;

	if (!of)
		return ERR_PTR(-ENOMEM);
	number = ida_alloc_max(&nodes, MOST_FUNCTIONS - 1, GFP_KERNEL);
	if (number < 0) {
		kfree(of);
		return ERR_PTR(number);
	}
	mutex_init(&of->lock);
	init_rwsem(&of->bar_lock);
	spin_lock_init(&of->event_lock);
	of->is_free = true;
	init_waitqueue_head(&of->bar_free);
	init_waitqueue_head(&of->closed);
	of->pdev = pci_dev_get(pdev);
	device_initialize(&of->dev);
	of->dev.class = &nvme_gpu_class;
	of->dev.parent = &pdev->dev;
	of->dev.release = free_function;
	of->dev.devt = MKDEV(MAJOR(first_node), MINOR(first_node) + number);
	cdev_init(&of->cdev, &nvme_gpu_node);
	of->cdev.owner = THIS_MODULE;
	return of;
}

/* The function decodes its memory, masters no bus and raises no line. */
static int enable(struct nvme_gpu_function *of)
{
	struct pci_dev *pdev = of->pdev;
	int err;

	if (pci_resource_len(pdev, 0) < SZ_4K ||
	    !(pci_resource_flags(pdev, 0) & IORESOURCE_MEM))
		return -ENODEV;
	err = pci_enable_device_mem(pdev);
	if (err)
		return err;
	pci_clear_master(pdev);
	pci_intx(pdev, 0);
	err = pci_request_selected_regions(pdev, 1, "nvme_gpu");
	if (err)
		goto disable;
	of->registers = pci_iomap_range(pdev, 0, 0, SZ_4K);
	err = of->registers ? 0 : -ENOMEM;
	if (err)
		goto release;
	/* For exporters of dma-bufs, which map by the kernel's DMA interface. */
	err = dma_set_mask_and_coherent(&pdev->dev, DMA_BIT_MASK(64));
	if (err)
		goto unmap;
	dma_set_max_seg_size(&pdev->dev, UINT_MAX);
	return 0;
unmap:
	pci_iounmap(pdev, of->registers);
release:
	pci_release_selected_regions(pdev, 1);
disable:
	pci_disable_device(pdev);
	return err;
}

static void disable(struct nvme_gpu_function *of)
{
	pci_iounmap(of->pdev, of->registers);
	pci_release_selected_regions(of->pdev, 1);
	pci_disable_device(of->pdev);
}

/*
 * An NVMe function that driver_override names matches the static table. By
 * driver_override alone the kernel offers any function, whose registers are
 * something else; by new_id, functions that nobody has named.
 */
static int check_function(struct pci_dev *pdev, const struct pci_device_id *id)
{
	if (!id->override_only) {
		pci_info(pdev, "refused: no NVMe function, or not by driver_override\n");
		return -ENODEV;
	}
	if (pci_num_vf(pdev)) {
		pci_info(pdev, "refused: its virtual functions may be in use\n");
		return -EBUSY;
	}
	return 0;
}

static int nvme_gpu_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct nvme_gpu_function *of;
	int err;

	err = check_function(pdev, id);
	if (err)
		return err;
	of = make_function(pdev);
	if (IS_ERR(of))
		return PTR_ERR(of);
	err = enable(of);
	if (err)
		goto put;
	pci_set_drvdata(pdev, of);
	err = dev_set_name(&of->dev, "nvme-gpu-%s", pci_name(pdev));
	if (!err)
		err = cdev_device_add(&of->cdev, &of->dev);
	if (err)
		goto disable;
	return 0;
disable:
	disable(of);
put:
	put_device(&of->dev);
	return err;
}

/* Takes the function from its opener, if there still is one. */
static void take_away(struct nvme_gpu_function *of)
{
	struct nvme_gpu_opener *opener;

	mutex_lock(&of->lock);
	WRITE_ONCE(of->gone, true);
	opener = of->opener;
	of->opener = NULL;
	mutex_unlock(&of->lock);
	if (!opener)
		return;
	nvme_gpu_quiesce_locked(of);
	nvme_gpu_end(opener);
	nvme_gpu_opener_put(opener);
}

/* With the device lock held. */
static void nvme_gpu_remove(struct pci_dev *pdev)
{
	struct nvme_gpu_function *of = pci_get_drvdata(pdev);
	unsigned int grace = min(READ_ONCE(grace_ms), MOST_GRACE_MS);

	WRITE_ONCE(of->wanted, true);
	/* Under the lock: who opens it later sees that it is wanted. */
	nvme_gpu_tell(of, NVME_GPU_INFO_WANTED);
	/* What has been pulled out is not there to be finished with. */
	if (pci_device_is_present(pdev))
		wait_event_killable_timeout(of->closed,
					    /* What let_go() has done is seen. */
					    smp_load_acquire(&of->is_free),
					    msecs_to_jiffies(grace));
	cdev_device_del(&of->cdev, &of->dev);
	nvme_gpu_bar_leave(of);
	take_away(of);
	disable(of);
	put_device(&of->dev);
}

/* The machine goes down, or another kernel comes up. */
static void nvme_gpu_shutdown(struct pci_dev *pdev)
{
	struct nvme_gpu_function *of = pci_get_drvdata(pdev);

	nvme_gpu_power_down(of);
	nvme_gpu_bar_leave(of);
	nvme_gpu_stop_dma(of);
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
	.shutdown = nvme_gpu_shutdown,
	.err_handler = &nvme_gpu_errors,
	.driver.pm = pm_sleep_ptr(&nvme_gpu_pm),
	.driver.probe_type = PROBE_FORCE_SYNCHRONOUS,
	/* An opener's addresses are in a domain of its own. */
	.driver_managed_dma = true,
};

static int __init nvme_gpu_init(void)
{
	int err;

	if (unsafe_dma && !nvme_gpu_unsafe())
		pr_warn("nvme_gpu: unsafe=1 has no effect: the kernel is locked down\n");
	err = iova_cache_get();
	if (err)
		return err;
	err = class_register(&nvme_gpu_class);
	if (err)
		goto put;
	err = alloc_chrdev_region(&first_node, 0, MOST_FUNCTIONS, "nvme_gpu");
	if (err)
		goto unregister;
	err = pci_register_driver(&nvme_gpu_driver);
	if (err)
		goto free;
	return 0;
free:
	unregister_chrdev_region(first_node, MOST_FUNCTIONS);
unregister:
	class_unregister(&nvme_gpu_class);
put:
	iova_cache_put();
	return err;
}

static void __exit nvme_gpu_exit(void)
{
	pci_unregister_driver(&nvme_gpu_driver);
	unregister_chrdev_region(first_node, MOST_FUNCTIONS);
	class_unregister(&nvme_gpu_class);
	iova_cache_put();
	ida_destroy(&nodes);
}

module_init(nvme_gpu_init);
module_exit(nvme_gpu_exit);

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
MODULE_AUTHOR("The nvme-gpu developers");
MODULE_DESCRIPTION("NVMe functions for drivers that run in GPU kernels");
MODULE_LICENSE("GPL");
MODULE_VERSION("0.1.0");
