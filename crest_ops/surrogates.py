"""Surrogate objectives of the policy ratio: per token a value to be MINIMISED and its explicit slope, without autograd.

Every surrogate is a frozen dataclass with `evaluate(log_ratio, credit, spans=None, *, mask=None, logp=None)`:

    log_ratio [N] real: logp - old_logp of the realised token.   credit [N] real: signed coefficient A, detached.
    spans: needed by levels above token; where given, tokens that the policy did not write count as masked.
    mask [N] bool: True = trained on; further tokens to leave out.   logp [N]: for the value of CISPO alone.

The ratio. r_n = exp(clip(mean over the span of n of log_ratio, -20, 20)) for the spans of `level`: the token itself,
its action, its turn or its trajectory. With ratio="sum" the plain sum stands in place of the mean, a different thing
(the importance weight of the whole span): 100 tokens of 0.01 give exp(1), not exp(0.01). Masked tokens are in neither.
Of a part of spans (`Spans.part`) the mean is over the tokens of all ranks, which all evaluate it.

The slope is d value_n / d logp_n. Above token level it follows GSPO's token form, arXiv 2507.18071, section 4.3:
r_n = sg[r_span] * exp(logp_n - sg[logp_n]). Each token carries its own credit through the common ratio; where credit
and weight are equal inside a span, these slopes are the exact gradient of its objective, whose mean every token moves.
The clip at 20 holds the ratio: outside it the slope is 0 (CISPO, whose ratio is a constant, excepted).

Masked tokens have value, slope and ratio exactly 0 and clipped False, whatever log_ratio, credit and logp hold there.
Arithmetic and results are float32, float64 where log_ratio is float64. Raises ValueError: shapes, a level above token
without spans; the constructors: unknown level or ratio, bounds out of range.

Shape letters: N token positions.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .segments import segment_expand, segment_mean, segment_sum
from .spans import Spans

MAX_LOG_RATIO = 20.0
"""The log-ratio of a span is clipped to this size on both sides, so that its exponential never overflows."""

Level = Literal["token", "action", "turn", "trajectory"]
LEVELS = ("token", "action", "turn", "trajectory")


class SurrogateValue(NamedTuple):
    """What a surrogate says of each token, all [N], detached.

    value: to be minimised. slope: d value / d logp. clipped bool: the bound holds, not the ratio. ratio: of the span.
    """

    value: Tensor
    slope: Tensor
    clipped: Tensor
    ratio: Tensor


@dataclass(frozen=True)
class PPOClip:
    """Clipped ratio: value = -min(r A, clip(r, 1 - low, 1 + high) A), slope = -r A, 0 where clipped.

    PPO, arXiv 1707.06347, eq. 7; separate bounds: DAPO, arXiv 2503.14476 (.2, .28). With dual = c > 1, where A < 0:
    value = min(value, -c A), slope 0 where that holds (dual clip, arXiv 1912.09729; c = 3 in verl).
    """

    low: float = 0.2
    high: float = 0.28
    dual: float | None = None
    level: Level = "token"
    ratio: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        _check_bounds(self)
        if self.dual is not None and not self.dual > 1:
            raise ValueError(f"dual is {self.dual}, want dual > 1 or None")

    def evaluate(
        self,
        log_ratio: Tensor,
        credit: Tensor,
        spans: Spans | None = None,
        *,
        mask: Tensor | None = None,
        logp: Tensor | None = None,
    ) -> SurrogateValue:
        """Value, slope, clipped and ratio of every token: see the module."""
        ratio, credit, free, inside = _ratio(self, log_ratio, credit, spans, mask)
        plain = -ratio * credit
        bounded = -ratio.clamp(1 - self.low, 1 + self.high) * credit
        clipped = bounded > plain
        value = torch.where(clipped, bounded, plain)
        if self.dual is not None:
            held = (credit < 0) & (value > -self.dual * credit)
            value, clipped = torch.where(held, -self.dual * credit, value), clipped | held
        slope = torch.where(free & ~clipped, plain, 0)
        return SurrogateValue(value, slope, clipped & inside, ratio)


@dataclass(frozen=True)
class GSPO(PPOClip):
    """PPOClip of the trajectory's mean ratio, with GSPO's narrow bounds.

    r = exp((1/|y|) * sum over t of (logp_t - old_logp_t)). GSPO, arXiv 2507.18071, eqs. 5-7 and 4.3 (token form).
    """

    low: float = 3e-4
    high: float = 4e-4
    level: Level = "trajectory"


@dataclass(frozen=True)
class CISPO:
    """Clipped importance weight: value = -sg[clip(r, 1 - low, 1 + high)] A logp, slope = -clip(r, 1 - low, 1 + high) A.

    CISPO (MiniMax-M1), arXiv 2506.13585. low None: no lower bound, min(r, 1 + high). Clipped tokens keep their slope;
    `clipped` says where the weight is at a bound. Where logp is not given, log_ratio stands for it in the value, which
    differs by a constant of the policy and has the same slope.
    """

    high: float = 0.28
    low: float | None = None
    level: Level = "token"
    ratio: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        _check_bounds(self)

    def evaluate(
        self,
        log_ratio: Tensor,
        credit: Tensor,
        spans: Spans | None = None,
        *,
        mask: Tensor | None = None,
        logp: Tensor | None = None,
    ) -> SurrogateValue:
        """Value, slope, clipped and ratio of every token: see the module."""
        ratio, credit, _, inside = _ratio(self, log_ratio, credit, spans, mask)
        weight = ratio.clamp(0.0 if self.low is None else 1 - self.low, 1 + self.high)
        slope = -weight * credit
        logp = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if logp is None else logp
        logp = torch.where(inside, logp.detach(), 0)
        value = torch.where(slope == 0, 0, slope * logp.to(slope.dtype))
        return SurrogateValue(value, slope, (weight != ratio) & inside, ratio)


@dataclass(frozen=True)
class SAPO:
    """Soft gate in place of the clip: value = -(4 / tau) s A, slope = -4 s (1 - s) r A, s = sigmoid(tau (r - 1)).

    tau = tau_pos where A > 0, else tau_neg. SAPO, arXiv 2511.20347 (1.0, 1.05). Nothing counts as clipped.
    """

    tau_pos: float = 1.0
    tau_neg: float = 1.05
    level: Level = "token"
    ratio: Literal["mean", "sum"] = "mean"

    def __post_init__(self) -> None:
        _check_level(self)
        if not (self.tau_pos > 0 and self.tau_neg > 0):
            raise ValueError(f"tau_pos is {self.tau_pos} and tau_neg {self.tau_neg}, want both > 0")

    def evaluate(
        self,
        log_ratio: Tensor,
        credit: Tensor,
        spans: Spans | None = None,
        *,
        mask: Tensor | None = None,
        logp: Tensor | None = None,
    ) -> SurrogateValue:
        """Value, slope, clipped and ratio of every token: see the module."""
        ratio, credit, free, _ = _ratio(self, log_ratio, credit, spans, mask)
        tau = torch.where(credit > 0, torch.full_like(credit, self.tau_pos), self.tau_neg)
        reach = tau * (ratio - 1)
        value = -4 / tau * reach.sigmoid() * credit
        slope = torch.where(free, -4 * reach.sigmoid() * (-reach).sigmoid() * ratio * credit, 0)
        return SurrogateValue(value, slope, torch.zeros_like(free), ratio)


Surrogate = PPOClip | CISPO | SAPO


def _ratio(
    surrogate: Surrogate, log_ratio: Tensor, credit: Tensor, spans: Spans | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ratio and credit (0 where masked), free = the ratio moves with logp, inside = not masked."""
    if not isinstance(log_ratio, Tensor) or log_ratio.dim() != 1:
        found = f"has shape {[*log_ratio.shape]}" if isinstance(log_ratio, Tensor) else f"is {type(log_ratio).__name__}"
        raise ValueError(f"log_ratio {found}, want a tensor [N]")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, want bool")
    for name, tensor in (("credit", credit), ("mask", mask)):
        if tensor is not None and tensor.shape != log_ratio.shape:
            raise ValueError(f"{name} has shape {[*tensor.shape]}, want {[*log_ratio.shape]} like log_ratio")
    check_level(surrogate, spans)
    if spans is not None and spans.num_tokens != log_ratio.shape[0]:
        raise ValueError(f"spans hold {spans.num_tokens} tokens, log_ratio has {log_ratio.shape[0]}: want one N")
    inside = torch.ones_like(log_ratio, dtype=torch.bool) if spans is None else spans.mask
    inside = inside if mask is None else inside & mask
    dtype = torch.float64 if log_ratio.dtype == torch.float64 else torch.float32
    log_ratio = torch.where(inside, log_ratio.detach().to(dtype), 0)
    if surrogate.level != "token":
        of_token, num = {
            "action": (spans.action_of_token, spans.num_actions),
            "turn": (spans.turn_of_token, spans.num_turns),
            "trajectory": (spans.trajectory_of_token, spans.num_trajectories),
        }[surrogate.level]
        ids = torch.where(inside, of_token, -1)
        reduce = segment_mean if surrogate.ratio == "mean" else segment_sum
        log_ratio = segment_expand(reduce(log_ratio, ids, num, process_group=spans.process_group), ids)
    free = inside & ~(log_ratio.abs() > MAX_LOG_RATIO)  # NaN is free: it must reach the gradient
    ratio = torch.where(inside, log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), 0)
    return ratio, torch.where(inside, credit.detach().to(dtype), 0), free, inside


def check_surrogate(surrogate: object) -> None:
    """Raises ValueError for anything but an instance of a surrogate."""
    if not isinstance(surrogate, Surrogate):
        raise ValueError(f"surrogate is {surrogate!r}, want a PPOClip, GSPO, CISPO or SAPO")


def ranks_of(surrogate: object, spans: object):
    """The process group over which a surrogate is averaged; None where it is this rank's alone."""
    return None if getattr(surrogate, "level", "token") == "token" else getattr(spans, "process_group", None)


def check_level(surrogate: Surrogate, spans: Spans | None) -> None:
    """Raises ValueError where the level is above token and there are no spans."""
    if spans is None and surrogate.level != "token":
        raise ValueError(f"{type(surrogate).__name__} at level {surrogate.level!r} needs spans: pass spans=Spans(...)")


def _check_level(surrogate: Surrogate) -> None:
    if surrogate.level not in LEVELS:
        raise ValueError(f"level is {surrogate.level!r}, want one of {', '.join(map(repr, LEVELS))}")
    if surrogate.ratio not in ("mean", "sum"):
        raise ValueError(f"ratio is {surrogate.ratio!r}, want 'mean' or 'sum'")


def _check_bounds(surrogate: PPOClip | CISPO) -> None:
    _check_level(surrogate)
    low, high = surrogate.low, surrogate.high
    unbounded = low is None and isinstance(surrogate, CISPO)
    if not unbounded and not (isinstance(low, int | float) and 0 <= low <= 1):
        raise ValueError(f"low is {low!r}, want 0 <= low <= 1")
    if not (isinstance(high, int | float) and high >= 0):
        raise ValueError(f"high is {high!r}, want high >= 0")


def as_numbers(surrogate: Surrogate) -> tuple[int, float, float, float]:
    """(kind, a, b, c) of a surrogate at token level, for ops that take plain numbers: 0 PPOClip, 1 CISPO, 2 SAPO."""
    if isinstance(surrogate, PPOClip):
        return 0, float(surrogate.low), float(surrogate.high), math.inf if surrogate.dual is None else surrogate.dual
    if isinstance(surrogate, CISPO):
        return 1, 1.0 if surrogate.low is None else float(surrogate.low), float(surrogate.high), 0.0
    return 2, float(surrogate.tau_pos), float(surrogate.tau_neg), 0.0


def from_numbers(kind: int, a: float, b: float, c: float) -> Surrogate:
    """The surrogate at token level of `as_numbers`."""
    if kind == 0:
        return PPOClip(a, b, None if c == math.inf else c)
    return CISPO(b, low=a) if kind == 1 else SAPO(a, b)
