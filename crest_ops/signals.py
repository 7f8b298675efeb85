"""What a credit method reads (Signals) and what it gives back (Credit).

Shape letters: N token positions, S actions, K turns, B trajectories. The letter that ends a field's name is its length.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .backend import checks_values
from .spans import Spans, check_whole

DistillKind = Literal["forward_kl", "reverse_kl", "sampled_reverse_kl"]


@dataclass(frozen=True, eq=False)
class Signals:
    """Everything that may be known of a batch; a method takes what its `needs` names. Log-probs in nats.

    reward_B: verified outcome of the trajectory. turn_reward_K: that of the turn (the turns of Spans, in order).
    action_reward_S: environment reward of the action. value_S: potential of the state before the action.
    teacher_gap_N: teacher minus student log-prob of the realised token.
    skill_gap_N: teacher with the hindsight skill minus teacher without it.
    surprisal_N, entropy_N: -log-prob of the realised token; entropy of the policy there.
    gold_logp [S + B]: mean gold-answer log-prob at every action boundary, per trajectory its T_i + 1 states in order.
    feedback_S int: -1, 0, +1 read from the environment's reply.
    role_S int: 0 decisive progress, 1 useful exploration, 2 no-progress infrastructure, 3 regression.
    clue_score_S: step score in [0, 2]. error_S bool: the action failed.
    cause_S int: index (over the whole batch, 0..S-1) of the earlier action whose error caused it, or -1.
    state_key_S int64: equal for equal states. action_mask_S bool: environment-facing actions, where a method treats
    them apart.
    """

    reward_B: Tensor | None = None
    turn_reward_K: Tensor | None = None
    action_reward_S: Tensor | None = None
    value_S: Tensor | None = None
    teacher_gap_N: Tensor | None = None
    skill_gap_N: Tensor | None = None
    surprisal_N: Tensor | None = None
    entropy_N: Tensor | None = None
    gold_logp: Tensor | None = None
    feedback_S: Tensor | None = None
    role_S: Tensor | None = None
    clue_score_S: Tensor | None = None
    error_S: Tensor | None = None
    cause_S: Tensor | None = None
    state_key_S: Tensor | None = None
    action_mask_S: Tensor | None = None

    def require(self, spans: Spans, *names: str) -> tuple[Tensor, ...]:
        """The named signals, detached, after checking them against the spans; real ones float32 (float64 as float64).

        Raises ValueError naming the signal, the index, what was found and what was wanted: missing, of the wrong length
        or kind (ids are int, flags bool), not finite (per-token signals: at a policy token), a feedback, role or
        clue score out of range, gold_logp above 0, a cause that is no earlier action of the same trajectory. Values on
        CUDA are looked at under CREST_DEBUG=1 only; spans that are a part are refused.
        """
        check_whole(spans)
        return tuple(self._checked(spans, name) for name in names)

    def _checked(self, spans: Spans, name: str) -> Tensor:
        signal = getattr(self, name)
        if signal is None:
            raise ValueError(f"signal {name} is missing: pass Signals({name}=...)")
        if not isinstance(signal, Tensor) or signal.is_complex() or signal.device != spans.mask.device:
            found = f"{signal.dtype} on {signal.device}" if isinstance(signal, Tensor) else type(signal).__name__
            raise ValueError(f"signal {name} is {found}, want a real tensor on {spans.mask.device}, as the spans")
        letters = {"N": spans.num_tokens, "S": spans.num_actions, "K": spans.num_turns, "B": spans.num_trajectories}
        length = letters["S"] + letters["B"] if name == "gold_logp" else letters[name[-1]]
        if [*signal.shape] != [length]:
            raise ValueError(f"signal {name} has shape {[*signal.shape]}, want [{length}] to match the spans")
        if name in _WHOLE and (signal.is_floating_point() or (signal.dtype == torch.bool) != (name in _FLAGS)):
            raise ValueError(f"signal {name} has dtype {signal.dtype}, want {'bool' if name in _FLAGS else 'int'}")
        if checks_values(signal):
            _refuse(name, signal, ~torch.isfinite(signal) & (spans.mask if name.endswith("_N") else True), "finite")
            if name in _RANGES:
                low, high = _RANGES[name]
                _refuse(name, signal, (signal < low) | (signal > high), f"a value in [{low:g}, {high:g}]")
            if name == "cause_S":
                _check_cause(signal, spans)
        signal = signal.detach()
        return signal if name in _WHOLE or signal.dtype == torch.float64 else signal.float()


_FLAGS = ("error_S", "action_mask_S")
_WHOLE = (*_FLAGS, "feedback_S", "role_S", "cause_S", "state_key_S")
_RANGES = {
    "feedback_S": (-1, 1),
    "role_S": (0, 3),
    "clue_score_S": (0, 2),
    "gold_logp": (-float("inf"), 0),
}


def _refuse(name: str, signal: Tensor, bad: Tensor, wanted: str) -> None:
    if bad.any():
        at = int(torch.nonzero(bad)[0])
        raise ValueError(f"signal {name}[{at}] is {signal[at].item()}, want {wanted}")


def _check_cause(cause_S: Tensor, spans: Spans) -> None:
    place_S = torch.arange(spans.num_actions, device=cause_S.device)
    outside_S = (cause_S < -1) | (cause_S >= place_S)
    _refuse("cause_S", cause_S, outside_S, "-1 or the index of an earlier action")
    trajectory_S = spans.trajectory_of_action
    apart_S = (cause_S >= 0) & (trajectory_S[cause_S.clamp(min=0).long()] != trajectory_S)
    _refuse("cause_S", cause_S, apart_S, "-1 or an earlier action of the same trajectory")


@dataclass(frozen=True, eq=False)
class Credit:
    """What the loss applies: loss = sum_N token_weight_N * surrogate(ratio_N, credit_N) (+ distillation); all detached.

    credit_N: signed coefficient of each token, 0 where the policy did not write it.
    token_weight_N float32: the reduction. surrogate: one of crest_ops.surrogates.
    distill_N: per-token weight of an auxiliary distillation term, with the sign that adds to the loss, or None.
    distill_kind: what distill_N weighs. "forward_kl": loss += sum_N distill_N * KL(teacher || policy)_N over the full
        vocabulary; "reverse_kl": KL(policy || teacher)_N instead; "sampled_reverse_kl": loss += sum_N distill_N *
        logp_N, where distill_N already holds the factor (old log-prob - teacher log-prob) of the realised token.

    A plain Credit spreads one group-relative signal over its span. MultiplicativeCredit and AdditiveCredit are the two
    ways in which a method brings in a second signal; a method's `assign` says by its type which it is.
    """

    credit_N: Tensor
    token_weight_N: Tensor
    surrogate: Any
    distill_N: Tensor | None = None
    distill_kind: DistillKind | None = None


@dataclass(frozen=True, eq=False)
class MultiplicativeCredit(Credit):
    """credit_N = advantage_N * factor, factor >= 0: the second signal sets the size, never the verifier's sign.

    advantage_N: what the verifier alone says of the token. Where it is 0, so is the credit.
    """

    advantage_N: Tensor | None = None


@dataclass(frozen=True, eq=False)
class AdditiveCredit(Credit):
    """credit_N = advantage_N + shift: the second signal can turn the verifier's sign round.

    advantage_N: what the verifier alone says of the token.
    """

    advantage_N: Tensor | None = None
