"""What a step's line of metrics.jsonl says of its sessions, its credit and its memory."""

import resource
import sys

import torch

from crest_ops import AdditiveCredit, Credit, Signals, Spans
from crest_train.credit import session_reward
from crest_train.probe_statistics import top_shares
from crest_train.ranks import gathered
from crest_train.sessions import Rollout


def outcome_metrics(batch: Rollout, reward_B: torch.Tensor, group_size: int) -> dict[str, float]:
    """How the sampled sessions went; names with TRL's meaning are TRL's.

    reward_B [B] float: of each session, group after group. reward_std: over all sessions, n - 1 below.
    frac_reward_zero_std: share of the groups in which all sessions earned the same. completions/*_length: tokens that
    the policy wrote in a session; clipped_ratio: share of the sessions that reached the model's context.
    turn_success/turn_k: of the sessions that have a k-th turn (not reached: failed). completions/mean_length/turn_k: in
    the sessions that reached it. entropy/turn_k: of the policy at its tokens there, mean, as they were sampled (nats).
    """
    length_B = batch.policy.sum(1).float()
    grouped = reward_B.view(-1, group_size)
    metrics = {
        "turn_success": float(batch.turn_reward.sum() / batch.num_turns.sum()),
        "session_success": float((session_reward(batch, "all") == 1).float().mean()),
        "reward": float(reward_B.mean()),
        "reward_std": float(reward_B.std()) if len(reward_B) > 1 else 0.0,
        "frac_reward_zero_std": float((grouped == grouped[:, :1]).all(1).float().mean()),
        "completions/mean_length": float(length_B.mean()),
        "completions/min_length": float(length_B.min()),
        "completions/max_length": float(length_B.max()),
        "completions/clipped_ratio": batch.cut_sessions / len(batch.sessions),
        "cut_sessions": batch.cut_sessions,
        "lost_sessions": batch.lost_sessions,
        "prompt_tokens": sum(len(session.prompt) for session in batch.sessions),
        "sampled_tokens": batch.sampled_tokens,
        "fed_tokens": batch.fed_tokens,
    }
    for k in range(batch.turn_reward.shape[1]):
        asked_B, written_BT = batch.num_turns > k, batch.turn == k
        metrics[f"turn_success/turn_{k + 1}"] = float(batch.turn_reward[asked_B, k].mean())
        if written_BT.any():
            metrics[f"entropy/turn_{k + 1}"] = float(batch.entropy[written_BT].mean())
            reached_B = written_BT.any(1)
            metrics[f"completions/mean_length/turn_{k + 1}"] = float(written_BT[reached_B].sum(1).float().mean())
    return metrics


def credit_metrics(credit: Credit, spans: Spans) -> dict[str, float]:
    """How the credit is spread over the policy's tokens.

    credit_top_1, _5, _10: share of the summed |token weight * credit| on the largest 1, 5 and 10 % of the tokens.
    sign_flipped, of additive credit: share of the tokens where its sign is the opposite of the verifier's.
    """
    sizes = (credit.token_weight_N * credit.credit_N).abs()[spans.mask]
    if not sizes.any():
        return {}
    names = ("credit_top_1", "credit_top_5", "credit_top_10")
    metrics = dict(zip(names, top_shares(sizes, (0.01, 0.05, 0.1)), strict=True))
    if isinstance(credit, AdditiveCredit):
        metrics["sign_flipped"] = float((credit.credit_N * credit.advantage_N < 0)[spans.mask].float().mean())
    return metrics


def teacher_metrics(credit: Credit, signals: Signals) -> dict[str, float]:
    """Over the tokens with credit: mean teacher gap (nats), and the share where it points the way the credit does."""
    with_credit_N = credit.credit_N != 0
    if signals.teacher_gap_N is None or not with_credit_N.any():
        return {}
    gap = signals.teacher_gap_N[with_credit_N]
    agrees = gap * credit.credit_N[with_credit_N] > 0
    return {"teacher_gap": float(gap.mean()), "share_amplified": float(agrees.float().mean())}


def peak_memory_mib() -> float:
    """The most memory that a process of the run has held so far: on the GPU where there is one in use, else in RAM."""
    if torch.cuda.is_initialized():
        return max(gathered(torch.cuda.max_memory_allocated() / 2**20))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max(gathered(peak / 2**20 if sys.platform == "darwin" else peak / 2**10))
