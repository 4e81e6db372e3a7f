"""Advantages: relative to a group of siblings, or by generalised advantage estimation from a critic."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sorl_lightning.functional.checks import Number, check_choice, check_range, check_same_shape
from sorl_lightning.functional.turns import fill

Scale = Literal["std", "none"]


def group_advantages(
    rewards: Float[Tensor, "N"], groups: Int[Tensor, "N"], scale: Scale = "std", epsilon: Number = 1e-6
) -> Float[Tensor, "N"]:
    """Reward of each trajectory relative to its siblings.

        std   A_i = (R_i - mean_G R) / (std_G R + epsilon)
        none  A_i = R_i - mean_G R                              Dr.GRPO

    The standard deviation is the unbiased one: rewards [1, 0, 0, 1] give +-0.866024. A group of one and a constant
    group give exactly 0. Constant means a spread within 1e-8 of the largest reward's size (within 4 units of rounding
    where the dtype is coarser), so that rounding is never amplified to +-1.

    Args:
        rewards: one reward per trajectory.
        groups: group of each; ids are arbitrary and members need not be adjacent.
        scale: what the centred rewards are divided by.
        epsilon: added to the standard deviation, in the rewards' unit.

    Raises:
        ValueError: an unknown ``scale``, a negative ``epsilon`` or shapes that differ.

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO); Liu et al. 2025, arXiv:2503.20783 (Dr.GRPO).
    """
    check_choice("scale", scale, Scale)
    check_range("epsilon", epsilon, 0.0, float("inf"))
    centred, index, sizes = _centred(rewards, groups)
    if scale == "std":
        variance = _by_group(centred.square(), index, sizes) / (sizes - 1).clamp(min=1)
        deviation = variance.sqrt()[index] + epsilon
        centred = torch.where(centred == 0, 0, centred / deviation)
    return centred.to(rewards.dtype)


def leave_one_out(rewards: Float[Tensor, "N"], groups: Int[Tensor, "N"]) -> Float[Tensor, "N"]:
    """Reward of each trajectory less the mean reward of its siblings; exactly 0 in constant groups and groups of one.

        A_i = R_i - mean over j != i in G of R_j = n / (n - 1) (R_i - mean_G R)

    Args:
        rewards: one reward per trajectory.
        groups: group of each; ids are arbitrary and members need not be adjacent.

    Raises:
        ValueError: shapes that differ.

    Source: Ahmadian et al. 2024, arXiv:2402.14740 (RLOO).
    """
    centred, index, sizes = _centred(rewards, groups)
    return (centred * (sizes / (sizes - 1).clamp(min=1))[index]).to(rewards.dtype)


def returns_to_go(rewards: Float[Tensor, "N K"], discount: Number = 1.0) -> Float[Tensor, "N K"]:
    """Discounted sum of the rewards from each turn on: G_k = sum over j >= k of discount^(j - k) r_j.

    Args:
        rewards: reward of each turn of each trajectory; 0 after its last.
        discount: per turn, in [0, 1].

    Raises:
        ValueError: ``discount`` out of range.
    """
    check_range("discount", discount, 0.0, 1.0)
    return _discounted(rewards.detach(), discount)


def gae(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B T"],
    turn: Int[Tensor, "B T"],
    bootstrap: Float[Tensor, "B"],
    gamma: Number = 1.0,
    lam: Number = 1.0,
) -> tuple[Float[Tensor, "B T"], Float[Tensor, "B T"]]:
    """Generalised advantage estimation over the generated tokens alone, and the critic's targets; 0 elsewhere.

        delta_t = r_t + gamma V_next(t) - V_t,    A_t = sum_k (gamma lam)^k delta_(k-th next),    return_t = A_t + V_t

    where "next" is the next *generated* token, across turn boundaries, and the bootstrap after the last one. No
    gradient flows through.

    Args:
        rewards: reward at each token; a turn's and the outcome's belong on the last generated token of their turn.
        values: the critic's value before each token. Both are read at generated tokens only.
        turn: turn of each token, -1 where the policy did not generate it; one trajectory per row.
        bootstrap: value after the last token of a truncated trajectory; 0 where it is finished.
        gamma: discount per generated token, in [0, 1].
        lam: decay of the estimator, in [0, 1].

    Raises:
        ValueError: ``gamma`` or ``lam`` out of range, or shapes that differ.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    check_range("gamma", gamma, 0.0, 1.0)
    check_range("lam", lam, 0.0, 1.0)
    check_same_shape(rewards=rewards, values=values, turn=turn)
    check_same_shape(bootstrap=bootstrap, rows=turn.new_empty(len(turn)))
    generated = turn >= 0
    lengths = generated.sum(1, keepdim=True)
    steps = torch.arange(turn.shape[1], device=turn.device).expand_as(turn)
    played = steps < lengths
    zeros = torch.zeros_like(values)
    reward = zeros.masked_scatter(played, rewards.detach().to(values)[generated])
    value = zeros.masked_scatter(played, values.detach()[generated])
    following = torch.where(steps == lengths - 1, bootstrap.detach().to(values)[:, None], value.roll(-1, dims=1))
    delta = torch.where(played, reward + gamma * following - value, 0)
    advantages = _discounted(delta, gamma * lam)
    return fill(generated, advantages[played]), fill(generated, (advantages + value)[played])


def whiten(advantages: Float[Tensor, "B T"], turn: Int[Tensor, "B T"], epsilon: Number = 1e-8) -> Float[Tensor, "B T"]:
    """Advantages with mean 0 and (unbiased) variance 1 over the generated tokens; 0 elsewhere, and for a single token.

    Args:
        advantages: advantage of each token; read only where ``turn`` is not -1.
        turn: turn of each token, -1 where the policy did not generate it.
        epsilon: added to the standard deviation, in the advantages' unit.

    Raises:
        ValueError: a negative ``epsilon`` or shapes that differ.
    """
    check_range("epsilon", epsilon, 0.0, float("inf"))
    check_same_shape(advantages=advantages, turn=turn)
    generated = turn >= 0
    one_group = torch.zeros_like(turn[generated])
    return fill(generated, group_advantages(advantages[generated], one_group, epsilon=epsilon))


def _centred(rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards less their group's mean (float64; 0 in constant groups), the group of each and the groups' sizes."""
    check_same_shape(rewards=rewards, groups=groups)
    ids, index, sizes = groups.unique(return_inverse=True, return_counts=True)
    exact = rewards.detach().double()
    centred = exact - (_by_group(exact, index, sizes) / sizes)[index]

    def extreme(values: Tensor, which: Literal["amin", "amax"]) -> Tensor:
        return values.new_zeros(len(ids)).scatter_reduce(0, index, values, which, include_self=False)

    tolerance = max(1e-8, 4 * torch.finfo(rewards.dtype).eps)
    spread = extreme(exact, "amax") - extreme(exact, "amin")
    constant = spread <= tolerance * extreme(exact.abs(), "amax")
    return torch.where(constant[index], 0, centred), index, sizes


def _by_group(values: Tensor, index: Tensor, sizes: Tensor) -> Tensor:
    return values.new_zeros(len(sizes)).index_add(0, index, values)


def _discounted(delta: Tensor, decay: float) -> Tensor:
    """sum_k decay^k delta_(t + k) along rows, by doubling the window: log2(T) steps instead of T."""
    width = 1
    while width < delta.shape[1]:
        ahead = torch.nn.functional.pad(delta[:, width:], (0, width))
        delta = delta + decay**width * ahead
        width *= 2
    return delta
