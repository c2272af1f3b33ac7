"""VORT as a Hugging Face model: a stack of pre-norm blocks, and a language model on top."""

# transformers leaves its own hooks untyped.
# mypy: disable-error-code="no-untyped-call"

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from vort.fractional._checks import check_at_least
from vort.layers import LayerStates, RMSNorm
from vort.layers.packing import Packing, check_call, is_exporting
from vort.layers.parts import VortMLP
from vort.memories import Memory
from vort.memories.retention_memory import RetentionMemory
from vort.models.block import VortBlock, are_bare, memory_in, mlp_width
from vort.models.cache_vort import VortCache, wrong_cache
from vort.models.configuration_vort import VortConfig
from vort.models.decoding import can_record, fingerprint, graph_for, step_for
from vort.models.folder import check_files, check_weights, show_in_transformers
from vort.models.generation import VortGenerationMixin
from vort.models.prefill import pieces_of, prefill_graph_for
from vort.models.tensor_parallel import register_styles, tensor_parallel_plan
from vort.ops.asked import Asked, check_places, check_range, norm_of_asked
from vort.ops.custom import traced
from vort.ops.gpu.launcher import has_triton, transformed
from vort.ops.linear import is_plain, is_watched, linear_cross_entropy, products
from vort.ops.padding import check_no_past, may_look, present

__all__ = ["VortBlock", "VortForCausalLM", "VortMLP", "VortModel", "mlp_width"]

# What a misspelt keyword may have been meant as.
_ARGUMENTS = (
    "input_ids", "attention_mask", "past_key_values", "inputs_embeds", "use_cache", "entity_mask",
    "output_hidden_states", "output_orders", "return_dict", "asked",
)  # fmt: skip
_ENTITIES = "entity_mask"
_ARGUMENTS_OF_HEAD = ("labels", "logits_to_keep", "shift_labels", "num_items_in_batch")


@dataclass
class VortModelOutput(BaseModelOutputWithPast):
    """Hidden states, cache, and on request the orders `[B, T, H]` of every layer."""

    orders: tuple[Tensor | None, ...] | None = None


@dataclass
class VortCausalLMOutput(CausalLMOutputWithPast):
    """Logits, loss, cache, and on request the orders `[B, T, H]` of every layer."""

    orders: tuple[Tensor | None, ...] | None = None


class VortPreTrainedModel(PreTrainedModel):
    """What the base model and the language model share."""

    config_class = VortConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    config: VortConfig
    _no_split_modules = ["VortBlock"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    # A memory cannot be taken back by a few tokens: no assisted decoding.
    _is_stateful = True
    _can_compile_fullgraph = True

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """The model saved in a folder or on the Hub; OSError in words if its file is damaged.

        Damaged means too: tensors are missing, or hold NaN or infinity. With output_loading_info
        what is missing is for the caller to judge.
        """
        name = pretrained_model_name_or_path
        check_files(name)
        shown = kwargs.pop("output_loading_info", False)
        kwargs.setdefault("use_safetensors", True)
        try:
            loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        except SafetensorError as error:
            raise OSError(
                f"the weights in {name} (model.safetensors) are damaged "
                f"or incomplete: {error}; copy or download them again"
            ) from error
        model, info = loaded
        check_weights(name, model, () if shown else info["missing_keys"])
        return (model, info) if shown else model

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing to do: saved folders name `vort_auto.py`, no copy of this file."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initial values; modules of this package know their own."""
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own and all(getattr(x, "_is_hf_initialized", False) for x in own):
            return  # loaded from a checkpoint
        reset = getattr(module, "reset_parameters", None)
        ours = getattr(type(module), "reset_parameters", None) is not nn.Linear.reset_parameters
        if ours and type(module).__module__.startswith("vort.") and reset is not None:
            reset()
        else:
            super()._init_weights(module)


def _check_asked(asked: Tensor, count: int | None) -> None:
    """Refuse what are no places, or of `count` positions none; values only where that is free."""
    check_places(asked)
    if asked.device.type != "cpu" or not len(asked) or traced(asked):
        return
    if count is not None:
        check_range(asked, count)
    if len(asked.unique()) < len(asked):
        raise ValueError("asked must name each place once")


class VortModel(VortPreTrainedModel):
    """Token embeddings, blocks, a final norm: hidden states for every token.

    >>> config = VortConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    >>> model = VortModel(config)
    >>> model(torch.randint(256, (1, 20))).last_hidden_state.shape
    torch.Size([1, 20, 64])
    """

    def __init__(self, config: VortConfig) -> None:
        config.mlp_size = mlp_width(config)
        config.base_model_tp_plan = tensor_parallel_plan(config)  # type: ignore[misc]  # never saved
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            VortBlock(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate all layers for lags up to `horizon`, weights unchanged.

        See `Router.set_horizon` for what changes. The horizon is saved with the model; caches made
        before are void. Where layers differ, those without one stay as they are, and so do those
        with one of their own (`layer_settings`).
        """
        horizon = check_at_least(horizon, 1, "horizon")
        own = ["horizon" in self.config.own_settings(i) for i in range(len(self.layers))]
        if all(own):
            raise ValueError("set_horizon needs a layer without a horizon of its own, got none")
        shared = [m for m, has in zip(self.memories, own, strict=True) if not has]
        made_for_one = [m for m in shared if type(m).set_horizon is not Memory.set_horizon]
        for memory in made_for_one or shared:
            memory.set_horizon(horizon)
        self.config.horizon = horizon

    @property
    def memories(self) -> list[Memory]:
        """What each layer keeps of the past; it is found within what has wrapped a layer."""
        return [memory_in(block) for block in self.layers]

    @property
    def keeps_state(self) -> bool:
        """Whether a state stands for the past in every layer."""
        return all(memory.keeps_state for memory in self.memories)

    @property
    def needs_entity(self) -> bool:
        """Whether any layer looks at an `entity_mask`; else one is refused."""
        return any(memory.needs_entity for memory in self.memories)

    def new_cache(
        self, *, static: bool = False, state_dtype: torch.dtype = torch.float32
    ) -> VortCache:
        """An empty cache for `past_key_values`; its arguments as `VortCache` has them."""
        retained = all(memory.is_retention for memory in self.memories)
        if state_dtype != torch.float32 and not retained:
            raise ValueError(
                f"state_dtype={state_dtype} needs a memory of decaying states, such as "
                f"memory='vort', got memory {self.config.memory_in_words()}"
            )
        grows = any(memory.state_size(1) != memory.state_size(0) for memory in self.memories)
        layers = self.config.num_hidden_layers
        return VortCache(layers, static=static, state_dtype=state_dtype, grows=grows)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: VortCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        entity_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_orders: bool = False,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        asked: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states `[B, T, hidden_size]` of tokens `[B, T]`.

        Args:
            input_ids: `[B, T]` tokens; give these or inputs_embeds.
            attention_mask: `[B, T]` or `[B, past + T]`, 0 at padding, on whichever side.
            past_key_values: the memory so far (`new_cache()`); updated in place if use_cache.
            inputs_embeds: `[B, T, hidden_size]` instead of tokens.
            use_cache: keep the memory after the last token. Default: config.use_cache, but not
                in training, nor where the memory has no state or rows are packed by position_ids.
            cu_seqlens: `[N + 1]` bounds of sequences packed into one row.
            entity_mask: `[B, T]`, or `[B, past + T]`: 1 at tokens of a named entity; for memories
                that look at it (`use_entity`).
            output_hidden_states: also return the input of every block and the last output.
            output_orders: also return the orders of every layer.
            return_dict: False for a tuple.
            position_ids: `[B, T]`. Positions follow from what has been seen, so what counts up
                changes nothing; what begins anew within a row is packed sequences, each with a
                memory, a window and a convolution of its own (`DataCollatorWithFlattening`).
            seq_idx: `[B, T]`, the number of each token's sequence, for packed ones too.
            asked: `[N]`, flat places b T + t of the only positions whose hidden states are wanted,
                each once: they come as `[N, hidden_size]`. The last block then leaves out what
                the others would need: on a CPU all of it, with the same result and the same
                gradients; on a GPU what follows the memory, the same but for rounding.
            **kwargs: other names of the same, cu_seq_lens_q and cu_seq_lens_k, max_length_q and
                max_length_k; what callers of other models send and needs no answer; no others.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        # This process's part of sequences that are cut over several, see `vort.distributed`.
        part = kwargs.pop("part", None)
        check_call(type(self).__name__, kwargs, _ARGUMENTS)
        if not isinstance(past_key_values, LayerStates | None):
            raise TypeError(wrong_cache(past_key_values))
        _check_layers(past_key_values, self.config)
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if hidden.dim() != 3:
            given = hidden.shape if input_ids is None else input_ids.shape
            raise ValueError(
                "input_ids must be [B, T], or inputs_embeds [B, T, hidden_size], "
                f"got shape {tuple(given)}"
            )
        if attention_mask is not None and past_key_values is None:
            check_no_past(attention_mask, hidden.shape[1])
        mask = _mask_of(attention_mask, hidden)
        packing = self._packing(
            hidden, mask, past_key_values, cu_seqlens, position_ids, seq_idx, kwargs
        )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and self.keeps_state
            use_cache = use_cache and (packing is None or cu_seqlens is not None)
        if self.gradient_checkpointing and self.training:
            if use_cache and past_key_values is not None:
                raise ValueError(
                    "use_cache must be False with gradient checkpointing in training, whose blocks "
                    "run twice: past_key_values can be read then, and not moved on"
                )
            use_cache = False
            # Read again in the backward, whatever has become of it by then.
            past_key_values = None if past_key_values is None else past_key_values.copy()
        if use_cache and past_key_values is None:
            past_key_values = self.new_cache()
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        shape = hidden.shape[0], hidden.shape[1]
        if entity_mask is not None:
            if not self.needs_entity:
                raise ValueError("entity_mask needs a memory that looks at it: set use_entity=True")
            entity_mask = present(entity_mask, *shape, "entity_mask")
        if packing is None and mask is not None and part is None:
            packing = self._without_padding(hidden, mask, past_key_values)
        if packing is not None:
            # Padding stands apart from the sequences and needs no mask.
            mask, cu_seqlens, hidden = None, packing.bounds, packing.lay(hidden)
            entity_mask = None if entity_mask is None else packing.lay(entity_mask)
        options = {
            "attention_mask": mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "cu_seqlens": cu_seqlens,
            "entity_mask": entity_mask,
            "output_orders": output_orders,
        }
        options |= {} if part is None else {"part": part}
        keep = bool(output_hidden_states)
        alone = None
        if asked is not None:
            _check_asked(asked, hidden.shape[0] * hidden.shape[1] if packing is None else None)
            alone = self._alone(asked, hidden, options, keep)
        through = self._through_untraced if _leaves_to_kernels(hidden) else self._through
        hidden, states, orders = through(hidden, options, keep, alone)
        if packing is not None:
            hidden = packing.back(hidden, shape)
            states = [packing.back(x, shape) for x in states]
            orders = [None if x is None else packing.back(x, shape) for x in orders]
        if asked is not None:
            hidden = hidden.flatten(0, 1)[asked] if alone is None else hidden[: len(asked)]
        result = VortModelOutput(
            last_hidden_state=hidden,  # type: ignore[arg-type]
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, hidden) if output_hidden_states else None,  # type: ignore[arg-type]
            orders=tuple(orders) if output_orders else None,
        )
        return result if _as_dict(return_dict, self.config) else result.to_tuple()

    def _packing(
        self,
        hidden: Tensor,
        mask: Tensor | None,
        cache: LayerStates | None,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        seq_idx: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Packing | None:
        """Where sequences of packed rows begin, asked once for all layers; None without any."""
        named = (cu_seqlens, position_ids, seq_idx)
        if not kwargs and all(x is None for x in named):
            return None
        given = kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
        if given is not None and mask is not None:
            raise ValueError("give attention_mask or cu_seqlens, not both")
        batch, length = hidden.shape[:2]
        return Packing.of(
            batch,
            length,
            mask,
            cu_seqlens=cu_seqlens,
            continues=cache is not None and cache.load_state(0) is not None,
            position_ids=position_ids,
            seq_idx=seq_idx,
            **kwargs,
        )

    def _without_padding(
        self, hidden: Tensor, mask: Tensor, cache: LayerStates | None
    ) -> Packing | None:
        """The tokens of padded rows alone, for all layers; None where rows go as they are.

        On a GPU nothing is computed for padding then, and every layer is the one of packed rows.
        """
        if cache is not None or not packs_well(hidden) or not may_look(mask):
            return None
        # Others take packed rows a sequence at a time; and whoever looks on expects rows.
        known = all(
            type(block) is VortBlock
            and block.has_own_parts
            and isinstance(block.self_attn.memory, RetentionMemory)
            for block in self.layers
        )
        if not known or is_watched(*self.layers):
            return None
        packing = Packing.of_tokens(mask)
        return packing if packing.places is not None and packing.places.numel() else None

    def _alone(
        self, places: Tensor, hidden: Tensor, options: dict[str, Any], keep: bool
    ) -> Asked | None:
        """Places of whole sequences that the last block may be asked for alone; None: of all."""
        other = any(x is not None and x is not False for k, x in options.items() if k != _ENTITIES)
        if other or keep or (self.gradient_checkpointing and self.training) or not self.layers:
            return None
        last: Any = self.layers[-1]
        known = are_bare(self.norm) and type(last) is VortBlock
        if not known or traced(hidden) or transformed():
            return None
        asked = Asked(places.to(hidden.device), *hidden.shape[:2])
        plain = hidden.device.type == "cpu" and not torch.is_autocast_enabled("cpu")
        return asked if (asked.late or plain) and last.takes_asked(asked) else None

    def _through(
        self, hidden: Tensor, options: dict[str, Any], keep: bool, asked: Asked | None = None
    ) -> tuple[Tensor, list[Tensor], list[Tensor | None]]:
        """Hidden states after all blocks and the norm; before each block, if kept; all orders.

        asked: of these positions alone, `[rows, hidden_size]` as `vort.ops.asked` has them.
        """
        states: list[Tensor] = []
        orders: list[Tensor | None] = []
        # Where kernels add a block's result as they norm it for the next, it is left to them.
        whole = keep or (self.gradient_checkpointing and self.training)
        whole = whole or not is_plain(hidden) or not are_bare(self.norm)
        delta: Tensor | None = None
        for block in self.layers[: None if asked is None else -1]:
            if whole or type(block) is not VortBlock or is_watched(block):
                hidden = hidden if delta is None else hidden + delta
                states.append(hidden)
                (hidden, order), delta = block(hidden, **options), None
            else:
                hidden, delta, order = block.deferred(hidden, delta, **options)
            orders.append(order)
        if asked is not None:
            last: Any = self.layers[-1]
            hidden, delta = last.of_asked(hidden, delta, asked, options[_ENTITIES])
        if asked is not None and not asked.late:
            hidden = norm_of_asked(hidden, *self.norm.fused(), asked)
        elif delta is None:
            hidden = self.norm(hidden)
        else:
            _, hidden = products(hidden, delta=delta, norm=self.norm.fused())
        return hidden, states, orders

    @torch.compiler.disable(  # type: ignore[untyped-decorator]
        reason="on a GPU the blocks are kernels already, which torch.compile would take apart"
    )
    def _through_untraced(self, *given: Any) -> Any:
        """`_through` as it is, whatever traces: compiled in seconds, and as fast as it is."""
        return self._through(*given)


class VortForCausalLM(VortPreTrainedModel, VortGenerationMixin):
    """A language model that trains, saves, loads and generates like any other.

    >>> config = VortConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=2)
    >>> model = VortForCausalLM(config).eval()
    >>> prompt = torch.randint(256, (1, 20))
    >>> model.generate(prompt, max_new_tokens=5, do_sample=False, eos_token_id=None).shape
    torch.Size([1, 25])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012

    def __init__(self, config: VortConfig) -> None:
        super().__init__(config)
        self.model = VortModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def set_horizon(self, horizon: int) -> None:
        """Re-calibrate all layers for lags up to `horizon`; see `VortModel.set_horizon`."""
        self.model.set_horizon(horizon)

    def new_cache(
        self, *, static: bool = False, state_dtype: torch.dtype = torch.float32
    ) -> VortCache:
        """An empty cache for `past_key_values`; its arguments as `VortCache` has them."""
        cache: VortCache = self.model.new_cache(static=static, state_dtype=state_dtype)
        return cache

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: VortCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        entity_mask: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        output_orders: bool = False,
        return_dict: bool | None = None,
        position_ids: Tensor | None = None,
        seq_idx: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits `[B, T, vocab_size]`, and the loss if there are labels.

        Args as in `VortModel.forward`, and:
            labels: `[B, T]`, the tokens themselves: position t is scored on t + 1; -100 is left
                out, and so is what `attention_mask` calls padding. Packed sequences should have
                -100 at each start. In training on a GPU the loss is made without ever holding all
                logits: `logits` is then None, unless `logits_to_keep` asks for some.
            logits_to_keep: the last so many positions, or an index of positions; 0: all. The loss
                is that of the same positions.
            num_items_in_batch: what the sum of losses is divided by; tokens scored by default.
            shift_labels: `[B, T]` instead of labels: what position t is scored on, itself.

        On a GPU a step of decoding (one token a row, a cache, no gradients) is recorded as a CUDA
        graph and replayed, with the same result; on a CPU that of one row of a small model is
        `vort.layers.plain_step`'s.
        """
        # Not in the signature: Trainer would take it for a label that every batch must have.
        targets = _targets(labels, kwargs.pop("shift_labels", None), attention_mask)
        part = kwargs.pop("part", None)
        if kwargs.get("asked") is not None:
            raise TypeError("asked is for the model without its head: call `.model` with it")
        check_call(type(self).__name__, kwargs, (*_ARGUMENTS, *_ARGUMENTS_OF_HEAD))
        kwargs |= {} if part is None else {"part": part}
        alone = targets is None and inputs_embeds is None and cu_seqlens is None
        # Where sequences begin is asked in the model; a single token begins none.
        alone = alone and seq_idx is None and not kwargs
        alone = alone and (position_ids is None or position_ids.shape[-1] == 1)
        quiet = not (output_orders or output_hidden_states or self.config.output_hidden_states)
        keeps = self.config.use_cache if use_cache is None else use_cache
        if alone and quiet and entity_mask is None and keeps:
            replayed = self._replay(input_ids, attention_mask, past_key_values)
            last = isinstance(logits_to_keep, int) and logits_to_keep == 1
            if replayed is None and last and self.model.keeps_state:
                given = (input_ids, attention_mask, past_key_values)
                replayed, past_key_values = self._read_prompt(*given)
            if replayed is not None:
                step = VortCausalLMOutput(logits=replayed, past_key_values=past_key_values)
                return step if _as_dict(return_dict, self.config) else step.to_tuple()
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cu_seqlens=cu_seqlens,
            entity_mask=entity_mask,
            output_hidden_states=output_hidden_states,
            output_orders=output_orders,
            return_dict=True,
            position_ids=position_ids,
            seq_idx=seq_idx,
            **kwargs,
        )
        hidden = found.last_hidden_state
        if targets is not None and targets.shape != hidden.shape[:2]:
            raise ValueError(
                f"labels must be {list(hidden.shape[:2])}, one for each position, "
                f"got {list(targets.shape)}"
            )
        if targets is not None and not targets.shape[1]:
            raise ValueError(f"labels must be of at least one position, got {list(targets.shape)}")
        whole = isinstance(logits_to_keep, int) and logits_to_keep == 0
        usual = self.training and whole and self.loss_function is ForCausalLMLoss
        if targets is not None and usual and is_plain(hidden, self.lm_head):
            count = num_items_in_batch
            count = (targets != -100).sum() if count is None else count
            total: Any = linear_cross_entropy(hidden, self.lm_head.weight, targets)
            fused = VortCausalLMOutput(
                loss=total / count,
                past_key_values=found.past_key_values,
                hidden_states=found.hidden_states,
                orders=found.orders,
            )
            return fused if _as_dict(return_dict, self.config) else fused.to_tuple()
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept])
        loss = None
        if targets is not None:
            loss = self.loss_function(
                logits=logits,
                labels=labels,
                shift_labels=targets[:, kept].contiguous(),
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        result = VortCausalLMOutput(
            loss=loss,
            logits=logits,
            past_key_values=found.past_key_values,
            hidden_states=found.hidden_states,
            orders=found.orders,
        )
        return result if _as_dict(return_dict, self.config) else result.to_tuple()

    def _replay(self, tokens: Tensor | None, mask: Tensor | None, cache: VortCache | None) -> Any:
        """Logits of one more token in every row, from a recorded step; None where there is none."""
        if (
            torch.compiler.is_compiling()
            or tokens is None
            or tokens.dim() != 2
            or tokens.shape[1] != 1
        ):
            return None
        if not isinstance(cache, VortCache) or (mask is not None and mask.dim() != 2):
            return None
        if mask is not None and not (len(mask) == len(tokens) and bool(mask[:, -1:].all())):
            return None
        if tokens.device.type == "cpu":
            step = step_for(self, cache, tokens)
            return None if step is None else step(int(tokens), cache)[None, None]
        graph = graph_for(self, cache, tokens)
        return None if graph is None else graph.step(tokens, cache)

    def _read_prompt(
        self, tokens: Tensor | None, mask: Tensor | None, cache: VortCache | None
    ) -> tuple[Tensor | None, VortCache | None]:
        """Logits after a prompt that is long, or of a shape seen before, and the cache after it.

        No logits where a call of the model will do as well; see `vort.models.prefill`.
        """
        if torch.is_grad_enabled() or self.training or torch.compiler.is_compiling():
            return None, cache
        if tokens is None or tokens.dim() != 2 or not isinstance(cache, VortCache | None):
            return None, cache
        _check_layers(cache, self.config)
        if mask is not None and cache is None:
            check_no_past(mask, tokens.shape[1])
        pieces = pieces_of(tokens)
        shown = None if mask is None else _mask_of(mask, tokens)
        records = tokens.shape[1] > 1 and shown is None and can_record(self, tokens)
        if len(pieces) == 1 and not records:
            return None, cache
        cache = self.new_cache() if cache is None else cache
        logits = None
        for piece in pieces:
            part = tokens[:, piece]
            graph = prefill_graph_for(self, cache, part, fingerprint(self)) if records else None
            if graph is not None:
                logits = graph.run(part, cache)
            elif len(pieces) > 1:
                seen = None if shown is None else shown[:, piece]
                found = self.model(part, seen, cache, use_cache=True).last_hidden_state
                logits = self.lm_head(found[:, -1:])
        return logits, cache


def _check_layers(cache: object, config: VortConfig) -> None:
    """Refuse the cache of another model, where that can be told by its layers."""
    count = config.num_hidden_layers
    if isinstance(cache, VortCache) and cache.num_layers != count:
        raise ValueError(
            f"past_key_values must be of as many layers as the model has, {count}, "
            f"got a cache of {cache.num_layers}"
        )


def _mask_of(attention_mask: Tensor | None, hidden: Tensor) -> Tensor | None:
    """The mask of the new positions, None where all are tokens: looked at once, for all layers."""
    if attention_mask is None:
        return None
    mask = present(attention_mask, *hidden.shape[:2])
    return None if may_look(mask) and bool(mask.all()) else mask


def packs_well(hidden: Tensor) -> bool:
    """Whether sequences of all lengths in one row are as fast as rows: where kernels are."""
    return is_plain(hidden)


def _targets(
    labels: Tensor | None, shift_labels: Tensor | None, mask: Tensor | None
) -> Tensor | None:
    """What each position is scored on, `[B, T]`; -100: on nothing.

    Padding is scored on nothing, and of `labels` nothing is scored on it: they hold whatever stands
    there. Who has shifted them has said what counts.
    """
    given = labels if shift_labels is None else shift_labels
    if given is None:
        return None
    padding = None if mask is None else present(mask, *given.shape[:2]) == 0
    if shift_labels is None:
        known = given if padding is None else given.masked_fill(padding, -100)
        given = nn.functional.pad(known[:, 1:], (0, min(1, known.shape[1])), value=-100)
    return given if padding is None else given.masked_fill(padding, -100)


def _leaves_to_kernels(hidden: Tensor) -> bool:
    """Whether torch.compile should leave the blocks alone; what is exported is traced."""
    compiles = torch.compiler.is_compiling() and not is_exporting()
    return compiles and hidden.is_cuda and has_triton()


def _as_dict(return_dict: bool | None, config: VortConfig) -> bool:
    return bool(config.return_dict) if return_dict is None else return_dict


AutoConfig.register("vort", VortConfig, exist_ok=True)
AutoModel.register(VortConfig, VortModel, exist_ok=True)
AutoModelForCausalLM.register(VortConfig, VortForCausalLM, exist_ok=True)
show_in_transformers(VortForCausalLM)
register_styles()
