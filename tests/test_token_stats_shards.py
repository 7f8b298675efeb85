"""Target -2 of the token_stats kernels: the row is wanted, its target is a column of another shard."""

import math

import pytest
import reference
import torch
from cases import logits_of
from crest_kernels.token_stats import token_stats, token_stats_grad

pytestmark = pytest.mark.usefixtures("poisoned_memory")
SPLIT = 130


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_two_shards_together_are_the_whole(softcap):
    x, y = logits_of(5, 300), torch.tensor([0, 129, 130, 299, -1])
    x[2, :SPLIT] = -math.inf  # nothing of this row lies in the first shard
    grad_logp, grad_entropy = logits_of(5, seed=3), logits_of(5, seed=4)
    one, unwanted = torch.ones(1), y < 0
    shards = [x[:, :SPLIT].contiguous(), x[:, SPLIT:].contiguous()]
    targets = [torch.where(y < SPLIT, y, -2), torch.where(y >= SPLIT, y - SPLIT, -2)]
    targets = [torch.where(unwanted, -1, target) for target in targets]
    found = [
        token_stats(shard[None], target, one, shard.shape[1], 1.0, softcap, False)
        for shard, target in zip(shards, targets, strict=True)
    ]
    logp, entropy, lse, _, normaliser = (torch.stack([part[i] for part in found]) for i in range(5))
    for target, part in zip(targets, logp, strict=True):
        assert (part[target == -2] == 0).all()

    whole_lse = torch.logsumexp(lse, 0)
    share = (lse - whole_lse).exp()
    whole_entropy = (share * entropy - torch.special.xlogy(share, share)).sum(0)
    owner = torch.stack(targets) >= 0
    whole_logp = (torch.where(owner, logp + lse, 0)).sum(0) - whole_lse
    wanted = x[:4], y[:4]
    exact = reference.stats(*wanted, softcap=softcap or None)
    for ours, theirs in zip((whole_logp, whole_entropy, whole_lse), exact, strict=False):
        assert (ours[:4] - theirs).abs().max() < 1e-5

    largest, log2_sum = normaliser[:, 0], normaliser[:, 1]
    whole_largest = largest.amax(0)
    whole_log2_sum = (torch.exp2(largest - whole_largest) * torch.exp2(log2_sum)).sum(0).log2()
    whole_normaliser = torch.stack([whole_largest, whole_log2_sum])
    for entropy_gradient in (None, grad_entropy):
        gradients = [torch.empty_like(shard) for shard in shards]
        for gradient, shard, target in zip(gradients, shards, targets, strict=True):
            token_stats_grad(
                gradient[None], shard[None], target, one, whole_entropy, whole_normaliser, grad_logp, entropy_gradient,
                shard.shape[1], 1.0, softcap,
            )  # fmt: skip
        exact = reference.gradient(
            *wanted, grad_logp[:4], (grad_entropy if entropy_gradient is not None else 0 * grad_entropy)[:4],
            softcap=softcap or None,
        )  # fmt: skip
        ours = torch.cat(gradients, 1)
        assert (ours[:4] - exact).abs().max() < 1e-5 and (ours[4] == 0).all()
