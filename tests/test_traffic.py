"""The traffic count on kernels and launches small enough to count by hand."""

import csv

import pytest
import torch
import triton
import triton.language as tl
from crest_bench import codegen, traffic
from crest_bench.cli import app
from crest_bench.traffic import CASES, counted
from typer.testing import CliRunner

V = 300


@triton.jit
def wasteful_kernel(x_ptr, y_ptr, count_ptr, length, BLOCK: tl.constexpr):
    """Reads every element three times and writes it twice, and the first one once more."""
    at = tl.arange(0, BLOCK)
    inside = at < length
    x = tl.load(x_ptr + at, mask=inside)
    x += tl.load(x_ptr + at, mask=inside) + tl.load(x_ptr + at, mask=inside)
    tl.store(y_ptr + at, x, mask=inside)
    tl.store(y_ptr + at, x, mask=inside)
    tl.store(y_ptr, 1.0)
    tl.atomic_add(count_ptr + at, 1, mask=inside)
    tl.load(x_ptr + at, mask=at < 0)


def test_a_wasteful_kernel_is_seen():
    x, y, count = torch.ones(5), torch.zeros(5), torch.zeros(5, dtype=torch.int64)
    with counted({"x": x, "y": y}) as (found, others):
        wasteful_kernel[(1,)](x, y, count, 5, BLOCK=8)
    assert found["x"].reads.tolist() == [3] * 5 and found["x"].writes.tolist() == [0] * 5
    assert (found["x"].read_bytes, found["x"].read_again_bytes, found["x"].written_bytes) == (20, 40, 0)
    assert found["y"].writes.tolist() == [3, 2, 2, 2, 2] and found["y"].written_bytes == 44
    assert others == {"read": 40, "written": 40}
    assert y.tolist() == [1.0, 3.0, 3.0, 3.0, 3.0] and count.tolist() == [1] * 5


def test_nothing_is_counted_outside_the_block():
    x = torch.ones(5)
    with counted({"x": x}) as (found, _):
        pass
    wasteful_kernel[(1,)](x, torch.zeros(5), torch.zeros(5, dtype=torch.int64), 5, BLOCK=8)
    assert not found["x"].reads.any()


def test_tensors_with_gaps_are_refused():
    with pytest.raises(ValueError, match="tensor has strides"):
        with counted({"x": torch.ones(4, 4)[:, :2]}):
            pass


# kernel: by tensor, bytes per logit of an unmasked row (first reads, reads again, writes), without the target's column
BY_HAND = {
    "token_stats": {"logits": (2, 0, 0)},
    "token_stats_grad": {"logits": (2, 0, 0), "gradient": (0, 0, 2)},
    "token_stats_grad_entropy": {"logits": (2, 0, 0), "gradient": (0, 0, 2)},
    "teacher_pair": {"logits": (2, 0, 0), "teacher": (2, 0, 0)},
    "divergence_kl": {"logits": (2, 0, 0), "teacher": (2, 0, 0)},
    "divergence_jsd": {"logits": (2, 2, 0), "teacher": (2, 2, 0)},
    "divergence_kl_grad": {"logits": (2, 0, 0), "teacher": (2, 0, 0), "gradient": (0, 0, 2)},
    "divergence_jsd_grad": {"logits": (2, 0, 0), "teacher": (2, 0, 0), "gradient": (0, 0, 2)},
    "policy_loss": {"logits": (2, 2, 2)},
    "policy_loss_entropy": {"logits": (2, 2, 2)},
}


@pytest.mark.parametrize("masked_rows", [0, 1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.kernel)
def test_every_kernel_moves_what_it_must(case, masked_rows, monkeypatch):
    monkeypatch.setattr(traffic, "VOCABULARY", V)
    rows = {row.tensor: row for row in traffic.count(case, masked_rows)}
    wanted = (2 - masked_rows) / 2
    for tensor, (read, again, written) in BY_HAND[case.kernel].items():
        row = rows[tensor]
        assert row.masked_percent == 50 * masked_rows
        assert row.read == pytest.approx(wanted * read, abs=1e-12)
        # The target's column is read up to twice and written once more: at most 2 of V columns.
        assert wanted * again <= row.read_again <= wanted * (again + 2 * 2 / V)
        if written:  # zeros where masked
            assert written <= row.written <= written + wanted * 2 / V
        else:
            assert row.written == 0 and row.times_written == f"0 x{2 * V}"
    if masked_rows == 2:
        assert all(row.read == 0 for name, row in rows.items() if name != "other")


def test_token_stats_in_full():
    case = next(case for case in CASES if case.kernel == "token_stats")
    tensors, launch = case.make(torch.tensor([False, True]))
    with counted(tensors) as (found, others):
        launch()
    reads = found["logits"].reads.reshape(2, -1)
    assert not reads[0].any() and reads[1, 12] == 2 and (reads[1].sum() == traffic.VOCABULARY + 1)
    assert others["read"] == 8 + (8 + 4) and others["written"] == 2 * 6 * 4


def test_all_kernels_of_the_machine_code_report_are_counted():
    ours = {kernel.name for kernel in codegen.KERNELS}
    assert ours <= {case.kernel for case in CASES} == set(BY_HAND)


def test_command_writes_csv(tmp_path, monkeypatch):
    monkeypatch.setattr(traffic, "VOCABULARY", V)
    run = CliRunner().invoke(app, ["traffic", "--results", str(tmp_path)])
    assert run.exit_code == 0, run.output
    with (tmp_path / "traffic.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    forward = next(row for row in rows if (row["kernel"], row["masked_percent"]) == ("token_stats", "0"))
    assert (forward["tensor"], forward["read"], forward["times_read"]) == ("logits", "2.0", "1 x598, 2 x2")
    assert not list(tmp_path.glob(".*"))
