"""Byte-level BPE: text to token ids and back, ids as the tokenizers library gives them."""

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_pipeline.token_store import token_dtype
from tfbig.errors import UserError

END_OF_TEXT = "<|endoftext|>"
_GATE_CHARACTERS = 1 << 16  # text on which the fast encoder must agree with the library
# GPT-2's pre-tokenizer, which the tokenizers library's ByteLevel has built in.
# Source: github.com/openai/gpt-2, src/encoder.py.
_GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_alphabet() -> dict[str, int]:
    """Returns the character that stands for each byte in a byte-level vocabulary.

    Printable bytes stand for themselves, the others for U+0100 and up.
    Source: github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> bytes:
    """Returns a tokenizer.json trained on `texts`, with end-of-text as its only special token.

    Args:
      texts: of the train split; the same texts in the same order give the same bytes.
      vocab_size: entries, end-of-text and the 256 bytes included; fewer come out of little text.

    Raises:
      UserError: vocab_size is below 257.
    """
    if vocab_size < 257:
        raise UserError(
            f"--vocab_size={vocab_size} is too small: 256 bytes and {END_OF_TEXT} are 257 entries."
        )
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
    """

    def __init__(self, contents: bytes, name: str = "tokenizer.json") -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(contents.decode())
            self._description = json.loads(contents)
        except Exception as error:  # the library raises bare Exception
            raise UserError(f"{name} is not a tokenizer.json: {error}") from None
        if self._description["model"]["type"] != "BPE" or not _is_byte_level(self._description):
            raise UserError(f"{name} is not a byte-level BPE: other tokenizers are not supported.")
        end_of_text_id = self._tokenizer.token_to_id(END_OF_TEXT)
        if end_of_text_id is None:
            raise UserError(f"{name} has no token {END_OF_TEXT}, which ends documents.")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # their names in a text stay text
        self.sha256 = sha256(contents).hexdigest()
        self.end_of_text_id: int = end_of_text_id
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1
        self.dtype = token_dtype(self.vocab_size)
        self._token_bytes, special = _bytes_of_tokens(self._description, vocabulary, name)
        self.num_bytes_of_token = np.array([len(token) for token in self._token_bytes], np.int64)
        self.num_bytes_of_token[special] = 0

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Reads a tokenizer.json.

        Raises:
          UserError: there is no such file, or it is no byte-level BPE.
        """
        try:
            contents = Path(path).read_bytes()
        except OSError as error:
            raise UserError(f"cannot read tokenizer {path}: {error.strerror}.") from None
        return cls(contents, str(path))

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (n,) of a text."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, self.dtype)

    def encode_batch(self, texts: Sequence[str], num_threads: int = 1) -> list[np.ndarray]:
        """Returns the ids of each text; several times faster than `encode` in a loop.

        Args:
          texts: documents.
          num_threads: that encode at the same time.
        """
        encoder = self._fast_encoder
        if encoder is None:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, self.dtype) for encoding in encodings]
        ids = encoder.encode_ordinary_batch(list(texts), num_threads=num_threads)
        return [np.array(document, self.dtype) for document in ids]

    def check_fast_encoder(self, texts: Sequence[str]) -> str:
        """Compares the fast encoder's ids with the library's on a sample of `texts`.

        Returns:
          "" when they agree or there is none; else why the library is used from now on.
        """
        num_characters = 0
        for text in texts:
            if self._fast_encoder is None or num_characters >= _GATE_CHARACTERS:
                break
            text = text[:_GATE_CHARACTERS]
            num_characters += len(text)
            if not np.array_equal(self.encode_batch([text])[0], self.encode(text)):
                self.__dict__["_fast_encoder"] = None
                return "tiktoken's ids differ from the tokenizers library's, which is used instead"
        return ""

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
        return int(self.num_bytes_of_token[np.asarray(ids)].sum())

    @cached_property
    def _fast_encoder(self) -> Any:
        """The core of tiktoken, where it describes the same function; None elsewhere."""
        description = self._description
        if description.get("normalizer") or not _is_gpt2_pre_tokenizer(description):
            return None
        added = {token["content"]: token for token in description["added_tokens"]}
        if not all(token["special"] for token in added.values()):
            return None
        ranks = {
            self._token_bytes[rank]: rank
            for token, rank in description["model"]["vocab"].items()
            if token not in added
        }
        if sum(len(token) == 1 for token in ranks) < 256 or not _merges_are_in_id_order(
            description
        ):
            return None
        import tiktoken

        return tiktoken.Encoding(
            self.sha256, pat_str=_GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={}
        )


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
    token_bytes = [b""] * (max(vocabulary.values()) + 1)
    for token, token_id in vocabulary.items():
        if token in added:
            token_bytes[token_id] = token.encode()
        elif all(character in alphabet for character in token):
            token_bytes[token_id] = bytes(alphabet[character] for character in token)
        else:
            raise UserError(f"{name}: its token {token!r} does not stand for bytes.")
    special = [token["id"] for token in added.values() if token["special"]]
    return token_bytes, special
