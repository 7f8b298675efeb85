"""What the probe measures per batch: the reference credit, the controls, the policy at its tokens, a gradient.

B = sessions, T = token positions, N = B*T, K = turns of a session, R = policy-written positions, D = gradient entries.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from crest_ops import Credit, PPOClip, Signals, Spans, linear_token_stats, resolve_head
from crest_train.config import Config
from crest_train.model import hidden_states
from crest_train.packing import passes
from crest_train.probe_statistics import gradient_sizes
from crest_train.projection import count_sketch
from crest_train.ranks import share, total
from crest_train.sessions import Rollout

CONTROLS = ("shuffled", "noise", "reduction")
GAPS = ("teacher_gap_N", "skill_gap_N")


def reference_credit(batch: Rollout, spans: Spans) -> Credit:
    """Unbiased credit for the expected sum of turn rewards J = E sum_k R_k, whose gradient it gives with a minus sign.

    credit of a token in turn k of rollout i:  sum over j >= k of R_j^(i)  -  mean over i' != i of the same of R^(i').
    loss = -(1/B) sum_n credit_n logp_n.  What a turn earned before the token cannot depend on it, and the other
    rollouts of the task are independent of this one, so that neither what is left out nor the baseline moves the
    expectation (REINFORCE, Williams 1992; leave-one-out baseline: RLOO, arXiv 2402.14740). No std, and a sum over
    tokens in place of a mean: dividing by what the policy itself decided would bias. A rollout alone in its group has
    baseline 0. Turns that were not reached earned 0.
    """
    to_go_BK = batch.turn_reward.flip(1).cumsum(1).flip(1)
    group_B = spans.group_of_trajectory
    sum_GK = to_go_BK.new_zeros(spans.num_groups, to_go_BK.shape[1]).index_add_(0, group_B, to_go_BK)
    others_B = (spans.group_size[group_B] - 1).clamp(min=1)
    advantage_BK = to_go_BK - (sum_GK[group_B] - to_go_BK) / others_B[:, None]
    credit_BT = torch.where(batch.policy, advantage_BK.gather(1, batch.turn.clamp(min=0)), 0)
    return Credit(credit_BT.flatten(), spans.mask.float() / len(credit_BT), PPOClip())


def controlled(signals: Signals, spans: Spans, control: str | None, generator: torch.Generator) -> Signals:
    """The signals with their gaps shuffled over the scored tokens, noisy (1 nat), or all 0.

    Scored are the policy's tokens in trajectories that have a gap anywhere; the others have no credit. Gaps of teacher
    and skill are shuffled alike.
    """
    if control is None:
        return signals
    given = {name: getattr(signals, name) for name in GAPS if getattr(signals, name) is not None}
    if control == "reduction":
        return replace(signals, **{name: torch.zeros_like(gap_N) for name, gap_N in given.items()})
    has_gap_N = torch.stack([gap_N != 0 for gap_N in given.values()]).any(0) & spans.mask
    scored_B = torch.zeros(spans.num_trajectories, dtype=torch.bool, device=has_gap_N.device)
    scored_B[spans.trajectory_of_token[has_gap_N]] = True
    place_n = (spans.mask & scored_B[spans.trajectory_of_token]).nonzero().flatten()
    order_n = torch.randperm(len(place_n), generator=generator)
    noise_n = torch.randn(len(place_n), generator=generator)
    changed = {}
    for name, gap_N in given.items():
        changed[name] = gap_N.clone()
        changed[name][place_n] = gap_N[place_n][order_n] if control == "shuffled" else gap_N[place_n] + noise_n
    return replace(signals, **changed)


@torch.no_grad()
def token_statistics(
    model: PreTrainedModel, batch: Rollout, config: Config
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-prob, entropy and sum of squared probabilities [B,T] of the policy at the tokens that it wrote; else 0.

    Several processes make them together.
    """
    head = resolve_head(model)
    found = [torch.zeros_like(batch.old_logp) for _ in range(3)]
    rows = share(batch.policy.any(1).nonzero().flatten().tolist())
    for part, cache in passes(model, batch, rows, config.training.tokens_per_micro_batch):
        length = int(batch.lengths[part].max())
        row_R, column_R = batch.policy[part, :length].nonzero(as_tuple=True)
        ids_BT = batch.ids[part, :length].to(model.device)
        hidden_BTH = hidden_states(model, ids_BT, cache)
        stats = linear_token_stats(
            hidden_BTH[row_R, column_R - 1],
            head.weight,
            ids_BT[row_R, column_R],
            temperature=config.rollout.temperature,
            outputs=("logp", "entropy", "sum_sq_probs"),
            **head.options,
        )
        for tensor, values in zip(found, (stats.logp, stats.entropy, stats.sum_sq_probs), strict=True):
            tensor[torch.tensor(part)[row_R], column_R] = values.cpu()
    return tuple(map(total, found))


def complete(batch: Rollout, logp_BT: torch.Tensor, entropy_BT: torch.Tensor) -> float:
    """Put the policy's own log-probs and entropies where none were recorded (NaN).

    Returns the mean absolute difference of the recorded log-probs from the policy's, 0 where none were.
    """
    recorded_BT = batch.policy & ~batch.old_logp.isnan()
    off = (batch.old_logp - logp_BT)[recorded_BT].abs()
    batch.old_logp = torch.where(batch.old_logp.isnan(), logp_BT, batch.old_logp)
    batch.entropy = torch.where(batch.entropy.isnan(), entropy_BT, batch.entropy)
    return float(off.mean()) if len(off) else 0.0


def token_sizes(
    credit: Credit, batch: Rollout, spans: Spans, logp_BT: torch.Tensor, sum_sq_BT: torch.Tensor
) -> torch.Tensor:
    """Size [R] of the gradient that the credit leaves at the logits of every token that the policy wrote.

    A full-vocabulary distillation term, which is no multiple of a log-prob's gradient, is left out.
    """
    logp_N, mask_N = logp_BT.flatten(), spans.mask
    log_ratio_N = logp_N - batch.old_logp.flatten()
    slope_N = credit.surrogate.evaluate(log_ratio_N, credit.credit_N, spans, mask=mask_N, logp=logp_N).slope
    coefficient_N = credit.token_weight_N * slope_N
    if credit.distill_kind == "sampled_reverse_kl":
        coefficient_N = coefficient_N + credit.distill_N
    return gradient_sizes(coefficient_N[mask_N], logp_N[mask_N], sum_sq_BT.flatten()[mask_N])


def gradient_vector(model: PreTrainedModel, project: int, seed: int) -> torch.Tensor:
    """The gradient that lies at the parameters, [D] float32 on the CPU: whole (project 0), or a sketch of it."""
    parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters() if p.requires_grad]
    if project:
        return count_sketch(parts, project, seed=seed)
    return torch.cat([part.flatten().float().cpu() for part in parts])
