"""What is refused, as a user meets it: without the type checks that the test run adds to every annotation."""

from __future__ import annotations

import subprocess
import sys

import pytest

PRELUDE = """
import torch
from sorl_lightning.functional import advantages, depth, divergences, logprobs, losses, ratios, turns, weights
x, wide, turn, n = torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2)
groups = torch.zeros(2, dtype=torch.int64)
"""
REFUSED = {
    "ratios.importance_ratio(x, x, turn, 'step')": ("level must be one of token, turn, turn_sum, sequence, got 'step'"),
    "ratios.importance_ratio(x, wide, turn)": (
        "shapes must agree, got logprobs (2, 3), behaviour_logprobs (2, 4), turn (2, 3)"
    ),
    "losses.clipped_surrogate(x, x, 0.0)": "epsilon_low must be positive and finite, got 0.0",
    "losses.clipped_surrogate(x, x, 0.2, -0.1)": "epsilon_high must be positive and finite, got -0.1",
    "losses.clipped_surrogate(x, wide)": "shapes must agree, got ratio (2, 3), advantages (2, 4)",
    "losses.weighted_sum(x, wide)": "shapes must agree, got values (2, 3), weights (2, 4)",
    "losses.clip_factor(1.0, 'half')": "rule must be one of max1, literal, plus1, relative, got 'half'",
    "losses.clip_factor(-1.0)": "bias_norm must not be negative, got -1.0",
    "losses.clip_factor(1.0, 'relative', 0.0)": "reference_norm must be positive and finite, got 0.0",
    "advantages.group_advantages(n, groups, 'var')": "scale must be one of std, none, got 'var'",
    "advantages.group_advantages(n, turn[0])": "shapes must agree, got rewards (2,), groups (3,)",
    "advantages.gae(x, x, turn, n, gamma=1.5)": "gamma must be in [0, 1], got 1.5",
    "advantages.gae(x, x, turn, torch.zeros(3))": "shapes must agree, got bootstrap (3,), rows (2,)",
    "turns.segments(turn, span='row')": "span must be one of turn, trajectory, got 'row'",
    "turns.pooled(x, turn, reduction='max')": "reduction must be one of mean, sum, got 'max'",
    "weights.turn_weights(turn, tail='keep')": "tail must be one of drop, pool, got 'keep'",
    "weights.turn_weights(turn, min_fraction=2)": "min_fraction must be in [0, 1], got 2",
    "weights.trajectory_weights(turn, turn[:1])": "shapes must agree, got turn (2, 3), trajectory (1, 3)",
    "weights.fixed_weights(turn, 0)": "length must be at least 1, got 0",
    "divergences.divergence(x, x, 'kl')": "kind must be one of reverse_kl, forward_kl, jsd, got 'kl'",
    "divergences.divergence(x, x, 'jsd', 2)": "beta must be in [0, 1], got 2",
    "divergences.divergence(x, wide)": "shapes must agree, got student_logits (2, 3), teacher_logits (2, 4)",
    "divergences.topk_divergence(x, turn, x[:, :2])": (
        "shapes must agree, got teacher_ids (2, 3), teacher_logprobs (2, 2)"
    ),
    "divergences.sampled_divergence(n, n, 'k4')": "estimator must be one of k1, k2, k3, got 'k4'",
    "depth.observe(depth.DepthState(1.0), turns.turn_statistics(turn), coverage_of='some')": (
        "coverage_of must be one of success, all, got 'some'"
    ),
    "logprobs.token_logprobs(x, wide, groups)": (
        "shapes must be hidden [N, D], head_weight [V, D] and targets [N], "
        "got hidden (2, 3), head_weight (2, 4), targets (2,)"
    ),
}


@pytest.fixture(scope="module")
def messages():
    """What each call raises, from one process."""
    lines = [PRELUDE]
    for call in REFUSED:
        lines.append(f"try:\n    {call}\nexcept ValueError as error:\n    print(error)\nelse:\n    print('accepted')")
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, capture_output=True, text=True)
    return dict(zip(REFUSED, run.stdout.splitlines(), strict=True))


@pytest.mark.parametrize("call", REFUSED)
def test_the_message_names_the_argument_its_value_and_what_is_allowed(messages, call):
    assert messages[call] == REFUSED[call]
