"""A saved model and its tokenizer, for commands that run one."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vort.models import VortForCausalLM


def load_model(name: str, device: str) -> "tuple[VortForCausalLM, PreTrainedTokenizerBase]":
    """The model in evaluation mode on a device; a folder without a tokenizer is read as bytes."""
    from transformers import AutoTokenizer

    from vort.models import ByteTokenizer, VortForCausalLM

    model: VortForCausalLM = VortForCausalLM.from_pretrained(name)
    model.eval()  # type: ignore[no-untyped-call]
    model.to(device)  # type: ignore[arg-type]  # transformers' annotation hides nn.Module's
    if Path(name).is_dir() and not (Path(name) / "tokenizer_config.json").is_file():
        return model, ByteTokenizer()
    return model, AutoTokenizer.from_pretrained(name)
