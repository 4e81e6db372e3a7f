"""Components of the papers, and what a run reports, each to be left out or swapped."""

from sorl_lightning.callbacks.atod_annealing import ATODAnnealing
from sorl_lightning.callbacks.best_checkpoint import BestCheckpoint
from sorl_lightning.callbacks.clipping_monitor import ClippingMonitor
from sorl_lightning.callbacks.clipping_triggered_normalization import ClippingTriggeredNormalization
from sorl_lightning.callbacks.collection_axis import CollectionAxis
from sorl_lightning.callbacks.depth_schedules import POPD, TCODF2B, TOPD, FixedDepth
from sorl_lightning.callbacks.graceful_stop import GracefulStop, Stopped, stoppable
from sorl_lightning.callbacks.hf_export import HFExport
from sorl_lightning.callbacks.kl_schedule_transition import KLScheduleTransition
from sorl_lightning.callbacks.progress_lines import ProgressLines
from sorl_lightning.callbacks.rollout_depth_controller import RolloutDepthController
from sorl_lightning.callbacks.scalar_layout import ScalarLayout
from sorl_lightning.callbacks.trajectory_log import TrajectoryLog
from sorl_lightning.callbacks.turn_authors import TCODB2F, GuidedOPD
from sorl_lightning.callbacks.turn_diagnosis import TurnDiagnosis
from sorl_lightning.callbacks.turn_weightings import SAGEOPD, ATODTurnWeights, PruneOPD, TurnDecay
from sorl_lightning.callbacks.vllm_sidecar import VLLMSidecar

__all__ = [
    "ATODAnnealing",
    "ATODTurnWeights",
    "BestCheckpoint",
    "ClippingMonitor",
    "ClippingTriggeredNormalization",
    "CollectionAxis",
    "FixedDepth",
    "GracefulStop",
    "GuidedOPD",
    "HFExport",
    "KLScheduleTransition",
    "POPD",
    "PruneOPD",
    "RolloutDepthController",
    "SAGEOPD",
    "ProgressLines",
    "ScalarLayout",
    "Stopped",
    "TCODB2F",
    "TCODF2B",
    "TOPD",
    "TrajectoryLog",
    "TurnDecay",
    "TurnDiagnosis",
    "VLLMSidecar",
    "stoppable",
]
