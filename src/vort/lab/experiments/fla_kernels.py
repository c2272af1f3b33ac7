"""flash-linear-attention's kernels, imported so that a first call takes seconds.

They try dozens of configurations each when first called and compile them one by one: for gated
linear attention that is minutes, in every process. Tables ask for a baseline's accuracy, to which
the choice makes no difference; the benchmark of speed lets them try all.
"""

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["few_configurations", "import_with_few_configurations"]

MOST = 3


@contextmanager
def few_configurations(most: int = MOST) -> Iterator[None]:
    """Kernels defined in here try at most that many of their configurations, spread over all."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.__init__

    def init(self: Any, fn: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        configs = list(configs)
        step = max(1, -(-len(configs) // most))
        original(self, fn, names, configs[::step], *args, **kwargs)

    Autotuner.__init__ = init
    try:
        yield
    finally:
        Autotuner.__init__ = original


def import_with_few_configurations() -> None:
    """Import the kernels behind memory="gla", where they are installed and a GPU would run them."""
    import torch

    if torch.cuda.is_available() and importlib.util.find_spec("fla") is not None:
        with few_configurations():
            importlib.import_module("fla.ops.gla")
