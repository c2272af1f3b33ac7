"""What `generate` asks of a model whose past is a memory: a cache of its own, and little else.

Positions follow from what has been seen, and a generated token needs no mask.
"""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, MaxLengthCriteria

from vort.layers.packing import Packing
from vort.models.cache_vort import VortCache, wrong_cache
from vort.models.decoding import is_steady
from vort.ops.gpu.launcher import has_triton

__all__ = ["VortGenerationMixin"]

# What `generate` may say about a step that is a token and a cache, and what of it `forward` hears.
FORWARDED = frozenset({"use_cache", "logits_to_keep", "output_hidden_states", "output_orders"})
PLAIN_STEP = FORWARDED | {"position_ids", "is_first_iteration", "output_attentions", "tokenizer"}


class VortGenerationMixin(GenerationMixin):
    """The hooks of `generate`, for a language model with `model` and `new_cache`.

    transformers looks for the end of the name.
    """

    def _valid_auto_compile_criteria(
        self, model_kwargs: dict[str, Any], generation_config: Any
    ) -> bool:
        """Not where a step is recorded and replayed anyway, unless `compile_config` asks for it."""
        model: Any = self
        records = model.device.type == "cuda" and has_triton() and is_steady(model)
        if records and generation_config.compile_config is None:
            return False
        valid: bool = super()._valid_auto_compile_criteria(  # type: ignore[misc]
            model_kwargs, generation_config
        )
        return valid

    def _prepare_cache_for_generation(  # type: ignore[override]
        self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        """`generate` asks for its cache here; ours, whatever kind it would have made."""
        given = model_kwargs.get("past_key_values")
        if given is not None and not isinstance(given, VortCache):
            raise TypeError(wrong_cache(given))
        _refuse_packed(model_kwargs)
        checkpointed = self.model.gradient_checkpointing and self.model.training
        if checkpointed or not self.model.keeps_state:
            # Every token is then read anew with all before it.
            generation_config.use_cache = model_kwargs["use_cache"] = False
        if given is not None and generation_config.use_cache is False:
            raise ValueError(
                "past_key_values must be left out where every token is read anew: with "
                "use_cache=False, gradient checkpointing in training, or a memory without a state"
            )
        if given is None and generation_config.use_cache is not False:
            static = generation_config.cache_implementation == "static"
            model_kwargs["past_key_values"] = self.new_cache(static=static)

    def _get_stopping_criteria(self: Any, *args: Any, **kwargs: Any) -> Any:
        """`max_position_embeddings` ends nothing in a model whose state does not grow.

        transformers would remind of it as a "predefined maximum length".
        """
        criteria = super()._get_stopping_criteria(*args, **kwargs)  # type: ignore[misc]
        if self.model.keeps_state and not self.base_model.new_cache().grows:
            for each in criteria:
                if isinstance(each, MaxLengthCriteria):
                    each.max_position_embeddings = None
        return criteria

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: there are no keys and values to be kept in pages."""
        raise NotImplementedError(
            "continuous batching pages keys and values, which a memory does not keep: "
            "give generate a padded batch"
        )

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None: positions follow from what has been seen."""

    @staticmethod
    def create_masks_for_generate(
        *, inputs_embeds: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Tensor | None:
        """The mask of the new positions: all that is needed, and of constant shape in decoding."""
        return None if attention_mask is None else attention_mask[:, -inputs_embeds.shape[1] :]

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """What the next step is prepared from: how many of its tokens are generated ones."""
        found: dict[str, Any] = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        return found | {"generated": model_kwargs.get("generated", 0) + 1}

    def prepare_inputs_for_generation(
        self: Any,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        entity_mask: Tensor | None = None,
        generated: int = 0,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `forward` gets at each step: embeddings and entities go with the prompt alone.

        A generated token is no padding: with a cache it needs no mask, which a recorded step would
        have to wait for the GPU to look at. Without one all is read anew at every step.
        """
        cache = kwargs.get("past_key_values")
        if generated and isinstance(cache, VortCache) and kwargs.get("next_sequence_length") == 1:
            del kwargs["past_key_values"], kwargs["next_sequence_length"]
            kwargs.pop("attention_mask", None)
            if kwargs.keys() <= PLAIN_STEP:
                token = input_ids[:, -1:]
                if cache.is_compileable:  # a graph is for one stride, and a view's grows
                    token = token.clone(memory_format=torch.contiguous_format)
                last = {"input_ids": token, "past_key_values": cache}
                return last | {name: kwargs[name] for name in kwargs.keys() & FORWARDED}
            kwargs |= {"past_key_values": cache, "next_sequence_length": 1}
        seen = 0 if cache is None or generated else cache.get_seq_length()
        if cache is not None and seen:
            _check_past(cache, kwargs.get("next_sequence_length"), kwargs.get("attention_mask"))
        if inputs_embeds is not None and generated and cache is None:
            tail = self.get_input_embeddings()(input_ids[:, -generated:])
            inputs_embeds = torch.cat([inputs_embeds, tail.to(inputs_embeds)], 1)
            kwargs["is_first_iteration"] = True
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids,  # type: ignore[arg-type]
            *args,
            inputs_embeds=inputs_embeds,  # type: ignore[arg-type]
            **kwargs,
        )
        for name in ("tokenizer", "assistant_tokenizer"):
            inputs.pop(name, None)  # of stopping at strings: `generate` hands them on to all
        tokens = inputs.get("input_ids")
        tokens = inputs.get("inputs_embeds") if tokens is None else tokens
        if entity_mask is not None and tokens is not None and (cache is None or not generated):
            entities = nn.functional.pad(entity_mask, (0, generated))
            inputs["entity_mask"] = _marks_of(entities, seen, tokens.shape[1])
        return inputs


def _refuse_packed(given: dict[str, Any]) -> None:
    """Refuse several sequences in a row: what is generated comes after the row."""
    for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
        if given.get(name) is not None:
            raise ValueError(f"{name} must be None in generate: give each sequence a row, padded")
    for name in ("position_ids", "seq_idx"):
        numbers = given.get(name)
        if numbers is None or numbers.dim() != 2:
            continue
        mask, (batch, length) = given.get("attention_mask"), numbers.shape
        # numbers may be those of what comes after a past alone
        if mask is not None and len(mask) == batch and mask.shape[1] >= length > 0:
            mask = mask[:, -length:]
        else:
            mask = None
        if Packing.of(batch, length, mask, **{name: numbers}) is not None:
            raise ValueError(
                f"{name} must be of one sequence a row in generate: give each sequence a row, "
                "padded"
            )


def _check_past(cache: VortCache, left: int | None, mask: Tensor | None) -> None:
    """Refuse a prompt with nothing left to read, and a mask that hides what has been read."""
    seen = cache.get_seq_length()
    if left is not None and left < 1:
        raise ValueError(
            "past_key_values must leave at least the last token of the prompt to be read, got "
            f"{seen} seen of {seen + left}; a prompt without the tokens seen needs an "
            "attention_mask of all"
        )
    counts = [state["local.seen"] for state in cache.states.values() if "local.seen" in state]
    if mask is None or not counts:
        return
    for row, (read, told) in enumerate(zip(counts[0], mask[:, :seen].bool().sum(1), strict=False)):
        if read > told:
            raise ValueError(
                f"attention_mask hides {int(read - told)} tokens of row {row} that past_key_values "
                "has read, as it has what generate writes after the end of a row: a memory cannot "
                "take them back, leave it out to read all anew"
            )


def _marks_of(entity_mask: Tensor, seen: int, length: int) -> Tensor:
    """The marks of `length` tokens that come after `seen`; a mask may begin with either."""
    given = entity_mask.shape[1]
    if given != length and given < seen + length:
        raise ValueError(
            f"entity_mask must cover {seen + length} tokens, those of the past included, "
            f"got {given}"
        )
    return entity_mask if given == length else entity_mask[:, seen : seen + length]
