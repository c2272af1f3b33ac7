"""One training loop for all models: resumable, scored by bucket; it needs the extra `lab`."""

from vort.training.checkpoint import latest_checkpoint, load_weights
from vort.training.config import TrainingConfig
from vort.training.evaluation import evaluate
from vort.training.loop import train
from vort.training.metrics import BucketMeter, Interval, Metrics, interval
from vort.training.result import TrainingResult
from vort.training.scoring import Objective, Scorer
from vort.training.search import RATES, SearchResult, learning_rate_search

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
