"""What a micro-batch's loss is made of."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The parts of one micro-batch's loss, each a scalar already summed under the batch's weights.

    The update is ``factor * grad(policy) + grad(regularizer + value)``.

    Attributes:
        policy: policy-gradient part, or the distillation loss.
        regularizer: KL to the reference, entropy bonus; None where there is none.
        value: critic loss; None without a critic.
        clip_bias: scalar whose gradient is the clipping bias C; None where nothing can clip.
        clipped: tokens whose ratio was clipped, bool [B, T].
        policy_by_token: what each token adds to ``policy``; clip_bias_by_token: to ``clip_bias``; both [B, T], for
            those who scale trajectories apart from one another.
        weights: weights of the tokens, [B, T].
    """

    policy: Tensor
    regularizer: Tensor | None = None
    value: Tensor | None = None
    clip_bias: Tensor | None = None
    clipped: Tensor | None = None
    policy_by_token: Tensor | None = None
    clip_bias_by_token: Tensor | None = None
    weights: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """The loss to minimise."""
        return sum((t for t in (self.regularizer, self.value) if t is not None), self.policy)
