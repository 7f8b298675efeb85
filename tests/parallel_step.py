"""One training step of a tiny causal LM on some rows of a batch, for the tests of data parallelism.

The denominator is the joined batch's: an all-reduce of the ranks' counts, divided by their number where gradients are
averaged over ranks.
"""

import torch
import torch.distributed as dist
from cases import logits_of, targets_of
from transformers import LlamaConfig, LlamaForCausalLM

from crest_ops import (
    GSPO,
    PPOClip,
    Spans,
    action_mean,
    hidden_states,
    linear_policy_loss,
    linear_token_divergence,
    linear_token_stats,
    policy_loss,
    resolve_head,
    token_mean,
)

B, T, V, H = 4, 7, 50, 16
IDS, CREDIT, OLD = targets_of(B, T, high=V), logits_of(B, T - 1, seed=2), logits_of(B, T - 1, seed=3, scale=0.2) - 4
MASK = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 1, 0, 0, 1, 0], [0, 0, 0, 0, 0, 1]]).bool()
TEACHER = logits_of(B, T - 1, H, seed=4, scale=1.0), logits_of(V, H, seed=5, scale=0.5)
KINDS = ["PPO", "GSPO per action", "log-probs", "divergence", "logits"]
# Rows of each of two ranks, and which tokens the policy wrote: a rank may have none, and there may be none at all.
SPLITS = {
    "uneven": ([0, 1, 2], [3]),
    "one rank without a policy token": ([0, 1], [2, 3]),
    "no policy token": ([0], [1, 2, 3]),
}


def mask_of(split):
    written = torch.zeros_like(MASK) if split == "no policy token" else MASK.clone()
    if split == "one rank without a policy token":
        written[2:] = False
    return written


def make_model(tied):
    torch.manual_seed(0)
    sizes = dict(hidden_size=H, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=V)
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=tied, max_position_embeddings=16))


def loss_of(model, kind, split, rows, group=None):
    """The loss of some rows, so that the mean over ranks of its gradient is the gradient of all rows' loss."""
    mask = mask_of(split)[rows]
    spans = Spans.from_mask(mask, group=torch.zeros(len(rows), dtype=torch.int64))
    per_action = kind == "GSPO per action"
    count = ((spans.action_length > 0) if per_action else spans.mask).sum()
    num_ranks = 1
    if group is not None:
        dist.all_reduce(count, group=group)
        num_ranks = group.size()
    reduction = action_mean if per_action else token_mean
    weight = reduction(spans, total=count.clamp(min=1) / num_ranks).view(mask.shape)
    arguments = dict(targets=IDS[rows, 1:], max_chunk_bytes=1)  # a row a chunk: ranks differ in their number
    terms = dict(credit=CREDIT[rows], token_weight=weight, old_logp=OLD[rows], entropy_coef=0.1, spans=spans)
    terms["surrogate"] = GSPO(0.1, 0.1) if per_action else PPOClip()
    if kind == "logits":
        logits = model(input_ids=IDS[rows]).logits[:, :-1]
        return policy_loss(logits, IDS[rows, 1:], **terms).loss

    def then(hidden):
        head = resolve_head(model)
        operands = hidden[:, :-1], head.weight
        if kind == "log-probs":
            found = linear_token_stats(*operands, **arguments, mask=mask, **head.options)
            return (weight * CREDIT[rows] * (found.logp + found.entropy)).sum()
        if kind == "divergence":
            teacher = TEACHER[0][rows], TEACHER[1]
            return (weight * linear_token_divergence(*operands, *teacher, mask=mask, **arguments).divergence).sum()
        return linear_policy_loss(*operands, **arguments, **terms, **head.options).loss

    return hidden_states(model, {"input_ids": IDS[rows]}, then)


def whole_step(tied, kind, split):
    """(loss, gradients by name) of one process with the joined batch."""
    model = make_model(tied)
    loss = loss_of(model, kind, split, list(range(B)))
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def check_step(ranks, key, tied, kind, split):
    """Every rank has the gradients of the joined batch; the mean of the ranks' losses is its loss."""
    loss, grads = whole_step(tied, kind, split)
    assert (sum(rank[key][0] for rank in ranks) / len(ranks) - loss).abs() < 1e-5
    assert any(grad.abs().max() > 1e-3 for grad in grads.values()) or split == "no policy token"
    for rank in ranks:
        found = rank[key][1]
        assert found.keys() == grads.keys()
        for name, grad in grads.items():
            size = max(1.0, float(grad.abs().max()))
            assert (found[name] - grad).abs().max() <= 1e-5 * size, name
