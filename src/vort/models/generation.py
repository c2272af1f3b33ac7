"""What `generate` asks of a model whose past is a memory: a cache of its own, and little else.

Positions follow from what has been seen, and a generated token needs no mask.
"""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, MaxLengthCriteria

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
        if not self.model.keeps_state:
            # Every token is then read anew with all before it.
            generation_config.use_cache = model_kwargs["use_cache"] = False
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
        """What the next step is prepared from: its tokens are generated ones."""
        found: dict[str, Any] = super()._update_model_kwargs_for_generation(
            outputs, model_kwargs, *args, **kwargs
        )
        return found | {"generated": True}

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        *args: Any,
        inputs_embeds: Tensor | None = None,
        entity_mask: Tensor | None = None,
        generated: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """What `forward` gets at each step: embeddings and entities go with the prompt alone.

        A generated token is no padding: with a cache it needs no mask, which a recorded step would
        have to wait for the GPU to look at.
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
        if entity_mask is not None and tokens is not None:
            length = tokens.shape[1]
            if entity_mask.shape[1] >= length and length > 1:
                inputs["entity_mask"] = entity_mask[:, -length:]
        return inputs
