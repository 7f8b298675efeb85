"""EFCA: the environment's replies weigh each action's return before GiGPO compares the returns.

arXiv 2608.08255, Learning from Environmental Feedback: Credit Assignment across Multiple Timescales for Agentic RL.
Signals after summaries of the paper; the weight itself is not public, and the one here is this project's own.
Shape letters: N token positions, S actions, B trajectories.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..reductions import Total
from ..returns import discounted_return
from ..signals import AdditiveCredit, Signals
from ..spans import Spans, check_length
from .gigpo import GiGPOConfig, credit_of_returns
from .settings import LARGEST, check_arguments, check_counts, check_number, check_numbers

needs = ("reward_B", "action_reward_S", "feedback_S", "state_key_S")


@dataclass(frozen=True)
class EFCAConfig(GiGPOConfig):
    """EFCA's settings, beside GiGPOConfig's; window 5 and eta .3 of arXiv 2608.08255, the others this project's choice.

    beta_feedback, beta_history >= 0: what the immediate and the history signal add to the weight. eta in [0, 1]: size
    of the history signal of a window without progress. window >= 1: actions that the history signal looks at.
    low in [0, 1], high in [1, 2]: bounds of the weight; no return changes its sign, at 0 and 2 some become 0.
    Raises ValueError: a value out of range or an unknown name.
    """

    beta_feedback: float = 0.2
    beta_history: float = 0.2
    eta: float = 0.3
    window: int = 5
    low: float = 0.5
    high: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, eta=(0, 1), low=(0, 1), high=(1, 2))
        check_numbers(self, beta_feedback=(0, LARGEST), beta_history=(0, LARGEST))
        check_counts(self, "window")


Config = EFCAConfig


def history_signal(feedback: Tensor, spans: Spans, *, window: int = 5, eta: float = 0.3) -> Tensor:
    """What the last `window` replies, the action's own included, say: stuck, going round in circles, or neither.

    c_t = -1 if feedback was -1 all through the window, -eta if it was never +1, else 0.
    EFCA, arXiv 2608.08255 (medium timescale). It looks back only. That the first window - 1 actions of a trajectory
    give 0, for want of a full window, is this project's reading.

    feedback [S] int in {-1, 0, 1}; window >= 1; eta in [0, 1]. Returns [S] float64.
    Raises ValueError: wrong shape, a number out of range.
    """
    S, trajectory_S = spans.num_actions, spans.trajectory_of_action
    check_length("feedback", feedback, S, "[S]")
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ValueError(f"window is {window!r}, want an int >= 1")
    check_number("eta", eta, 0, 1)
    place_S = torch.arange(S, device=feedback.device)
    start_S = (place_S - (window - 1)).clamp(min=0)
    full_S = (place_S >= window - 1) & (trajectory_S[start_S] == trajectory_S)

    def count(hit_S: Tensor) -> Tensor:
        total = torch.cat([hit_S.new_zeros(1, dtype=torch.int64), hit_S.cumsum(0)])
        return total[1:] - total[start_S]

    stuck_S, idle_S = count(feedback < 0) == window, count(feedback > 0) == 0
    return torch.where(full_S, torch.where(stuck_S, -1, -eta * idle_S.double()), 0)


def reweighted_return(
    returns: Tensor,
    feedback: Tensor,
    history: Tensor,
    *,
    beta_feedback: float,
    beta_history: float,
    low: float,
    high: float,
) -> Tensor:
    """Return of each action, better where the environment's replies were good, worse where they were not.

    R~ = R + (w - 1) * |R|,  w = clip(1 + beta_feedback * c_fb + beta_history * c_hist, low, high).
    EFCA, arXiv 2608.08255, multiplies the return by a weight, R~ = w * R, which this is where R >= 0; where R < 0 that
    would reward bad replies, hence |R|. This form and w are this project's own. R~ is R bitwise where both signals are
    0; R = 0 stays 0, so a group of failures without a reward learns nothing here either.

    returns, feedback, history [S] real; betas >= 0, low in [0, 1], high in [1, 2]. Returns [S] in the dtype of returns.
    Raises ValueError: a number out of range.
    """
    check_number("beta_feedback", beta_feedback, 0, LARGEST)
    check_number("beta_history", beta_history, 0, LARGEST)
    check_number("low", low, 0, 1)
    check_number("high", high, 1, 2)
    weight_S = (1 + beta_feedback * feedback.double() + beta_history * history.double()).clamp(low, high)
    return returns + ((weight_S - 1) * returns.abs()).to(returns.dtype)


def assign(spans: Spans, signals: Signals, config: EFCAConfig = EFCAConfig(), *, total: Total = None) -> AdditiveCredit:
    """Credit of every policy token: GiGPO's, for reweighted returns: credit_n = A^E_i + omega * A^S_s(R~).

    R~ = reweighted_return of R = discounted_return of the action rewards, by the signals feedback_S and
    history_signal. EFCA, arXiv 2608.08255; see GiGPO, arXiv 2505.10978, for A^E and A^S. Its "turns" are the actions of
    Spans, one environment reply each. Additive, as GiGPO is: advantage_N is A^E. All feedback 0 before a full window,
    or both betas 0, gives GiGPO bitwise.

    total: the reduction's count over the whole batch, if this is a piece of it. Needs reward_B, action_reward_S,
    feedback_S and state_key_S. Returns credit_N [N] float32 (float64 for float64 rewards), 0 outside the spans.
    Raises ValueError: a signal missing, of the wrong length or not finite, feedback outside {-1, 0, 1}.
    """
    check_arguments(spans, signals, config, EFCAConfig)
    reward_B, action_reward_S, feedback_S, state_key_S = signals.require(spans, *needs)
    return_S = reweighted_return(
        discounted_return(action_reward_S, spans, config.gamma),
        feedback_S,
        history_signal(feedback_S, spans, window=config.window, eta=config.eta),
        beta_feedback=config.beta_feedback,
        beta_history=config.beta_history,
        low=config.low,
        high=config.high,
    )
    return credit_of_returns(reward_B, return_S, state_key_S, spans, config, total=total)
