// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stopping the function: its DMA, its controller, by a reset; and what the
 * system does to it: resets by others, errors of the bus, sleep.
 *
 * Bus mastering is set by nvme_gpu_start_dma() alone, each time after the
 * controller was seen disabled: when a file was opened, when its opener has
 * asked for a reset, and when what the system did to the function is over.
 */
#include <linux/delay.h>
#include <linux/io.h>
#include <linux/nvme.h>
#include <linux/pm.h>
#include <linux/sched/signal.h>

#include "nvme_gpu.h"

/* How long a reset waits for the device lock. */
#define MOST_WAIT (10 * HZ)
/* CAP.TO counts half seconds. */
#define READY_UNIT (HZ / 2)
/* How long a controller may take to be ready for power to go. */
#define SHUTDOWN_WAIT (5 * HZ)
#define ALL_ONES (~0u)

/*
 * Sets bus mastering, with the controller disabled, and drops the event
 * @answered. Does nothing after a revocation that is not answered, nor while
 * the BAR is blocked: the code that unblocks it calls this function.
 */
void nvme_gpu_start_dma(struct nvme_gpu_opener *opener, u32 answered)
{
	struct nvme_gpu_function *of = opener->of;
	unsigned long flags;

	spin_lock_irqsave(&of->event_lock, flags);
	opener->events &= ~answered;
	if (!(opener->events & NVME_GPU_INFO_REVOKED) &&
	    !READ_ONCE(of->bar_blocked))
		pci_set_master(of->pdev);
	spin_unlock_irqrestore(&of->event_lock, flags);
}

/*
 * @opener, which may be NULL, gets the event before it can see a command fail.
 * One lock for event and bit: a reset that ends meanwhile sets the bit before
 * this clears it, or answers the event.
 */
static void stop_dma(struct nvme_gpu_function *of, struct nvme_gpu_opener *opener,
		     u32 event)
{
	struct pci_dev *pdev = of->pdev;
	unsigned long flags;

	spin_lock_irqsave(&of->event_lock, flags);
	if (opener)
		nvme_gpu_raise(opener, event);
	pci_clear_master(pdev);
	spin_unlock_irqrestore(&of->event_lock, flags);
	/* What is gone has no transactions, and reads as if it had. */
	if (pci_device_is_present(pdev) &&
	    !pci_wait_for_pending_transaction(pdev))
		pci_warn(pdev, "transactions are pending after bus mastering went off\n");
}

void nvme_gpu_stop_dma(struct nvme_gpu_function *of)
{
	stop_dma(of, NULL, 0);
}

/* Memory is taken back: before it is unmapped, and once more afterwards. */
void nvme_gpu_revoke(struct nvme_gpu_opener *opener)
{
	stop_dma(opener->of, opener, NVME_GPU_INFO_REVOKED);
}

static int read_register(struct nvme_gpu_function *of, unsigned int at,
			 u32 *value, bool killable)
{
	int err = nvme_gpu_bar_get(of, killable);

	if (err)
		return err;
	*value = readl(of->registers + at);
	nvme_gpu_bar_put(of);
	return *value == ALL_ONES ? -ENODEV : 0;
}

static int write_register(struct nvme_gpu_function *of, unsigned int at,
			  u32 value, bool killable)
{
	int err = nvme_gpu_bar_get(of, killable);

	if (err)
		return err;
	writel(value, of->registers + at);
	nvme_gpu_bar_put(of);
	return 0;
}

/* Waits until @mask of the status has @value. */
static int wait_status(struct nvme_gpu_function *of, u32 mask, u32 value,
		       unsigned long most, bool killable)
{
	unsigned long end = jiffies + most;
	u32 status;
	int err;

	for (;;) {
		bool is_late = time_after(jiffies, end);

		err = read_register(of, NVME_REG_CSTS, &status, killable);
		if (err)
			return err;
		if ((status & mask) == value)
			return 0;
		if (is_late)
			return -ETIMEDOUT;
		if (killable && fatal_signal_pending(current))
			return -EINTR;
		usleep_range(1000, 2000);
	}
}

/*
 * Whether the BAR is where it was. A reset that nobody has restored after, as
 * when the system gives up recovering from an error of the bus, leaves none;
 * what is read there is all ones, or zeros, which look like a controller that
 * is disabled.
 */
static bool decodes(struct pci_dev *pdev)
{
	u16 command = 0;
	u32 bar = 0;

	pci_read_config_word(pdev, PCI_COMMAND, &command);
	pci_read_config_dword(pdev, PCI_BASE_ADDRESS_0, &bar);
	return command & PCI_COMMAND_MEMORY &&
	       (bar & PCI_BASE_ADDRESS_MEM_MASK) ==
		       lower_32_bits(pci_bus_address(pdev, 0));
}

/*
 * Clears CC.EN and waits until the controller is not ready: it has forgotten
 * its queues then. -ENODEV: there is no controller where it was.
 */
int nvme_gpu_disable(struct nvme_gpu_function *of, bool killable)
{
	u32 config, capabilities;
	int err;

	/* The lock keeps resets away, which switch it off for a while. */
	err = nvme_gpu_bar_get(of, killable);
	if (err)
		return err;
	err = decodes(of->pdev) ? 0 : -ENODEV;
	nvme_gpu_bar_put(of);
	if (!err)
		err = read_register(of, NVME_REG_CAP, &capabilities, killable);
	if (!err)
		err = read_register(of, NVME_REG_CC, &config, killable);
	if (!err && config & NVME_CC_ENABLE)
		err = write_register(of, NVME_REG_CC, config & ~NVME_CC_ENABLE,
				     killable);
	if (err)
		return err;
	return wait_status(of, NVME_CSTS_RDY, 0,
			   (NVME_CAP_TIMEOUT((u64)capabilities) + 1) * READY_UNIT,
			   killable);
}

/* Lets a controller that works make its data safe, as power may go. */
void nvme_gpu_power_down(struct nvme_gpu_function *of)
{
	u32 config;

	if (read_register(of, NVME_REG_CC, &config, false) ||
	    !(config & NVME_CC_ENABLE))
		return;
	config = (config & ~NVME_CC_SHN_MASK) | NVME_CC_SHN_NORMAL;
	if (write_register(of, NVME_REG_CC, config, false) ||
	    wait_status(of, NVME_CSTS_SHST_MASK, NVME_CSTS_SHST_CMPLT,
			SHUTDOWN_WAIT, false))
		pci_warn(of->pdev, "the controller did not shut down\n");
}

/* -EAGAIN: another has the device lock. */
static int try_reset(struct nvme_gpu_function *of)
{
	struct pci_dev *pdev = of->pdev;
	struct pci_dev *bridge = pci_upstream_bridge(pdev);
	int err = -EAGAIN;

	if (bridge && !pci_dev_trylock(bridge))
		return -EAGAIN;
	if (pci_dev_trylock(pdev)) {
		/* Once remove() has begun the function may be another's. */
		err = READ_ONCE(of->wanted) ? -ENODEV :
					      pci_reset_function_locked(pdev);
		pci_dev_unlock(pdev);
	}
	if (bridge)
		pci_dev_unlock(bridge);
	return err;
}

static int reset_function(struct nvme_gpu_function *of, bool killable)
{
	unsigned long end = jiffies + MOST_WAIT;
	int err;

	if (!of->pdev->reset_methods[0])
		return -EOPNOTSUPP;
	for (;;) {
		if (READ_ONCE(of->wanted))
			return -ENODEV;
		err = try_reset(of);
		if (err != -EAGAIN)
			return err;
		if (killable && fatal_signal_pending(current))
			return -EINTR;
		if (time_after(jiffies, end))
			return -EBUSY;
		usleep_range(1000, 2000);
	}
}

/*
 * What NVME_GPU_KMOD_RESET does. With -EOPNOTSUPP the function has no reset,
 * and its controller was disabled instead; with another error bus mastering
 * stays off.
 */
int nvme_gpu_reset(struct nvme_gpu_opener *opener)
{
	struct nvme_gpu_function *of = opener->of;
	int err, disabled;

	err = mutex_lock_killable(&of->lock);
	if (err)
		return err;
	if (of->gone)
		err = -ENODEV;
	else
		nvme_gpu_stop_dma(of);
	mutex_unlock(&of->lock);
	if (err)
		return err;
	atomic_inc(&of->asked);
	err = reset_function(of, true);
	atomic_dec(&of->asked);
	if (!err)
		nvme_gpu_bar_recover(of, true);
	else if (err != -EOPNOTSUPP)
		return err;
	disabled = nvme_gpu_disable(of, true);
	if (disabled)
		return disabled;
	if (mutex_lock_killable(&of->lock))
		return -EINTR;
	if (of->gone)
		err = -ENODEV;
	else
		nvme_gpu_start_dma(opener, NVME_GPU_INFO_REVOKED |
					   NVME_GPU_INFO_STOPPED);
	mutex_unlock(&of->lock);
	return err;
}

static void disable_after(struct nvme_gpu_function *of, int err)
{
	if (!err)
		return;
	if (pci_device_is_present(of->pdev) && nvme_gpu_disable(of, false))
		pci_warn(of->pdev, "neither reset (%d) nor disabled: bus mastering stays off\n",
			 err);
}

/*
 * Stops the function and makes it forget addresses, at the end of an opener.
 * -ENODEV, and it is only stopped, when remove() has the device lock: the rest
 * is its own then.
 */
int nvme_gpu_quiesce(struct nvme_gpu_function *of)
{
	bool is_ours;
	int err;

	mutex_lock(&of->lock);
	is_ours = !of->gone;
	if (is_ours)
		nvme_gpu_stop_dma(of);
	mutex_unlock(&of->lock);
	if (!is_ours)
		return -ENODEV;
	atomic_inc(&of->asked);
	err = reset_function(of, false);
	atomic_dec(&of->asked);
	if (READ_ONCE(of->wanted))
		return -ENODEV;
	if (!err)
		nvme_gpu_bar_recover(of, false);
	disable_after(of, err);
	return 0;
}

/*
 * Disables the controller and waits until it is: the next driver lets it
 * master the bus, and commands under way would go to addresses of this one.
 */
static void disable_alone(struct nvme_gpu_function *of)
{
	u32 csts, cap = readl(of->registers + NVME_REG_CAP);
	unsigned long end = jiffies +
		(NVME_CAP_TIMEOUT((u64)cap) + 1) * READY_UNIT;

	writel(readl(of->registers + NVME_REG_CC) & ~NVME_CC_ENABLE,
	       of->registers + NVME_REG_CC);
	do {
		csts = readl(of->registers + NVME_REG_CSTS);
		if (csts == ALL_ONES || !(csts & NVME_CSTS_RDY))
			return;
		usleep_range(1000, 2000);
	} while (time_before(jiffies, end));
	pci_warn(of->pdev, "the controller is not disabled\n");
}

/* The same for remove(), which has the device lock. */
void nvme_gpu_quiesce_locked(struct nvme_gpu_function *of)
{
	struct pci_dev *pdev = of->pdev;
	struct pci_dev *bridge = pci_upstream_bridge(pdev);
	int err = -EOPNOTSUPP;

	nvme_gpu_stop_dma(of);
	if (!pci_device_is_present(pdev))
		return;
	if (pdev->reset_methods[0]) {
		/* A reset by the bridge needs the lock of the bridge. */
		bool has_bridge = bridge && pci_dev_trylock(bridge);

		pci_cfg_access_lock(pdev);
		err = pci_reset_function_locked(pdev);
		pci_cfg_access_unlock(pdev);
		if (has_bridge)
			pci_dev_unlock(bridge);
	}
	/* The BAR is the module's alone by now, and not blocked. */
	if (err)
		disable_alone(of);
}

/*
 * Stops the function for a reason other than a call of the opener. The opener
 * gets an event at once, as the end may never come, and again at the end.
 */
static void stop(struct nvme_gpu_function *of, unsigned int why)
{
	nvme_gpu_bar_block(of, why);
	nvme_gpu_stop_dma(of);
	nvme_gpu_tell(of, NVME_GPU_INFO_STOPPED);
}

static bool is_open(struct nvme_gpu_function *of)
{
	bool is;

	mutex_lock(&of->lock);
	is = of->opener;
	mutex_unlock(&of->lock);
	return is;
}

/*
 * @why is over: the function may continue once its controller is disabled,
 * unless memory was revoked, or another reason stops it still.
 */
static void go_on(struct nvme_gpu_function *of, unsigned int why)
{
	struct nvme_gpu_opener *opener;
	int err;

	nvme_gpu_bar_unblock(of, why);
	/* Else the next open, or the end of the last reason, does this. */
	if (!is_open(of) || READ_ONCE(of->bar_blocked))
		return;
	err = nvme_gpu_disable(of, false);
	if (err)
		pci_warn(of->pdev, "not disabled (%d): bus mastering stays off\n", err);
	mutex_lock(&of->lock);
	opener = of->opener;
	if (opener) {
		if (!err)
			nvme_gpu_start_dma(opener, 0);
		nvme_gpu_signal(opener, NVME_GPU_INFO_STOPPED);
	}
	mutex_unlock(&of->lock);
}

static void reset_prepare(struct pci_dev *pdev)
{
	struct nvme_gpu_function *of = pci_get_drvdata(pdev);

	nvme_gpu_bar_block(of, NVME_GPU_BLOCKED_RESET);
	nvme_gpu_stop_dma(of);
}

static void reset_done(struct pci_dev *pdev)
{
	struct nvme_gpu_function *of = pci_get_drvdata(pdev);

	if (atomic_read(&of->asked))
		nvme_gpu_bar_unblock(of, NVME_GPU_BLOCKED_RESET);
	else
		go_on(of, NVME_GPU_BLOCKED_RESET);
}

static pci_ers_result_t error_detected(struct pci_dev *pdev,
				       pci_channel_state_t state)
{
	stop(pci_get_drvdata(pdev), NVME_GPU_BLOCKED_ERROR);
	if (state == pci_channel_io_perm_failure)
		return PCI_ERS_RESULT_DISCONNECT;
	return state == pci_channel_io_normal ? PCI_ERS_RESULT_CAN_RECOVER :
						PCI_ERS_RESULT_NEED_RESET;
}

static pci_ers_result_t mmio_enabled(struct pci_dev *pdev)
{
	return PCI_ERS_RESULT_RECOVERED;
}

static pci_ers_result_t slot_reset(struct pci_dev *pdev)
{
	pci_restore_state(pdev);
	/* What was saved may be another driver's. */
	nvme_gpu_stop_dma(pci_get_drvdata(pdev));
	pci_intx(pdev, 0);
	pci_save_state(pdev);
	return PCI_ERS_RESULT_RECOVERED;
}

static void error_resume(struct pci_dev *pdev)
{
	go_on(pci_get_drvdata(pdev), NVME_GPU_BLOCKED_ERROR);
}

const struct pci_error_handlers nvme_gpu_errors = {
	.error_detected = error_detected,
	.mmio_enabled = mmio_enabled,
	.slot_reset = slot_reset,
	.resume = error_resume,
	.reset_prepare = reset_prepare,
	.reset_done = reset_done,
};

static int suspend(struct device *dev)
{
	struct nvme_gpu_function *of = dev_get_drvdata(dev);

	nvme_gpu_power_down(of);
	stop(of, NVME_GPU_BLOCKED_SLEEP);
	return 0;
}

static int resume(struct device *dev)
{
	go_on(dev_get_drvdata(dev), NVME_GPU_BLOCKED_SLEEP);
	return 0;
}

const struct dev_pm_ops nvme_gpu_pm = {
	SYSTEM_SLEEP_PM_OPS(suspend, resume)
};
