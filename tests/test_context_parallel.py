"""Tokens split over four ranks, one of them without any: segment ops, reductions and losses are those of one process.

Every rank runs every case and keeps what it found; the tests compare that with the same call on the whole batch.
"""

import math

import pytest
import torch
import torch.distributed as dist
from cases import logits_of, targets_of
from ranks import run_ranks

from crest_ops import CISPO, GSPO, METHODS, SAPO, PPOClip, Signals, Spans, linear_policy_loss, policy_loss
from crest_ops.allocation import entropy_gate, softmax_allocation
from crest_ops.reductions import action_mean, fixed_length, sequence_mean, token_mean, turn_mean
from crest_ops.segments import (
    segment_center,
    segment_difference,
    segment_discounted_sum,
    segment_mean,
    segment_softmax,
    segment_std,
    segment_sum,
    segment_zscore,
)
from crest_ops.token_returns import reinforce_return

W, H, V = 4, 6, 20
# Two rows of 12 tokens, split along time: rank 0 has columns 0-3, rank 1 none, rank 2 column 4, rank 3 the rest. The
# first row's first action crosses ranks 0, 2 and 3; the second row's policy tokens are all on rank 3.
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1]]).bool()
TURN = torch.tensor([[0] * 9 + [1] * 3, [0] * 9 + [1] * 3])
SPANS = Spans.from_mask(MASK, group=torch.tensor([0, 0]), turn=TURN)
N, S, K = SPANS.num_tokens, SPANS.num_actions, SPANS.num_turns
COLUMNS = [range(0, 4), range(0, 0), range(4, 5), range(5, 12)]
PLACES = [torch.arange(N).view(2, -1)[:, list(columns)].flatten() for columns in COLUMNS]
IDS = SPANS.trajectory_of_token
OPS = {
    "sum": lambda x, ids, **group: segment_sum(x, ids, 2, **group),
    "mean": lambda x, ids, **group: segment_mean(x, ids, 2, **group),
    "std": lambda x, ids, **group: segment_std(x, ids, 2, unbiased=True, **group),
    "center": lambda x, ids, **group: segment_center(x, ids, 2, **group),
    "zscore": lambda x, ids, **group: segment_zscore(x, ids, 2, unbiased=False, eps=1e-3, **group),
    "softmax": lambda x, ids, **group: segment_softmax(x, ids, 2, **group),
    "discounted": lambda x, ids, **group: segment_discounted_sum(x, ids, 0.9, **group),
    "difference": lambda x, ids, **group: segment_difference(
        x, ids, 2, first=torch.tensor([0.5, -1.0]), last=torch.tensor([2.0, 3.0]), **group
    ),
}
PER_SEGMENT = ("sum", "mean", "std")
REDUCTIONS = {f.__name__: f for f in (token_mean, action_mean, turn_mean, sequence_mean)}
REDUCTIONS["fixed_length"] = lambda spans: fixed_length(spans, 10)
SURROGATES = {
    "token": PPOClip(),
    "action": PPOClip(level="action"),
    "turn": SAPO(level="turn"),
    "trajectory": CISPO(level="trajectory"),
    "sum over a trajectory": PPOClip(0.1, 0.1, level="trajectory", ratio="sum"),
    "GSPO": GSPO(0.02, 0.02),
    "on policy": GSPO(),
}
REFUSED = {
    "values": dict(values=torch.ones(3, 2)),
    "ids": dict(ids=torch.full((len(PLACES[2]),), 7)),
    "num_segments": dict(num_segments=3),
    "the bytes of a value": dict(values=torch.ones(len(PLACES[2]), dtype=torch.float64)),
    "whether values require grad": dict(values=torch.ones(len(PLACES[2]), requires_grad=True)),
}


def values_of(dtype=torch.float32):
    values = logits_of(N, seed=3, dtype=dtype)
    return torch.where(SPANS.mask, values, math.nan)


def run_op(name, dtype, place=slice(None), rank=None, group=None):
    """(result, gradient) of a weighted sum; of the whole, that of all ranks' sums."""
    x = values_of(dtype)[place].requires_grad_()
    given = {} if group is None else {"process_group": group}
    y = OPS[name](x, IDS[place], **given)
    if name in PER_SEGMENT:
        factors = torch.stack([logits_of(2, seed=r, dtype=dtype) for r in range(W)])
        factor = factors.sum(0) if rank is None else factors[rank]
    else:
        factor = logits_of(N, seed=5, dtype=dtype)[place]
    (factor * y).sum().backward()
    return y.detach(), x.grad


def run_loss(name, linear, place=slice(None), spans=SPANS, rows=slice(None), group=None):
    """(loss, ratio, clipped, gradients by hidden (or logits) and weight)."""
    hidden = logits_of(N, H, seed=1, scale=1.0)[place].requires_grad_()
    weight = logits_of(V, H, seed=2, scale=1.0)[rows].requires_grad_()
    credit, old_logp = logits_of(N, seed=6), logits_of(N, seed=7, scale=0.2) - 3
    given = dict(
        credit=credit[place], old_logp=None if name == "on policy" else old_logp[place], spans=spans,
        token_weight=action_mean(spans), surrogate=SURROGATES[name], entropy_coef=0.1,
    )  # fmt: skip
    targets = targets_of(N, high=V)[place]
    if linear:
        found = linear_policy_loss(hidden, weight, targets, process_group=group, **given)
    else:
        found = policy_loss(hidden @ weight.t(), targets, **given)
    found.loss.backward()
    return found.loss.detach(), found.ratio, found.clipped, hidden.grad, weight.grad


def message_of(call):
    try:
        call()
    except ValueError as error:
        return str(error)


def refusal(name, rank):
    change = REFUSED[name] if rank == 2 else {}
    place = PLACES[rank]
    given = dict(values=torch.ones(len(place)), ids=IDS[place], num_segments=2) | change
    return message_of(lambda: segment_sum(**given, process_group=dist.group.WORLD))


def credit_refusal(linear, rank, part):
    credit = torch.ones(len(PLACES[rank]))
    if rank == 3:
        credit[part.mask.nonzero()[0]] = math.nan
    given = dict(targets=targets_of(N, high=V)[PLACES[rank]], credit=credit, token_weight=token_mean(part))
    given |= dict(spans=part, surrogate=GSPO())
    hidden = logits_of(len(credit), H)
    if linear:
        return message_of(lambda: linear_policy_loss(hidden, logits_of(V, H), **given))
    return message_of(lambda: policy_loss(hidden @ logits_of(V, H).t(), **given))


def work(rank):
    place, part = PLACES[rank], SPANS.part(PLACES[rank], dist.group.WORLD)
    found = {}
    for dtype in (torch.float32, torch.float64):
        for name in OPS:
            found[name, dtype] = run_op(name, dtype, place, rank, dist.group.WORLD)
    for name, reduction in REDUCTIONS.items():
        found[name] = reduction(part)
    for linear in (False, True):
        for name in SURROGATES:
            found[name, linear] = run_loss(name, linear, place, part)
        found["credit", linear] = credit_refusal(linear, rank, part)
    gap, sign = values_of()[place], logits_of(S).sign()
    found["gate"] = entropy_gate(gap, part, eps=1e-3, scope="turn")
    found["share"] = softmax_allocation(sign, gap, part, eta=0.7, tau=1.0, clip=3.0)
    found |= {name: refusal(name, rank) for name in REFUSED}
    found["one group"] = message_of(lambda: run_loss("GSPO", True, place, part, group=dist.group.WORLD))
    tokens, columns = (
        [g for ranks in pairs for g in [dist.new_group(ranks)] if rank in ranks][0]
        for pairs in ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    )
    half = PLACES_OF_TWO[rank // 2]
    found["both"] = run_loss("GSPO", True, half, SPANS.part(half, tokens), ROWS_OF_TWO[rank % 2], columns)
    return found


PLACES_OF_TWO = [torch.arange(N).view(2, -1)[:, columns].flatten() for columns in (slice(0, 5), slice(5, 12))]
ROWS_OF_TWO = [slice(0, 7), slice(7, V)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(work, tmp_path_factory.mktemp("context"), W)


def joined(parts, places=PLACES):
    """What the ranks hold, in the order of the whole batch."""
    order = torch.cat(places).argsort()
    return torch.cat(parts)[order]


def close(found, wanted, bound=None):
    bound = bound or (1e-12 if wanted.dtype == torch.float64 else 2e-6)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    assert (found.double() - wanted.double()).abs().max() <= bound * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPS)
def test_segments_across_ranks_are_those_of_one_process(ranks, name, dtype):
    wanted, wanted_grad = run_op(name, dtype)
    found, grads = zip(*(rank[name, dtype] for rank in ranks), strict=True)
    if name in PER_SEGMENT:
        for whole in found:
            assert torch.equal(whole, found[0])
            close(whole, wanted)
    else:
        close(joined(found), wanted)
    assert (wanted_grad[SPANS.mask] != 0).any()
    close(joined(grads), wanted_grad)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_weights_of_the_parts_are_those_of_the_whole(ranks, name):
    close(joined([rank[name] for rank in ranks]), REDUCTIONS[name](SPANS))


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", SURROGATES)
def test_losses_of_the_parts_add_up_to_the_whole(ranks, name, linear):
    loss, ratio, clipped, hidden_grad, weight_grad = run_loss(name, linear)
    found = [rank[name, linear] for rank in ranks]
    close(sum(part[0] for part in found), loss)
    close(joined([part[1] for part in found]), ratio)
    assert torch.equal(joined([part[2] for part in found]), clipped)
    close(joined([part[3] for part in found]), hidden_grad)
    close(sum(part[4] for part in found), weight_grad, 1e-5)
    if name == "GSPO":
        assert clipped[SPANS.mask].any() and not clipped[SPANS.mask].all()


def test_tokens_and_columns_may_both_be_split(ranks):
    loss, ratio, _, hidden_grad, weight_grad = run_loss("GSPO", True)
    found = [rank["both"] for rank in ranks]
    close(found[0][0] + found[2][0], loss)
    for column in (0, 1):
        pair = [found[column], found[2 + column]]
        close(joined([part[1] for part in pair], PLACES_OF_TWO), ratio)
        close(joined([part[3] for part in pair], PLACES_OF_TWO), hidden_grad)
        close(pair[0][4] + pair[1][4], weight_grad[ROWS_OF_TWO[column]], 1e-5)


def test_gate_and_allocation_take_a_part(ranks):
    gap, sign = values_of(), logits_of(S).sign()
    close(joined([rank["gate"] for rank in ranks]), entropy_gate(gap, SPANS, eps=1e-3, scope="turn"))
    wanted = softmax_allocation(sign, gap, SPANS, eta=0.7, tau=1.0, clip=3.0)
    close(joined([rank["share"] for rank in ranks]), wanted)


@pytest.mark.parametrize("name", REFUSED)
def test_what_one_rank_refuses_is_refused_by_all(ranks, name):
    for rank, found in enumerate(ranks):
        wanted = name if rank == 2 or name.startswith(("num", "the", "whether")) else "rank 2 of process_group"
        assert found[name] is not None and found[name].startswith(wanted)


@pytest.mark.parametrize("linear", [False, True])
def test_a_bad_credit_of_one_rank_is_an_error_of_all(ranks, linear):
    for rank, found in enumerate(ranks):
        wanted = "credit[" if rank == 3 else "rank 3 of process_group"
        assert found["credit", linear] is not None and found["credit", linear].startswith(wanted)


def test_one_group_cannot_split_both(ranks):
    assert all(found["one group"].startswith("process_group is the group of the part") for found in ranks)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A group of one, in this process."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_parts_are_checked_and_refused_where_the_whole_is_wanted(alone):
    part = SPANS.part(torch.arange(5), alone)
    assert torch.equal(part.action_length, SPANS.action_length) and part.num_tokens == 5
    assert torch.equal(part.to("cpu").action_length, SPANS.action_length) and part.to("cpu").process_group is alone
    for place, problem in (
        (torch.tensor([0, N]), r"place\[1\] is 24, no token of the batch"),
        (torch.tensor([-1]), r"place\[0\] is -1"),
        (torch.tensor([3, 3]), r"place\[1\] goes back or repeats"),
        (torch.tensor([3, 2]), r"place\[1\] goes back or repeats"),
        (torch.ones(2), "place has shape"),
        (slice(0, 2), "place is a slice"),
    ):
        with pytest.raises(ValueError, match=problem):
            SPANS.part(place, alone)
    with pytest.raises(ValueError, match="process_group is str"):
        SPANS.part(torch.arange(5), "gloo")
    for call in (
        lambda: part.part(torch.arange(2), alone),
        lambda: METHODS["grpo"].assign(part, Signals(reward_B=torch.ones(2)), METHODS["grpo"].Config()),
        lambda: reinforce_return(torch.ones(5), part, 0.9),
    ):
        with pytest.raises(ValueError, match="spans are a part"):
            call()


def test_a_group_of_one_is_no_group(alone):
    x = values_of().requires_grad_()
    found = segment_mean(x, IDS, 2, process_group=alone)
    assert torch.equal(found, segment_mean(x, IDS, 2)) and found.requires_grad
    with pytest.raises(ValueError, match="process_group is int, want a torch.distributed.ProcessGroup"):
        segment_mean(x, IDS, 2, process_group=3)
