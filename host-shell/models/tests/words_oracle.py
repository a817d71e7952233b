"""Writes `tokenizer/words.json`: the words into which Qwen2's tokenizer and tiktoken's o200k split `tokenizer/texts.json`.

    pip install transformers tiktoken regex
    python words_oracle.py

A text is a list of the lengths of its words in bytes, after the normalisation that the tokenizer makes.
"""

import json
import pathlib

import regex
import tiktoken_ext.openai_public as public
import transformers.models.qwen2.tokenization_qwen2 as qwen2
from tokenizers import Regex, normalizers, pre_tokenizers

FOLDER = pathlib.Path(__file__).parent / "tokenizer"


def of_qwen2(text: str) -> list[str]:
    text = normalizers.NFC().normalize_str(text)
    split = pre_tokenizers.Split(Regex(qwen2.PRETOKENIZE_REGEX), behavior="isolated", invert=False)
    return [word for word, _ in split.pre_tokenize_str(text)]


def of_o200k(text: str, pattern: list[str] = []) -> list[str]:
    if not pattern:
        public.load_tiktoken_bpe = lambda *_, **__: {}
        pattern.append(public.o200k_base()["pat_str"])
    return regex.findall(pattern[0], text)


def main() -> None:
    texts = json.loads((FOLDER / "texts.json").read_text())
    lengths = {
        name: [[len(word.encode()) for word in words(text)] for text in texts]
        for name, words in (("qwen2", of_qwen2), ("gpt-4o", of_o200k))
    }
    (FOLDER / "words.json").write_text(json.dumps(lengths, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
