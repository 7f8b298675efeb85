"""Losses made of every op over a vocabulary, compiled and compared with eager, for the tests of torch.compile."""

import pytest
import torch

from crest_ops import (
    GSPO,
    Spans,
    crest_policy_loss,
    linear_policy_loss,
    linear_token_divergence,
    linear_token_stats,
    policy_loss,
    token_divergence,
    token_stats,
)

V, H, WIDER = 37, 6, 40  # WIDER: the teacher's vocabulary
CHUNK = 64 * 4 * 8  # bytes of 8 rows of logits: most lengths take several chunks
# Prime, even, around multiples of 8 and 16, several chunks; none that torch specialises (0, 1) or another size equals.
LENGTHS = [3, 2, 5, 7, 8, 9, 11, 13, 15, 16, 17, 19, 23, 24, 25, 31, 32, 33, 41, 48]


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def case(length):
    """Everything that an op may take, for `length` tokens."""
    return dict(
        logits=random(length, V, seed=1), teacher=random(length, WIDER, seed=2), hidden=random(length, H, seed=3),
        weight=random(V, H, seed=4), teacher_hidden=random(length, H + 1, seed=5), bias=random(V, seed=6),
        teacher_weight=random(V, H + 1, seed=7), mask=random(length, seed=8) > -1, credit=random(length, seed=9),
        old_logp=random(length, seed=10) / 10 - 3.5, ref_logp=random(length, seed=11) / 10 - 3.5,
        targets=torch.randint(0, V, (length,), generator=torch.Generator().manual_seed(12)),
        token_weight=torch.linspace(0.1, 1, length), advantage=torch.tensor([0.7]),
        spans=Spans.from_mask(torch.ones(1, length).bool(), group=torch.tensor([0])),
    )  # fmt: skip


def stats(given, kl_coef, entropy_coef, **options):
    found = token_stats(given["logits"], given["targets"], mask=given["mask"], temperature=0.8, **options)
    return (given["credit"] * found.logp).sum() - 0.1 * found.entropy.sum()


def reverse_kl(given, kl_coef, entropy_coef, **options):
    found = token_divergence(given["logits"], given["teacher"], given["targets"], mask=given["mask"], **options)
    return (given["credit"] * found.divergence).sum() - 0.1 * (found.entropy + found.gap).sum()


def jsd(given, kl_coef, entropy_coef, **options):
    return reverse_kl(given, kl_coef, entropy_coef, kind="jsd", **options)


def loss_terms(given, kl_coef, entropy_coef):
    names = ("credit", "token_weight", "old_logp", "ref_logp", "mask", "targets")
    return {name: given[name] for name in names} | dict(kl_coef=kl_coef, entropy_coef=entropy_coef)


def loss_of_logits(given, kl_coef, entropy_coef, **options):
    return policy_loss(given["logits"], **loss_terms(given, kl_coef, entropy_coef), **options).loss


def crest_loss(given, kl_coef, entropy_coef, **options):
    return crest_policy_loss(
        given["logits"], given["teacher"], given["targets"], given["spans"], given["advantage"],
        token_weight=given["token_weight"], old_logp=given["old_logp"], mask=given["mask"], **options,
    ).loss  # fmt: skip


def linear_stats(given, kl_coef, entropy_coef, **options):
    found = linear_token_stats(
        given["hidden"], given["weight"], given["targets"], head_bias=given["bias"], mask=given["mask"],
        max_chunk_bytes=CHUNK, **options,
    )  # fmt: skip
    return (given["credit"] * found.logp).sum() - 0.1 * found.entropy.sum()


def linear_divergence(given, kl_coef, entropy_coef, **options):
    found = linear_token_divergence(
        given["hidden"], given["weight"], given["teacher_hidden"], given["teacher_weight"], given["targets"],
        head_bias=given["bias"], mask=given["mask"], max_chunk_bytes=2 * CHUNK, **options,
    )  # fmt: skip
    return (given["credit"] * found.divergence).sum() - 0.1 * found.gap.sum()


def linear_loss(given, kl_coef, entropy_coef, **options):
    return linear_policy_loss(
        given["hidden"], given["weight"], head_bias=given["bias"], max_chunk_bytes=CHUNK,
        **loss_terms(given, kl_coef, entropy_coef), **options,
    ).loss  # fmt: skip


def linear_loss_over_spans(given, kl_coef, entropy_coef, **options):
    return linear_loss(given, kl_coef, entropy_coef, surrogate=GSPO(0.5, 0.5), spans=given["spans"], **options)


OPS = [
    stats, reverse_kl, loss_of_logits, crest_loss, linear_stats, linear_divergence, linear_loss, linear_loss_over_spans,
]  # fmt: skip
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def with_leaves(op, given):
    """The case with what has a gradient as leaves, and those."""
    names = ("hidden", "weight", "bias") if op.__name__.startswith("linear") else ("logits",)
    leaves = {name: given[name].clone().requires_grad_() for name in names}
    return given | leaves, list(leaves.values())


def compiled(op, backend="aot_eager"):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(op, fullgraph=True, dynamic=True, backend=backend)


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compare(op, function, length, kl_coef=0.1, entropy_coef=0.2, **options):
    given, leaves = with_leaves(op, case(length))
    results = []
    for call in (op, function):
        loss = call(given, kl_coef, entropy_coef, **options)
        results.append([loss, *torch.autograd.grad(2 * loss, leaves)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
