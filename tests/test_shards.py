"""A head whose rows are split over the ranks of a group against the whole head, in three processes that start once.

Every rank runs every case and keeps what it found; the tests compare that with the same call in this process.
"""

import math
import multiprocessing
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import logits_of, targets_of

from crest_ops import CISPO, GSPO, SAPO, PPOClip, Spans, linear_policy_loss, linear_token_stats

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
}
INTERPRETED = ("everything", OUT, "last shard out of the support", "far above 0", "dual clip")
FEW = [("everything", "torch"), ("everything", "triton"), ("PPOClip", "torch")]
CASES = {
    "three": [(name, "torch") for name in [*STATS, *LOSSES]] + [(name, "triton") for name in INTERPRETED],
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
}


def operands(dtype=torch.float32, out=None, flat=False, shift=0.0, nan=None):
    """(hidden, weight, bias, targets); the targets lie on every shard."""
    hidden = logits_of(N, H, dtype=dtype, seed=10, scale=0.0 if flat else 1.0)
    weight = logits_of(V, H, dtype=dtype, seed=11, scale=2 / H**0.5)
    bias = (0.0 if flat else logits_of(V, dtype=dtype, seed=12, scale=0.5)) + torch.full((V,), shift, dtype=dtype)
    targets = torch.tensor([0, 19, 20, 52, 53, 82, -100, 25])
    if out is not None:
        bias[out] = -math.inf
    if nan is not None:
        weight[nan, 0] = math.nan
    return hidden, weight, bias, targets


def run(name, backend, group=None, rows=slice(None)):
    """Outputs and gradients of a case, of the whole head or of some of its rows."""
    arguments = dict(STATS.get(name, {}))
    kinds = {kind: arguments.pop(kind) for kind in ("dtype", "out", "flat", "shift", "nan") if kind in arguments}
    frozen, upstream = arguments.pop("frozen", False), arguments.pop("upstream", 1.0)
    hidden, weight, bias, targets = operands(**kinds)
    leaves = [t.clone().requires_grad_(t is hidden or not frozen) for t in (hidden, weight[rows], bias[rows])]
    arguments |= dict(head_bias=leaves[2], backend=backend, process_group=group)
    if name in STATS:
        stats = linear_token_stats(*leaves[:2], targets, **arguments)
        found = {key: value for key, value in vars(stats).items() if value is not None}
        total = (logits_of(N, seed=1) * torch.where(stats.logp == -math.inf, 0, stats.logp)).sum()
        if stats.entropy is not None:
            total = total + (logits_of(N, seed=2) * stats.entropy).sum()
    else:
        given = {key: logits_of(N, seed=seed, scale=1.0) for seed, key in enumerate(["credit", "old_logp", "ref_logp"])}
        given["old_logp"] = None if name == "on policy" else given["old_logp"] * 0.3 - 4
        loss = linear_policy_loss(
            *leaves[:2], targets, token_weight=logits_of(N, seed=5).abs(), **given, kl_coef=0.1, entropy_coef=0.05,
            surrogate=LOSSES[name], importance_weight=logits_of(N, seed=6).abs(), spans=SPANS, mask=MASK,
            temperature=0.8, **arguments,
        )  # fmt: skip
        total, found = loss.loss, vars(loss) | {f"metrics {key}": value for key, value in loss.metrics.items()}
        found.pop("metrics")
    if total.requires_grad:
        (upstream * total).backward()
    found = {key: value.detach() for key, value in found.items()}
    return found, [leaf.grad for leaf in leaves]


def refusal(change, group, rank, rows):
    """The message of the ValueError of this rank."""
    hidden, weight, bias, targets = operands()
    arguments = dict(hidden=hidden, head_weight=weight[rows], head_bias=bias[rows], targets=targets)
    if change.get("rank", rank) == rank:
        arguments |= {key: value for key, value in change.items() if key != "rank"}
    try:
        linear_token_stats(**arguments, process_group=group)
    except ValueError as error:
        return str(error)


def work(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3, timeout=timedelta(seconds=60)
    )
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
            found |= {name: refusal(change, process_group, rank, rows) for name, change in REFUSED.items()}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def slices(group):
    ends = [sum(SPLITS[group][: i + 1]) for i in range(len(SPLITS[group]))]
    return [slice(end - size, end) for end, size in zip(ends, SPLITS[group], strict=True)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of the three ranks found."""
    folder = tmp_path_factory.mktemp("shards")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "triton", "crest_ops", "crest_kernels.token_stats", "pytest"])
    processes = [context.Process(target=work, args=(rank, str(folder))) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


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
            assert torch.equal(found[key].nan_to_num(7), here[0][0][key].nan_to_num(7)), f"{key}: ranks differ"
    grads = [grads for _, grads in here]
    if STATS.get(name, {}).get("reduce_hidden_grad", True):
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


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_reaches_every_rank(ranks, name):
    """No rank is left waiting for one that raised; the one at fault names its argument, the others name it."""
    messages = [rank[name] for rank in ranks]
    at_fault = REFUSED[name].get("rank")
    for rank, message in enumerate(messages):
        assert message is not None
        if at_fault in (None, rank):
            assert message.startswith(name.split()[0])
        else:
            assert message.startswith(f"rank {at_fault} of process_group")


@pytest.mark.parametrize("op", [linear_token_stats, linear_policy_loss])
def test_a_bad_group_is_named(op):
    hidden, weight, _, _ = operands()
    given = {} if op is linear_token_stats else dict(credit=torch.ones(N), token_weight=torch.ones(N))
    for bad in ("gloo", 3, [0, 1]):
        with pytest.raises(ValueError, match="process_group is .*want a torch.distributed.ProcessGroup"):
            op(hidden, weight, targets=targets_of(N, high=V), process_group=bad, **given)
