"""Figures, table and plot of a comparison, worked by hand."""

import csv
import io

import pytest
from crest_train.compare_report import (
    COLUMNS,
    SETTING,
    area_under_curve,
    beyond_noise,
    comparison_table,
    curves_of,
    paired,
    read_rows,
    report,
    steps_to,
    summarise,
    write_rows,
)
from rich.console import Console
from test_cli import crest_train


def row(method, seed, step, turn, session=0.0, rate=6e-4, seconds=0.0, top=None, **changes):
    setting = dict(zip(SETTING, ("desk", 8, "mean", 8, 8, 20, 6e-4), strict=True))
    parts = {"rollout_seconds": seconds, "teacher_seconds": 0.0, "credit_seconds": 0.0, "training_seconds": 0.0}
    top = dict.fromkeys(("credit_top_1", "credit_top_5", "credit_top_10"), top)
    run = {"method": method, "rate": rate, "seed": seed, "step": step, "seconds": seconds, "needs": "reward_B"}
    return setting | run | {"turn_success": turn, "session_success": session} | parts | top | changes


def curve(method, seed, *turns, rate=6e-4, seconds=2.0, top=0.25):
    """A run of four evaluations' distance, 0, 5, 10 and 20."""
    steps = (0, 5, 10, 20)
    return [
        row(method, seed, step, round(turn, 4), round(turn / 2, 4), rate, seconds * step, top if step else None)
        for step, turn in zip(steps, turns, strict=True)
    ]


class TestFigures:
    def test_area_and_steps_by_hand(self):
        """.5 .7 .9 .9 at 0, 5, 10, 20: (5*.6 + 5*.8 + 10*.9) / 20 = .8; .8 is halfway between 5 and 10."""
        found = curve("grpo", 0, 0.5, 0.7, 0.9, 0.9)
        assert area_under_curve(found) == pytest.approx(0.8)
        assert steps_to(found, 0.8) == pytest.approx(7.5) and steps_to(found, 0.9) == 10
        assert steps_to(found, 0.95) == float("inf") and steps_to(found, 0.4) == 0
        assert area_under_curve(found[:1]) == 0.5

    def test_paired_differences_by_hand(self):
        """Areas .5, .6 against .4, .3 (and a seed without a partner): differences .1 and .3, mean .2, sd .1 sqrt 2."""
        one = {0: curve("a", 0, *[0.5] * 4), 1: curve("a", 1, *[0.6] * 4), 2: curve("a", 2, *[0.9] * 4)}
        other = {0: curve("b", 0, *[0.4] * 4), 1: curve("b", 1, *[0.3] * 4), 5: curve("b", 5, *[0.1] * 4)}
        assert paired(one, other) == (pytest.approx(0.2), pytest.approx(0.1 * 2**0.5), 2)
        assert paired(one, {7: other[0]}) is None
        assert paired(one, {1: other[1]}) == (pytest.approx(0.3), None, 1)

    def test_noise_by_hand(self):
        """t at .975 for 2 degrees of freedom is 4.303: 4.303 * .1 / sqrt 3 = .2484."""
        assert beyond_noise(0.249, 0.1, 3) is True and beyond_noise(0.248, 0.1, 3) is False
        assert beyond_noise(-0.249, 0.1, 3) is True and beyond_noise(0.0, 0.0, 3) is False
        assert beyond_noise(5.0, None, 1) is None
        assert beyond_noise(0.2229, 1.0, 100) is True and beyond_noise(0.2227, 1.0, 100) is False

    def test_runs_that_were_held_out_after_other_steps(self):
        rows = curve("grpo", 0, 0.5, 0.6, 0.7, 0.8) + curve("grpo", 1, 0.5, 0.6, 0.7, 0.8)
        rows = [row for row in rows if row["seed"] == 0 or row["step"] in (0, 10, 20)]
        with pytest.raises(ValueError, match="grpo, rate .*, seed 1: held out after other steps than grpo"):
            curves_of(rows)

    def test_a_run_that_is_there_twice(self):
        with pytest.raises(ValueError, match="grpo, rate 0.0006, seed 3: step 0 twice"):
            curves_of(curve("grpo", 3, *[0.5] * 4) * 2)


@pytest.fixture
def three_methods():
    """Two rates, two seeds: grpo best at 6e-4, turn_grpo at 1.2e-3, crest ran one seed only at its better rate."""
    rows = []
    for seed, more in ((0, 0.0), (1, 0.02)):
        rows += curve("grpo", seed, 0.5, *[0.7 + more] * 3, seconds=1.0)
        rows += curve("grpo", seed, 0.5, *[0.6 + more] * 3, rate=1.2e-3)
        rows += curve("turn_grpo", seed, 0.5, *[0.8 + 2 * more] * 3)
        rows += curve("turn_grpo", seed, 0.5, 0.8, 0.95, 0.95 + more, rate=1.2e-3, seconds=1.5, top=0.5)
        rows += curve("crest", seed, 0.5, *[0.71 - 2 * more] * 3, seconds=3.0)
    return rows + curve("crest", 0, 0.5, *[0.99] * 3, rate=1.2e-3)


class TestSummary:
    def test_best_and_common_rate(self, three_methods):
        summary = summarise(three_methods)
        best = {found["method"]: found for found in summary if found["choice"] == "best"}
        common = {found["method"]: found for found in summary if found["choice"] == "common"}
        assert list(best) == ["turn_grpo", "grpo", "crest"] and list(common) == ["turn_grpo", "grpo", "crest"]
        assert {name: found["rate"] for name, found in best.items()} == {
            "grpo": 6e-4,
            "turn_grpo": 1.2e-3,
            "crest": 6e-4,  # the other rate lacks a seed
        }
        assert all(found["rate"] == 6e-4 and found["seeds"] == 2 for found in common.values())

    def test_figures_by_hand(self, three_methods):
        """grpo: (5*.6 + 15*.7) / 20 = .675 and, with .02 more from step 5, .675 + .02 * 17.5 / 20 = .6925."""
        best = {found["method"]: found for found in summarise(three_methods) if found["choice"] == "best"}
        grpo, turn, crest = best["grpo"], best["turn_grpo"], best["crest"]
        assert grpo["area_mean"] == pytest.approx(0.68375) and grpo["area_sd"] == pytest.approx(0.0175 / 2**0.5)
        assert grpo["turn_success_5_mean"] == pytest.approx(0.71) and grpo["session_success_end_mean"] == pytest.approx(
            0.355
        )
        assert grpo["steps_to_0.9"] is None and turn["steps_to_0.9"] == pytest.approx(5 + 5 * 0.1 / 0.15)
        assert grpo["area_minus_grpo_mean"] is None and grpo["area_minus_grpo_n"] == 0
        # From step 5 on crest is .01 above grpo with seed 0 and .05 below with seed 1, times 17.5 / 20.
        assert crest["area_minus_grpo_mean"] == pytest.approx((0.00875 - 0.04375) / 2)
        assert crest["area_minus_grpo_sd"] == pytest.approx(0.0525 / 2**0.5) and crest["area_minus_grpo_n"] == 2
        assert crest["beyond_noise_grpo"] is False
        assert (crest["seconds_per_step_mean"], crest["seconds_to_grpo"]) == (3.0, 3.0)
        assert turn["credit_top_5_mean"] == 0.5 and turn["seconds_to_grpo"] == 1.5

    def test_table_marks_what_does_not_beat_grpo(self):
        rows = []
        for seed, noise in enumerate((0.0, 0.001, 0.002)):
            for method, turn in (("grpo", 0.6), ("crest", 0.7), ("efca", 0.5), ("trace", 0.6 + noise)):
                rows += curve(method, seed, 0.5, *[turn + noise] * 3)
        summary = summarise(rows)
        assert [found["choice"] for found in summary] == ["common"] * 4
        file = io.StringIO()
        Console(file=file, width=150).print(comparison_table(summary))
        said = file.getvalue()
        methods = ("grpo", "crest", "efca", "trace")
        lines = {line.split()[0]: line for line in said.splitlines() if line.strip().startswith(methods)}
        assert list(lines) == ["crest", "trace", "grpo", "efca"]
        assert " yes " in lines["crest"] and " NO " in lines["trace"] and " worse " in lines["efca"]
        assert " +.087±.000 " in lines["crest"] and " >20 " in lines["crest"] and "…" not in said
        assert "desk, 8 turns, 20 steps of 8 x 8 rollouts, session reward mean: all at rate 0.0006" in said

    def test_report_writes_what_it_reads(self, three_methods, tmp_path):
        long = [found | {"turns": 16} for found in three_methods]
        report(three_methods, tmp_path, Console(quiet=True))
        assert read_rows([tmp_path / "compare.csv"]) == three_methods
        with open(tmp_path / "summary.csv", newline="") as file:
            written = list(csv.DictReader(file))
        assert len(written) == 6 and written[1]["area_mean"] == "0.68375" and written[1]["steps_to_0.9"] == ""
        assert "each at its best rate" in (tmp_path / "table.txt").read_text()
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
        report(three_methods + long, tmp_path, Console(quiet=True))
        assert {path.name for path in tmp_path.glob("curves-*")} == {"curves-2.png"}

    def test_files_that_are_no_comparison(self, tmp_path):
        path = tmp_path / "other.csv"
        path.write_text("method,seed\ngrpo,0\n")
        with pytest.raises(ValueError, match=r"other.csv: has no column environment, turns"):
            read_rows([path])
        write_rows(path, [row("grpo", 0, 0, 0.5) | {"turn_success": "half"}], COLUMNS)
        with pytest.raises(ValueError, match=r"other.csv: line 2: .*half"):
            read_rows([path])
        for value, message in ((float("nan"), "turn_success is nan, wanted a finite number"), ("", "is missing")):
            write_rows(path, [row("grpo", 0, 0, 0.5) | {"turn_success": value}], COLUMNS)
            with pytest.raises(ValueError, match=f"other.csv: line 2: .*{message}"):
                read_rows([path])
        write_rows(path, [], COLUMNS)
        with pytest.raises(ValueError, match="other.csv: has no rows"):
            read_rows([path])

    def test_a_run_that_is_not_finished_is_named(self, three_methods, tmp_path):
        cut = [found for found in three_methods if (found["method"], found["step"]) != ("crest", 20)]
        with pytest.raises(ValueError, match=r"crest, rate .*, seed .*: ends with step 10 of 20; wanted finished runs"):
            report(cut, tmp_path, Console(quiet=True))
        assert not list(tmp_path.iterdir())


def test_command_draws_anew_from_files(monkeypatch, capsys, three_methods, tmp_path):
    write_rows(tmp_path / "old.csv", three_methods, COLUMNS)
    arguments = ["compare", "--from-csv", tmp_path / "old.csv", "--output", tmp_path / "new"]
    assert crest_train(monkeypatch, *arguments) == 0
    assert "each at its best rate" in capsys.readouterr().out
    assert (tmp_path / "new" / "compare.csv").read_text() == (tmp_path / "old.csv").read_text()
