"""What a step's line of metrics.jsonl says of its sessions, its credit and its memory."""

import resource
import sys

import torch

from crest_ops import AdditiveCredit, Credit, Signals, Spans
from crest_train.credit import session_reward
from crest_train.probe_statistics import top_shares
from crest_train.ranks import gathered
from crest_train.sessions import Rollout


def outcome_metrics(batch: Rollout) -> dict[str, float]:
    """How the sampled sessions went."""
    return {
        "turn_success": float(batch.turn_reward.sum() / batch.num_turns.sum()),
        "session_success": float((session_reward(batch, "all") == 1).float().mean()),
        "cut_sessions": batch.cut_sessions,
        "sampled_tokens": batch.sampled_tokens,
        "fed_tokens": batch.fed_tokens,
    }


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
