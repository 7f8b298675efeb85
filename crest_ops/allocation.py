"""Where inside a span the credit goes: what a privileged teacher and the policy's own uncertainty say of each token.

A direction s in {-1, 0, +1} is the sign of the verified advantage; s = 0 is neutral everywhere: weight 1, gate closed,
whatever the teacher says. Arithmetic in the dtype of the inputs, element by element unless spans are taken.

Shape letters: N token positions, S actions.
"""

from typing import Literal

import torch
from torch import Tensor

from .segments import segment_expand, segment_softmax, segment_zscore
from .spans import Spans

MAX_EXPONENT = 20.0
"""Exponents are clamped to this size on both sides, far past any clip, so that exp never overflows."""

Scope = Literal["batch", "trajectory", "turn"]


def agreement_weight(sign: Tensor, gap: Tensor, tau: float, eps: float) -> Tensor:
    """How strongly the teacher sides with the verified direction.

    w = clip(exp(s * gap / tau), 1 - eps, 1 + eps), w = 1 where s = 0.
    RLSD, arXiv 2604.03128 (tau 1, eps .2); SERL, arXiv 2605.19447; CrEST, arXiv 2608.13179 (tau 2, eps .28).
    The exponent is clamped to +-20 (RLSD's code); that s = 0 is neutral also for a gap of inf or NaN is this project's.

    sign, gap: tensors of one shape; gap = teacher minus student log-prob of the realised token. Returns the same shape.
    Raises ValueError: tau <= 0, eps outside [0, 1] or two shapes.
    """
    _check_one_shape(sign=sign, gap=gap)
    if not tau > 0:
        raise ValueError(f"tau is {tau}, want tau > 0")
    if not 0 <= eps <= 1:
        raise ValueError(f"eps is {eps}, want 0 <= eps <= 1")
    weight = (sign * gap / tau).clamp(-MAX_EXPONENT, MAX_EXPONENT).exp().clamp(1 - eps, 1 + eps)
    return torch.where(sign == 0, 1, weight)


def direction_gate(sign: Tensor, gap: Tensor) -> Tensor:
    """True where the teacher agrees with the verified direction: g = [s * gap > 0].

    CrEST, arXiv 2608.13179. sign, gap: tensors of one shape. Returns the same shape, bool.
    Raises ValueError: two shapes.
    """
    _check_one_shape(sign=sign, gap=gap)
    return sign * gap > 0


def entropy_gate(
    uncertainty: Tensor,
    spans: Spans,
    *,
    scope: Scope = "trajectory",
    eps: float = 1e-6,
    mask: Tensor | None = None,
) -> Tensor:
    """How uncertain the policy was at a token, against the other policy tokens of the same scope; 0.5 is average.

    g = sigmoid((u - mean u) / (std u + eps)).
    CrEST, arXiv 2608.13179, where u is the surprisal -log p(realised token). The paper takes the statistics "over
    response tokens": over the whole batch, each trajectory (default) or each turn is this project's choice, and so is
    the population std. Equal uncertainties (one token included) give exactly 0.5; positions outside the spans give 0.5.

    uncertainty [N] real, looked at inside the spans only. mask [N] bool: True = trained on; further positions to leave
    out of the statistics (they give 0.5). Returns [N] in (0, 1). Raises ValueError: unknown scope, a
    mask of another shape or dtype.
    """
    if scope == "batch":
        ids_N, num = spans.mask.int() - 1, 1
    elif scope == "trajectory":
        ids_N, num = spans.trajectory_of_token, spans.num_trajectories
    elif scope == "turn":
        ids_N, num = spans.turn_of_token, spans.num_turns
    else:
        raise ValueError(f"scope is {scope!r}, want 'batch', 'trajectory' or 'turn'")
    if mask is not None:
        if mask.shape != ids_N.shape or mask.dtype != torch.bool:
            raise ValueError(f"mask is {[*mask.shape]} {mask.dtype}, want {[*ids_N.shape]} bool")
        ids_N = torch.where(mask, ids_N, -1)
    group = spans.process_group
    return segment_zscore(uncertainty, ids_N, num, unbiased=False, eps=eps, process_group=group).sigmoid()


def crest_modulation(
    sign: Tensor, gap: Tensor, gate: Tensor, *, lam: float, eps: float, tau: float, rho: float
) -> Tensor:
    """Factor that enlarges a token's credit where the teacher agrees, more so where the policy was uncertain.

    phi = 1 + lam_eff * (w - 1),  lam_eff = clip(lam * g_dir * (1 + rho * (2 * g_ent - 1)), 0, lam),
    w = agreement_weight(s, gap, tau, eps),  g_dir = direction_gate(s, gap),  g_ent = gate.
    CrEST, arXiv 2608.13179. 1 <= phi <= 1 + lam * eps: no sign changes and nothing shrinks; exactly 1 where the teacher
    disagrees or is the student, where s = 0, and for lam = 0. The clip makes every token of above-average uncertainty
    take lam in full, so the gate only holds back the others.

    sign, gap, gate: tensors of one shape; gate in [0, 1] from entropy_gate. Returns the same shape.
    Raises ValueError: lam < 0 or infinite, rho outside [0, 1], tau <= 0, eps outside [0, 1], two shapes.
    """
    if not 0 <= lam < float("inf"):
        raise ValueError(f"lam is {lam}, want lam >= 0 and finite")
    if not 0 <= rho <= 1:
        raise ValueError(f"rho is {rho}, want 0 <= rho <= 1")
    _check_one_shape(sign=sign, gap=gap, gate=gate)
    excess = agreement_weight(sign, gap, tau, eps) - 1
    strength = (lam * (1 + rho * (2 * gate - 1))).clamp(0, lam)
    return torch.where(direction_gate(sign, gap), 1 + strength * excess, 1)


def softmax_allocation(sign: Tensor, gap: Tensor, spans: Spans, *, eta: float, tau: float, clip: float) -> Tensor:
    """Share of its action's credit that each token gets, by how much the teacher sides with the action's direction.

    omega_j = L * rho_j,  rho_j = (1 - eta) / L + eta * softmax_j(s * clip(gap_j, -clip, clip) / tau),  L tokens.
    HTA and APM of FACTOR, arXiv 2608.07118 (eta .7, tau 1, clip 3). The mean over an action is 1 whatever the teacher
    says, and omega >= 1 - eta; exactly 1 for eta = 0, where s = 0, and for an action of one token. Clipping keeps every
    omega of an action within exp(2 * clip / tau) of every other. A gap of NaN counts only where s = 0: not at all.

    sign [S]: direction of the action. gap [N] real, teacher minus student log-prob of the realised token, looked at
    inside the spans only. clip > 0, inf leaves the gap as it is. Returns [N], 0 outside the spans.
    Raises ValueError: wrong shapes, eta outside [0, 1], tau <= 0, clip <= 0.
    """
    for name, found, length in (("sign", sign, spans.num_actions), ("gap", gap, spans.num_tokens)):
        if [*found.shape] != [length]:
            raise ValueError(f"{name} has shape {[*found.shape]}, want [{length}] to match the spans")
    if not 0 <= eta <= 1:
        raise ValueError(f"eta is {eta}, want 0 <= eta <= 1")
    if not tau > 0:
        raise ValueError(f"tau is {tau}, want tau > 0")
    if not clip > 0:
        raise ValueError(f"clip is {clip}, want clip > 0")
    sign_N = segment_expand(sign, spans.action_of_token)
    evidence_N = torch.where(sign_N == 0, 0, sign_N * gap.clamp(-clip, clip) / tau)
    share_N = segment_softmax(evidence_N, spans.action_of_token, spans.num_actions, process_group=spans.process_group)
    relative_N = share_N * segment_expand(spans.action_length, spans.action_of_token)
    omega_N = torch.lerp(torch.ones_like(relative_N), relative_N, eta)
    return torch.where(spans.mask, torch.where(sign_N == 0, 1, omega_N), 0)


def _check_one_shape(**tensors: Tensor) -> None:
    shapes = {name: [*tensor.shape] for name, tensor in tensors.items()}
    if any(shape != shapes["sign"] for shape in shapes.values()):
        raise ValueError(f"shapes are {', '.join(f'{name} {shape}' for name, shape in shapes.items())}, want one shape")
