"""The examples run, and what they print was checked by them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = {
    "nvme_benchmark.py": ((), ["--size-mb", "3"]),
    "embedding_training.py": (("torch",), ["--rows", "1000", "--steps", "100"]),
    "rerank.py": (("numpy", "wordllama", "tokenizers", "safetensors"), []),
    "gnn.py": (("torch", "torch_geometric"), ["--nodes", "2000"]),
    "generate.py": (("numpy",), ["--layers", "3"]),
}


def test_each_example_is_here():
    assert {path.name for path in FOLDER.glob("*.py")} == set(EXAMPLES)


# torch of CI has no CUDA: with it the other way is the same.
RUNS = [(name, "cpu") for name in EXAMPLES] + [("nvme_benchmark.py", "gpu"), ("rerank.py", "gpu")]


@pytest.mark.parametrize("name, by", RUNS)
def test_an_example_runs_and_is_right(name, by):
    packages, words = EXAMPLES[name]
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")
    if by == "cpu":
        words = [*words, "--cpu"]
    done = subprocess.run([sys.executable, FOLDER / name, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["checked"] == "right"
    if name == "nvme_benchmark.py":
        assert (answer["to"] == "cpu") == (by == "cpu")


def test_rerank_takes_words_of_the_caller():
    pytest.importorskip("wordllama", reason="wordllama is not installed")
    words = ["--cpu", "a dog barks", "prices of shares fell", "the puppy is loud"]
    done = subprocess.run([sys.executable, FOLDER / "rerank.py", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["best"] == "the puppy is loud"
