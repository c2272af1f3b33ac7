"""One training loop for all models: resumable, scored by bucket; it needs the extra `lab`."""

from vort.lab.training.checkpoint import latest_checkpoint, load_weights
from vort.lab.training.config import TrainingConfig
from vort.lab.training.loop import train
from vort.lab.training.metrics import BucketMeter, Interval, Metrics, evaluate, interval
from vort.lab.training.run import Stopped, TrainingResult
from vort.lab.training.scorer import Objective, Scorer

__all__ = [
    "BucketMeter",
    "Interval",
    "Metrics",
    "Objective",
    "Scorer",
    "Stopped",
    "TrainingConfig",
    "TrainingResult",
    "evaluate",
    "interval",
    "latest_checkpoint",
    "load_weights",
    "train",
]
