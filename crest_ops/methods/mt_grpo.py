"""MT-GRPO: the first turn is judged by its own reward beside the outcome, later turns by the outcome alone.

arXiv 2505.11821, Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level Reward Design. Shape letters: N token
positions, K turns, B trajectories.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..advantages import group_advantage
from ..reductions import REDUCTIONS, Total
from ..segments import segment_expand, segment_sum, segment_zscore
from ..signals import AdditiveCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, check_arguments, check_numbers, check_settings

needs = ("reward_B", "turn_reward_K")


@dataclass(frozen=True)
class MTGRPOConfig:
    """MT-GRPO's settings; defaults of arXiv 2505.11821 and its code (lam 1, std_eps 1e-4, clip .2, token mean).

    lam >= 0: weight of the first turn's own advantage. unbiased, std_eps: of all three advantages.
    Raises ValueError: a value out of range or an unknown name.
    """

    lam: float = 1.0
    unbiased: bool = True
    std_eps: float = 1e-4
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(self)
        check_numbers(self, lam=(0, LARGEST))


Config = MTGRPOConfig


def assign(
    spans: Spans, signals: Signals, config: MTGRPOConfig = MTGRPOConfig(), *, total: Total = None
) -> AdditiveCredit:
    """Credit of every policy token, by the place of its turn in its trajectory i.

    first of several turns:  credit_n = A_out_i + lam * A_turn_i;   later turns:  credit_n = A_out_i;
    the only turn:  credit_n = A_comb_i.  A_out, A_turn, A_comb are z-scores inside the group of the outcome reward R_i,
    of the first turn's reward r_i and of R_i + r_i.
    MT-GRPO, arXiv 2505.11821, section 4. There tokens before and after the first tool result differ, and a rollout
    without a tool result gets A_comb; that a turn of Spans ends where its result arrives is this project's reading, so
    an agent with a single request passes each action as a turn. Rollouts without a turn are left out of A_turn and
    A_comb. Additive: where A_turn disagrees it can turn the verifier's sign round; advantage_N is A_out.

    total: the reduction's count over the whole batch, if this is a piece of it. Needs reward_B, turn_reward_K. Returns
    credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, MTGRPOConfig)
    reward_B, turn_reward_K = signals.require(spans, *needs)
    trajectory_K, B = spans.trajectory_of_turn, spans.num_trajectories
    first_K = torch.ones_like(trajectory_K, dtype=torch.bool)
    first_K[1:] = trajectory_K[1:] != trajectory_K[:-1]
    first_group_K = torch.where(first_K, spans.group_of_turn, -1)
    only_K = segment_sum(torch.ones_like(trajectory_K), trajectory_K, B)[trajectory_K] == 1

    def among_first_turns(reward_K: Tensor) -> Tensor:
        return segment_zscore(reward_K, first_group_K, B, unbiased=config.unbiased, eps=config.std_eps)

    outcome_K = group_advantage(reward_B, spans, unbiased=config.unbiased, eps=config.std_eps)[trajectory_K]
    combined_K = among_first_turns(turn_reward_K + reward_B[trajectory_K])
    own_K = outcome_K + config.lam * among_first_turns(turn_reward_K)  # later turns have no advantage of their own
    return AdditiveCredit(
        segment_expand(torch.where(only_K, combined_K, own_K), spans.turn_of_token),
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=segment_expand(outcome_K, spans.turn_of_token),
    )
