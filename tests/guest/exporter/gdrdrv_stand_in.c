// SPDX-License-Identifier: GPL-2.0-only
/*
 * For tests alone: the calls of gdrcopy's module gdrdrv that the driver makes,
 * with BAR 2 of a PCI function in the place of GPU memory. As the real one, it
 * gives a handle for an address of the GPU, and maps the BAR's page frames at
 * the offset that the handle is.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/uaccess.h>

#define BAR 2
/* Pages of a GPU. */
#define GPU_PAGE 65536
/*
 * The only handle. The caller maps the memory at the file offset HANDLE pages;
 * any number would do.
 */
#define HANDLE 0x40

static char *bdf = "0000:00:18.0";
module_param(bdf, charp, 0);
MODULE_PARM_DESC(bdf, "The function whose BAR 2 is mapped");

static unsigned int version = 2 << 16 | 4;
module_param(version, uint, 0644);
MODULE_PARM_DESC(version, "What the version call answers: major << 16 | minor");

static struct pci_dev *peer;

struct pin {
	u64 address;
	u64 bytes;
	u64 token;
	u32 space;
	u64 handle;
};

#define PIN _IOWR(0xDA, 1, struct pin)
/* The real one has the size of a pointer in it. */
#define VERSION _IOWR(0xDA, 255, void *)

static long do_pin(void __user *at)
{
	struct pin pin;

	if (copy_from_user(&pin, at, sizeof(pin)))
		return -EFAULT;
	if (!pin.address || pin.address % GPU_PAGE || pin.bytes % GPU_PAGE ||
	    pin.bytes > pci_resource_len(peer, BAR))
		return -EINVAL;
	pin.handle = HANDLE;
	return copy_to_user(at, &pin, sizeof(pin)) ? -EFAULT : 0;
}

static long do_version(void __user *at)
{
	u32 answer[2] = { version, 2 << 16 };

	return copy_to_user(at, answer, sizeof(answer)) ? -EFAULT : 0;
}

static long stand_in_ioctl(struct file *file, unsigned int command,
			   unsigned long argument)
{
	switch (command) {
	case PIN:
		return do_pin((void __user *)argument);
	case VERSION:
		return do_version((void __user *)argument);
	default:
		return -ENOTTY;
	}
}

static int stand_in_mmap(struct file *file, struct vm_area_struct *vma)
{
	unsigned long bytes = vma->vm_end - vma->vm_start;

	if (vma->vm_pgoff != HANDLE || bytes > pci_resource_len(peer, BAR))
		return -EINVAL;
	vma->vm_page_prot = pgprot_writecombine(vma->vm_page_prot);
	return io_remap_pfn_range(vma, vma->vm_start,
				  pci_resource_start(peer, BAR) >> PAGE_SHIFT,
				  bytes, vma->vm_page_prot);
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = stand_in_ioctl,
	.mmap = stand_in_mmap,
};

static struct miscdevice misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "gdrdrv",
	.fops = &operations,
	.mode = 0600,
};

static int __init stand_in_init(void)
{
	unsigned int domain, bus, slot, function;
	int err;

	if (sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return -EINVAL;
	peer = pci_get_domain_bus_and_slot(domain, bus,
					   PCI_DEVFN(slot, function));
	if (!peer)
		return -ENODEV;
	err = pci_enable_device_mem(peer);
	if (err)
		goto put;
	err = misc_register(&misc);
	if (err)
		goto disable;
	return 0;
disable:
	pci_disable_device(peer);
put:
	pci_dev_put(peer);
	return err;
}

static void __exit stand_in_exit(void)
{
	misc_deregister(&misc);
	pci_disable_device(peer);
	pci_dev_put(peer);
}

module_init(stand_in_init);
module_exit(stand_in_exit);

MODULE_AUTHOR("The nvme-gpu developers");
MODULE_DESCRIPTION("A stand-in of gdrdrv over a PCI BAR, for tests");
MODULE_LICENSE("GPL");
