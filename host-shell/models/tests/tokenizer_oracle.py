"""Compares the tokens of `nvme_models::Tokenizer` with those of llama.cpp, on many texts of one vocabulary.

    pip install xllamacpp gguf numpy sentencepiece tokenizers
    python tokenizer_oracle.py train FOLDER TEXT.md...       # two small vocabularies, spm.gguf and llama-bpe.gguf
    python tokenizer_oracle.py of tokenizer.model OUT.gguf   # SentencePiece's, or Llama 3's file of ranks
    python tokenizer_oracle.py texts COUNT SEED TEXT.md... > texts.json
    python tokenizer_oracle.py tokens MODEL.gguf < texts.json > expected.json
    cargo run -p nvme-models --example tokenize MODEL.gguf < texts.json > found.json
    cargo run -p nvme-models --example tokenizer_texts > many.json
    python tokenizer_oracle.py many tests/tokenizer < many.json > tests/tokenizer/blocks.json

The files of tests/tokenizer are made by the first, third, fourth and last line; a test compares them.
"""

import base64
import importlib.metadata
import json
import pathlib
import random
import sys
import urllib.request

import gguf
import numpy

CONTROL, USER_DEFINED = gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED


def write(out, model, pre, tokens, kinds, scores=None, merges=None, keys=()):
    """A model of one narrow layer: llama.cpp's server opens nothing without tensors."""
    writer = gguf.GGUFWriter(out, "llama")
    width, hidden = 32, 32
    writer.add_context_length(64)
    writer.add_embedding_length(width)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if scores:
        writer.add_token_scores(scores)
    if merges is not None:
        writer.add_token_merges(merges)
    for name, token in keys:
        getattr(writer, name)(token)
    ones = numpy.zeros
    writer.add_tensor("token_embd.weight", ones((len(tokens), width), numpy.float16))
    for name in ("attn_norm", "ffn_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", ones(width, numpy.float32))
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", ones((width, width), numpy.float16))
    writer.add_tensor("output_norm.weight", ones(width, numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_sentence_piece(model, out, added=()):
    import sentencepiece

    pieces = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokens, scores, kinds = [], [], []
    for token in range(pieces.vocab_size()):
        kind = gguf.TokenType.NORMAL
        if pieces.is_unknown(token):
            kind = gguf.TokenType.UNKNOWN
        elif pieces.is_control(token):
            kind = CONTROL
        elif pieces.is_unused(token):
            kind = gguf.TokenType.UNUSED
        elif pieces.is_byte(token):
            kind = gguf.TokenType.BYTE
        tokens.append(pieces.id_to_piece(token))
        scores.append(pieces.get_score(token))
        kinds.append(kind)
    for text in added:
        tokens.append(text)
        scores.append(-1000.0)
        kinds.append(USER_DEFINED)
    keys = [("add_bos_token_id", pieces.bos_id()), ("add_eos_token_id", pieces.eos_id())]
    write(out, "llama", "default", tokens, kinds, scores=scores, keys=keys)


def signs():
    """GPT-2's characters for bytes."""
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {byte: chr(byte) for byte in own} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def of_ranks(lines, out):
    """Llama 3's file: a token in base64 and its rank in each line. The merges are those that make the tokens."""
    ranks = {base64.b64decode(text): int(rank) for text, rank in (line.split() for line in lines.splitlines() if line)}
    sign = signs()
    write_as = lambda token: "".join(sign[byte] for byte in token)
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda pair: pair[1]):
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [(ranks.get(a + b, rank), at) for at, (a, b) in enumerate(zip(parts, parts[1:]))]
            least, at = min(pairs)
            if least >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append(" ".join(map(write_as, parts)))
    tokens = [write_as(token) for token, _ in sorted(ranks.items(), key=lambda pair: pair[1])]
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [CONTROL] * len(names)
    keys = [("add_bos_token_id", len(tokens)), ("add_eos_token_id", len(tokens) + 1)]
    write(out, "gpt2", "llama-bpe", tokens + names, kinds, merges=merges, keys=keys)


def train(folder, paths):
    import io

    import sentencepiece
    import tokenizers

    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for path in paths for line in path.read_text().splitlines() if line.strip()]
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=out, vocab_size=700, model_type="bpe", byte_fallback=True,
        character_coverage=0.9995, normalization_rule_name="identity", remove_extra_whitespaces=False,
        split_digits=True, allow_whitespace_only_pieces=True, minloglevel=2,
    )
    of_sentence_piece(out.getvalue(), folder / "spm.gguf", ["<|im_start|>", "<|im_end|>", "<|im"])
    words = (
        r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    model = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=True))
    pre = tokenizers.pre_tokenizers
    split = pre.Split(tokenizers.Regex(words), "isolated")
    model.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, initial_alphabet=sorted(signs().values()), show_progress=False)
    model.train_from_iterator(lines, trainer)
    state = json.loads(model.to_str())["model"]
    tokens = sorted(state["vocab"], key=state["vocab"].get)
    merges = [" ".join(pair) for pair in state["merges"]]
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    kinds = [gguf.TokenType.NORMAL] * len(tokens) + [CONTROL] * len(names)
    keys = [("add_bos_token_id", len(tokens)), ("add_eos_token_id", len(tokens) + 1)]
    write(folder / "llama-bpe.gguf", "gpt2", "llama-bpe", tokens + names, kinds, merges=merges, keys=keys)


ODD = [
    " ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n", "\u00a0", "\u3000", "'s", "'LL", "don't", "1234567", "٣٤٥", "½", "²",
    "<s>", "</s>", "<unk>", "<0x0A>", "<|im_start|>", "<|im_end|>", "<|im", "<|eot_id|>", "<|begin_of_text|>", "[INST]",
    "[/INST]", "é", "e\u0301", "Grüße", "中文字符", "日本語のテキスト", "한국어", "عربي", "हिन्दी", "ไทย", "🙂", "👩‍👩‍👧", "🇩🇪", "\u200b",
    "\ufeff", "\u2581", "\x00", "\x7f", "ſ", "İ", "_", "__init__", "a" * 50, "0x1F", "3.14", "\u0300", "𝒳", "￿",
]


def texts(count, seed, paths):
    source, draw = "\n".join(path.read_text() for path in paths), random.Random(seed)
    found = []
    while len(found) < count:
        kind, text = draw.randrange(4), ""
        for _ in range(draw.randrange(1, 12)):
            if kind == 0 or draw.random() < 0.3:
                text += draw.choice(ODD)
            elif kind == 1:
                text += chr(draw.choice([draw.randrange(0x20, 0x250), draw.randrange(0x20, 0xD800), draw.randrange(0x1F000, 0x1FB00)]))
            else:
                at = draw.randrange(len(source))
                text += source[at : at + draw.randrange(1, 80)]
        found.append(text)
    return found


def tokens(model, texts):
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(model)
    params.n_ctx, params.n_parallel, params.warmup = 64, 1, False
    server = xllamacpp.Server(params)
    found = []
    for text in texts:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            found.append(json.load(answer)["tokens"])
    return found


def sum_of(lists):
    """FNV-1a of 64 bits, a number at a time: of each list its length, then its numbers."""
    found = 0xCBF29CE484222325
    for one in lists:
        for number in (len(one), *one):
            found = (found ^ number) * 0x100000001B3 % (1 << 64)
    return f"{found:016x}"


def many(folder, texts):
    """The sum of the bytes of all texts, and for each 100 texts that of the tokens which llama.cpp makes of them."""
    version = importlib.metadata.version("xllamacpp")
    found = {"by": f"llama.cpp of xllamacpp {version}", "texts": [sum_of([text.encode() for text in texts])]}
    for kind in ("spm", "llama-bpe"):
        made = tokens(folder / f"{kind}.gguf", texts)
        found[kind] = [sum_of(made[at : at + 100]) for at in range(0, len(made), 100)]
    return found


def main():
    match sys.argv[1:]:
        case ["train", folder, *paths]:
            train(pathlib.Path(folder), [pathlib.Path(path) for path in paths])
        case ["of", path, out]:
            data = pathlib.Path(path).read_bytes()
            is_ranks = data[:256].isascii() and data.split(b"\n", 1)[0].split()[-1:] == [b"0"]
            of_ranks(data.decode(), out) if is_ranks else of_sentence_piece(data, out)
        case ["texts", count, seed, *paths]:
            json.dump(texts(int(count), int(seed), [pathlib.Path(path) for path in paths]), sys.stdout, ensure_ascii=True)
        case ["tokens", model]:
            json.dump(tokens(model, json.load(sys.stdin)), sys.stdout)
        case ["many", folder]:
            json.dump(many(pathlib.Path(folder), json.load(sys.stdin)), sys.stdout, indent=0)
            print()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
