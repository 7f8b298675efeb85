"""The difference between the distribution that tokens were drawn from and the policy's: measured, and corrected.

Two things make one. An engine with kernels of its own computes other log-probs from the same weights; and top_p, top_k
or min_p take tokens out of what is sampled. Either way a token was drawn with sampler_logp, while the policy gives it
old_logp, and the gradient, an expectation over the policy, is weighted with exp(old_logp - sampler_logp).

B = sessions, T = token positions, N = B*T.
"""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from crest_ops import Credit
from crest_train.config import Config
from crest_train.probe_credit import complete, token_statistics
from crest_train.sessions import Rollout


def rescore(model: PreTrainedModel, batch: Rollout, config: Config) -> None:
    """Put the policy's own log-probs and entropies where the engine could not say them: one pass without gradient."""
    logp_BT, entropy_BT, _ = token_statistics(model, batch, config)
    complete(batch, logp_BT, entropy_BT)
    for row, session in enumerate(batch.sessions):
        for action in session.actions:
            written = slice(action.start, action.start + len(action.tokens))
            action.logp = batch.old_logp[row, written].tolist()
            action.entropy = batch.entropy[row, written].tolist()


def importance_weight(old_logp: torch.Tensor, sampler_logp: torch.Tensor, cap: float) -> torch.Tensor:
    """w = min(exp(old_logp - sampler_logp), cap), of any shape, without gradient.

    Truncated importance sampling token by token, outside the clipped ratio of the surrogate: Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training". It corrects each token's own distribution, not
    that of the tokens before it, and the cap trades variance for bias.
    Of a distribution that was cut and renormalised, w is the mass Z <= 1 that was left. This is right within its
    support alone: what was cut off is never seen, and an expectation over the policy lacks the share 1 - Z of these
    tokens. Refusing the cuts would have been the other choice; with w the gradient is that of the policy on the tokens
    it can write, where without it each of these would count 1 / Z times.
    """
    return (old_logp - sampler_logp).detach().exp().clamp(max=cap)


def corrected(credit: Credit, batch: Rollout, cap: float) -> tuple[Credit, dict[str, float]]:
    """The credit with its token weights [N] multiplied by the importance weights, and how large these are.

    Over the policy's tokens, under TRL's names where they mean the same: |old_logp - sampler_logp| (nats), the weight,
    and the share of tokens whose weight was truncated; the means once more for every turn of the sessions, .../turn_k.
    Where all tokens were drawn from the policy's own distribution: the credit as it is, and nothing to tell.
    """
    if torch.equal(batch.old_logp, batch.sampler_logp):
        return credit, {}
    weight_BT = importance_weight(batch.old_logp, batch.sampler_logp, cap)
    difference_BT = (batch.old_logp - batch.sampler_logp).abs()
    truncated_BT = batch.old_logp - batch.sampler_logp > torch.tensor(cap).log()
    difference, weight = difference_BT[batch.policy], weight_BT[batch.policy]
    metrics = {
        "sampling/sampling_logp_difference/max": float(difference.max()),
        "sampling/importance_sampling_ratio/min": float(weight.min()),
        "sampling/importance_sampling_ratio/max": float(weight.max()),
    }
    means = {
        "sampling/sampling_logp_difference/mean": difference_BT,
        "sampling/importance_sampling_ratio/mean": weight_BT,
        "sampling/importance_sampling_ratio/truncated": truncated_BT.float(),
    }
    for name, values_BT in means.items():
        metrics[name] = float(values_BT[batch.policy].mean())
        for k in range(int(batch.turn.max()) + 1):
            metrics[f"{name}/turn_{k + 1}"] = float(values_BT[batch.turn == k].mean())
    weight_N = torch.where(batch.policy, weight_BT, 1).flatten()
    return replace(credit, token_weight_N=credit.token_weight_N * weight_N), metrics
