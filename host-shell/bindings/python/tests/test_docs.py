"""What documents say runs."""

from __future__ import annotations

import doctest
import importlib.util
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

import nvme_gpu

ROOT = Path(__file__).parents[4]
PAGES = [
    "README.md",
    "docs/guide/python.md",
    "docs/guide/torch.md",
    "docs/guide/lookup.md",
    "docs/guide/compute-python.md",
    "docs/guide/models.md",
    "docs/guide/experts.md",
    "docs/guide/kv.md",
    "host-shell/bindings/python/README.md",
]


def has_checkpoints():
    """Whether this torch has torch.distributed.checkpoint as DcpReader extends it: from 2.3 on. Older ones have no such
    blocks; test_dcp.py uses a stand-in there."""
    try:
        from torch.distributed.checkpoint.filesystem import FileSystemBase  # noqa: F401
    except ImportError:
        return False
    return True


def blocks():
    for page in PAGES:
        path = ROOT / page
        if not path.exists():
            continue
        for number, text in enumerate(re.findall(r"^```python\n(.*?)^```", path.read_text(), re.M | re.S)):
            if "distributed.checkpoint" in text and not has_checkpoints():
                continue
            # transformers asks for a newer torch than Debian's: a skipped test would fail the whole run.
            if "transformers" in text and not importlib.util.find_spec("transformers"):
                continue
            yield pytest.param(text, id=f"{page}-{number}")


@pytest.mark.parametrize("text", list(blocks()))
def test_a_block_of_a_page_runs(text, tmp_path, monkeypatch):
    pytest.importorskip("numpy")
    if "torch" in text:
        pytest.importorskip("torch")
    if "fastsafetensors" in text:
        pytest.importorskip("fastsafetensors")
    if "mke2fs" in text and not shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin"):
        pytest.skip("needs mke2fs, of e2fsprogs")
    monkeypatch.chdir(tmp_path)
    exec(compile(text, "block", "exec"), {"__name__": "__main__"})


def test_a_page_installs_what_its_blocks_import():
    """Before the block. numpy is installed with the package, which pyproject.toml says."""
    comes_along = {"nvme_gpu", "numpy", *sys.stdlib_module_names}
    manifest = (ROOT / "host-shell/bindings/python/pyproject.toml").read_text()
    assert re.search(r'^dependencies = \["numpy', manifest, re.M)
    for page in PAGES:
        path = ROOT / page
        if not path.exists():
            continue
        before, *rest = re.split(r"^```python\n", path.read_text(), flags=re.M)
        for part in rest:
            block = part.partition("\n```")[0]
            lines = re.findall(r"^ *(?:import|from) ([^\n]+)", block, re.M)
            names = {name.split(".")[0].split()[0] for line in lines for name in line.split(" import ")[0].split(", ")}
            installed = re.findall(r"pip install ([^\n`]+)", before)
            assert any("host-shell/bindings/python" in one for one in installed), f"{page}: no line installs the package"
            assert names - comes_along <= set(re.findall(r"[a-z_]+", " ".join(installed))), page
            before += part


def test_there_are_blocks():
    assert len(list(blocks())) >= 4


def test_the_example_of_the_module_runs():
    pytest.importorskip("numpy")
    assert doctest.testmod(nvme_gpu).attempted >= 5
    assert doctest.testmod(nvme_gpu).failed == 0


def test_every_public_name_is_described():
    for name in nvme_gpu.__all__:
        value = getattr(nvme_gpu, name)
        assert name == "__version__" or value.__doc__, name
        for member, found in vars(value).items() if isinstance(value, type) else ():
            if callable(found) and not member.startswith("_"):
                assert found.__doc__, f"{name}.{member}"
