"""What a launcher of several processes (torchrun, Accelerate) tells each of them.

A file of its own because the command line asks before it loads torch, whose imports take seconds.
"""

import os

__all__ = ["processes", "rank"]


def processes() -> int:
    """How many train together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; the first is 0, and it speaks for all."""
    return int(os.environ.get("RANK", "0"))
