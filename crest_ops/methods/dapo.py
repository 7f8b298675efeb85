"""DAPO: GRPO with a wider upper clip, a token mean and only the groups that have something to say.

arXiv 2503.14476, DAPO: An Open-Source LLM Reinforcement Learning System at Scale. Shape letters: N token positions,
B trajectories.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reductions import REDUCTIONS, Total
from ..segments import segment_center, segment_expand, segment_sum
from ..signals import Credit, Signals
from ..spans import Spans, check_length
from ..surrogates import PPOClip, Surrogate
from . import grpo
from .grpo import GRPOConfig
from .settings import check_arguments

needs = grpo.needs


@dataclass(frozen=True)
class DAPOConfig(GRPOConfig):
    """DAPO's settings: GRPOConfig's, with the clip .2/.28 and the token mean (arXiv 2503.14476, 3.1 and 3.3).

    dynamic: leave the tokens of constant groups out of the reduction (dynamic_sampling). Raises ValueError: as
    GRPOConfig.
    """

    surrogate: Surrogate = PPOClip(0.2, 0.28)
    reduction: str = "token_mean"
    dynamic: bool = True


Config = DAPOConfig


def dynamic_sampling(reward: Tensor, spans: Spans) -> Tensor:
    """Which trajectories to keep: keep_i = [the rewards of its group are not all equal].

    DAPO, arXiv 2503.14476, section 3.2, eq. 11: the paper samples on until the batch is full of such groups, which is
    the caller's to do. A group of one is constant.

    reward [B] real, of the trajectories of spans. Returns [B] bool. Raises ValueError: wrong shape.
    """
    check_length("reward", reward, spans.num_trajectories, "[B]")
    group_B, B = spans.group_of_trajectory, spans.num_trajectories
    apart_B = segment_center(reward, group_B, B) != 0
    return segment_sum(apart_B, group_B, B)[group_B] > 0


def soft_overlong_penalty(spans: Spans, max_length: float, *, buffer: float = 4096, factor: float = 1.0) -> Tensor:
    """What to add to the reward of long trajectories: 0 up to max_length - buffer, then linear to -factor.

    penalty_i = -factor * clip((L_i - (max_length - buffer)) / buffer, 0, 1).
    DAPO, arXiv 2503.14476, section 3.4, eq. 13. L_i counts the policy's own tokens, not the tool output between them
    (this project's reading: the paper has no tools).

    Returns [B] float32. Raises ValueError: not 0 < buffer <= max_length, factor < 0.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer} and max_length {max_length}, want 0 < buffer <= max_length")
    if not factor >= 0:
        raise ValueError(f"factor is {factor}, want factor >= 0")
    return -factor * ((spans.trajectory_length - (max_length - buffer)) / buffer).clamp(0, 1)


def assign(spans: Spans, signals: Signals, config: DAPOConfig = DAPOConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: credit_n = A_i of its trajectory i, as in GRPO; constant groups do not count.

    DAPO, arXiv 2503.14476, eqs. 8-12. With config.dynamic the reduction takes the tokens of constant groups for tokens
    that the policy did not write: weight 0, and out of the denominator. total: the reduction's count over the whole
    batch, of kept groups, if this is a piece of it.
    Needs reward_B. Returns Credit; credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans and where
    the group is constant.
    Raises ValueError: reward_B missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, DAPOConfig)
    credit = grpo.assign(spans, signals, config, total=total)
    if not config.dynamic:
        return credit
    keep_N = segment_expand(dynamic_sampling(signals.reward_B.detach(), spans), spans.trajectory_of_token)
    kept = replace(spans, action_of_token=torch.where(keep_N, spans.action_of_token, -1))
    return Credit(
        torch.where(keep_N, credit.credit_N, 0),
        REDUCTIONS[config.reduction](kept, total=total),
        config.surrogate,
    )
