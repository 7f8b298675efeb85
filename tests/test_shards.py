"""A head whose rows are split over the ranks of a group against the whole head, in three processes that start once.

Every rank runs every case and keeps what it found; the tests compare that with the same call in this process.
"""

import math

import pytest
import torch
import torch.distributed as dist
from cases import logits_of, targets_of
from ranks import run_ranks

from crest_ops import (
    CISPO,
    GSPO,
    SAPO,
    PPOClip,
    Spans,
    linear_policy_loss,
    linear_token_divergence,
    linear_token_stats,
)

N, H, V = 8, 16, 90
SPLITS = {"three": (20, 33, 37), "pair": (41, 49), "one": (V,)}
SPANS = Spans.from_mask(torch.tensor([[0, 1, 1, 1], [1, 0, 1, 1]]).bool(), group=torch.tensor([0, 0]))
MASK = torch.arange(N) % 4 != 3
OUTPUTS = ("logp", "entropy", "sum_sq_probs")
ROUNDING = {torch.float64: 1e-14, torch.float32: 4e-6, torch.bfloat16: 2**-6}

OUT = "first shard out of the support"
EVERYTHING = dict(
    softcap=4.0, logit_scale=0.7, vocab_size=83, mask=MASK, temperature=torch.linspace(0.5, 2, N), outputs=OUTPUTS
)
STATS = {
    "float32": {},
    "bfloat16": dict(dtype=torch.bfloat16),
    "float64": dict(dtype=torch.float64),
    "bfloat16 with float32 logits": dict(dtype=torch.bfloat16, logits_dtype=torch.float32),
    "everything": EVERYTHING,
    "a row at a time": EVERYTHING | dict(max_chunk_bytes=1),
    "part of the hidden gradient": dict(reduce_hidden_grad=False),
    OUT: dict(out=slice(0, 41)),
    "last shard out of the support": dict(out=slice(41, V)),
    "last shard out of the support, capped": dict(out=slice(41, V), softcap=4.0),
    "no support": dict(out=slice(0, V)),
    "a million times the gradient": dict(out=slice(0, 41), upstream=1e6),
    "uniform": dict(flat=True),
    "far above 0": dict(shift=5e4),
    "far below 0": dict(shift=-5e4, temperature=0.5),
    "log-prob alone": dict(outputs=("logp",)),
    "all masked": dict(mask=torch.zeros(N, dtype=torch.bool)),
    "frozen head": dict(frozen=True),
    "NaN in a shard": dict(nan=50),
}
LOSSES = {
    "PPOClip": PPOClip(0.2, 0.28),
    "dual clip": PPOClip(0.1, 0.1, dual=1.5),
    "CISPO": CISPO(),
    "SAPO": SAPO(),
    "GSPO": GSPO(),
    "turn level": PPOClip(level="turn"),
    "sum over an action": PPOClip(level="action", ratio="sum"),
    "on policy": PPOClip(0.2, 0.28),
    "bfloat16 loss": PPOClip(0.2, 0.28),
    "loss, part of the hidden gradient": PPOClip(0.2, 0.28),
}
SUPPORT_OF_BOTH = dict(out=slice(0, 41), teacher_out=slice(0, 41))
JSD = dict(kind="jsd", softcap=4.0, logit_scale=0.7, vocab_size=83, mask=MASK, temperature=torch.linspace(0.5, 2, N))
DIVERGENCES = {
    "reverse_kl": {},
    "forward_kl": dict(kind="forward_kl"),
    "divergence of bfloat16": dict(dtype=torch.bfloat16),
    "divergence of everything": dict(
        kind="forward_kl", softcap=4.0, logit_scale=0.7, vocab_size=83, mask=MASK, temperature=torch.linspace(0.5, 2, N)
    ),
    "divergence a row at a time": dict(max_chunk_bytes=1),
    "divergence, part of the hidden gradient": dict(reduce_hidden_grad=False),
    "equal models": dict(same=True),
    "first shard out of both supports": SUPPORT_OF_BOTH,
    "first shard out of the teacher's": dict(kind="forward_kl", teacher_out=slice(0, 41)),
    "last shard out of the student's": dict(out=slice(41, V)),
    "no support of either": dict(out=slice(0, V), teacher_out=slice(0, V)),
    "divergence of a frozen head": dict(frozen=True),
    "NaN in a teacher's shard": dict(teacher_nan=50),
    "jsd": dict(kind="jsd", jsd_weight=0.3),
    "jsd of everything": JSD,
    "jsd a row at a time": JSD | dict(max_chunk_bytes=1),
    "jsd, first shard out of the teacher's": dict(kind="jsd", teacher_out=slice(0, 41)),
    "jsd, first shard out of the student's": dict(kind="jsd", out=slice(0, 41)),
    "jsd of equal models": dict(kind="jsd", same=True),
}
PART = [name for name, case in {**STATS, **DIVERGENCES}.items() if "reduce_hidden_grad" in case]
PART += ["loss, part of the hidden gradient"]
INTERPRETED = ("everything", OUT, "last shard out of the support", "far above 0", "dual clip")
INTERPRETED += ("divergence of everything", "first shard out of both supports")
FEW = [("everything", "torch"), ("everything", "triton"), ("PPOClip", "torch"), ("reverse_kl", "torch")]
CASES = {
    "three": [(name, "torch") for name in [*STATS, *LOSSES, *DIVERGENCES]] + [(name, "triton") for name in INTERPRETED],
    "pair": FEW,
    "one": FEW,
}
REFUSED = {
    "head_weight of rank 1": dict(rank=1, head_weight=torch.zeros(3, H + 1)),
    "head_bias of rank 2": dict(rank=2, head_bias=torch.zeros(3)),
    "backend of rank 0": dict(rank=0, backend="cuda"),
    "vocab_size": dict(vocab_size=53, targets=torch.zeros(N, dtype=torch.int64)),
    "targets": dict(targets=torch.full((N,), V)),
    "hidden": dict(hidden=None),
    "targets of rank 1": dict(rank=1, targets=torch.full((N,), V)),
    "hidden of rank 2": dict(rank=2, hidden=None),
    "temperature of rank 0": dict(rank=0, temperature=-1.0),
}
CREDITS = {"credit of rank 1": 1, "credit of rank 2": 2}  # the rank that holds a NaN
TEACHERS = {
    "teacher_head_weight of rank 2": dict(rank=2, teacher_head_weight=torch.zeros(3, H)),
    "backend": dict(kind="jsd", backend="triton"),
    "kind of rank 1": dict(rank=1, kind="kl"),
}


def operands(dtype=torch.float32, out=None, flat=False, shift=0.0, nan=None, seed=10):
    """(hidden, weight, bias, targets); the targets lie on every shard."""
    hidden = logits_of(N, H, dtype=dtype, seed=seed, scale=0.0 if flat else 1.0)
    weight = logits_of(V, H, dtype=dtype, seed=seed + 1, scale=2 / H**0.5)
    bias = (0.0 if flat else logits_of(V, dtype=dtype, seed=seed + 2, scale=0.5)) + torch.full((V,), shift, dtype=dtype)
    targets = torch.tensor([0, 19, 20, 52, 53, 82, -100, 25])
    if out is not None:
        bias[out] = -math.inf
    if nan is not None:
        weight[nan, 0] = math.nan
    return hidden, weight, bias, targets


def run(name, backend, group=None, rows=slice(None)):
    """Outputs and gradients of a case, of the whole head or of some of its rows."""
    arguments = dict(STATS.get(name, DIVERGENCES.get(name, {})))
    if name == "bfloat16 loss":
        arguments["dtype"] = torch.bfloat16
    if name == "loss, part of the hidden gradient":
        arguments["reduce_hidden_grad"] = False
    kinds = {kind: arguments.pop(kind) for kind in ("dtype", "out", "flat", "shift", "nan") if kind in arguments}
    frozen, upstream = arguments.pop("frozen", False), arguments.pop("upstream", 1.0)
    teacher = {"out": arguments.pop("teacher_out", None), "nan": arguments.pop("teacher_nan", None)}
    teacher |= {"seed": 10 if arguments.pop("same", False) else 20, "dtype": kinds.get("dtype", torch.float32)}
    hidden, weight, bias, targets = operands(**kinds)
    leaves = [t.clone().requires_grad_(t is hidden or not frozen) for t in (hidden, weight[rows], bias[rows])]
    arguments |= dict(head_bias=leaves[2], backend=backend, process_group=group)
    if name in STATS:
        total, found = stats_of(leaves, targets, arguments)
    elif name in DIVERGENCES:
        total, found = divergence_of(leaves, operands(**teacher), rows, targets, arguments)
    else:
        total, found = loss_of(name, leaves, targets, arguments)
    if total.requires_grad:
        (upstream * total).backward()
    return {key: value.detach() for key, value in found.items()}, [leaf.grad for leaf in leaves]


def stats_of(leaves, targets, arguments):
    stats = linear_token_stats(*leaves[:2], targets, **arguments)
    total = (logits_of(N, seed=1) * torch.where(stats.logp == -math.inf, 0, stats.logp)).sum()
    if stats.entropy is not None:
        total = total + (logits_of(N, seed=2) * stats.entropy).sum()
    return total, {key: value for key, value in vars(stats).items() if value is not None}


def divergence_of(leaves, teacher, rows, targets, arguments):
    given = dict(teacher_hidden=teacher[0], teacher_head_weight=teacher[1][rows], teacher_head_bias=teacher[2][rows])
    found = vars(linear_token_divergence(*leaves[:2], targets=targets, **given, **arguments))
    total = 0.0
    found = {key: value for key, value in found.items() if value is not None}
    for seed, key in enumerate(("logp", "entropy", "gap", "forward_kl", "reverse_kl", "divergence")):
        if key in found:
            total = total + (logits_of(N, seed=seed) * torch.where(found[key].isinf(), 0, found[key])).sum()
    return total, found


def loss_of(name, leaves, targets, arguments):
    given = {key: logits_of(N, seed=seed, scale=1.0) for seed, key in enumerate(["credit", "old_logp", "ref_logp"])}
    given["old_logp"] = None if name == "on policy" else given["old_logp"] * 0.3 - 4
    loss = linear_policy_loss(
        *leaves[:2], targets, token_weight=logits_of(N, seed=5).abs(), **given, kl_coef=0.1, entropy_coef=0.05,
        surrogate=LOSSES[name], importance_weight=logits_of(N, seed=6).abs(), spans=SPANS, mask=MASK,
        temperature=0.8, **arguments,
    )  # fmt: skip
    found = vars(loss) | {f"metrics {key}": value for key, value in loss.metrics.items()}
    found.pop("metrics")
    return loss.loss, found


def refusal(name, group, rank, rows):
    """The message of the ValueError of this rank."""
    hidden, weight, bias, targets = operands()
    arguments = dict(hidden=hidden, head_weight=weight[rows], head_bias=bias[rows], targets=targets)
    op = linear_token_stats
    if name in CREDITS:
        op, credit = linear_policy_loss, torch.ones(N)
        credit[2] = math.nan if CREDITS[name] == rank else 1.0
        arguments |= dict(credit=credit, token_weight=torch.ones(N))
    if name in TEACHERS:
        op = linear_token_divergence
        arguments |= dict(teacher_hidden=hidden, teacher_head_weight=weight[rows])
    change = {**REFUSED, **TEACHERS}.get(name, {})
    if change.get("rank", rank) == rank:
        arguments |= {key: value for key, value in change.items() if key != "rank"}
    try:
        op(**arguments, process_group=group)
    except ValueError as error:
        return str(error)


def work(rank):
    groups = {"three": dist.group.WORLD, "pair": dist.new_group([0, 1])}
    groups["one"] = [dist.new_group([r]) for r in range(3)][rank]
    found = {}
    for group, process_group in groups.items():
        place = 0 if group == "one" else rank
        if group == "pair" and rank == 2:
            continue
        rows = slices(group)[place]
        for name, backend in CASES[group]:
            found[group, name, backend] = run(name, backend, process_group, rows)
        if group == "three":
            found |= {name: refusal(name, process_group, rank, rows) for name in [*REFUSED, *CREDITS, *TEACHERS]}
    return found


def slices(group):
    ends = [sum(SPLITS[group][: i + 1]) for i in range(len(SPLITS[group]))]
    return [slice(end - size, end) for end, size in zip(ends, SPLITS[group], strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the three ranks found."""
    return run_ranks(work, tmp_path_factory.mktemp("shards"), 3)


def assert_close(found, wanted):
    """NaN and -inf in the same places, the rest within rounding of the largest."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    finite = wanted.isfinite()
    assert torch.equal(found.isfinite(), finite)
    assert torch.allclose(found[~finite].double(), wanted[~finite].double(), equal_nan=True)
    size = wanted[finite].double().abs().max() if finite.any() else 0.0
    assert (
        (found[finite].double() - wanted[finite].double()).abs() <= ROUNDING.get(found.dtype, 0) * max(1.0, size)
    ).all()


@pytest.mark.parametrize(
    ("group", "name", "backend"), [(group, *case) for group in ("three", "pair") for case in CASES[group]]
)
def test_shards_together_are_the_whole_head(ranks, group, name, backend):
    here = [rank[group, name, backend] for rank in ranks[: len(SPLITS[group])]]
    wanted, (hidden_grad, weight_grad, bias_grad) = run(name, backend)
    for found, _ in here:
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_close(found[key], value)
            if "equal models" in name and (key.endswith("_kl") or key == "divergence"):
                assert (value == 0).all() and (found[key] == 0).all()
            assert torch.equal(found[key].nan_to_num(7), here[0][0][key].nan_to_num(7)), f"{key}: ranks differ"
    grads = [grads for _, grads in here]
    if name not in PART:
        for hidden, *_ in grads:
            assert_close(hidden, hidden_grad)
            assert torch.equal(hidden.nan_to_num(7), grads[0][0].nan_to_num(7))
    else:
        assert_close(sum(hidden for hidden, *_ in grads), hidden_grad)
        assert (grads[0][0] - hidden_grad).abs().max() > 1e-2
    for i, whole in ((1, weight_grad), (2, bias_grad)):
        if whole is None:
            assert all(part[i] is None for part in grads)
        else:
            assert_close(torch.cat([part[i] for part in grads]), whole)


@pytest.mark.parametrize(("name", "backend"), CASES["one"])
def test_a_group_of_one_is_no_group(ranks, name, backend):
    found, grads = ranks[2]["one", name, backend]
    wanted, wanted_grads = run(name, backend)
    for ours, theirs in zip((*found.values(), *grads), (*wanted.values(), *wanted_grads), strict=True):
        assert_close(ours, theirs)


def test_the_bounds_hold_over_shards(ranks):
    entropy = ranks[0]["three", "uniform", "torch"][0]["entropy"]
    assert (entropy <= math.log(V) * (1 + 1e-7)).all() and entropy.max() > math.log(V) - 1e-6
    for name, backend in CASES["three"]:
        found, _ = ranks[0]["three", name, backend]
        assert not (found["logp"] > 0).any() and not ("entropy" in found and (found["entropy"] < 0).any())


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_target_that_its_shard_excludes_has_no_gradient_on_any(ranks, backend):
    """Targets 0 to 40 are out of the support: their rows are as if masked, but for logp = -inf."""
    _, _, _, targets = operands()
    excluded = (targets >= 0) & (targets < 41)
    for rank in ranks:
        found, (hidden_grad, weight_grad, _) = rank["three", OUT, backend]
        assert (found["logp"][excluded] == -math.inf).all() and (hidden_grad[excluded] == 0).all()
    assert (ranks[0]["three", OUT, backend][1][1] == 0).all()  # none of its columns
    assert weight_grad.abs().sum() > 0


@pytest.mark.parametrize("name", [*REFUSED, *CREDITS, *TEACHERS])
def test_a_refusal_reaches_every_rank(ranks, name):
    """No rank is left waiting for one that raised; the one at fault names its argument, the others name it."""
    messages = [rank[name] for rank in ranks]
    at_fault = CREDITS[name] if name in CREDITS else {**REFUSED, **TEACHERS}[name].get("rank")
    for rank, message in enumerate(messages):
        assert message is not None
        if at_fault in (None, rank):
            assert message.startswith(name.split()[0])
        else:
            assert message.startswith(f"rank {at_fault} of process_group")


@pytest.mark.parametrize("op", [linear_token_stats, linear_policy_loss, linear_token_divergence])
def test_a_bad_group_is_named(op):
    hidden, weight, _, _ = operands()
    given = {
        linear_token_stats: {},
        linear_policy_loss: dict(credit=torch.ones(N), token_weight=torch.ones(N)),
        linear_token_divergence: dict(teacher_hidden=hidden, teacher_head_weight=weight),
    }[op]
    for bad in ("gloo", 3, [0, 1]):
        with pytest.raises(ValueError, match="process_group is .*want a torch.distributed.ProcessGroup"):
            op(hidden, weight, targets=targets_of(N, high=V), process_group=bad, **given)
