"""Predictions on numbers worked by hand."""

import csv
from dataclasses import fields

import pytest
from crest_bench.cli import app
from crest_bench.codegen import Count
from crest_bench.roofline import (
    DEVICES,
    Device,
    Moved,
    moved_by_kernel,
    predict,
    predict_heads,
    predict_kernels,
    product_times,
)
from crest_bench.rows_file import write_rows
from crest_bench.traffic import Traffic
from typer.testing import CliRunner

# 10 units at 1 GHz: 1e10 * 4 = 4e10 instructions and 1e10 * 2 = 2e10 exponentials a second; 1e11 bytes a second.
TOY = Device("toy", "sm_0", 1e11, 10, 1e9, 4, 2, 1e12, 1e9)


def loop(instructions, exponentials, kernel="token_stats", role="stats", package="crest-ops", target="sm_90"):
    return {
        "package": package, "kernel": kernel, "role": role, "target": target, "triton": "3.9.0", "loop": "hot",
        "instructions": str(instructions), "exponentials": str(exponentials),
    }  # fmt: skip


def moved(kernel, tensor, read, read_again, written, masked=0):
    return {
        "kernel": kernel, "masked_percent": str(masked), "tensor": tensor, "read": str(read),
        "read_again": str(read_again), "written": str(written),
    }  # fmt: skip


def test_limits_by_hand():
    # 2 bytes: 20 ps. 0.4 instructions: 10 ps. 0.2 exponentials: 10 ps.
    found = predict([loop(0.4, 0.2)], Moved(2, 0, 0, "counted"), TOY)
    assert (found.memory_ps, found.issue_ps, found.exponential_ps, found.predicted_ps) == (20, 10, 10, 20)
    assert (found.limit, found.share_of_peak_bandwidth) == ("memory", 1)
    # 1.6 instructions: 40 ps, twice what the bytes need.
    found = predict([loop(1.6, 0.2)], Moved(2, 0, 0, "counted"), TOY)
    assert (found.predicted_ps, found.limit, found.share_of_peak_bandwidth) == (40, "issue", 0.5)
    # 1 exponential: 50 ps.
    found = predict([loop(1.6, 1)], Moved(2, 0, 0, "counted"), TOY)
    assert (found.predicted_ps, found.limit, found.share_of_peak_bandwidth) == (50, "exponentials", 0.4)


def test_loops_add_up():
    # Two loops, one for each tensor: 0.4 + 0.8 instructions per logit of the student.
    two = predict([loop(0.4, 0.1), loop(0.8, 0.1)], Moved(4, 0, 0, "counted"), TOY)
    assert (two.instructions, two.exponentials) == (1.2, 0.2)
    # One loop that loads both tensors: what it issues per load counts twice.
    one = predict([loop(0.4, 0.1)], Moved(4, 0, 0, "counted"), TOY)
    assert (one.instructions, one.exponentials) == (0.8, 0.2)
    # The JSD: statistics of each row, then one visit of both: 1 + 2 + 2 * 4.
    jsd = [loop(each, 0.1, kernel="divergence_jsd", role="pair") for each in (1, 2, 4)]
    assert predict(jsd, Moved(4, 4, 0, "counted"), TOY).instructions == 11
    with pytest.raises(ValueError, match="divergence_jsd has 2 loops"):
        predict(jsd[:2], Moved(4, 4, 0, "counted"), TOY)


def test_rows_read_again_without_a_bound_on_those_in_flight_come_from_memory():
    found = predict([loop(0.1, 0.1, role="pair")], Moved(4, 4, 0, "counted"), TOY)
    assert (found.memory_bytes, found.cache_bytes, found.memory_ps) == (8, 0, 80)


def test_second_read_comes_from_the_cache_where_rows_fit():
    fused = Moved(2, 2, 2, "counted")
    rows = 10 * 151936 * 2  # bytes of one row per unit
    fits, spills = (Device("toy", "sm_0", 1e11, 10, 1e9, 4, 2, 1e12, cache) for cache in (rows, rows - 1))
    loops = [loop(0.1, 0.1, role="fused")] * 2
    found = predict(loops, fused, fits)
    assert (found.memory_bytes, found.cache_bytes, found.memory_ps) == (4, 2, 40)
    found = predict(loops, fused, spills)
    assert (found.memory_bytes, found.cache_bytes, found.memory_ps) == (6, 0, 60)
    assert found.instructions == 0.2


def test_h200_by_hand():
    # 2 / 4.8e12 = 0.4167 ps; 7.594 / (132 * 1.83e9 * 128) = 0.2456 ps; 1.031 / (132 * 1.83e9 * 16) = 0.2668 ps
    h200 = next(device for device in DEVICES if device.name == "H200")
    found = predict([loop(7.594, 1.031)], Moved(2, 0, 0, "counted"), h200)
    assert (found.memory_ps, found.issue_ps, found.exponential_ps) == (0.4167, 0.2456, 0.2668)
    assert (found.limit, found.predicted_ps) == ("memory", 0.4167)


def test_mi300x_by_hand():
    # 2 / 5.3e12 = 0.3774 ps; 20.656 / (304 * 2.1e9 * 64) = 0.5056 ps; 0.3774 / 0.5056 = 0.746
    mi300x = next(device for device in DEVICES if device.name == "MI300X")
    found = predict([loop(20.656, 1.031)], Moved(2, 0, 0, "counted"), mi300x)
    assert (found.memory_ps, found.issue_ps, found.limit) == (0.3774, 0.5056, "issue")
    assert found.share_of_peak_bandwidth == 0.746


def test_traffic_sums_tensors_of_unmasked_launches():
    rows = [
        moved("teacher_pair", "logits", 2.00001, 0.00001, 0), moved("teacher_pair", "teacher", 2, 0, 0),
        moved("teacher_pair", "other", 5, 0, 5), moved("teacher_pair", "logits", 1, 0, 0, masked=50),
    ]  # fmt: skip
    assert moved_by_kernel(rows) == {"teacher_pair": Moved(4, 0, 0, "counted")}


def test_kernels_devices_and_peers():
    counts = [
        loop(8, 1), loop(9, 1, target="gfx942"), loop(99, 9) | {"loop": "tail"}, loop(8, 1, kernel="uncounted"),
        loop(20, 1, kernel="token_stats", role="grad", package="peer 1.0"),
        loop(8, 1, kernel="odd", role="odd", package="peer 1.0"),
    ]  # fmt: skip
    found = list(predict_kernels(counts, [moved("token_stats", "logits", 2, 0, 0)]))
    assert [(row.package, row.device, row.memory_bytes, row.instructions) for row in found] == [
        ("crest-ops", "H100", 2, 8), ("crest-ops", "H200", 2, 8), ("crest-ops", "MI300X", 2, 9),
        ("peer 1.0", "H100", 4, 20), ("peer 1.0", "H200", 4, 20),
    ]  # fmt: skip
    assert [row.bytes_source for row in found] == ["counted"] * 3 + ["least of the role"] * 2
    assert {row.kind for row in found} == {"prediction, not a measurement"}


def test_products_by_hand():
    # H=100, V=1000, R=50: 200 FLOP at 1e12: 200 ps. Bytes of the first two products: weight 2*100/50 = 4, hidden
    # 2*100/1000 = 0.2, logits 2: 6.2, at 1e11 62 ps. dW in float32, read and written: 16 + 0.2 + 2 = 18.2, 182 ps.
    assert product_times(100, 1000, 50, TOY) == pytest.approx([200e-12] * 3)
    slow = Device("toy", "sm_0", 1e10, 10, 1e9, 4, 2, 1e12, 1e9)
    assert product_times(100, 1000, 50, slow) == pytest.approx([620e-12, 620e-12, 1820e-12])


def test_heads_of_the_fused_kernel():
    fused = [loop(7, 1, kernel="policy_loss", role="fused"), loop(6, 1, kernel="policy_loss", role="fused")]
    kernels = list(predict_kernels(fused, [moved("policy_loss", "logits", 2, 2, 2)]))
    found = {(row.head, row.device): row for row in predict_heads(kernels)}
    row = found["qwen3-8b", "H200"]
    # Floor 6 * 4096 / 989e12 = 24.85 ps; visit 4 / 4.8e12 = 0.8333 ps; 2^28 / (2 * 151936) = 883 rows fit: chunks of
    # 6 * 128 = 768, where dW moves 4 * 2 * 4096 / 768 + 2 + 2 * 4096 / 151936 = 44.72 bytes: 9.317 ps, more than its
    # 8.283 ps of FLOP; the other two products move 12.72 bytes, 2.65 ps.
    assert (row.chunk_rows, row.floor_ps, row.gemm_ps, row.visit_ps) == (768, 24.849, 25.883, 0.8333)
    assert row.share_of_floor == pytest.approx(24.849 / 26.717, abs=1e-3)
    assert row.kind == "prediction, not a measurement"


def test_command(tmp_path):
    run = CliRunner().invoke(app, ["roofline", "--results", str(tmp_path)])
    assert run.exit_code == 2 and "crest-bench codegen" in run.output
    for name, kind, row in (
        ("codegen", Count, loop(8, 1)), ("traffic", Traffic, moved("token_stats", "logits", 2, 0, 0)),
    ):  # fmt: skip
        write_rows(
            [kind(**(dict.fromkeys((field.name for field in fields(kind)), "") | row))], tmp_path / f"{name}.csv"
        )
    run = CliRunner().invoke(app, ["roofline", "--results", str(tmp_path)])
    assert run.exit_code == 0 and "PREDICTION, not a measurement" in run.output
    with (tmp_path / "roofline.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["device"] for row in rows] == ["H100", "H200"]
    assert {row["kind"] for row in rows} == {"prediction, not a measurement"}
    (tmp_path / "traffic.csv").write_text("a,b\n1,2\n")
    run = CliRunner().invoke(app, ["roofline", "--results", str(tmp_path)], env={"COLUMNS": "400"})
    assert run.exit_code == 2 and "traffic.csv:1 has the columns a, b" in run.output
