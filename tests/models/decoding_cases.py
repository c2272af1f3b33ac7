"""What a recorded step of decoding must be equal to; plain functions, run on a GPU with or without
pytest: `python -m tests.models.decoding_cases`.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from vort.models import VortConfig, VortForCausalLM, block, prefill
from vort.models import modeling_vort as modeling

# Of which some kernels know nothing: these must leave a layer to others.
OPTIONS: dict[str, dict[str, object]] = {
    " with learned rates": {"learn_basis": True},
    " with orders from values": {"order_input": "values"},
    " with free writes": {"write_gain": "scale"},
    " of layers that differ": {
        "layer_settings": [{"num_scales": 4, "num_features": 16}, {"sliding_window": 0}]
    },
}


def model_of(dtype: torch.dtype, **changes: object) -> VortForCausalLM:
    """A small model on the GPU with every part in it."""
    torch.manual_seed(0)
    config = VortConfig(
        **{
            "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "sliding_window": 16, "horizon": 1000, "output_gate": True,
            **changes,
        }
    )  # fmt: skip
    model: VortForCausalLM = VortForCausalLM(config).to("cuda", dtype).eval()
    return model


def without_graphs(function):  # type: ignore[no-untyped-def]
    """The function's result with every step computed launch by launch."""
    kept = modeling.graph_for
    modeling.graph_for = lambda *given: None
    try:
        return function()
    finally:
        modeling.graph_for = kept


def difference(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y.double()).norm() / y.double().norm()).item()


@torch.no_grad()
def steps_equal_the_uncached_forward(
    dtype: torch.dtype,
    batch: int = 2,
    state_dtype: torch.dtype = torch.float32,
    **changes: object,
) -> float:
    """The worst difference of a step's logits from those of the whole sequence."""
    model = model_of(dtype, **changes)
    ids = torch.randint(256, (batch, 60), device="cuda")
    whole = model(ids, use_cache=False).logits
    cache = model.new_cache(state_dtype=state_dtype)
    model(ids[:, :40], past_key_values=cache, use_cache=True)
    steps = [
        model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
        for t in range(40, 60)
    ]
    return difference(torch.cat(steps, 1), whole[:, 40:])


@torch.no_grad()
def blocks_step_in_six_launches(dtype: torch.dtype, **changes: object) -> float:
    """Share of a recorded step's blocks that took the way of many launches."""
    model = model_of(dtype, **changes)
    ids = torch.randint(256, (1, 8), device="cuda")
    cache = model.new_cache()
    model(ids, past_key_values=cache, use_cache=True)
    step, missed = block.attention_step, []

    def watched(*given):  # type: ignore[no-untyped-def]
        found = step(*given)
        missed.append(found is None)
        return found

    block.attention_step = watched
    try:
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    finally:
        block.attention_step = step
    return sum(missed) / len(missed) if missed else 1.0


@torch.no_grad()
def padding_at_the_end_is_not_replayed(dtype: torch.dtype) -> float:
    """Difference of a row's logits after another row had a step of padding, from it alone."""
    model = model_of(dtype)
    ids = torch.randint(256, (2, 12), device="cuda")
    cache, alone = model.new_cache(), model.new_cache()
    model(ids[:, :10], past_key_values=cache, use_cache=True)
    model(ids[1:, :10], past_key_values=alone, use_cache=True)
    model(ids[:, 10:11], past_key_values=cache, use_cache=True)
    model(ids[1:, 10:11], past_key_values=alone, use_cache=True)
    mask = torch.ones(2, 12, dtype=torch.long, device="cuda")
    mask[1, -1] = 0
    model(ids[:, 11:], past_key_values=cache, attention_mask=mask, use_cache=True)
    last = model(ids[:, :1], past_key_values=cache, use_cache=True).logits[1:]
    return difference(last, model(ids[1:, :1], past_key_values=alone, use_cache=True).logits)


@torch.no_grad()
def generation_is_the_same(dtype: torch.dtype) -> float:
    """Share of tokens that differ with and without graphs, rows left-padded."""
    model = model_of(dtype)
    ids = torch.randint(256, (3, 30), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7], mask[2, :20] = 0, 0

    def run() -> Tensor:
        found: Tensor = model.generate(
            ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None
        )
        return found

    return (run() != without_graphs(run)).float().mean().item()


@torch.no_grad()
def two_caches_take_turns(dtype: torch.dtype) -> float:
    """Worst difference of two interleaved sequences from the same ones apart."""
    model = model_of(dtype)
    ids = torch.randint(256, (2, 30), device="cuda")

    def run(order: list[int]) -> Tensor:
        caches = [model.new_cache() for _ in range(2)]
        found: list[list[Tensor]] = [[], []]
        for i in range(2):
            model(ids[i : i + 1, :20], past_key_values=caches[i], use_cache=True)
        place = [20, 20]
        for i in order:
            t = place[i]
            token = ids[i : i + 1, t : t + 1]
            found[i].append(model(token, past_key_values=caches[i], use_cache=True).logits)
            place[i] += 1
        return torch.cat([torch.cat(x, 1) for x in found])

    return difference(run([0, 1] * 10), run([0] * 10 + [1] * 10))


@torch.no_grad()
def new_weights_are_noticed(dtype: torch.dtype) -> float:
    """Difference from a fresh computation after the weights have changed in place."""
    model = model_of(dtype)
    ids = torch.randint(256, (1, 12), device="cuda")

    def run() -> Tensor:
        cache = model.new_cache()
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        parts = [
            model(ids[:, t : t + 1], past_key_values=cache, use_cache=True).logits
            for t in range(8, 12)
        ]
        return torch.cat(parts, 1)

    before = run()
    for parameter in model.parameters():
        parameter.mul_(1.05)
    after = run()
    assert difference(after, before) > 1e-3
    return difference(after, without_graphs(run))


@torch.no_grad()
def a_new_horizon_is_noticed(dtype: torch.dtype) -> float:
    """Difference from a fresh computation after the kernels were calibrated anew."""
    model = model_of(dtype)
    ids = torch.randint(256, (1, 12), device="cuda")

    def run() -> Tensor:
        cache = model.new_cache()
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        return model(ids[:, 8:9], past_key_values=cache, use_cache=True).logits  # type: ignore[no-any-return]

    run()
    model.set_horizon(100_000)
    return difference(run(), without_graphs(run))


def gradients_equal_those_of_modules(dtype: torch.dtype, **changes: object) -> float:
    """Worst relative difference of the loss's gradients from a model whose modules are called."""
    model = model_of(dtype, **{"num_hidden_layers": 2, **changes}).train()
    ids = torch.randint(256, (2, 200), device="cuda")
    mask = torch.ones_like(ids)
    mask[1, :30] = 0
    labels = ids.masked_fill(mask == 0, -100)

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        loss = model(ids, attention_mask=mask, labels=labels).loss
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    fused = gradients()
    hooks = [m.register_forward_hook(lambda *given: None) for m in model.modules()]
    called = gradients()
    for hook in hooks:
        hook.remove()
    assert fused.keys() == called.keys()
    return max(difference(fused[n], called[n]) for n in fused)


@torch.no_grad()
def prompts_of_a_shape_seen_before(dtype: torch.dtype, **changes: object) -> float:
    """Worst difference from the whole sequence: a prompt in two pieces and steps, time and again.

    The first of each shape is launched kernel by kernel, the second recorded, the rest replayed.
    """
    model = model_of(dtype, **changes)
    worst = 0.0
    for _ in range(4):
        ids = torch.randint(256, (2, 70), device="cuda")
        whole = model(ids, use_cache=False).logits
        cache = model.new_cache()
        last = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
        found = [model(ids[:, :40], **last).logits, model(ids[:, 40:64], **last).logits]
        found += [model(ids[:, t : t + 1], **last).logits for t in range(64, 70)]
        wanted = whole[:, [39, *range(63, 70)]]
        worst = max(worst, difference(torch.cat(found, 1), wanted))
    recorded = [g for g in prefill._graphs[model].values() if g is not None]
    assert len(recorded) == 2, "both pieces are recorded"
    return worst


BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
# Where flash-linear-attention is installed its kernels read the whole sequence, and multiply
# float32 as TF32; a step is computed in float32.
ITS_KERNELS, TF32 = ("gla", "gla_scales", "mamba2", "gated_delta"), 3e-3


class Printed(dict[str, tuple[float, float]]):
    """Says what is put into it."""

    def __setitem__(self, name: str, found: tuple[float, float]) -> None:
        error, bound = found
        print("ok  " if error <= bound else "FAIL", name, f"{error:.1e}", flush=True)
        super().__setitem__(name, found)


def all_differences() -> dict[str, tuple[float, float]]:
    """Every check by name: what was found, and its bound."""
    found = Printed()
    for dtype, bound in BOUNDS.items():
        name = str(dtype).split(".")[-1]
        variants: dict[str, dict[str, object]] = {
            "": {},
            " without entropy": {"use_entropy": False},
            " without convolution": {"conv_size": 0},
            " with one exponential": {"memory": "exponential"},
            " with a mixture": {"memory": "mixture"},
            " with gla": {"memory": "gla"},
            " with gla of many states": {"memory": "gla_scales", "num_scales": 4},
            " with mamba2": {"memory": "mamba2"},
            " with gated_delta": {"memory": "gated_delta"},
            " without a memory": {"memory": "none"},
            ", one row": {"batch": 1},
            ", three rows": {"batch": 3},
            ", sixteen rows": {"batch": 16},
            ", seventy rows": {"batch": 70},
            " without groups": {"num_key_value_heads": 4, "batch": 1},
            " without a window": {"sliding_window": 0},
            " with a long window": {"sliding_window": 300},
            " without gates": {"output_gate": False, "write_gate": False, "read_weights": False},
            " without norms": {"qk_norm": False, "output_norm": False},
            " without RoPE": {"rope_theta": None},
            " unnormalised": {"normalizer": "none", "qk_norm": True},
            " with undecayed sums": {"normalizer": "undecayed", "include_self": False},
            " with biases": {"attention_bias": True},
            " with FAVOR": {"feature_map": "favor"},
            " with elu": {"feature_map": "elu"},
            " with banks": {"routing": "banks", "num_banks": 3},
            " with entities": {"use_entity": True},
            " with a convolution of 2": {"conv_size": 2},
            **OPTIONS,
        }
        for kind, changes in variants.items():
            error = steps_equal_the_uncached_forward(dtype, **changes)  # type: ignore[arg-type]
            theirs = changes.get("memory") in ITS_KERNELS and find_spec("fla") is not None
            found[f"steps{kind}, {name}"] = (error, max(bound, TF32) if theirs else bound)
        narrow = {"state_dtype": torch.bfloat16}
        for kind, changes in {"": {}, " without a window": {"sliding_window": 0}}.items():
            error = steps_equal_the_uncached_forward(dtype, **narrow, **changes)  # type: ignore[arg-type]
            found[f"steps, bfloat16 states{kind}, {name}"] = (error, 3e-2)
        for kind, changes in {"": {}, " with banks": {"routing": "banks", "num_banks": 3}}.items():
            error = prompts_of_a_shape_seen_before(dtype, **changes)  # type: ignore[arg-type]
            found[f"prompts{kind}, {name}"] = (error, bound)
        missed = blocks_step_in_six_launches(dtype)
        found[f"blocks of many launches, {name}"] = (missed, 0.0)
        found[f"padding at the end, {name}"] = (padding_at_the_end_is_not_replayed(dtype), bound)
        found[f"two caches, {name}"] = (two_caches_take_turns(dtype), bound)
        found[f"new weights, {name}"] = (new_weights_are_noticed(dtype), bound)
        found[f"new horizon, {name}"] = (a_new_horizon_is_noticed(dtype), bound)
        for kind, changes in {"": {}, **OPTIONS}.items():
            error = gradients_equal_those_of_modules(dtype, **changes)
            found[f"gradients{kind}, {name}"] = (error, 3 * bound)
    found["generation, float32"] = (generation_is_the_same(torch.float32), 0.0)
    return found


if __name__ == "__main__":
    all_differences()
