"""Credit of each action from what follows it: discounted returns, temporal differences, averages over a few steps.

Every function takes `spans`, the Spans that say which actions form a trajectory; nothing crosses a trajectory's end.
Arithmetic is float64, rounded once to the result: float32 (float64 where an input is float64).

Shape letters: S actions, B trajectories. t counts the actions of one trajectory from 0, T is how many it has.
"""

import torch
from torch import Tensor

from .backend import checks_values
from .segments import segment_difference, segment_discounted_sum, segment_expand, segment_sum
from .spans import Spans, check_length


def discounted_return(reward: Tensor, spans: Spans, gamma: float) -> Tensor:
    """Discounted sum of the rewards from each action to the end of its trajectory.

    R_t = sum over k >= t of gamma^(k-t) * r_k. The step return of GiGPO, arXiv 2505.10978, among others.

    reward [S] real, gamma in [0, 1]. Returns [S]. Raises ValueError: wrong shape, gamma out of range.
    """
    check_length("reward", reward, spans.num_actions, "[S]")
    returned_S = segment_discounted_sum(reward.double(), spans.trajectory_of_action, gamma)
    return returned_S.to(_dtype(reward))


def td_credit(reward: Tensor, value: Tensor, baseline: Tensor, spans: Spans) -> Tensor:
    """Credit of each action: its reward and what it changed in the potential; a trajectory keeps its total.

    A*_t = r_t + V~_{t+1} - V~_t,  V~_0 = b_i, V~_t = V(x_t) for 0 < t < T, V~_T = 0;  sum_t A*_t = sum_t r_t - b_i.
    TAC of FACTOR, arXiv 2608.07118; the sum holds for any V. Here an action without a token is no step (this project's
    reading): its credit is 0, its value is not looked at, and its reward goes to the last step before it in its
    trajectory, or to the first if there is none before, so that the steps alone keep the total.

    reward, value [S] real: environment reward of the action, potential of the state before it. baseline [B] real.
    Returns [S]. Rounding to float32 moves the sum by at most 2^-24 * sum_t |A*_t|. Raises ValueError: wrong shapes.
    """
    check_length("reward", reward, spans.num_actions, "[S]")
    check_length("value", value, spans.num_actions, "[S]")
    check_length("baseline", baseline, spans.num_trajectories, "[B]")
    change_S = segment_difference(value.double(), _steps(spans), spans.num_trajectories, first=baseline.double())
    return (_reward_of_steps(reward.double(), spans) + change_S).to(_dtype(reward, value, baseline))


def uniform_credit(advantage: Tensor, spans: Spans) -> Tensor:
    """The same share of its trajectory's advantage for each action: A*_t = A_i / T_i.

    FACTOR, arXiv 2608.07118, while its potential warms up. An action without a token is no step, as in td_credit: it
    gets 0 and is not counted in T_i. advantage [B] real. Returns [S]. Raises ValueError: wrong shape.
    """
    check_length("advantage", advantage, spans.num_trajectories, "[B]")
    step_S = _steps(spans)
    share_B = advantage.double() / _count(step_S, spans.num_trajectories).clamp(min=1)
    return segment_expand(share_B, step_S).to(_dtype(advantage))


def log_ratio_td(gold_logp: Tensor, spans: Spans, eps: float = 0.1) -> Tensor:
    """How much each action brought the gold answer nearer: the one-step difference of a log-ratio state value.

    delta_k = V_{k+1} - V_k = log(d_k / d_{k+1}),  V_k = log(d_0 / d_k),  d_k = -gold_logp_k + eps.
    TRACE, arXiv 2607.13988 (Turn-level Reward Assignment via Credit Estimation), from summaries of the paper. The sum
    over a trajectory is log(d_0 / d_T), whatever lies between; an action that changes nothing gets exactly 0.

    gold_logp [S+B] real, <= 0: mean log-prob of the gold answer's tokens at each boundary, per trajectory its T + 1
    states in order. Returns [S]. Raises ValueError: eps <= 0 or infinite, wrong shape, a log-prob above 0, not finite.
    """
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps is {eps}, want eps > 0 and finite")
    check_length("gold_logp", gold_logp, spans.num_actions + spans.num_trajectories, "[S+B]")
    if checks_values(gold_logp):
        bad = ~torch.isfinite(gold_logp) | (gold_logp > 0)
        if bad.any():
            at = int(torch.nonzero(bad)[0])
            raise ValueError(f"gold_logp[{at}] is {gold_logp[at].item()}, want a finite log-prob <= 0")
    log_distance = (eps - gold_logp.double()).log()
    before_S = torch.arange(spans.num_actions, device=gold_logp.device) + spans.trajectory_of_action
    return (log_distance[before_S] - log_distance[before_S + 1]).to(_dtype(gold_logp))


def k_step_credit(
    delta: Tensor,
    spans: Spans,
    steps: int,
    gamma: float,
    *,
    outcome: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Discounted mean of the next `steps` differences, with the outcome added where the end is among them.

    c_k = (sum_{u=k..h} gamma^(u-k) * delta_u) / (sum_{u=k..h} gamma^(u-k)),  h = min(k + steps - 1, T - 1),
    and where h = T - 1:  c_k += 2 * gamma^(T-k) * outcome_i.
    TRACE, arXiv 2607.13988 (steps 3, gamma .8), from summaries of the paper. steps = 1 without outcome gives delta.

    delta [S] real. outcome [B] real: advantage of the trajectory; None adds nothing. mask [S] bool: the actions that
    are steps (None: all, also those without a token); the others get 0 and are stepped over. Returns [S].
    Raises ValueError: wrong shapes, steps < 1, gamma outside [0, 1].
    """
    S, B = spans.num_actions, spans.num_trajectories
    check_length("delta", delta, S, "[S]")
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps is {steps!r}, want an int >= 1")
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}, want 0 <= gamma <= 1")
    step_S = spans.trajectory_of_action
    if mask is not None:
        check_length("mask", mask, S, "[S]")
        step_S = torch.where(mask, step_S, -1)
    delta_S, place_S = torch.where(step_S < 0, 0, delta.double()), torch.arange(S, device=delta.device)
    end_B = torch.full((B,), float(S), dtype=torch.float64, device=delta.device)
    next_S = place_S + segment_difference(place_S.double(), step_S, B, last=end_B).long()  # S past the end
    next_, delta_ = torch.cat([next_S, next_S.new_full((1,), S)]), torch.cat([delta_S, delta_S.new_zeros(1)])
    at_S, sum_S, weight_S, count_S = place_S, *torch.zeros(3, S, dtype=torch.float64, device=delta.device)
    for ahead in range(min(steps, S)):
        present_S = (at_S < S).double()
        sum_S = sum_S + gamma**ahead * delta_[at_S]
        weight_S = weight_S + gamma**ahead * present_S
        count_S = count_S + present_S
        at_S = next_[at_S]
    credit_S = sum_S / weight_S
    if outcome is not None:
        check_length("outcome", outcome, B, "[B]")
        fill_S = 2 * gamma ** count_S.double() * segment_expand(outcome.double(), step_S)
        credit_S = credit_S + torch.where(at_S == S, fill_S, 0)
    credit_S = torch.where(step_S < 0, 0, credit_S)
    return credit_S.to(_dtype(delta) if outcome is None else _dtype(delta, outcome))


def _steps(spans: Spans) -> Tensor:
    """[S]: trajectory of each action that holds a token, -1 for one that does not."""
    return torch.where(spans.action_length > 0, spans.trajectory_of_action, -1)


def _reward_of_steps(reward_S: Tensor, spans: Spans) -> Tensor:
    """[S]: rewards, those of actions without a token moved to the step before, else to the trajectory's first one."""
    step_S, trajectory_S = _steps(spans), spans.trajectory_of_action
    count_B = _count(step_S, spans.num_trajectories)
    rank_S = (step_S >= 0).cumsum(0) - 1  # of the last step up to here, over the whole batch
    rank_S = torch.maximum(rank_S, (count_B.cumsum(0) - count_B)[trajectory_S])
    host_S = torch.where(count_B[trajectory_S] > 0, rank_S, -1)
    reward_of_rank = segment_sum(reward_S, host_S, spans.num_actions)
    return segment_expand(reward_of_rank, torch.where(step_S >= 0, rank_S, -1))


def _count(ids_S: Tensor, num: int) -> Tensor:
    return segment_sum(torch.ones_like(ids_S, dtype=torch.float64), ids_S, num).long()


def _dtype(*inputs: Tensor) -> torch.dtype:
    return torch.float64 if any(values.dtype == torch.float64 for values in inputs) else torch.float32
