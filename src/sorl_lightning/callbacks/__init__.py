"""Components of the papers, and what a run reports, each to be left out or swapped."""

from sorl_lightning.callbacks.best_checkpoint import BestCheckpoint
from sorl_lightning.callbacks.clipping_monitor import ClippingMonitor
from sorl_lightning.callbacks.clipping_triggered_normalization import ClippingTriggeredNormalization
from sorl_lightning.callbacks.collection_axis import CollectionAxis
from sorl_lightning.callbacks.graceful_stop import GracefulStop, Stopped
from sorl_lightning.callbacks.hf_export import HFExport
from sorl_lightning.callbacks.trajectory_log import TrajectoryLog

__all__ = [
    "BestCheckpoint",
    "ClippingMonitor",
    "ClippingTriggeredNormalization",
    "CollectionAxis",
    "GracefulStop",
    "HFExport",
    "Stopped",
    "TrajectoryLog",
]
