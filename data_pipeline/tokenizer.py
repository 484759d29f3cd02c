"""Byte-level BPE: text to token ids and back, ids as the tokenizers library gives them."""

import itertools
import json
import os
import re
import unicodedata
from collections.abc import Iterable
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.token_store import token_dtype
from tfbig.errors import UserError

END_OF_TEXT = "<|endoftext|>"
MOST_ENTRIES = 1 << 24  # of a vocabulary that is trained: the trainer takes memory for all of them
_BLOCK_IDS = 1 << 16  # ids whose sizes stay in a core's cache
# GPT-2's pre-tokenizer, which the tokenizers library's ByteLevel has built in.
# Source: github.com/openai/gpt-2, src/encoder.py.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[str, int]:
    """Returns the character that stands for each byte in a byte-level vocabulary.

    Printable bytes stand for themselves, the others for U+0100 and up.
    Source: github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError when a vocabulary cannot hold all bytes, or be held itself."""
    if vocab_size < 257:
        raise UserError(
            f"--vocab_size={vocab_size} is too small: 256 bytes and {END_OF_TEXT} are 257 entries; "
            "give at least that."
        )
    if vocab_size > MOST_ENTRIES:
        raise UserError(
            f"--vocab_size={vocab_size} is more than the {MOST_ENTRIES:,} entries that are "
            "trained: give e.g. 50257."
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Returns a tokenizer.json trained on `texts`, with end-of-text as its only special token.

    Args:
      texts: of the train split; the same texts in the same order give the same bytes.
      vocab_size: entries, end-of-text and the 256 bytes included; fewer come out of little text.

    Raises:
      UserError: vocab_size is below 257.
    """
    check_vocab_size(vocab_size)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return (tokenizer.to_str(pretty=True) + "\n").encode()


def read_tokenizer_file(path: str | os.PathLike[str]) -> bytes:
    """Returns a tokenizer.json's contents, made from a vocabulary and its merges where given so.

    Args:
      path: a tokenizer.json, a folder that holds one (or vocab.json and merges.txt), or two paths
        separated by a comma: vocab.json,merges.txt, as GPT-2's encoder.json,vocab.bpe.

    Raises:
      UserError: there is no such file, or the pair is no byte-level BPE.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        whole = os.path.join(name, "tokenizer.json")
        pair = [os.path.join(name, part) for part in ("vocab.json", "merges.txt")]
        name = whole if os.path.exists(whole) else ",".join(pair)
    vocabulary, comma, merges = name.partition(",")
    if comma and not os.path.exists(name):
        return _from_vocabulary_and_merges(vocabulary, merges)
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read tokenizer {path}: {error.strerror}; name a file.") from None


def _from_vocabulary_and_merges(vocabulary: str, merges: str) -> bytes:
    for part in (vocabulary, merges):
        if not os.path.isfile(part):
            raise UserError(f"cannot read tokenizer {part}: there is no such file; name one.")
    try:
        tokenizer = tokenizers.Tokenizer(models.BPE.from_file(vocabulary, merges))
    except Exception as error:  # the library raises bare Exception
        raise UserError(f"{vocabulary} and {merges} are no BPE vocabulary: {error}") from None
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if tokenizer.token_to_id(END_OF_TEXT) is not None:
        tokenizer.add_special_tokens([END_OF_TEXT])
    return (tokenizer.to_str(pretty=True) + "\n").encode()


class Tokenizer:
    """A byte-level BPE tokenizer of a tokenizer.json.

    Special tokens' names in a text are text; nothing is added to it.

    Args:
      contents: of the file.
      name: of the file, for messages.

    Raises:
      UserError: the file is no byte-level BPE with an end-of-text token.

    Attributes:
      sha256: of the file.
      vocab_size: ids are below it.
      end_of_text_id: between documents.
      dtype: the smallest that holds all ids: uint16 or int32.
      description: the file, parsed.
      library: the tokenizers library's own object.
    """

    def __init__(self, contents: bytes, name: str = "tokenizer.json") -> None:
        try:
            self.library = tokenizers.Tokenizer.from_str(contents.decode())
            self.description = json.loads(contents)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{name} is not a tokenizer.json: {error}") from None
        if self.description["model"]["type"] != "BPE" or not _is_byte_level(self.description):
            raise UserError(f"{name} is not a byte-level BPE: other tokenizers are not supported.")
        end_of_text_id = self.library.token_to_id(END_OF_TEXT)
        if end_of_text_id is None:
            raise UserError(f"{name} has no token {END_OF_TEXT}, which ends documents.")
        self.library.no_truncation()
        self.library.no_padding()
        self.library.encode_special_tokens = True  # their names in a text stay text
        self.sha256 = sha256(contents).hexdigest()
        self.end_of_text_id: int = end_of_text_id
        vocabulary = self.library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = token_dtype(self.vocab_size)
        self._token_bytes, special = _bytes_of_tokens(self.description, vocabulary, name)
        sizes = np.array([len(token) for token in self._token_bytes], np.int64)
        sizes[special] = 0
        # As small as it can be: what is looked up again and again stays in a core's cache.
        self.num_bytes_of_token = sizes.astype(np.min_scalar_type(int(sizes.max())))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a tokenizer.json, or a folder of one, or vocab.json,merges.txt.

        Raises:
          UserError: there is no such file, or it is no byte-level BPE.
        """
        return cls(read_tokenizer_file(path), str(path))

    def is_of(self, contents: bytes) -> bool:
        """Returns whether `contents` are the file that this one was made of."""
        return sha256(contents).hexdigest() == self.sha256

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (n,) of a text."""
        encoding = self.library.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Returns the bytes of ids; characters may be cut at either end.

        Raises:
          IndexError: an id is not below vocab_size.
        """
        return b"".join([self._token_bytes[int(token)] for token in ids])

    def num_bytes(self, ids: np.ndarray) -> int:
        """Returns the bytes of text that ids stand for; special tokens stand for none."""
        flat = np.asarray(ids).reshape(-1)
        blocks = range(0, len(flat), _BLOCK_IDS)
        found = (self.num_bytes_of_token.take(flat[k : k + _BLOCK_IDS]) for k in blocks)
        return sum(int(sizes.sum(dtype=np.int64)) for sizes in found)

    @cached_property
    def is_gpt2_like(self) -> bool:
        """Whether encoding is GPT-2's pre-tokenizer and merging by lowest id.

        What may come before is composition (NFC) and a match of added tokens, as of GPT-NeoX's.
        """
        description = self.description
        return (
            (self.composes or not description.get("normalizer"))
            and _is_gpt2_pre_tokenizer(description)
            and _are_simply_matched(description, self.composes)
            and sum(len(token) == 1 for token in self.mergeable_ranks()) >= 256
            and _merges_are_in_id_order(description)
        )

    @property
    def composes(self) -> bool:
        """Whether text is composed (NFC) before all else."""
        return (self.description.get("normalizer") or {}).get("type") == "NFC"

    @cached_property
    def matched_tokens(self) -> dict[str, int]:
        """The added tokens that are found in texts, with their ids; special ones are not."""
        added = self.description.get("added_tokens", [])
        return {token["content"]: token["id"] for token in added if not token["special"]}

    def mergeable_ranks(self) -> dict[bytes, int]:
        """Returns {bytes: id} of the tokens that merging makes, special ones left out."""
        added = {token["content"] for token in self.description.get("added_tokens", [])}
        return {
            self._token_bytes[rank]: rank
            for token, rank in self.description["model"]["vocab"].items()
            if token not in added
        }


def _pre_tokenizers(description: dict) -> list[dict]:
    pre_tokenizer = description.get("pre_tokenizer") or {}
    return pre_tokenizer.get("pretokenizers", [pre_tokenizer])


def _is_byte_level(description: dict) -> bool:
    return any(step.get("type") == "ByteLevel" for step in _pre_tokenizers(description))


def _is_gpt2_pre_tokenizer(description: dict) -> bool:
    steps = _pre_tokenizers(description)
    return (
        len(steps) == 1
        and steps[0]["type"] == "ByteLevel"
        and steps[0].get("use_regex", True)
        and not steps[0].get("add_prefix_space", True)
    )


def _are_simply_matched(description: dict, composes: bool) -> bool:
    """Returns whether added tokens are found wherever they stand in a text, whatever is around.

    That is also where a special token does not hide them, none goes over a place where long texts
    are cut, and composition neither makes nor changes one.
    """
    added = description.get("added_tokens", [])
    matched = [token for token in added if not token["special"]]
    special = {character for token in added if token["special"] for character in token["content"]}
    return all(
        not (token.get("lstrip") or token.get("rstrip") or token.get("single_word"))
        and token.get("normalized", False) == matched[0].get("normalized", False)
        and (token.get("normalized", False) or not composes)
        and unicodedata.is_normalized("NFC", token["content"])
        and not special & set(token["content"])
        and not re.search(r"\S[ \n]", token["content"])
        for token in matched
    )


def _merges_are_in_id_order(description: dict) -> bool:
    """Returns whether merging by lowest id, as tiktoken does, is merging by first in the list."""
    model = description["model"]
    if model.get("dropout") or model.get("ignore_merges") or model.get("byte_fallback"):
        return False
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    ids = [model["vocab"]["".join(pair)] for pair in pairs]
    return all(before < after for before, after in itertools.pairwise(ids))


def _bytes_of_tokens(
    description: dict, vocabulary: dict[str, int], name: str
) -> tuple[list[bytes], list[int]]:
    """Returns the bytes of each id, and the ids of special tokens."""
    alphabet = byte_alphabet()
    added = {token["content"]: token for token in description.get("added_tokens", [])}
    byte_of = alphabet.__getitem__
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token in added:
            token_bytes[token_id] = token.encode()
        else:
            try:
                token_bytes[token_id] = bytes(map(byte_of, token))
            except KeyError:
                raise UserError(f"{name}: its token {token!r} does not stand for bytes.") from None
    special = [token["id"] for token in added.values() if token["special"]]
    return token_bytes, special
