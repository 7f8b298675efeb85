"""Per-token weights that turn per-token losses into one number: loss = sum over n of weight_n * l_n.

Every function takes `spans`, the Spans of the N positions, and returns token_weight [N] float32, exactly 0 where the
policy did not write the token. The denominator is a count of the batch (tokens, actions, turns or trajectories);
`total`, a number or 0-d tensor, replaces it where the batch is one piece of a larger one (data parallel, accumulation):
pieces weighted with the same total add up to the whole. It must be finite and > 0; on CUDA its value is looked at under
CREST_DEBUG=1 only. Spans that hold no policy token contribute 0 and are not counted, unless a function says so. An
all-masked batch gives zeros. A part of spans (`Spans.part`) has the weights of the whole batch at its tokens.

No function talks to other ranks. In data parallel one all-reduce of each rank's count gives `total`: their sum where
gradients are summed over ranks, their sum divided by the number of ranks where they are averaged (DDP, FSDP).

Shape letters: N token positions, S actions, K turns, B trajectories.
"""

import math
from numbers import Real
from typing import Literal

import torch
from torch import Tensor

from .backend import checks_values
from .segments import segment_expand
from .spans import Spans

Total = int | float | Tensor | None


def token_mean(spans: Spans, *, total: Total = None) -> Tensor:
    """Mean over policy tokens: w_n = 1 / (number of policy tokens). DAPO, arXiv 2503.14476.

    total: policy tokens of the whole batch. Raises ValueError: total <= 0.
    """
    return _weights(spans.mask.double(), _denominator(total, spans.trajectory_length.sum()))


def action_mean(spans: Spans, *, total: Total = None) -> Tensor:
    """Mean over actions of the mean over each action's tokens: w_n = 1 / (S' * L_action(n)), S' actions with a token.

    FACTOR, arXiv 2608.07118: 1/(sum_i T_i) * sum_{i,t} (1/L_{i,t}) * sum_j l_{i,t,j}; that an action without a token is
    not counted is this project's reading. total: non-empty actions of the whole batch. Raises ValueError: total <= 0.
    """
    return _mean_of_means(spans.action_of_token, spans.action_length, total)


def turn_mean(spans: Spans, *, total: Total = None) -> Tensor:
    """Mean over turns of the mean over each turn's tokens: w_n = 1 / (K' * L_turn(n)), K' turns with a token.

    total: turns with a token of the whole batch. Raises ValueError: total <= 0.
    """
    return _mean_of_means(spans.turn_of_token, spans.turn_length, total)


def sequence_mean(
    spans: Spans, *, total: Total = None, fully_masked: Literal["excluded", "counted"] = "excluded"
) -> Tensor:
    """Mean over trajectories of the mean over each one's tokens: w_n = 1 / (B' * L_trajectory(n)), B' with a token.

    GRPO, arXiv 2402.03300, eq. 3 ("seq-mean of token-mean"). Trainers differ in a trajectory without a policy token:
    fully_masked "excluded" leaves it out of B' (verl), "counted" divides by all B (SkyRL, which takes its length as 1).
    total: the trajectories of the whole batch that count. Raises ValueError: total <= 0, unknown fully_masked.
    """
    if fully_masked not in ("excluded", "counted"):
        raise ValueError(f"fully_masked is {fully_masked!r}, want 'excluded' or 'counted'")
    if fully_masked == "counted" and total is None:
        total = max(spans.num_trajectories, 1)
    return _mean_of_means(spans.trajectory_of_token, spans.trajectory_length, total)


def fixed_length(spans: Spans, length: float, *, total: Total = None) -> Tensor:
    """Sum over tokens divided by a constant length, mean over trajectories: w_n = 1 / (B * length).

    Dr.GRPO, arXiv 2503.20783. B counts every trajectory, one without a policy token too, so that the denominator does
    not depend on what the policy wrote. length must stay the same through training. total: trajectories of the whole
    batch. Raises ValueError: length <= 0 or infinite, total <= 0.
    """
    if not 0 < length < math.inf:
        raise ValueError(f"length is {length}, want length > 0 and finite")
    return _weights(spans.mask.double() / length, _denominator(total, spans.num_trajectories))


def _mean_of_means(ids_N: Tensor, length: Tensor, total: Total) -> Tensor:
    share = 1 / length.clamp(min=1).double()
    return _weights(segment_expand(share, ids_N), _denominator(total, (length > 0).sum()))


def _denominator(total: Total, count: Tensor | int) -> Tensor | float:
    if total is None:
        return torch.as_tensor(count).clamp(min=1)
    if isinstance(total, Tensor):
        number = total.dim() == 0 and total.dtype != torch.bool and not total.is_complex()
        positive = number and (not checks_values(total) or 0 < total < math.inf)
    else:
        positive = isinstance(total, Real) and not isinstance(total, bool) and 0 < total < math.inf
    if not positive:
        raise ValueError(
            f"total is {total!r}, want the count of the whole batch, a number or 0-d tensor > 0 and finite"
        )
    return total


def _weights(share_N: Tensor, denominator: Tensor | float) -> Tensor:
    return (share_N / denominator).float()


REDUCTIONS = {
    "token_mean": token_mean,
    "action_mean": action_mean,
    "turn_mean": turn_mean,
    "sequence_mean": sequence_mean,
}
"""The reductions that need nothing but spans, by the name that method configs use."""
