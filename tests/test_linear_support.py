"""What the linear ops stand on: chunks, compilation, CREST_DEBUG=1, refused input, the memory estimate's arguments."""

import importlib
import math

import pytest
import torch
from cases import logits_of
from linear_cases import ROW, H, N, V, head_case, leaf

from crest_ops import GSPO, PPOClip, Spans, estimate_memory, linear_policy_loss, linear_token_stats
from crest_ops.chunks import ChunkedHead, chunk_rows, move_rows_forward, row_bytes

LOSS_MODULE = importlib.import_module("crest_ops.linear_policy_loss")  # the package's attribute is the function


@pytest.fixture
def debug(monkeypatch):
    monkeypatch.setenv("CREST_DEBUG", "1")


class TestChunks:
    def test_rows_lie_at_aligned_distances(self):
        assert row_bytes(101, torch.bfloat16) == 256 and row_bytes(128, torch.float32) == 512

    @pytest.mark.parametrize(
        ("num_rows", "budget_rows", "wanted"),
        [
            (0, 10, 1),
            (7, 0, 1),  # less than a row: a row all the same
            (7, 3, 3),
            (7, 1000, 7),
            (1000, 300, 256),  # whole tiles of 128
            (1000, 900, 512),  # two chunks, spread evenly
            (129, 129, 128),
        ],
    )
    def test_chunk_rows(self, num_rows, budget_rows, wanted):
        assert chunk_rows(num_rows, V, torch.float32, max(1, budget_rows * ROW)) == wanted

    @pytest.mark.parametrize("rows", [0, 1, 5, 700])
    @pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
    def test_rows_to_keep_come_forward(self, rows, share):
        x = logits_of(rows, 3)
        keep = torch.rand(rows, generator=torch.Generator().manual_seed(rows)) < share
        moved = x.clone()
        order = move_rows_forward(moved, keep)
        assert sorted(order.tolist()) == keep.nonzero()[:, 0].tolist()
        assert torch.equal(moved[: len(order)], x[order])

    def test_a_chunk_is_within_its_budget(self):
        hidden, weight, _, _ = head_case(40)
        head = ChunkedHead(hidden, weight, None, None, V, torch.float32, torch.float32, 6 * ROW)
        assert head.buffer_RV.numel() * 4 == 6 * ROW
        assert [here.stop - here.start for here, _ in head.chunks()] == [6] * 6 + [4]


def loss_of(hidden, weight, y, **arguments):
    return linear_policy_loss(hidden, weight, y, torch.ones(len(y)), token_weight=torch.ones(len(y)), **arguments)


@pytest.mark.usefixtures("debug")
class TestDebug:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("call", [linear_token_stats, loss_of])
    def test_a_clean_run_passes(self, dtype, call):
        hidden, weight, bias, y = head_case(40, dtype=dtype)
        bias[::7] = -math.inf
        y[:3] = 0  # excluded
        hidden[7] = math.nan
        for softcap in (None, 3.0):
            call(
                hidden, weight, y, head_bias=bias, softcap=softcap, temperature=torch.linspace(0.5, 2.0, 40),
                logit_scale=0.7, mask=torch.arange(40) % 3 > 0, max_chunk_bytes=5 * ROW,
            )  # fmt: skip

    def test_tokens_outside_the_spans_are_not_compared(self):
        hidden, weight, _, y = head_case(8)
        spans = Spans.from_mask(torch.tensor([[0, 1, 0, 0, 1, 0, 0, 0]]).bool(), group=torch.tensor([0]))
        for surrogate in (PPOClip(), GSPO()):
            loss_of(hidden, weight, y, spans=spans, surrogate=surrogate, old_logp=torch.full((8,), -4.0))

    @pytest.mark.parametrize("call", [linear_token_stats, loss_of])
    @pytest.mark.parametrize("place", ["logp", "entropy"])
    @pytest.mark.parametrize("excluded", [False, True])
    def test_a_broken_visit_is_reported(self, monkeypatch, call, place, excluded):
        """Row 1 of 3 is off by 0.1, whatever lies out of its support."""
        module = LOSS_MODULE if call is loss_of else importlib.import_module("crest_ops.linear")
        right = module.run_stats

        def broken(*arguments):
            found = list(right(*arguments))
            found[["logp", "entropy"].index(place)][1] += 0.1
            return tuple(found)

        monkeypatch.setattr(module, "run_stats", broken)
        hidden, weight, bias, y = head_case(3)
        bias[5:8] = -math.inf if excluded else 0.0
        y[:] = torch.tensor([1, 2, 3])
        with pytest.raises(RuntimeError, match=f"{place} of row 1 is"):
            call(hidden, weight, y, head_bias=bias)


def changed(**change):
    hidden, weight, bias, y = head_case()
    return dict(hidden=hidden, head_weight=weight, targets=y, head_bias=bias) | change


HEAD = [
    (dict(hidden=torch.zeros(N, H + 1)), "head_weight"),
    (dict(hidden=torch.zeros(N + 1, H)), "hidden"),
    (dict(hidden=torch.zeros(N, H, dtype=torch.int64)), "hidden"),
    (dict(hidden=torch.zeros(H)), "hidden"),
    (dict(hidden=[[0.0] * H] * N), "hidden"),
    (dict(head_weight=torch.nn.Linear(H, V)), "head_weight is the module"),
    (dict(head_weight=torch.zeros(0)), "head_weight"),
    (dict(head_weight=torch.zeros(0, H)), "head_weight"),
    (dict(head_weight=torch.zeros(V, H, dtype=torch.int8)), "head_weight"),
    (dict(head_weight=torch.zeros(V, H, device="meta")), "head_weight"),
    (dict(head_bias=torch.zeros(V + 1)), "head_bias"),
    (dict(head_bias=torch.zeros(V, 1)), "head_bias"),
    (dict(head_bias=0.0), "head_bias"),
    (dict(targets=torch.zeros(N)), "targets"),
    (dict(targets=[1] * N), "targets"),
    (dict(targets=torch.full((N,), V)), r"targets\[0\] is 101"),
    (dict(targets=torch.full((N,), -1)), r"targets\[0\] is -1"),
    (dict(targets=torch.full((N,), V - 1), vocab_size=V - 1), r"targets\[0\] is 100"),
    (dict(mask=torch.ones(N)), "mask"),
    (dict(mask=torch.ones(N + 1).bool()), "mask"),
    (dict(temperature=0.0), "temperature"),
    (dict(temperature=torch.zeros(N)), r"temperature\[0\]"),
    (dict(temperature=torch.ones(N, 1)), "temperature"),
    (dict(temperature=math.nan), "temperature"),
    (dict(softcap=-1.0), "softcap"),
    (dict(logit_scale=0.0), "logit_scale"),
    (dict(vocab_size=V + 1), "vocab_size"),
    (dict(vocab_size=0), "vocab_size"),
    (dict(ignore_index=None), "ignore_index"),
    (dict(backend="cuda"), "backend"),
    (dict(logits_dtype=torch.bfloat16), "logits_dtype"),
    (dict(logits_dtype="float32"), "logits_dtype"),
    (dict(max_chunk_bytes=0), "max_chunk_bytes"),
    (dict(max_chunk_bytes=1e6), "max_chunk_bytes"),
    (dict(process_group="gloo"), "process_group"),
]
LOSS = [
    (dict(credit=torch.full((N,), math.nan)), r"credit\[0\] is nan"),
    (dict(credit=torch.ones(1)), "credit"),
    (dict(credit=torch.ones(N, dtype=torch.int64)), "credit"),
    (dict(credit=None), "credit"),
    (dict(token_weight=None), "token_weight"),
    (dict(token_weight=torch.full((N,), math.inf)), r"token_weight\[0\] is inf"),
    (dict(old_logp=torch.zeros(N, 1)), "old_logp"),
    (dict(old_logp=torch.full((N,), -math.inf)), r"old_logp\[0\] is -inf"),
    (dict(ref_logp=torch.full((N,), math.nan)), r"ref_logp\[0\] is nan"),
    (dict(importance_weight=2.0), "importance_weight"),
    (dict(kl_coef=0.1), "kl_coef"),
    (dict(entropy_coef=math.nan), "entropy_coef"),
    (dict(surrogate="ppo"), "surrogate"),
    (dict(surrogate=GSPO()), "spans"),
    (dict(surrogate=GSPO(), old_logp=torch.zeros(N)), "spans"),
    (dict(spans=Spans.from_mask(torch.ones(1, 5).bool(), group=torch.tensor([0]))), "spans"),
    (dict(spans=torch.ones(N)), "spans"),
]


@pytest.fixture
def no_work(monkeypatch):
    def product(*_, **__):
        raise AssertionError("a matrix product before the arguments were checked")

    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch, "addmm", product)


@pytest.mark.usefixtures("no_work")
class TestBadInput:
    @pytest.mark.parametrize(("change", "message"), [*HEAD, (dict(outputs="logp"), "outputs")], ids=str)
    def test_stats(self, change, message):
        with pytest.raises(ValueError, match=message):
            linear_token_stats(**changed(**change))

    @pytest.mark.parametrize(("change", "message"), HEAD + LOSS, ids=str)
    def test_loss(self, change, message):
        with pytest.raises(ValueError, match=message):
            linear_policy_loss(**dict(credit=torch.ones(N), token_weight=torch.ones(N)) | changed(**change))

    @pytest.mark.parametrize(
        "change",
        [
            dict(num_tokens=0), dict(hidden_size=0), dict(vocab_size=-1), dict(max_chunk_bytes=0),
            dict(num_tokens=1.5), dict(policy_share=1.5), dict(policy_share=-0.1), dict(policy_share=math.nan),
        ],
        ids=str,
    )  # fmt: skip
    def test_estimate_memory(self, change):
        with pytest.raises(ValueError, match=next(iter(change))):
            estimate_memory(**dict(num_tokens=8, policy_share=0.5, hidden_size=4, vocab_size=10) | change)


def test_memory_grows_with_what_is_asked_for():
    size = dict(num_tokens=4096, policy_share=0.1, hidden_size=256, vocab_size=5000, dtype=torch.float32, device="cpu")
    plain = estimate_memory(**size)
    assert estimate_memory(**size, frozen_head=True) < plain
    assert estimate_memory(**size | dict(policy_share=0.5)) > plain
    narrow = size | dict(dtype=torch.bfloat16)
    assert estimate_memory(**narrow, logits_dtype=torch.float32) > estimate_memory(**narrow)
    assert estimate_memory(**size, max_chunk_bytes=1 << 16) < plain


def test_ops_agree_with_their_descriptions():
    """Schemas, fake implementations and autograd registrations, as torch.library checks them."""
    hidden, weight, bias, _ = head_case(4)
    y = torch.tensor([3, -1, 0, 7])
    scalars = (V - 1, 1.0, 0.0, torch.float32, torch.float32, 3 * ROW, "torch")
    leaves = (leaf(hidden), leaf(weight), leaf(bias))
    stats = torch.ops.crest.linear_token_stats
    torch.library.opcheck(stats, (*leaves, y, torch.ones(1), *scalars, True, True, "", True))
    for dtype in (torch.float32, torch.float16):
        inputs = [t.detach().to(dtype) for t in leaves]
        options = (*scalars[:3], dtype, dtype, *scalars[5:])
        _, entropy, _, _, normaliser = stats(*inputs, y, torch.ones(1), *options, True, False, "", True)
        saved = (*inputs, y, torch.ones(1), entropy, normaliser, torch.ones(4), torch.ones(4))
        for needs in ([True, True, True], [True, False, False]):
            torch.library.opcheck(torch.ops.crest.linear_token_stats_grad, (*saved, *options, needs, "", True))
            per_token = (torch.ones(4), torch.ones(4), torch.zeros(4) - 4, None, None)
            surrogate = (0, 0.2, 0.28, math.inf, *torch.zeros(2, dtype=torch.float64))
            torch.library.opcheck(
                torch.ops.crest.linear_policy_loss,
                (*inputs, y, torch.ones(1), *per_token, *surrogate, *options, needs),
            )
