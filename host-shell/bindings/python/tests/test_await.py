"""Transfers in coroutines, and their failures as values."""

import asyncio

import pytest

import nvme_gpu


def test_coroutines_wait_for_transfers_beside_others():
    with nvme_gpu.open("sim:mem?size=1MiB&latency=20ms") as store:
        store.write(bytes([5]) * 4096)
        turns = 0

        async def count():
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def read():
            counting = asyncio.ensure_future(count())
            buffers = [bytearray(512) for _ in range(4)]
            found = await asyncio.gather(*(store.read_into(one, 512 * at) for at, one in enumerate(buffers)))
            counting.cancel()
            return [one is buffer and bytes(one) == bytes([5]) * 512 for one, buffer in zip(found, buffers)]

        assert asyncio.run(read()) == [True] * 4
        # The loop ran while the drive worked.
        assert turns > 1


def test_a_failure_is_raised_by_await_and_is_a_value():
    with nvme_gpu.open("sim:mem?size=1MiB&fault=status:0x281@op=read") as store:

        async def read():
            return await store.read_into(bytearray(512), 0)

        with pytest.raises(nvme_gpu.Status) as caught:
            asyncio.run(read())
        assert (caught.value.sct, caught.value.sc) == (2, 0x81)
        failure = store.read_into(bytearray(512), 0).exception()
        assert isinstance(failure, nvme_gpu.Status) and failure.sc == 0x81
        assert store.write_from(bytearray(4096), 0).exception() is None


def test_an_exception_is_waited_for_no_longer_than_asked():
    with nvme_gpu.open("sim:mem?size=1MiB&latency=300ms") as store:
        pending = store.read_into(bytearray(512), 0)
        with pytest.raises(nvme_gpu.Timeout) as caught:
            pending.exception(0.0)
        assert caught.value.code == "unfinished"
        assert pending.exception() is None
