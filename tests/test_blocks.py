"""The torch backend handles rows a few at a time: how many must not show, in any op."""

import pytest
import torch
from cases import logits_of, targets_of
from divergence_cases import exact_of
from every_op import OPS, run

from crest_ops import linear_token_divergence, rows, token_divergence

V = 40


@pytest.fixture(params=[2, 3, 5])
def rows_per_block(request, monkeypatch):
    monkeypatch.setattr(rows, "BLOCK_ELEMENTS", request.param * V)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    return request.param


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(7,), (1, 6), (2, 4)])
@pytest.mark.parametrize("masked", [False, True])
def test_the_size_of_a_block_does_not_show(op, shape, masked, rows_per_block, monkeypatch):
    x, y = logits_of(*shape, V), targets_of(*shape, high=V)
    mask = torch.ones(shape, dtype=torch.bool)
    if masked:
        mask.view(-1)[1::3] = False
    few = run(op, x, y, mask=mask, backend="torch")
    gradient = few.gradient()
    monkeypatch.setattr(rows, "BLOCK_ELEMENTS", 1 << 18)
    whole = run(op, x, y, mask=mask, backend="torch")
    same = torch.allclose if op.startswith("linear") else torch.equal
    assert same(few.logp, whole.logp) and same(few.entropy, whole.entropy)
    assert same(gradient, whole.gradient())


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_divergences_over_many_blocks(kind, rows_per_block):
    x, teacher, y = logits_of(9, V), logits_of(9, V, seed=3), targets_of(9, high=V)
    leaf = x.clone().requires_grad_()
    found = token_divergence(leaf, teacher, y, kind=kind, backend="torch")
    (gradient,) = torch.autograd.grad(found.divergence.sum(), leaf)
    wide = x.double().requires_grad_()
    wanted = exact_of(wide, teacher, y, kind)[-1]
    assert (found.divergence - wanted).abs().max() < 1e-5
    assert (gradient - torch.autograd.grad(wanted.sum(), wide)[0]).abs().max() < 1e-5
    head = torch.eye(V)
    linear = linear_token_divergence(x, head, teacher, head, y, kind=kind, backend="torch")
    assert (linear.divergence - wanted).abs().max() < 1e-5
