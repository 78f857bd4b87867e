"""Tokenizers: published vocabularies give the published ids, own files keep theirs, bad ones are one clear line."""
from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models

from suite import tokenizer
from suite.corpora import DataError
from suite.data import cache_folder

SHARED = cache_folder()
MIXED = "Hello, world! It's 12345\n\n\tcafé 你好 \U0001f600  end "


@pytest.mark.parametrize("name, size, end, hello", [
    ("gpt2", 50257, 50256, [15496, 11, 995, 0]),
    ("qwen2.5", 151646, 151643, [9707, 11, 1879, 0]),
])
def test_published_vocabularies(name, size, end, hello):
    made = tokenizer.choose(name, SHARED).build(lambda: iter(()))
    assert (tokenizer.size(made), tokenizer.end_of_text(made)) == (size, end)
    assert made.encode("Hello, world!").ids == hello
    assert made.decode(made.encode(MIXED).ids) == MIXED
    assert Tokenizer.from_str(made.to_str()).encode(MIXED).ids == made.encode(MIXED).ids


def test_trained_vocabulary_spells_every_byte():
    made = tokenizer.choose(300, SHARED).build(lambda: iter(["low lower lowest " * 50]))
    assert tokenizer.size(made) < 300  # the text runs out of pairs
    assert tokenizer.end_of_text(made) == 0
    assert made.decode(made.encode(MIXED).ids) == MIXED
    assert len(made.encode(" lowest").ids) == 1


def test_own_tokenizer_without_an_end_of_text_gets_one(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).save(str(path))
    made = tokenizer.choose(str(path), SHARED).build(lambda: iter(()))
    assert (tokenizer.size(made), tokenizer.end_of_text(made)) == (3, 2)


def test_identity_follows_the_file(tmp_path):
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a")).save(str(path))
    before = tokenizer.choose(str(path), SHARED).identity
    Tokenizer(models.WordLevel({"b": 0, "</s>": 1}, unk_token="b")).save(str(path))
    assert tokenizer.choose(str(path), SHARED).identity != before


def test_bad_tokenizers_are_one_clear_line(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 1}')
    with pytest.raises(DataError, match=r"tokenizer\.json: not a readable tokenizer\.json: ") as error:
        tokenizer.choose(str(path), SHARED).build(lambda: iter(()))
    assert "\n" not in str(error.value)
    with pytest.raises(DataError, match=r"^gpt-2: no such tokenizer; one is a vocabulary size, gpt2, qwen2\.5 or the path of a"):
        tokenizer.choose("gpt-2", SHARED)
    with pytest.raises(DataError, match=r"^tokenizer 256: a byte-level vocabulary has at least 257 entries$"):
        tokenizer.choose(256, SHARED)
