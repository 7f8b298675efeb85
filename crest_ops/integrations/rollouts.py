"""What trainers' hooks pass (masks, rewards, log-probs) as Spans, Signals and per-token losses.

Shape letters: N token positions, S actions, K turns, B rollouts (trajectories), T padded length.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..backend import checks_values
from ..methods import METHODS, needs_of
from ..policy_loss import TokenLosses, check_coefficients, finite_given, token_losses, with_gradient
from ..segments import segment_sum
from ..signals import Signals
from ..spans import Spans
from ..surrogates import CISPO, GSPO, SAPO, PPOClip, Surrogate
from ..vocabulary import FLOAT_DTYPES, check_per_token


class Bounds(NamedTuple):
    """What a trainer's configuration says of the ratio, in the words of crest_ops.surrogates."""

    low: float
    high: float
    dual: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05


SURROGATES: Mapping[str, Callable[[Bounds], Surrogate]] = MappingProxyType(
    {
        "crest_ppo": lambda bounds: PPOClip(bounds.low, bounds.high, bounds.dual),
        "crest_gspo": lambda bounds: GSPO(bounds.low, bounds.high),
        "crest_gspo_action": lambda bounds: GSPO(bounds.low, bounds.high, level="action"),
        "crest_cispo": lambda bounds: CISPO(bounds.high, low=bounds.low),
        "crest_sapo": lambda bounds: SAPO(bounds.tau_pos, bounds.tau_neg),
    }
)
"""The policy losses by the names under which trainers find them; crest_gspo_action averages the ratio per action."""


def installed(package: str) -> bool:
    """Whether a trainer's package can be imported."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def refuse_unknown(unknown: Mapping[str, Any], where: str) -> None:
    """Raises ValueError naming the first argument that holds something and has no meaning here."""
    for name, value in unknown.items():
        if value is not None:
            raise ValueError(f"{where} was passed {name} ({type(value).__name__}), which it cannot take into account")


def as_mask(name: str, mask: Tensor, shape: torch.Size) -> Tensor:
    """`mask` as bool: it is bool, or numbers that are 0 or 1, of this shape. Raises ValueError naming it."""
    if not isinstance(mask, Tensor) or mask.shape != shape:
        found = [*mask.shape] if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"{name} is {found}, want a tensor {[*shape]}")
    if mask.dtype != torch.bool and checks_values(mask) and ((mask != 0) & (mask != 1)).any():
        raise ValueError(f"{name} holds {float(mask[(mask != 0) & (mask != 1)][0])}, want 0 and 1")
    return mask.bool()


def action_places(mask: Tensor) -> Tensor:
    """[B, T] int64: which action of its row, from 0, began last at or before a token; -1 before the first.

    An action starts where the mask rises. mask [B, T] bool: the policy wrote the token.
    """
    return (mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]).cumsum(1) - 1


def action_spans(mask: Tensor, group: Tensor | None = None) -> Spans:
    """Spans of a padded batch of which only the mask is known: every action is a turn of its own.

    An action starts where the mask rises; two with no other token between them are one, since nothing tells them
    apart. mask [B, T] bool: the policy wrote the token. group [B] int: None where no rollouts are compared.
    """
    if group is None:
        group = torch.zeros(len(mask), dtype=torch.int64, device=mask.device)
    return Spans.from_mask(mask, group=group, turn=action_places(mask).clamp(min=0))


def reward_signals(rewards: Tensor, spans: Spans) -> Signals:
    """reward_B, turn_reward_K and action_reward_S of rewards that lie on tokens.

    A rollout's reward is the sum of its row. A reward belongs to the last action that began at or before its token:
    that of an action may lie on its last token or on the reply to it. rewards [B, T] real, over the N = B * T
    positions of spans. Raises ValueError naming the row of a reward that is not finite or lies before the first action.
    """
    rewards = rewards if rewards.dtype == torch.float64 else rewards.float()
    began_BT = spans.action_of_token.view(rewards.shape).cummax(1).values if rewards.numel() else rewards.int()
    if checks_values(rewards):
        early_B = ((began_BT < 0) & (rewards != 0)).any(1) & (spans.trajectory_length > 0)
        for bad_B, problem in (
            (~rewards.isfinite().all(1), "holds a value that is not finite"),
            (early_B, "has a reward before the row's first action: want it on one of its tokens or on the reply"),
        ):
            if bad_B.any():
                raise ValueError(f"token_level_rewards[{int(bad_B.nonzero()[0])}] {problem}")
    action_reward_S = segment_sum(rewards.flatten(), began_BT.flatten(), spans.num_actions)
    return Signals(
        reward_B=rewards.sum(1),
        turn_reward_K=segment_sum(action_reward_S, spans.turn_of_action, spans.num_turns),
        action_reward_S=action_reward_S,
    )


REWARD_SIGNALS = ("reward_B", "turn_reward_K", "action_reward_S")
"""The signals of `reward_signals`: all that an advantage hook's arguments hold."""


def given_methods(signals: Sequence[str] = REWARD_SIGNALS) -> tuple[str, ...]:
    """Names of the methods that need nothing but these signals."""
    return tuple(name for name, method in METHODS.items() if set(method.needs) <= set(signals))


def check_method(method: str, config: Any, trainer: str) -> Any:
    """The method's config, its default for None. Raises ValueError: another method's, or signals that are not there."""
    config = METHODS[method].Config() if config is None else config
    if not isinstance(config, METHODS[method].Config):
        raise ValueError(f"config is {type(config).__name__}, want {METHODS[method].Config.__name__}")
    missing = sorted(set(needs_of(method, config)) - set(REWARD_SIGNALS))
    if missing:
        raise ValueError(
            f"method {method!r} needs {', '.join(missing)}, which {trainer} does not pass to an estimator: "
            f"want one of {', '.join(given_methods())}, or call METHODS[{method!r}].assign where the signals are known"
        )
    return config


def check_std(divides: bool, config: Any, name: str) -> None:
    """Raises ValueError where the trainer says not to divide by the group's std, and the method's config does."""
    if not divides and hasattr(config, "std_eps") and getattr(config, "scale", "std") != "none":
        raise ValueError(f"{name} is False, but {type(config).__name__} divides by the std: choose crest_dr_grpo")


def assign_advantages(method: str, config: Any, rewards: Tensor, mask: Tensor, index: Sequence | Tensor) -> Tensor:
    """A method's credit of every token [B, T], from rewards on tokens [B, T], the mask [B, T] and the rollouts' uids.

    index [B]: equal for rollouts of one task; of any type that a dict takes for a key. Raises ValueError naming the
    argument: shapes, no index, a mask other than 0 and 1, and whatever the method refuses.
    """
    if not isinstance(rewards, Tensor) or rewards.dim() != 2:
        raise ValueError(f"token_level_rewards is {type(rewards).__name__}, want a tensor [B, T]")
    check_per_token("token_level_rewards", rewards, rewards.shape, FLOAT_DTYPES, rewards.device)
    mask = as_mask("response_mask", mask, rewards.shape)
    group = torch.tensor(_groups(index, len(rewards)), dtype=torch.int64, device=rewards.device)
    spans = action_spans(mask, group)
    credit = METHODS[method].assign(spans, reward_signals(rewards, spans), config)
    return credit.credit_N.view(rewards.shape)


def _groups(index: Sequence | Tensor, rows: int) -> list[int]:
    """The group of every row, from 0, in the order in which its uid is first seen."""
    uids = _plain(index)
    if not isinstance(uids, Sequence) or len(uids) != rows:
        found = f"holds {len(uids)} uids" if isinstance(uids, Sequence) else f"is {type(index).__name__}"
        raise ValueError(f"index {found}, want {rows} uids, one a row")
    seen: dict[Any, int] = {}
    try:
        return [seen.setdefault(_plain(uid), len(seen)) for uid in uids]
    except TypeError as error:
        shape = f" {[*index.shape]}" if hasattr(index, "shape") else ""
        raise ValueError(f"index is {type(index).__name__}{shape} ({error}), want one uid a row, [{rows}]") from error


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values


def logp_losses(
    logp: Tensor,
    old_logp: Tensor,
    advantages: Tensor,
    spans: Spans,
    surrogate: Surrogate,
    *,
    importance_weight: Tensor | None = None,
    ref_logp: Tensor | None = None,
    kl_coef: float = 0.0,
) -> TokenLosses:
    """The credit-weighted loss of each token from log-probs that a trainer computed itself.

    value_n = importance_weight_n * surrogate(r_n, A_n) + kl_coef * k3_n, r = exp(logp - old_logp); k3, clips and masked
    tokens as in crest_ops.policy_loss, of which this is the part behind the log-probs. The caller weighs and sums:
    loss = sum_n token_weight_n * value_n.

    logp [...]: carries the gradient. old_logp, advantages (A), importance_weight, ref_logp [...]: its shape, detached;
    what they hold where the spans have no action has no part in anything. Returns TokenLosses shaped like logp: value
    has the gradient slope by logp; metrics without the entropy, which log-probs do not tell.
    Raises ValueError naming the argument: shapes, dtypes, devices, values that are not finite at a policy token.
    """
    check_per_token("logp", logp, getattr(logp, "shape", torch.Size()), FLOAT_DTYPES, spans.mask.device)
    per_token = {
        "old_logp": old_logp,
        "advantages": advantages,
        "importance_weight": importance_weight,
        "ref_logp": ref_logp if kl_coef else None,
    }
    for name, value in per_token.items():
        if value is not None or name in ("old_logp", "advantages"):
            check_per_token(name, value, logp.shape, FLOAT_DTYPES, logp.device)
    check_coefficients(kl_coef, 0.0, ref_logp, surrogate, spans)
    logp_N = logp.reshape(-1) if logp.dtype == torch.float64 else logp.reshape(-1).float()
    detached_N = torch.where(spans.mask, logp_N.detach(), 0)
    given = finite_given(per_token, spans.mask)
    given["credit"] = given.pop("advantages")
    found = token_losses(detached_N, torch.zeros_like(detached_N), given, surrogate, spans, spans.mask, kl_coef, 0.0)
    del found.metrics["entropy"]
    value_N = with_gradient(found.value, logp_N, found.slope, None, None)
    per_token = (x_N.view(logp.shape) for x_N in (value_N, found.slope, found.ratio, found.clipped))
    return TokenLosses(*per_token, found.metrics)
