"""TensorBoard opens with the charts that one looks at first."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from typing_extensions import override

# Category: chart: tags, as regular expressions. A chart whose tags a run does not write stays empty.
LAYOUT: dict[str, dict[str, list[Any]]] = {
    "success": {
        "success, share of trajectories": ["Multiline", ["^rollout/success$", "^val/success$"]],
        "return, reward of a trajectory": ["Multiline", ["^rollout/return$", "^val/return$"]],
        "endings, share of trajectories": ["Multiline", ["^rollout/ending/.*"]],
    },
    "clipping": {
        "clipped, share": ["Multiline", ["^train/clip_fraction$", "^train/clip_fraction_turns$"]],
        "importance ratio": ["Multiline", ["^train/ratio$", "^train/ratio_max$"]],
        "KL, nats a token": ["Multiline", ["^train/(policy|reference|mismatch)_kl$", "^(train|val)/divergence$"]],
    },
    "clipping bias": {
        "L2 norms": ["Multiline", ["^(normalization|clipping)/(policy|bias)_norm$"]],
        "factor of the policy gradient": ["Multiline", ["^(normalization|clipping)/factor$"]],
    },
    "depth": {
        "turns": [
            "Multiline",
            ["^rollout/turn(s|_limit)$", "^depth/(cap|smoothed|effective|coverage)$"],
        ],
    },
    "throughput": {
        "tokens a second": ["Multiline", ["^throughput/.*_per_second$"]],
        "seconds a collection": ["Multiline", ["^rollout/seconds$"]],
    },
}


class ScalarLayout(Callback):
    """Lay out TensorBoard's custom scalars: success, clipping, its bias, depth, throughput."""

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(LAYOUT)
