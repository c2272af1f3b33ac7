"""One training loop for all models: resumable, scored by bucket; it needs the extra `lab`."""

from vort.lab.training.checkpoint import latest_checkpoint, load_weights
from vort.lab.training.config import TrainingConfig
from vort.lab.training.evaluation import evaluate
from vort.lab.training.loop import train
from vort.lab.training.metrics import BucketMeter, Interval, Metrics, interval
from vort.lab.training.result import TrainingResult
from vort.lab.training.scoring import Objective, Scorer
from vort.lab.training.search import RATES, SearchResult, learning_rate_search

__all__ = [
    "RATES",
    "BucketMeter",
    "Interval",
    "Metrics",
    "Objective",
    "Scorer",
    "SearchResult",
    "TrainingConfig",
    "TrainingResult",
    "evaluate",
    "interval",
    "latest_checkpoint",
    "learning_rate_search",
    "load_weights",
    "train",
]
