"""Logits where something is asked, from models of any make."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Objective", "Scorer", "Scores"]

# Models that can be asked for some positions alone are, where these are one of so many or fewer.
_FEW = 2
# From a model and a compact batch (`vort.lab.training.data.compact`) to a scalar loss.
Objective = Callable[[nn.Module, dict[str, Tensor]], Tensor]


class Scores(dict[str, Tensor]):
    """`loss` (a scalar), and `logits` `[N, num_classes]` where the model gives logits.

    A dict, so that wrappers for several devices know how to hand it on.
    """


class Scorer(nn.Module):
    """A model that answers only the questions asked.

    At 10,000 positions with 64 queries, logits of all positions would be most of the memory. Models
    made of `base_model` and a linear head (Hugging Face's) are taken apart so that the head sees
    only labelled positions, once a trial has shown that the two parts are all there is (some models
    cap or scale logits). Others compute all logits, of which the labelled ones are kept. A model
    that returns a scalar, or an output with `loss` but no `logits`, is trained on that loss.

    Args:
        model: called with `input_ids` `[B, T]`, and with `labels` if it is no Hugging Face model
            and takes them (unshifted, -100 where nothing is asked); `entity_mask` goes to models
            that take it, and `position_ids` where rows hold several sequences.
        num_classes: logits beyond these are cut off: no label is there.
        objective: the loss to train on instead of cross-entropy.
    """

    def __init__(
        self, model: nn.Module, num_classes: int, objective: Objective | None = None
    ) -> None:
        super().__init__()
        self.model = model
        self.num_classes = num_classes
        self.objective = objective
        self.gives_logits = True
        names = inspect.signature(model.forward).parameters
        self.hugging_face = hasattr(model, "get_output_embeddings")
        # A state to go on from, which nobody will, is memory and time.
        self.options = {"use_cache": False} if "use_cache" in names else {}
        known = {"position_ids"}
        if getattr(getattr(model, "base_model", model), "needs_entity", True):
            known.add("entity_mask")
        self.extras = [name for name in names if name in known]
        self.wants_labels = "labels" in names and not self.hugging_face
        self.has_parts = self._parts_are_all()
        base = getattr(model, "base_model", model)
        self.asks = "asked" in inspect.signature(base.forward).parameters

    def forward(self, batch: dict[str, Tensor]) -> Scores:
        """Scores of a compact batch: `input_ids` `[B, T]`, flat `positions` and `targets` `[N]`."""
        if self.training and self.objective is not None:
            return Scores(loss=self.objective(self.model, batch))
        if "position_ids" in batch and "position_ids" not in self.extras:
            raise TypeError(
                f"{type(self.model).__name__} must take position_ids to learn from rows of several "
                "sequences, which may not see each other; or set the task's packed=False"
            )
        given: dict[str, Any] = {name: batch[name] for name in self.extras if name in batch}
        given |= self.options
        targets, positions = batch["targets"], batch["positions"]
        if self.has_parts:
            model: Any = self.model
            count = batch["input_ids"].numel()
            if self.asks and _FEW * len(positions) <= count:
                given["asked"] = positions
            hidden = model.base_model(input_ids=batch["input_ids"], **given)[0].flatten(0, -2)
            # Where all are asked, in order, there is nothing to pick.
            if "asked" not in given and len(positions) < count:
                hidden = hidden[positions]
            logits = model.get_output_embeddings()(hidden)
        else:
            if self.wants_labels:
                given["labels"] = _spread(batch)
            found = self._call(batch["input_ids"], given)
            if found.get("logits") is None:
                self.gives_logits = False
                return Scores(loss=found["loss"])
            logits = found["logits"].flatten(0, 1)[positions]
        logits = logits[:, : self.num_classes].float()
        # A mean over nothing would be no number.
        loss = nn.functional.cross_entropy(logits, targets) if len(targets) else logits.sum()
        return Scores(loss=loss, logits=logits)

    def _call(self, input_ids: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """Whatever a model returns, as a dict with `logits` or `loss`."""
        found = self.model(input_ids, **given)
        if isinstance(found, Tensor):
            return {"loss" if found.ndim == 0 else "logits": found}
        if isinstance(found, dict):
            return found
        if hasattr(found, "logits") or hasattr(found, "loss"):
            return {name: getattr(found, name, None) for name in ("logits", "loss")}  # type: ignore[misc]
        if isinstance(found, tuple) and isinstance(found[0], Tensor):
            return {"logits": found[0]}
        raise TypeError(
            "a model must return logits [B, T, V], a scalar loss, or an output with one of them, "
            f"got {type(found).__name__}"
        )

    @torch.no_grad()
    def _parts_are_all(self) -> bool:
        """Whether head(base_model(x)) is what the model computes."""
        model: Any = self.model
        head = model.get_output_embeddings() if self.hugging_face else None
        base = getattr(model, "base_model", None)
        if not isinstance(head, nn.Linear) or not isinstance(base, nn.Module) or base is model:
            return False
        training = model.training
        model.eval()
        trial = torch.arange(8, device=head.weight.device)[None] % self.num_classes
        whole = model(input_ids=trial, **self.options).logits
        parts = head(base(input_ids=trial, **self.options)[0])
        model.train(training)
        return whole.shape == parts.shape and torch.equal(whole, parts)


def _spread(batch: dict[str, Tensor]) -> Tensor:
    """Labels `[B, T]` of a compact batch."""
    labels = torch.full_like(batch["input_ids"], -100)
    labels.view(-1)[batch["positions"]] = batch["targets"]
    return labels
