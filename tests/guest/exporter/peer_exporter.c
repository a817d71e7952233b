// SPDX-License-Identifier: GPL-2.0-only
/*
 * For tests alone: BAR 2 of a PCI function as a dma-buf, as a GPU's driver
 * exports its memory. The addresses that it gives an importer are mapped for
 * it, or those of the BAR itself under translation, or of nothing at all. It
 * takes the memory back when it is asked to.
 */
#include <linux/dma-buf.h>
#include <linux/dma-fence.h>
#include <linux/dma-mapping.h>
#include <linux/dma-resv.h>
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/slab.h>
#include <linux/version.h>

#define BAR 2

/* Calls of /dev/peer-exporter: EXPORT takes a kind and returns a dma-buf. */
#define EXPORT _IO('V', 1)
/* Takes back what was exported last. */
#define REVOKE _IO('V', 2)
/* Says that what was exported last has its content. */
#define FILL _IO('V', 3)

enum kind {
	/* Mapped by dma_map_resource(). */
	GOOD,
	/* Addresses of the BAR: issue 1324 of NVIDIA's open kernel modules. */
	RAW,
	/* Addresses that are neither mapped nor a BAR's. */
	NOWHERE,
	/* A table of half of it. */
	SHORT,
	/* A descriptor that lets its holder read alone. */
	READ_ONLY,
	/* Its content is on its way until FILL. */
	UNFILLED,
	KINDS
};

/* In the low 4 KiB, where no BAR lies and no address is given out. */
#define NOTHING 0x1000

static char *bdf = "0000:00:18.0";
module_param(bdf, charp, 0);
MODULE_PARM_DESC(bdf, "The function whose BAR 2 is exported");

static struct pci_dev *peer;

struct export {
	enum kind kind;
	u64 bytes;
	/* Guarded by the reservation lock. */
	bool revoked;
	/* NULL: it is where it should be. */
	struct dma_fence *content;
};

static DEFINE_SPINLOCK(fence_lock);

static const char *fence_name(struct dma_fence *fence)
{
	return "peer_exporter";
}

static const struct dma_fence_ops fence_ops = {
	.get_driver_name = fence_name,
	.get_timeline_name = fence_name,
};

/* Has importers wait for the content. */
static int unfill(struct dma_buf *buffer, struct export *what)
{
	struct dma_fence *fence = kzalloc(sizeof(*fence), GFP_KERNEL);
	int err;

	if (!fence)
		return -ENOMEM;
	dma_fence_init(fence, &fence_ops, &fence_lock,
		       dma_fence_context_alloc(1), 1);
	dma_resv_lock(buffer->resv, NULL);
	err = dma_resv_reserve_fences(buffer->resv, 1);
	if (!err)
		dma_resv_add_fence(buffer->resv, fence, DMA_RESV_USAGE_KERNEL);
	dma_resv_unlock(buffer->resv);
	if (err) {
		dma_fence_signal(fence);
		dma_fence_put(fence);
		return err;
	}
	what->content = fence;
	return 0;
}

static void fill(struct export *what)
{
	if (what->content) {
		dma_fence_signal(what->content);
		dma_fence_put(what->content);
	}
	what->content = NULL;
}

/* Guards @last. */
static DEFINE_MUTEX(last_lock);
/* With a reference of ours. */
static struct dma_buf *last;

static int export_attach(struct dma_buf *buffer, struct dma_buf_attachment *by)
{
	/* As NVIDIA's: nothing but a PCI function may have it. */
	return by->peer2peer && dev_is_pci(by->dev) ? 0 : -EOPNOTSUPP;
}

static int export_pin(struct dma_buf_attachment *by)
{
	return 0;
}

static void export_unpin(struct dma_buf_attachment *by)
{
}

static int address_for(struct dma_buf_attachment *by, struct export *what,
		       enum dma_data_direction way, dma_addr_t *at)
{
	phys_addr_t bar = pci_resource_start(peer, BAR);

	switch (what->kind) {
	case RAW:
		*at = bar;
		return 0;
	case NOWHERE:
		*at = NOTHING;
		return 0;
	default:
		*at = dma_map_resource(by->dev, bar, what->bytes, way, 0);
		return dma_mapping_error(by->dev, *at) ? -EIO : 0;
	}
}

static struct sg_table *export_map(struct dma_buf_attachment *by,
				   enum dma_data_direction way)
{
	struct export *what = by->dmabuf->priv;
	struct sg_table *table;
	dma_addr_t at;
	int err;

	if (what->revoked)
		return ERR_PTR(-ENODEV);
	table = kzalloc(sizeof(*table), GFP_KERNEL);
	if (!table)
		return ERR_PTR(-ENOMEM);
	err = sg_alloc_table(table, 1, GFP_KERNEL);
	if (err)
		goto free;
	err = address_for(by, what, way, &at);
	if (err)
		goto free_table;
	sg_set_page(table->sgl, NULL, what->bytes, 0);
	sg_dma_address(table->sgl) = at;
	sg_dma_len(table->sgl) = what->kind == SHORT ? what->bytes / 2 :
						       what->bytes;
	return table;
free_table:
	sg_free_table(table);
free:
	kfree(table);
	return ERR_PTR(err);
}

static void export_unmap(struct dma_buf_attachment *by, struct sg_table *table,
			 enum dma_data_direction way)
{
	struct export *what = by->dmabuf->priv;

	if (what->kind != RAW && what->kind != NOWHERE)
		dma_unmap_resource(by->dev, sg_dma_address(table->sgl),
				   what->bytes, way, 0);
	sg_free_table(table);
	kfree(table);
}

static int export_mmap(struct dma_buf *buffer, struct vm_area_struct *vma)
{
	unsigned long first = pci_resource_start(peer, BAR) >> PAGE_SHIFT;

	vma->vm_page_prot = pgprot_noncached(vma->vm_page_prot);
	return io_remap_pfn_range(vma, vma->vm_start, first + vma->vm_pgoff,
				  vma->vm_end - vma->vm_start,
				  vma->vm_page_prot);
}

static void export_release(struct dma_buf *buffer)
{
	fill(buffer->priv);
	kfree(buffer->priv);
}

static const struct dma_buf_ops export_ops = {
	.attach = export_attach,
	.pin = export_pin,
	.unpin = export_unpin,
	.map_dma_buf = export_map,
	.unmap_dma_buf = export_unmap,
	.mmap = export_mmap,
	.release = export_release,
};

static void replace_last(struct dma_buf *by)
{
	struct dma_buf *old;

	mutex_lock(&last_lock);
	old = last;
	last = by;
	mutex_unlock(&last_lock);
	if (old)
		dma_buf_put(old);
}

static long do_export(unsigned long kind)
{
	DEFINE_DMA_BUF_EXPORT_INFO(info);
	struct dma_buf *buffer;
	struct export *what;
	int fd, err;

	if (kind >= KINDS)
		return -EINVAL;
	what = kzalloc(sizeof(*what), GFP_KERNEL);
	if (!what)
		return -ENOMEM;
	what->kind = kind;
	what->bytes = pci_resource_len(peer, BAR);
	info.ops = &export_ops;
	info.size = what->bytes;
	info.flags = kind == READ_ONLY ? O_RDONLY : O_RDWR;
	info.priv = what;
	buffer = dma_buf_export(&info);
	if (IS_ERR(buffer)) {
		kfree(what);
		return PTR_ERR(buffer);
	}
	err = kind == UNFILLED ? unfill(buffer, what) : 0;
	if (err) {
		dma_buf_put(buffer);
		return err;
	}
	get_dma_buf(buffer);
	replace_last(buffer);
	fd = dma_buf_fd(buffer, O_CLOEXEC);
	if (fd < 0)
		dma_buf_put(buffer);
	return fd;
}

static long do_revoke(void)
{
	struct dma_buf *buffer;
	struct export *what;

	mutex_lock(&last_lock);
	buffer = last;
	last = NULL;
	mutex_unlock(&last_lock);
	if (!buffer)
		return -ENOENT;
	what = buffer->priv;
	dma_resv_lock(buffer->resv, NULL);
	what->revoked = true;
#if LINUX_VERSION_CODE >= KERNEL_VERSION(7, 1, 0)
	dma_buf_invalidate_mappings(buffer);
#else
	dma_buf_move_notify(buffer);
#endif
	dma_resv_unlock(buffer->resv);
	dma_buf_put(buffer);
	return 0;
}

static long do_fill(void)
{
	long err = -ENOENT;

	mutex_lock(&last_lock);
	if (last) {
		fill(last->priv);
		err = 0;
	}
	mutex_unlock(&last_lock);
	return err;
}

static long exporter_ioctl(struct file *file, unsigned int command,
			   unsigned long argument)
{
	switch (command) {
	case EXPORT:
		return do_export(argument);
	case REVOKE:
		return do_revoke();
	case FILL:
		return do_fill();
	default:
		return -ENOTTY;
	}
}

static int exporter_release(struct inode *inode, struct file *file)
{
	/* What is left would hold the module. */
	replace_last(NULL);
	return 0;
}

static const struct file_operations operations = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = exporter_ioctl,
	.release = exporter_release,
};

static struct miscdevice misc = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "peer-exporter",
	.fops = &operations,
	.mode = 0600,
};

static int __init exporter_init(void)
{
	unsigned int domain, bus, slot, function;
	int err = -ENODEV;

	if (sscanf(bdf, "%x:%x:%x.%x", &domain, &bus, &slot, &function) != 4)
		return -EINVAL;
	peer = pci_get_domain_bus_and_slot(domain, bus,
					   PCI_DEVFN(slot, function));
	if (!peer)
		return -ENODEV;
	if (!pci_resource_len(peer, BAR))
		goto put;
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

static void __exit exporter_exit(void)
{
	misc_deregister(&misc);
	pci_disable_device(peer);
	pci_dev_put(peer);
}

module_init(exporter_init);
module_exit(exporter_exit);

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
MODULE_IMPORT_NS("DMA_BUF");
#else
MODULE_IMPORT_NS(DMA_BUF);
#endif
MODULE_AUTHOR("The nvme-gpu developers");
MODULE_DESCRIPTION("A PCI BAR as a dma-buf, for tests");
MODULE_LICENSE("GPL");
