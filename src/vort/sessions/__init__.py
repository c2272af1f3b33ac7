"""Models that read and write: sessions, and a saved model without Hugging Face around it."""

from vort.sessions.bare import BareModel, Bytes, read_bare
from vort.sessions.session import Session, sample_token

__all__ = ["BareModel", "Bytes", "Session", "read_bare", "sample_token"]
