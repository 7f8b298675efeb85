"""GiGPO: beside the episode's advantage, each action's against the other actions taken in the same state.

arXiv 2505.10978, Group-in-Group Policy Optimization for LLM Agent Training. Shape letters: N token positions,
S actions, B trajectories.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..advantages import anchor_advantage, group_advantage
from ..reductions import REDUCTIONS, Total
from ..returns import discounted_return
from ..segments import segment_center, segment_expand, segment_zscore
from ..signals import AdditiveCredit, Signals
from ..spans import Spans
from ..surrogates import PPOClip, Surrogate
from .settings import LARGEST, check_arguments, check_numbers, check_settings

needs = ("reward_B", "action_reward_S", "state_key_S")


@dataclass(frozen=True)
class GiGPOConfig:
    """GiGPO's settings; defaults of arXiv 2505.10978 and its authors' code (omega 1, gamma .95, clip .2, token mean).

    omega >= 0: weight of the action's advantage. gamma: discount of the return. mode: "mean_norm" subtracts the mean,
    "mean_std_norm" divides by the std as well (unbiased, std_eps), both for episodes and for actions. episode_over:
    what the episode's mean and std are taken over: "trajectories" (the paper's equation) or "actions", where every
    action is a row and longer trajectories weigh more (the default of the authors' code). singleton: see
    advantages.group_advantage; the code has "reward".
    Raises ValueError: a value out of range or an unknown name.
    """

    omega: float = 1.0
    gamma: float = 0.95
    mode: Literal["mean_norm", "mean_std_norm"] = "mean_norm"
    episode_over: Literal["trajectories", "actions"] = "trajectories"
    singleton: Literal["zero", "reward"] = "zero"
    unbiased: bool = True
    std_eps: float = 1e-6
    surrogate: Surrogate = PPOClip(0.2, 0.2)
    reduction: str = "token_mean"

    def __post_init__(self) -> None:
        check_settings(
            self,
            mode=("mean_norm", "mean_std_norm"),
            episode_over=("trajectories", "actions"),
            singleton=("zero", "reward"),
        )
        check_numbers(self, omega=(0, LARGEST), gamma=(0, 1))

    @property
    def scale(self) -> Literal["std", "none"]:
        """The mode in the words of crest_ops.advantages."""
        return "std" if self.mode == "mean_std_norm" else "none"


Config = GiGPOConfig


def assign(
    spans: Spans, signals: Signals, config: GiGPOConfig = GiGPOConfig(), *, total: Total = None
) -> AdditiveCredit:
    """Credit of every policy token: credit_n = A^E_i + omega * A^S_s, i its trajectory, s its action.

    A^E: advantage of reward_B inside the task group. A^S: anchor_advantage of the return R_s = discounted_return of the
    action rewards. GiGPO, arXiv 2505.10978, eqs. 3-8. Additive: A^S can turn the verifier's sign round; advantage_N is
    A^E. An action without a token is a step like others.

    total: the reduction's count over the whole batch, if this is a piece of it. Needs reward_B, action_reward_S (of
    which the outcome is part, if returns are to hold it) and state_key_S. Returns credit_N [N] float32 (float64 for
    float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite.
    """
    check_arguments(spans, signals, config, GiGPOConfig)
    reward_B, action_reward_S, state_key_S = signals.require(spans, *needs)
    return_S = discounted_return(action_reward_S, spans, config.gamma)
    return credit_of_returns(reward_B, return_S, state_key_S, spans, config, total=total)


def credit_of_returns(
    reward: Tensor, returns: Tensor, state_key: Tensor, spans: Spans, config: GiGPOConfig, *, total: Total = None
) -> AdditiveCredit:
    """GiGPO's credit for given returns: credit_n = A^E_i(reward) + omega * A^S_s(returns).

    reward [B], returns [S] real, state_key [S] int. total: as in assign. Raises ValueError: wrong shapes.
    """
    norm = {"unbiased": config.unbiased, "eps": config.std_eps}
    episode_S = _episode_advantage(reward, spans, config)
    step_S = anchor_advantage(returns, state_key, spans, scale=config.scale, **norm)
    return AdditiveCredit(
        segment_expand(episode_S + config.omega * step_S, spans.action_of_token),
        REDUCTIONS[config.reduction](spans, total=total),
        config.surrogate,
        advantage_N=segment_expand(episode_S, spans.action_of_token),
    )


def _episode_advantage(reward_B: Tensor, spans: Spans, config: GiGPOConfig) -> Tensor:
    """A^E of each action's trajectory, [S]."""
    trajectory_S, B = spans.trajectory_of_action, spans.num_trajectories
    norm = {"unbiased": config.unbiased, "eps": config.std_eps}
    if config.episode_over == "trajectories":
        advantage_B = group_advantage(reward_B, spans, scale=config.scale, singleton=config.singleton, **norm)
        return advantage_B[trajectory_S]
    reward_S, group_S = reward_B[trajectory_S], spans.group_of_trajectory[trajectory_S]
    if config.scale == "std":
        advantage_S = segment_zscore(reward_S, group_S, B, **norm)
    else:
        advantage_S = segment_center(reward_S, group_S, B)
    if config.singleton == "zero":
        return advantage_S
    return torch.where(spans.group_size[group_S] == 1, reward_S.to(advantage_S.dtype), advantage_S)
