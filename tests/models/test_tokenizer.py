"""Bytes in, bytes out: any text survives, offsets hold, Hugging Face's machinery works."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import AutoTokenizer

from vort.layers.entity_probe import RuleProbe, encode_with_entities
from vort.models import VortConfig
from vort.models.tokenization_vort import ByteTokenizer

TOKENIZER = ByteTokenizer()
ANY_TEXT = st.text(max_size=60) | st.sampled_from(
    ["<pad>", "<eos>x<bos>", "\x00\x1f\x7f\r\n", "👩‍👩‍👧 नमस्ते", " a  b ,  .", "\ufffd\ufeff"]
)


@given(ANY_TEXT)
def test_any_text_comes_back_as_it_went_in(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text
    assert TOKENIZER.convert_tokens_to_string(TOKENIZER.tokenize(text)) == text
    assert TOKENIZER.convert_tokens_to_ids(TOKENIZER.tokenize(text)) == ids


@given(st.lists(ANY_TEXT, min_size=1, max_size=4), st.sampled_from(["left", "right"]))
def test_padded_batches_decode_to_their_texts(texts: list[str], side: str) -> None:
    batch = TOKENIZER(texts, padding=True, padding_side=side, return_tensors="pt")
    lengths = [len(text.encode()) for text in texts]
    assert batch["input_ids"].shape == (len(texts), max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    if max(lengths):
        kept = batch["attention_mask"][:, -1 if side == "left" else 0]
        assert kept.tolist() == [int(length > 0) for length in lengths]
    assert TOKENIZER.batch_decode(batch["input_ids"], skip_special_tokens=True) == texts


@given(ANY_TEXT, st.integers(1, 80), st.sampled_from(["left", "right"]))
def test_offsets_name_the_character_of_every_byte(text: str, room: int, side: str) -> None:
    tokenizer = ByteTokenizer(special_tokens_pattern="bos_eos", truncation_side=side)
    encoded = tokenizer(
        text,
        return_offsets_mapping=True,
        truncation=True,
        max_length=room + 2,
        padding="max_length",
    )
    ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
    every = [(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()]
    expected = every[:room] if side == "right" else every[max(len(every) - room, 0) :]
    assert [pair for index, pair in zip(ids, offsets, strict=True) if index < 256] == expected
    assert all(pair == (0, 0) for index, pair in zip(ids, offsets, strict=True) if index >= 256)
    assert len(offsets) == len(ids) == room + 2


def test_special_ids_are_those_of_the_configuration() -> None:
    config = VortConfig()
    assert len(TOKENIZER) == config.vocab_size == 259
    ids = (TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, TOKENIZER.eos_token_id)
    assert ids == (config.pad_token_id, config.bos_token_id, config.eos_token_id)


def test_text_spells_special_tokens_only_on_request() -> None:
    assert TOKENIZER.encode("<eos>") == list(b"<eos>")
    assert TOKENIZER.encode("a<eos>", split_special_tokens=False) == [97, 258]


def test_broken_utf8_is_replaced_and_bytes_of_one_letter_meet_again() -> None:
    assert TOKENIZER.batch_decode([[195], [195, 169], [104, 258]]) == ["\ufffd", "é", "h<eos>"]
    assert TOKENIZER.decode([195, 104], errors="ignore") == "h"


def test_an_id_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match=r"ids must lie in 0\.\.258, got 300"):
        TOKENIZER.decode([65, 300])


@pytest.mark.parametrize("loader", [ByteTokenizer, AutoTokenizer])
def test_saved_and_loaded_it_is_the_same(loader: type, tmp_path: Path) -> None:
    ByteTokenizer(padding_side="left", special_tokens_pattern="bos").save_pretrained(tmp_path)
    loaded = loader.from_pretrained(tmp_path)
    assert isinstance(loaded, ByteTokenizer)
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.padding_side == "left"
    assert loaded("é<eos>")["input_ids"] == [257, *"é<eos>".encode()]
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (256, 257, 258)


def test_added_tokens_come_after_the_special_ones(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.add_tokens(["<name>"]) == 1
    tokenizer.save_pretrained(tmp_path)
    loaded = ByteTokenizer.from_pretrained(tmp_path)
    assert loaded.encode("<name>a", split_special_tokens=False) == [259, 97]
    assert loaded.decode([259, 97]) == "<name>a"


def test_offsets_of_pairs_are_refused() -> None:
    with pytest.raises(ValueError, match="without text_pair"):
        TOKENIZER("a", "b", return_offsets_mapping=True)


def test_a_batch_gets_its_entity_mask() -> None:
    texts = ["so é Mary sang", "no one"]
    batch = encode_with_entities(TOKENIZER, texts, RuleProbe(), padding=True)
    assert batch["entity_mask"].shape == batch["input_ids"].shape
    assert "offset_mapping" not in batch
    named = TOKENIZER.decode(batch["input_ids"][0][batch["entity_mask"][0] > 0])
    assert named == "Mary"
    assert torch.count_nonzero(batch["entity_mask"][1]) == 0
    causal = encode_with_entities(TOKENIZER, texts[0], RuleProbe(causal=True), causal=True)
    assert causal["entity_mask"].nonzero().tolist() == [[0, len("so é Mary".encode())]]
