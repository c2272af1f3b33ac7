"""Text as bytes, behind Hugging Face's tokenizer interface."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, BatchEncoding, PreTrainedTokenizer

from vort.models.configuration_vort import VortConfig
from vort.models.folder import write_code

__all__ = ["ByteTokenizer"]

BYTES = 256


class ByteTokenizer(PreTrainedTokenizer):
    """One token per byte of UTF-8, plus padding, beginning and end: 259 tokens, no files.

    Any text goes in and comes out again. Text never yields a special token, even if it spells
    one out; pass `split_special_tokens=False` to have `"<eos>"` in a text read as one. Nothing is
    put around a text unless `special_tokens_pattern` says so ("bos", "eos", "bos_eos").

    Args:
        pad_token: padding, id 256.
        bos_token: beginning, id 257.
        eos_token: end, id 258.
        **kwargs: as for every tokenizer: `padding_side`, `model_max_length`, ...

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer("né")["input_ids"]
    [110, 195, 169]
    >>> tokenizer.decode([110, 195, 169])
    'né'
    >>> tokenizer("né", return_offsets_mapping=True)["offset_mapping"]
    [(0, 1), (1, 2), (1, 2)]
    """

    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    vocab_files_names: dict[str, str] = {}  # noqa: RUF012
    _auto_map = {"AutoTokenizer": ["vort_auto.ByteTokenizer", None]}  # noqa: RUF012

    def __init__(
        self,
        pad_token: str = "<pad>",
        bos_token: str = "<bos>",
        eos_token: str = "<eos>",
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("split_special_tokens", True)
        kwargs.setdefault("special_tokens_pattern", "none")
        kwargs["clean_up_tokenization_spaces"] = False  # what went in comes out
        # A saved tokenizer lists them with their ids; a new one gets them in this order.
        kwargs.setdefault("added_tokens_decoder", _specials_by_id(pad_token, bos_token, eos_token))
        super().__init__(  # type: ignore[no-untyped-call]
            pad_token=pad_token, bos_token=bos_token, eos_token=eos_token, **kwargs
        )
        # The base class takes this setting without saving it.
        self.init_kwargs["special_tokens_pattern"] = self.special_tokens_pattern

    def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Write the tokenizer to a folder, and beside it where the Auto classes find this one."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_code(save_directory)
        return super().save_pretrained(save_directory, *args, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoTokenizer") -> None:
        """Nothing to do: saved folders name `vort_auto.py`, no copy of this file."""

    @property
    def vocab_size(self) -> int:
        """256: the bytes. `len(tokenizer)` counts the special tokens too."""
        return BYTES

    def get_vocab(self) -> dict[str, int]:
        """Token to id; byte n is written as the character with code n."""
        return {chr(byte): byte for byte in range(BYTES)} | self.added_tokens_encoder

    def save_vocabulary(
        self, save_directory: str, filename_prefix: str | None = None
    ) -> tuple[str, ...]:
        """Nothing to save."""
        return ()

    def _tokenize(self, text: str, **kwargs: Any) -> list[str]:
        return [chr(byte) for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        if len(token) != 1 or ord(token) >= BYTES:
            raise ValueError(f"token must be a character below U+0100 or special, got {token!r}")
        return ord(token)

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < BYTES:
            raise ValueError(f"ids must lie in 0..{len(self) - 1}, got {index}")
        return chr(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Text of `tokens`; bytes that are no UTF-8 become U+FFFD."""
        vocabulary = self.get_vocab()
        return self._decode([vocabulary[token] for token in tokens])

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        errors: str = "replace",
        **kwargs: Any,
    ) -> str:
        """Text of ids. `errors` is that of `bytes.decode`."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        skipped = set(self.all_special_ids) if skip_special_tokens else set()
        data = bytearray()
        for index in ids:
            if 0 <= index < BYTES:
                data.append(index)
            elif index not in skipped:
                data += self.convert_ids_to_tokens(int(index)).encode()
        return data.decode(errors=errors)

    def _encode_plus(  # type: ignore[override]  # the rest is passed on by name
        self,
        text: Any,
        text_pair: Any = None,
        *,
        return_offsets_mapping: bool = False,
        **kwargs: Any,
    ) -> BatchEncoding:
        """As in the base class, with offsets, and without a detour through strings of one byte."""
        whole = kwargs.get("split_special_tokens", self.split_special_tokens)
        quick = whole and text_pair is None and not kwargs.get("is_split_into_words", False)
        source = _as_bytes(text) if quick else text
        encoded = super()._encode_plus(source, text_pair, **kwargs)
        if return_offsets_mapping:
            if not quick or not _is_text(text):
                raise ValueError(
                    "return_offsets_mapping takes a text or a list of texts, without text_pair, "
                    "is_split_into_words or split_special_tokens=False"
                )
            self._add_offsets(encoded, text, kwargs.get("return_tensors"))
        return encoded

    def _add_offsets(self, encoded: BatchEncoding, text: str | list[str], tensors: Any) -> None:
        """Put `offset_mapping` beside `input_ids`, of the same kind and shape."""
        ids = encoded["input_ids"]
        rows = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(text, str) and not tensors:
            encoded["offset_mapping"] = self._offsets_of(text, rows)
            return
        texts = [text] if isinstance(text, str) else text
        offsets = [self._offsets_of(t, row) for t, row in zip(texts, rows, strict=True)]
        encoded.update(BatchEncoding({"offset_mapping": offsets}, tensor_type=tensors))

    def _offsets_of(self, text: str, ids: list[int]) -> list[tuple[int, int]]:
        """Characters of each id; truncation and padding are read off the ids themselves."""
        characters = _character_of_bytes(text)
        kept = sum(index < BYTES for index in ids)
        shown = (
            characters[len(characters) - kept :] if self.truncation_side == "left" else characters
        )
        following = iter(shown.tolist())
        places = (next(following) if index < BYTES else None for index in ids)
        return [(0, 0) if place is None else (place, place + 1) for place in places]


def _specials_by_id(*tokens: Any) -> dict[int, Any]:
    from transformers import AddedToken

    return {
        BYTES + number: token
        if isinstance(token, AddedToken)
        else AddedToken(token, special=True, normalized=False)
        for number, token in enumerate(tokens)
    }


def _is_text(text: Any) -> bool:
    return isinstance(text, str) or (
        isinstance(text, Sequence) and all(isinstance(item, str) for item in text)
    )


def _as_bytes(text: Any) -> Any:
    """Texts as lists of bytes; the base class wants an empty one as a string."""
    if isinstance(text, str):
        return list(text.encode()) or ""
    if isinstance(text, (list, tuple)) and all(isinstance(item, str) for item in text):
        return [_as_bytes(item) for item in text]
    return text


def _character_of_bytes(text: str) -> NDArray[np.int64]:
    """Index of the character that each byte belongs to."""
    data = np.frombuffer(text.encode(), dtype=np.uint8)
    begins = (data & 0b1100_0000) != 0b1000_0000  # all but the continuation bytes of UTF-8
    return np.cumsum(begins) - 1


AutoTokenizer.register(  # type: ignore[no-untyped-call]
    VortConfig, tokenizer_class=ByteTokenizer, exist_ok=True
)
