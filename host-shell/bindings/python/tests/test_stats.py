"""Counts, advice and events, as Python sees them."""

import logging
import subprocess
import sys

import pytest

import nvme_gpu


def test_counts_of_all_stores_and_what_a_gather_moved():
    with nvme_gpu.open("sim:mem?size=3MiB") as one, nvme_gpu.open("sim:mem?size=2MiB") as other:
        table = one.table(0, shape=(100, 16), dtype="int32")
        table.scatter([1, 2], [[1] * 16, [2] * 16])
        before = one.stats()
        assert table[[1, 2, 1]].tolist()[2] == [1] * 16
        now = one.stats()
        assert now["rows_written"] == 2 and now["rows_read"] == 3
        assert now["duplicates_saved"] == 1 and now["bytes_read"] > before["bytes_read"]
        assert sum(now["latency_us"]) == now["commands"] and now["latency_ns"] > 0
        assert now["commands_under_way"] == 0 and now["waited_ns"] >= now["latency_ns"]
        found = [store for store in nvme_gpu.stats() if store["device"].startswith("sim:mem?size=")]
        assert [store["device"] for store in found] == sorted([one.path["device"], other.path["device"]])
        mine = next(store for store in found if store["device"] == one.path["device"])
        assert mine["rows_read"] == 3 and mine["why"] == one.path["why"]
    assert not [store for store in nvme_gpu.stats() if store["device"].startswith("sim:mem?size=3")]


def test_advice_is_that_of_the_tool():
    with nvme_gpu.open("sim:mem?size=2MiB") as store:
        (advice,) = store.explain()
    assert advice["now"] and advice["better"].startswith("tier 0") and advice["between"]
    assert set(advice) == {"device", "now", "better", "between"}


def test_events_come_to_logging_and_only_when_they_are_asked_for(caplog):
    caplog.set_level(logging.INFO, logger="nvme_gpu")
    lose = "sim:mem?size=2MiB&fault=drop@op=read,nth=1"

    def events():
        with nvme_gpu.open(lose, timeout_ms=300) as store:
            with pytest.raises(nvme_gpu.NvmeGpuError):
                store.read(512)
        nvme_gpu.log_events(None)
        found = [record for record in caplog.records if record.name == "nvme_gpu" and "(device=" in record.message]
        caplog.clear()
        return found

    assert events() == []
    nvme_gpu.log_events(logging.INFO)
    found = events()
    assert found[0].levelno == logging.INFO and found[0].message.startswith("the controller is up")
    assert any(record.levelno == logging.WARNING and "the controller is reset" in record.message for record in found)
    nvme_gpu.log_events()
    assert {record.levelno for record in events()} <= {logging.WARNING, logging.ERROR}


def test_a_program_that_logs_ends():
    text = "import logging, nvme_gpu; logging.basicConfig(level=20); nvme_gpu.log_events(20); nvme_gpu.open('sim:mem?size=1MiB')"
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "the controller is up" in ran.stderr
