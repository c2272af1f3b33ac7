"""A saved model without Hugging Face: it reads and writes seconds before that has been loaded.

Only what needs nothing more: a small model of one memory, in float32 on a CPU, whose tokens are
bytes. Its parts are the layers themselves and its numbers are those of `VortForCausalLM` to the
bit. Whatever else a folder holds, and all that is wrong with it, is left to Hugging Face.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vort.layers import LayerStates, RMSNorm, VortAttention
from vort.layers.parts import VortMLP
from vort.layers.plain_step import LARGEST, plain_step_for
from vort.memories import LayerSettings

__all__ = ["BareModel", "Bytes", "read_bare"]

BYTES, SPECIAL = 256, 3
# What config.json says beside the settings of layers: what a model is built and drawn from here...
_USED = {
    "vocab_size": 259,
    "num_hidden_layers": 4,
    "mlp_size": None,
    "tie_word_embeddings": True,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
# ... what must be so, and what makes no difference to a model that is trained.
_FIXED = {
    "model_type": "vort",
    "architectures": ["VortForCausalLM"],
    "dtype": "float32",
    "layer_memories": None,
    "layer_settings": None,
}
_IDLE = {
    "auto_map", "initializer_range", "intermediate_size", "match_parameters",
    "max_position_embeddings", "pad_token_id", "transformers_version", "use_cache",
}  # fmt: skip
_TOKENS = {"tokenizer_class": "ByteTokenizer", "split_special_tokens": True}


class BareModel(nn.Module):
    """A language model of the names and numbers of `VortForCausalLM`, for a `Session`.

    Args:
        settings: of the layers.
        config: vocab_size, num_hidden_layers, mlp_size, tie_word_embeddings and special tokens.
        drawn: how tokens are drawn if nobody says so, as generation_config.json has it.
    """

    def __init__(
        self, settings: LayerSettings, config: Mapping[str, Any], drawn: Mapping[str, Any]
    ) -> None:
        super().__init__()
        size, count = settings.hidden_size, config["num_hidden_layers"]
        self.config = SimpleNamespace(
            **config, horizon=settings.horizon, memory_of=lambda layer: settings.memory
        )
        self.generation_config = SimpleNamespace(
            do_sample=drawn.get("do_sample", False), to_dict=lambda: dict(drawn)
        )
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], size)
        self.model.layers = nn.ModuleList(
            _Block(settings, index, config["mlp_size"]) for index in range(count)
        )
        self.model.norm = RMSNorm(size, eps=settings.rms_norm_eps)
        self.lm_head = nn.Linear(size, config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.lm_head.weight.device

    def new_cache(self) -> LayerStates:
        """An empty memory."""
        return LayerStates()

    def forward(
        self,
        input_ids: Tensor,
        past_key_values: LayerStates,
        entity_mask: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """What has `logits` `[1, 1, vocab_size]`: those after tokens `[1, T]`."""
        cache = past_key_values
        if input_ids.numel() == 1 and entity_mask is None and cache.states:
            step = plain_step_for(self, cache, _Block)
            if step is not None:
                return SimpleNamespace(logits=step(int(input_ids), cache)[None, None])
        base: Any = self.model
        x = base.embed_tokens(input_ids)
        kept = {"past_key_values": cache, "use_cache": True, "entity_mask": entity_mask}
        for block in base.layers:
            x = x + block.self_attn(block.input_layernorm(x), **kept)[0]
            x = x + block.mlp(block.post_attention_layernorm(x))
        return SimpleNamespace(logits=self.lm_head(base.norm(x)[:, -1:]))


class _Block(nn.Module):
    """The parts of a block, under the names that weights are saved by."""

    def __init__(self, settings: LayerSettings, index: int, width: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(settings.hidden_size, eps=settings.rms_norm_eps)
        self.self_attn = VortAttention(settings, layer_idx=index)
        self.post_attention_layernorm = RMSNorm(settings.hidden_size, eps=settings.rms_norm_eps)
        self.mlp = VortMLP(settings.hidden_size, width)


class Bytes:
    """What a `Session` asks of a tokenizer, as `ByteTokenizer` answers it.

    >>> tokenizer = Bytes()
    >>> tokenizer.decode([*tokenizer("né")["input_ids"], 258])
    'né'
    """

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        """The bytes of a text, as `input_ids`."""
        return {"input_ids": list(text.encode())}

    def decode(self, ids: list[int], **_: Any) -> str:
        """Text of ids, special ones left out; bytes that are no UTF-8 become U+FFFD."""
        return bytes(index for index in ids if index < BYTES).decode(errors="replace")


def read_bare(folder: str | Path) -> BareModel | None:
    """The model in a folder, in evaluation mode, if it needs nothing more than this file knows.

    None: it takes Hugging Face to load it, or to say what is wrong.
    """
    place = Path(folder)
    weights = place / "model.safetensors"
    try:
        if not weights.is_file() or weights.stat().st_size > 4 * LARGEST:
            return None
        settings, config = _settings_of(_json(place / "config.json"))
        drawn = _json(place / "generation_config.json")
        _check_tokens(_json(place / "tokenizer_config.json"), config["vocab_size"])
        with torch.random.fork_rng(devices=[]):
            model = BareModel(settings, config, drawn)
        return _filled(model, weights)
    except (OSError, ValueError, TypeError, KeyError, RuntimeError):
        return None


def _json(path: Path) -> dict[str, Any]:
    """What a file says; nothing where there is none."""
    if not path.exists():
        return {}
    if not path.is_file():
        raise OSError(f"{path} is no regular file")
    found = json.loads(path.read_text())
    if not isinstance(found, dict):
        raise TypeError(f"{path} must hold an object, got {type(found).__name__}")
    return found


def _settings_of(saved: dict[str, Any]) -> tuple[LayerSettings, dict[str, Any]]:
    """The settings of layers, and those of the stack; ValueError for whatever is not known here."""
    names = {field.name for field in fields(LayerSettings)}
    odd = saved.keys() - names - _USED.keys() - _FIXED.keys() - _IDLE
    wrong = [name for name, value in _FIXED.items() if saved.get(name) != value]
    config = {name: saved.get(name, value) for name, value in _USED.items()}
    if odd or wrong or config["mlp_size"] is None:
        raise ValueError(f"a plain model is wanted, got {sorted(odd) or wrong}")
    return LayerSettings(**{name: saved[name] for name in names & saved.keys()}), config


def _check_tokens(saved: dict[str, Any], size: int) -> None:
    """Refuse tokens that are not bytes and their three special ones; unless said, they are."""
    wrong = [name for name, value in _TOKENS.items() if saved.get(name, value) != value]
    added = {int(index) for index in saved.get("added_tokens_decoder", {})}
    if wrong or size > BYTES + SPECIAL or added - set(range(BYTES, BYTES + SPECIAL)):
        raise ValueError("tokens must be bytes")


def _filled(model: BareModel, path: Path) -> BareModel:
    """The model with the weights of a file: all of them, no others, and all of them numbers."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        given = load_file(path)
    except SafetensorError as damaged:
        raise OSError(str(damaged)) from damaged
    if model.config.tie_word_embeddings:
        given.setdefault("lm_head.weight", given["model.embed_tokens.weight"])
    if not all(x.is_floating_point() and bool(torch.isfinite(x).all()) for x in given.values()):
        raise ValueError("weights must be finite numbers")
    model.load_state_dict(given)  # in float32, whatever they were stored in
    return model.eval()
