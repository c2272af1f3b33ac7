"""A saved model is a folder: what stands in it so that others find us, what is refused of it.

transformers knows a model type once its package is imported, and looks for no plug-ins. A folder
therefore holds a file of code that imports this package: `trust_remote_code=True` has the Auto
classes run it where nobody has imported vort by hand.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers.models.auto import modeling_auto

from vort.files import write_atomically

__all__ = [
    "AUTO_MAP",
    "check_files",
    "check_weights",
    "show_in_transformers",
    "teach_peft",
    "write_code",
]

_CODE = "vort_auto.py"
_TEXT = '''"""Where transformers finds the classes of this model: in the package vort."""

from vort.models import ByteTokenizer, VortConfig, VortForCausalLM, VortModel

__all__ = ["ByteTokenizer", "VortConfig", "VortForCausalLM", "VortModel"]
'''
AUTO_MAP = {
    "AutoConfig": "vort_auto.VortConfig",
    "AutoModel": "vort_auto.VortModel",
    "AutoModelForCausalLM": "vort_auto.VortForCausalLM",
}
_READ = {".json", ".safetensors", ".jinja", ".model", ".txt", ".py"}


def write_code(folder: str | Path) -> None:
    """Put the file that `AUTO_MAP` speaks of into a folder."""
    write_atomically(Path(folder) / _CODE, _TEXT)


def check_files(name: Any) -> None:
    """Refuse a folder with a pipe or a device where a file is read: reading would never end."""
    if not isinstance(name, str | Path) or not Path(name).is_dir():
        return
    for path in sorted(Path(name).iterdir()):
        if path.suffix in _READ and path.exists() and not path.is_file():
            raise OSError(f"{path} is no regular file, so it cannot be part of a model")


def check_weights(name: Any, model: nn.Module, missing: Any) -> None:
    """Refuse weights that are not all there, or not all numbers."""
    if missing:
        first = sorted(missing)[0]
        raise OSError(
            f"the weights in {name} are incomplete: of the tensors that config.json asks for "
            f"{len(missing)} are missing, {first} first"
        )
    for key, x in model.state_dict().items():
        x = x.to_local() if hasattr(x, "to_local") else x  # of a tensor over several ranks, ours
        if x.is_meta or not x.is_floating_point() or x.element_size() < 2:
            continue  # not here, or packed by a quantiser
        if not bool(torch.isfinite(x).all()):
            raise OSError(f"the weights in {name} are not all finite numbers: see {key}")


def show_in_transformers(model: type) -> None:
    """Make a class an attribute of transformers, where `transformers serve` looks for it.

    And one of its causal language models by name: registering does not, and `Trainer` shifts the
    labels that it smooths for those alone. transformers loads itself anew on occasion, and whoever
    imported it before keeps the former.
    """
    names = getattr(modeling_auto, "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", {})
    names.setdefault("vort", model.__name__)
    loaded = [sys.modules["transformers"]]
    loaded += [vars(module).get("transformers") for module in [*sys.modules.values()]]  # type: ignore[misc]
    for module in loaded:
        if isinstance(module, ModuleType) and module.__name__ == "transformers":
            setattr(module, model.__name__, model)


def teach_peft() -> None:
    """Tell peft, where it is loaded, which modules adapters go to by default: as in Llama.

    Its lists are by model type and open to additions; blocks here bear the names of Llama's.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, known in vars(constants).items() if constants is not None else ():
        if name.endswith("_MODULES_MAPPING") and "llama" in known:
            known.setdefault("vort", known["llama"])
