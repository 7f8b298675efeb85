"""ABC: every step is scored by the clues of the verified answer that it found, and the scores are the credit.

Answer-Backtracked Credit Assignment (ABSeeker), arXiv 2608.05102; not Adaptive-Boundary-Clipping, which calls itself
ABC-GRPO too. The clues are searched for backwards from the verified answer, once a question; finding and judging them
stays with the caller. The full text is not public to this project: rubric and constants are those of a third-party
summary. A plain Credit: its direction comes from the steps' own scores, and no verdict on the outcome enters.
Shape letters: N token positions, S actions (steps), B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..reductions import REDUCTIONS, Total
from ..returns import discounted_return
from ..segments import segment_center, segment_expand, segment_mean, segment_sum, segment_zscore
from ..signals import Credit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import check_arguments, check_numbers, check_settings

needs = ("clue_score_S",)

RUBRIC = (1.0, 0.8, 0.4, -0.8)
"""Base score of a step, and what finding a clue, excluding a wrong candidate and discarding a right clue add to it."""


@dataclass(frozen=True)
class ABCConfig:
    """Settings of ABC-GRPO; gamma of arXiv 2608.05102.

    gamma: discount from step to step. statistics: what the group's mean and std are taken over, "step": all steps of
    all rollouts alike; "trajectory": each rollout's mean first, so that a long one weighs no more than a short one.
    This project's choices: statistics, and with GRPO's values unbiased (sample std), std_eps, surrogate and reduction.
    Raises ValueError: a value out of range or an unknown name.
    """

    gamma: float = 0.25
    statistics: Literal["step", "trajectory"] = "step"
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "sequence_mean"

    def __post_init__(self) -> None:
        check_settings(self, statistics=("step", "trajectory"))
        check_numbers(self, gamma=(0, 1))


Config = ABCConfig


def clue_score(
    found: Tensor,
    excluded: Tensor,
    discarded: Tensor,
    *,
    rubric: tuple[float, float, float, float] = RUBRIC,
) -> Tensor:
    """Score of a step by what it did with the clues: r = clip(1 + .8 found + .4 excluded - .8 discarded, 0, 2).

    ABC, arXiv 2608.05102. found: clues found or verified, excluded: wrong candidates excluded, discarded: right clues
    discarded wrongly, each a flag or a count; that a clue counts once, the first time, is this project's reading and
    the caller's part. rubric: base score and the three amounts (a summary speaks of a fifth, which is not known).

    found, excluded, discarded [S] bool, int or real. Returns [S] float32 (float64 if one of them is), in [0, 2].
    Raises ValueError: three shapes, a rubric that is not four numbers.
    """
    counts = {"found": found, "excluded": excluded, "discarded": discarded}
    for name, count in counts.items():
        if not isinstance(count, Tensor) or count.is_complex() or count.shape != counts["found"].shape:
            what = f"{[*count.shape]} {count.dtype}" if isinstance(count, Tensor) else type(count).__name__
            raise ValueError(f"{name} is {what}, want a real tensor [S], the three of one shape")
    if len(rubric) != len(RUBRIC):
        raise ValueError(f"rubric is {rubric!r}, want the base score and three amounts")
    dtype = torch.float64 if any(count.dtype == torch.float64 for count in counts.values()) else torch.float32
    base, *amounts = rubric
    score = sum((amount * count.to(dtype) for amount, count in zip(amounts, counts.values(), strict=True)), base)
    return score.clamp(0, 2)


def sft_weight(score: Tensor, alpha: float = 2.0, beta: float = 1.0) -> Tensor:
    """Weight of a step in supervised fine-tuning on successes and failures alike: w(r) = 2 sigmoid(alpha (r - beta)).

    ABC-SFT, arXiv 2608.05102: w = sigmoid(alpha (r - beta)), with the factor 2 of its implementation, so that w(1) = 1
    and scores of 1 are plain fine-tuning: loss = sum over steps of w_t * sum over tokens of -logp / number of tokens,
    the weights segment_expand(w, spans.action_of_token) * reductions.token_mean(spans) (the unweighted denominator is
    this project's reading).

    score: of each step (clue_score), real, of any shape, e.g. [S]. alpha > 0: slope. beta: score of weight 1. Returns
    that shape, in (0, 2).
    Raises ValueError: alpha <= 0, no real tensor.
    """
    if not isinstance(score, Tensor) or score.is_complex():
        what = score.dtype if isinstance(score, Tensor) else type(score).__name__
        raise ValueError(f"score is {what}, want a real tensor [S]")
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}, want alpha > 0")
    return 2 * (alpha * (score - beta)).sigmoid()


def step_advantage(score: Tensor, spans: Spans, config: ABCConfig) -> Tensor:
    """Score of each step against those of its group: r^_t = (r_t - mean_g r) / (std_g r + eps).

    ABC, arXiv 2608.05102, "in-group normalised". With statistics "trajectory" the step t of rollout i counts
    u_t = n_g / (B_g T_i) instead of once: mean_g = sum u r / n_g, var_g = sum u (r - mean_g)^2 / (n_g - c), n_g steps
    and B_g rollouts of the group, c = 1 if unbiased else 0 (this project's form). Equal scores give exactly 0.
    score [S] real. A step without a token counts. Returns [S] float32 (float64 for float64).
    """
    S, B, trajectory_S = spans.num_actions, spans.num_trajectories, spans.trajectory_of_action
    group_S = spans.group_of_trajectory[trajectory_S]
    if config.statistics == "step":
        return segment_zscore(score, group_S, B, unbiased=config.unbiased, eps=config.std_eps)
    one_S = torch.ones(S, dtype=torch.float64, device=score.device)
    steps_B = segment_sum(one_S, trajectory_S, B)
    rollouts_G = segment_sum((steps_B > 0).double(), spans.group_of_trajectory, B)
    steps_G = segment_sum(one_S, group_S, B)
    share_S = steps_G[group_S] / (rollouts_G[group_S] * steps_B[trajectory_S])
    centered_S = segment_center(score, group_S, B)
    share_S = share_S.to(centered_S.dtype)
    centered_S = centered_S - segment_mean(share_S * centered_S, group_S, B)[group_S]
    variance_G = segment_sum(share_S * centered_S.square(), group_S, B) / (steps_G - int(config.unbiased)).clamp(min=1)
    scale_G = variance_G.sqrt().to(centered_S.dtype) + config.std_eps
    return centered_S / torch.where(scale_G == 0, 1, scale_G)[group_S]


def assign(spans: Spans, signals: Signals, config: ABCConfig = ABCConfig(), *, total: Total = None) -> Credit:
    """Credit of every policy token: the discounted sum of the group-relative scores from its step on (ABC-GRPO).

    credit_n = A_t = sum over k >= t of gamma^(k-t) * r^_k, t the step of token n, k to the end of its trajectory;
    r^ = step_advantage. ABC, arXiv 2608.05102. gamma 0: the step's own score; 1: reward to go. total: the reduction's
    count over the whole batch, if this is a piece of it.
    Needs clue_score_S. Returns credit_N [N] float32 (float64 for float64 scores), 0 outside the spans.
    Raises ValueError: clue_score_S missing, of the wrong length, not finite or outside [0, 2].
    """
    check_arguments(spans, signals, config, ABCConfig)
    (score_S,) = signals.require(spans, *needs)
    advantage_S = discounted_return(step_advantage(score_S, spans, config), spans, config.gamma)
    credit_N = segment_expand(advantage_S, spans.action_of_token)
    return Credit(credit_N, REDUCTIONS[config.reduction](spans, total=total), config.surrogate)
