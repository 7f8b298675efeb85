"""linear_token_divergence is token_divergence of hidden @ weight.T + bias of both models, a chunk at a time."""

import math

import pytest
import torch
from cases import both, logits_of, targets_of

from crest_ops import linear_token_divergence, token_divergence

pytestmark = pytest.mark.usefixtures("poisoned_memory")
KINDS = ["reverse_kl", "forward_kl", "jsd"]
kinds = pytest.mark.parametrize("kind", KINDS)
N, V, H, TEACHER_H = 13, 150, 8, 12
OUTPUTS = ("logp", "entropy", "teacher_logp", "gap", "divergence")


def models(dtype=torch.float32, wider=0, bias=True):
    """(hidden, head_weight, head_bias) of the student, then of the teacher, of another hidden size."""
    student = logits_of(N, H, scale=1.0), logits_of(V, H, seed=1, scale=1.0), logits_of(V, seed=2, scale=1.0)
    teacher = (
        logits_of(N, TEACHER_H, seed=3, scale=1.0),
        logits_of(V + wider, TEACHER_H, seed=4, scale=0.8),
        logits_of(V + wider, seed=5, scale=1.0),
    )
    student, teacher = ([tensor.to(dtype) for tensor in model] for model in (student, teacher))
    return student if bias else [*student[:2], None], teacher if bias else [*teacher[:2], None]


def run(student, teacher, y, upstream, **arguments):
    """(outputs, gradients by hidden, weight and bias) with upstream [4, N] for logp, entropy, gap and divergence."""
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in student]
    hidden, weight, bias = leaves
    found = linear_token_divergence(
        hidden, weight, *teacher[:2], y, head_bias=bias, teacher_head_bias=teacher[2], **arguments
    )
    total = sum((w * getattr(found, name)).sum() for w, name in zip(upstream, OUTPUTS[:2] + OUTPUTS[3:], strict=True))
    return found, torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])


def exact(
    student, teacher, y, upstream, kind, jsd_weight=0.5, mask=None, temperature=1.0, softcap=None, logit_scale=1.0
):
    """The same in float64 by autograd through log_softmax."""
    leaves = [None if tensor is None else tensor.detach().double().requires_grad_() for tensor in student]

    def log_probs(hidden, weight, bias):
        x = logit_scale * (hidden.double() @ weight.double().t() + (0 if bias is None else bias.double()))
        x = x if softcap is None else softcap * torch.tanh(x / softcap)
        scale = temperature.double()[:, None] if isinstance(temperature, torch.Tensor) else temperature
        return torch.log_softmax(x[:, :V] / scale, -1)

    log_p, log_q = log_probs(*leaves), log_probs(*teacher)
    if kind == "jsd":
        log_m = ((1 - jsd_weight) * log_p.exp() + jsd_weight * log_q.exp()).log()
        divergence = (1 - jsd_weight) * (log_p.exp() * (log_p - log_m)).sum(1)
        divergence = divergence + jsd_weight * (log_q.exp() * (log_q - log_m)).sum(1)
    else:
        a, b = (log_p, log_q) if kind == "reverse_kl" else (log_q, log_p)
        divergence = (a.exp() * (a - b)).sum(1)
    logp, teacher_logp = (log.gather(1, y.clamp(min=0)[:, None])[:, 0] for log in (log_p, log_q))
    outputs = logp, -(log_p.exp() * log_p).sum(1), teacher_logp, teacher_logp - logp, divergence
    outputs = [output if mask is None else torch.where(mask, output, 0) for output in outputs]
    total = sum((w * o).sum() for w, o in zip(upstream, outputs[:2] + outputs[3:], strict=True))
    return outputs, torch.autograd.grad(total, [leaf for leaf in leaves if leaf is not None])


def upstream_of(n=N):
    return logits_of(4, n, seed=9, scale=1.0)


@both
@kinds
@pytest.mark.parametrize("max_chunk_bytes", [1, 1 << 13, 1 << 28])
def test_values_and_gradients(backend, kind, max_chunk_bytes):
    if backend == "triton" and max_chunk_bytes == 1:
        pytest.skip("as the other chunks, minutes in the interpreter")
    student, teacher = models(wider=5)
    y, mask = targets_of(N, high=V), torch.arange(N) % 3 != 1
    arguments = dict(kind=kind, jsd_weight=0.3, mask=mask)
    expected, expected_gradients = exact(student, teacher, y, upstream_of(), **arguments)
    found, gradients = run(
        student, teacher, y, upstream_of(), backend=backend, max_chunk_bytes=max_chunk_bytes, **arguments
    )  # fmt: skip
    for name, value in zip(OUTPUTS, expected, strict=True):
        assert getattr(found, name).dtype == torch.float32
        assert (getattr(found, name) - value).abs().max() < 2e-5, name
    for ours, value in zip(gradients, expected_gradients, strict=True):
        assert (ours - value).abs().max() < 1e-4
    assert (gradients[0][~mask] == 0).all()


@kinds
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_every_factor_of_the_chain_once(kind, per_token, bias):
    student, teacher = ([t if t is None else t.double() for t in model] for model in models(bias=bias))
    y = targets_of(N, high=V)
    temperature = torch.linspace(0.4, 2, N) if per_token else 0.7
    arguments = dict(kind=kind, temperature=temperature, softcap=5.0, logit_scale=1.3)
    expected, expected_gradients = exact(student, teacher, y, upstream_of(), **arguments)
    found, gradients = run(student, teacher, y, upstream_of(), max_chunk_bytes=1 << 13, **arguments)
    for name, value in zip(OUTPUTS, expected, strict=True):
        assert getattr(found, name).dtype == torch.float64
        assert (getattr(found, name) - value).abs().max() < 1e-9, name
    for ours, value in zip(gradients, expected_gradients, strict=True):
        assert (ours - value).abs().max() < 1e-9


@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@kinds
def test_no_worse_than_the_product_in_bfloat16(kind, logits_dtype):
    student, teacher = models(torch.bfloat16)
    y = targets_of(N, high=V)
    expected, expected_gradients = exact(student, teacher, y, upstream_of(), kind)
    found, gradients = run(student, teacher, y, upstream_of(), kind=kind, logits_dtype=logits_dtype)
    logits = [hidden @ weight.t() + bias for hidden, weight, bias in (student, teacher)]
    plain = token_divergence(*logits, y, kind=kind)
    allowed = 1e-5 if logits_dtype else (plain.divergence - expected[4]).abs().max() * 1.5 + 1e-3
    assert (found.divergence - expected[4]).abs().max() < allowed
    for ours, value in zip(gradients, expected_gradients, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - value).abs().max() < 2e-2 * value.abs().max()


def test_gradient_of_the_weight_adds_up_in_float32_over_chunks():
    """4096 equal rows in 64 chunks: in bfloat16 the sum would stop growing at 256 times a row's part."""
    rows = 4096
    student, teacher = models(torch.bfloat16, bias=False)
    student = [student[0][:1].expand(rows, H), student[1], None]
    teacher = [teacher[0][:1].expand(rows, TEACHER_H), teacher[1], None]
    y, upstream = torch.zeros(rows, dtype=torch.int64), torch.ones(4, rows)
    _, (_, one) = run(
        [student[0][:1], *student[1:]], [teacher[0][:1], *teacher[1:]], y[:1], upstream[:, :1],
        logits_dtype=torch.float32,
    )  # fmt: skip
    _, (_, many) = run(student, teacher, y, upstream, logits_dtype=torch.float32, max_chunk_bytes=64 * 192 * 8)
    assert (many.float() - rows * one.float()).abs().max() < 0.01 * rows * one.abs().max()


@both
def test_masked_rows_and_rows_without_gradient_are_left_out(backend):
    student, teacher = models()
    y, mask = targets_of(N, high=V), torch.arange(N) % 2 == 0
    upstream = upstream_of() * (torch.arange(N) != 4)
    clean, clean_gradients = run(student, teacher, y, upstream, mask=mask, backend=backend)
    student[0][~mask], teacher[0][~mask] = math.nan, math.nan
    y[1] = -5
    found, gradients = run(student, teacher, y, upstream, mask=mask, backend=backend)
    for name in OUTPUTS:
        assert torch.equal(getattr(found, name), getattr(clean, name)) and (getattr(found, name)[~mask] == 0).all()
    assert all(torch.equal(ours, before) for ours, before in zip(gradients, clean_gradients, strict=True))
    assert (gradients[0][~mask] == 0).all() and (gradients[0][4] == 0).all() and (gradients[0][6] != 0).any()
    none = torch.zeros(N, dtype=torch.bool)
    found, gradients = run(student, teacher, y, upstream, mask=none, backend=backend)
    assert (found.divergence == 0).all() and all((gradient == 0).all() for gradient in gradients)


@kinds
def test_only_what_is_asked_for_gets_a_gradient(kind):
    student, teacher = models()
    hidden, weight, bias = (tensor.clone() for tensor in student)
    hidden.requires_grad_()
    teacher = [tensor.clone().requires_grad_() for tensor in teacher]
    y = targets_of(N, high=V)
    found = linear_token_divergence(
        hidden, weight, *teacher[:2], y, head_bias=bias, teacher_head_bias=teacher[2], kind=kind
    )
    found.divergence.sum().backward(retain_graph=True)
    assert hidden.grad.abs().sum() > 0
    assert weight.grad is None and bias.grad is None and all(tensor.grad is None for tensor in teacher)
    first = hidden.grad.clone()
    hidden.grad = None
    found.divergence.sum().backward()
    assert torch.equal(hidden.grad, first)


def test_double_backward_raises():
    student, teacher = models()
    hidden = student[0].clone().requires_grad_()
    found = linear_token_divergence(hidden, student[1], *teacher[:2], targets_of(N, high=V))
    (gradient,) = torch.autograd.grad(found.divergence.sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.square().sum().backward()


@both
@kinds
def test_a_policy_that_is_its_own_teacher_does_not_diverge(backend, kind):
    student, _ = models()
    found, gradients = run(
        student, student, targets_of(N, high=V), torch.tensor([0.0, 0, 0, 1e3])[:, None].expand(4, N), kind=kind,
        backend=backend, max_chunk_bytes=1 << 13,
    )  # fmt: skip
    assert (found.divergence == 0).all() and (found.gap == 0).all()
    assert all((gradient == 0).all() for gradient in gradients)


def test_vocabularies_padded_differently_and_shapes():
    student, teacher = models(wider=42)
    y = targets_of(N, high=V - 30)
    student[1][V - 20 :], teacher[1][V - 20 :] = math.nan, math.nan
    logits = [hidden @ weight[: V - 20].t() for hidden, weight, _ in (student, teacher)]
    expected = token_divergence(*logits, y)
    for shape in ((N,), (1, N), (N, 1)):
        hidden, teacher_hidden = student[0].view(*shape, H), teacher[0].view(*shape, TEACHER_H)
        found = linear_token_divergence(
            hidden, student[1], teacher_hidden, teacher[1], y.view(shape), vocab_size=V - 20
        )
        assert found.divergence.shape == shape
        assert torch.allclose(found.divergence.flatten(), expected.divergence, atol=1e-5)
    weight = student[1].clone().requires_grad_()
    linear_token_divergence(student[0], weight, *teacher[:2], y, vocab_size=V - 20).divergence.sum().backward()
    assert (weight.grad[V - 20 :] == 0).all() and torch.isfinite(weight.grad).all()


def test_autocast_takes_the_products_in_its_dtype():
    student, teacher = models()
    y = targets_of(N, high=V)
    narrow = [[tensor.bfloat16() for tensor in model[:2]] for model in (student, teacher)]
    plain = linear_token_divergence(*narrow[0], *narrow[1], y)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_token_divergence(*student[:2], *teacher[:2], y)
    assert torch.equal(found.divergence, plain.divergence) and found.divergence.dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (dict(teacher_hidden=torch.zeros(2, TEACHER_H)), "teacher_hidden"),
        (dict(teacher_hidden=torch.zeros(3, 5)), "teacher_head_weight"),
        (dict(teacher_head_weight=torch.zeros(9, TEACHER_H)), r"teacher_head_weight is \[9, 12\], want at least 10"),
        (dict(teacher_head_weight=torch.zeros(0)), "teacher_head_weight"),
        (dict(teacher_head_bias=torch.zeros(3)), "teacher_head_bias"),
        (dict(teacher_hidden=torch.zeros(3, TEACHER_H, device="meta")), "teacher_"),
        (dict(head_weight=torch.zeros(0)), "head_weight"),
        (dict(head_bias=torch.zeros(3)), "head_bias"),
        (dict(targets=torch.tensor([0, 10, 1])), r"targets\[1\] is 10"),
        (dict(kind="kl"), "kind"),
        (dict(kind="jsd", jsd_weight=2.0), "jsd_weight"),
        (dict(max_chunk_bytes=0), "max_chunk_bytes"),
        (dict(logits_dtype=torch.bfloat16), "logits_dtype"),
        (dict(temperature=-1.0), "temperature"),
    ],
)
def test_bad_input_is_named(change, name):
    arguments = dict(
        hidden=torch.zeros(3, H), head_weight=torch.zeros(10, H), teacher_hidden=torch.zeros(3, TEACHER_H),
        teacher_head_weight=torch.zeros(12, TEACHER_H), targets=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    with pytest.raises(ValueError, match=name):
        linear_token_divergence(**arguments | change)


@pytest.mark.parametrize("jsd_weight", [0.0, 0.5])
def test_opcheck(jsd_weight):
    student, teacher = models()
    y = torch.where(torch.arange(N) % 3 == 0, -1, targets_of(N, high=V))
    float32 = torch.float32
    scalars = (V, 1.0, 0.0, float32, float32, float32, float32, 1 << 13, jsd_weight, "torch", "", True)
    tensors = [tensor.requires_grad_() for tensor in student] + teacher + [y, torch.ones(1)]
    torch.library.opcheck(torch.ops.crest.linear_token_divergence, (*tensors, *scalars))
    with torch.no_grad():
        _, entropy, _, *saved, normaliser = torch.ops.crest.linear_token_divergence(*tensors, *scalars)
        saved = torch.stack([entropy, *saved, *normaliser])
        tensors = [tensor.detach() for tensor in tensors]
        torch.library.opcheck(
            torch.ops.crest.linear_token_divergence_grad,
            (*tensors, saved, torch.ones(4, N), *scalars, [True, False, True]),
        )
