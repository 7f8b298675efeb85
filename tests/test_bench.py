"""The benchmark of the linear policy loss: cases, providers against float64, rows, figures, and its commands."""

import csv
import math
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from crest_bench import environment, linear_measure, measure
from crest_bench.accuracy import errors, exact
from crest_bench.cases import Case, Head, make_inputs, policy_mask, policy_tokens
from crest_bench.cli import app
from crest_bench.contract import CROSS_ENTROPY, PPO, PRODUCTS, Output, Provider
from crest_bench.linear_rows import Row, append_rows, latest, load_rows
from crest_bench.linear_tables import case_tables, growth_table
from crest_bench.measure import Times, call, spread
from crest_bench.plot import GIB, _gib, _label, _order, _ratio, axis_end, draw
from crest_bench.providers import FLOORS, PROVIDERS
from rich.console import Console
from typer.testing import CliRunner

TINY = Case(Head("tiny", 16, 64), 32, 12, "float32")
ENVIRONMENT = {
    "commit": "abc", "device": "cpu", "device_name": "a processor", "threads": 1, "torch": "2.13", "triton": "3.9",
    "packages": "",
}  # fmt: skip
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="resident memory is read from /proc")


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "share", "policy"), [(2048, 25, 512), (2048, 3, 61), (1000, 10, 100), (32, 100, 32), (5, 3, 1)]
)
def test_masks_have_the_share_in_runs_between_tool_outputs(tokens, share, policy):
    assert policy_tokens(tokens, share) == policy
    mask = policy_mask(tokens, policy, torch.Generator().manual_seed(0))
    assert mask.shape == (tokens,) and int(mask.sum()) == policy
    starts = int((mask[1:] & ~mask[:-1]).sum()) + int(mask[0])
    assert starts == (max(1, policy // 64) if policy < tokens else 1)


def test_inputs_are_seeded_and_ratios_lie_near_one_or_clearly_beyond_the_clip():
    case = replace(TINY, tokens=2000, policy_tokens=1000)
    inputs, again = make_inputs(case), make_inputs(case)
    assert torch.equal(inputs.hidden, again.hidden) and torch.equal(inputs.old_logp, again.old_logp)
    assert inputs.token_weight[inputs.mask].sum().item() == pytest.approx(1) and inputs.token_weight.min() == 0
    logp = (inputs.hidden.double() @ inputs.head_weight.double().t()).log_softmax(-1)
    size = (logp.gather(-1, inputs.targets[:, None])[:, 0] - inputs.old_logp).abs()[inputs.mask]
    near, far = size < 0.1001, (size - 0.4).abs() < 1e-4
    assert (near | far).all() and 10 <= far.sum() <= 80


def test_a_default_case_is_affordable_on_a_cpu():
    assert Head("smollm2-135m", 576, 49152).default_tokens("cpu") == 2048
    assert Head("qwen3-8b", 4096, 151936).default_tokens("cpu") == 64


# --- providers --------------------------------------------------------------------------------------------------------


def reference(inputs, objective):
    """(loss, logp, entropy, gradients) at the policy's tokens through autograd in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (inputs.hidden, inputs.head_weight))
    at = inputs.mask
    log_p = torch.log_softmax(hidden[at] @ weight.t(), -1)
    logp = log_p[torch.arange(len(log_p)), inputs.targets[at]]
    if objective == CROSS_ENTROPY:
        loss = -logp.sum() / len(logp)
    else:
        credit = inputs.credit[at].double()
        ratio = torch.exp(logp - inputs.old_logp[at].double())
        loss = -torch.min(ratio * credit, ratio.clip(0.8, 1.28) * credit).sum() / len(logp)
    return loss, logp, -(log_p.exp() * log_p).sum(-1), torch.autograd.grad(loss, (hidden, weight))


@pytest.fixture(scope="module")
def inputs():
    made = make_inputs(TINY)
    made.old_logp[made.mask.nonzero()[:4, 0]] -= 0.5  # clipped where the credit is positive
    return made


@pytest.mark.parametrize("name", [name for name, provider in PROVIDERS.items() if provider.objective != PRODUCTS])
def test_provider_computes_what_it_says(name, inputs):
    provider = PROVIDERS[name]
    if reason := provider.missing("cpu"):
        pytest.skip(reason)
    output, gradients, _, _ = call(provider.load(), inputs)
    loss, logp, entropy, wanted = reference(inputs, provider.objective)
    assert output.loss.item() == pytest.approx(loss.item(), abs=1e-5)
    for gradient, exactly in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient.double(), exactly, atol=1e-5, rtol=1e-4)
    assert (output.entropy is not None) == provider.entropy
    for found, exactly in ((output.logp, logp), (output.entropy, entropy)):
        if found is not None:
            found = found if found.numel() == len(logp) else found[inputs.mask]
            torch.testing.assert_close(found.detach().double(), exactly, atol=1e-5, rtol=0)
    if provider.entropy and provider.entropy_gradient and name != "crest":  # whose entropy term is an argument
        assert output.entropy.requires_grad


@pytest.mark.parametrize("objective", [PPO, CROSS_ENTROPY])
def test_errors_are_taken_against_float64(objective, inputs, monkeypatch):
    monkeypatch.setattr("crest_bench.accuracy.CHUNK_ELEMENTS", 5 * 64)  # 5 rows of 12 at a time
    wanted = exact(inputs, objective)
    loss, logp, entropy, gradients = reference(inputs, objective)
    torch.testing.assert_close(wanted.loss, loss.detach(), atol=0, rtol=1e-7)  # a float32 token weight
    off = Output(loss, logp.detach() + 0.25, entropy.detach())
    found = errors(off, (gradients[0], gradients[1] * 1.5), inputs, wanted)
    assert found == pytest.approx(
        {"logp_error": 0.25, "entropy_error": 0, "hidden_grad_error": 0, "weight_grad_error": 0.5}, abs=1e-6
    )


def test_the_floor_is_the_three_products_over_policy_rows(inputs):
    from crest_bench.providers import _products

    hidden, weight = inputs.hidden.detach()[inputs.mask], inputs.head_weight.detach()
    logits = hidden @ weight.t()
    for chunk in (5, 512):
        _, (hidden_grad, weight_grad), _, _ = call(_products(chunk)(), inputs)
        torch.testing.assert_close(hidden_grad[inputs.mask], logits @ weight)
        torch.testing.assert_close(weight_grad, logits.t() @ hidden)
        assert not hidden_grad[~inputs.mask].any()


# --- measurement ------------------------------------------------------------------------------------------------------


def test_spread_and_full_time():
    assert spread([3.0]) == (3.0, 3.0, 3.0)
    assert spread([5.0, 1.0, 2.0, 3.0, 4.0]) == pytest.approx((1.8, 3.0, 4.2))
    assert Times([1.0, 2.0], [0.5, 0.25]).of("full") == [1.5, 2.25]


def test_a_provider_that_fails_is_recorded_and_the_others_go_on(monkeypatch):
    def fails(inputs):
        raise NotImplementedError("no such dtype\nand more")

    monkeypatch.setitem(PROVIDERS, "broken", Provider("broken", lambda: fails, "torch"))
    seen = []
    names = ["broken", "eager"]
    parts = linear_measure.measure_case(TINY, "cpu", ["speed", "error"], ["full"], names, 2, ENVIRONMENT, seen.append)
    rows = list(next(parts))
    assert len(seen) == 3 * 4  # the rows of speed are there before errors are looked at
    rows += next(parts)
    assert len(seen) == linear_measure.steps(["speed", "error"], names, 2) == 3 * 4 + 2
    broken = [row for row in rows if row.provider == "broken"]
    assert [(row.metric, row.value) for row in broken] == [("seconds", ""), ("logp_error", "")]
    assert all(row.notes == "failed: NotImplementedError: no such dtype" for row in broken)
    seconds = {row.provider: row for row in rows if row.metric == "seconds"}
    assert list(seconds) == [*names, *FLOORS]
    floor = min(seconds[name].value for name in FLOORS)
    assert seconds["eager"].ratio_to_floor == pytest.approx(seconds["eager"].value / floor)
    text = Console(width=200, file=open("/dev/null", "w"), record=True)
    for table in case_tables(rows):
        text.print(table)
    assert "failed" in text.export_text() and growth_table(rows) is None


@needs_proc
def test_memory_is_what_a_fresh_process_holds_above_the_inputs():
    case = Case(Head("flat", 8, 32768), 1024, 512, "float32")
    logits = 512 * 32768 * 4
    held = measure.memory("eager", case, "cpu")
    assert 2 * logits <= held["peak"] <= 8 * logits
    assert held["gradients"] == (32768 + 1024) * 8 * 4
    with pytest.raises(RuntimeError, match="KeyError: 'nobody'"):
        measure.memory("nobody", case, "cpu")


# --- rows and figures -------------------------------------------------------------------------------------------------


def row(**values):
    return Row(
        **{
            "timestamp": "2026-01-01T00:00:00+00:00", **ENVIRONMENT, "head": "tiny", "hidden": 16, "vocabulary": 64,
            "tokens": 32, "policy_share": 37.5, "policy_tokens": 12, "dtype": "float32", "provider": "eager",
            "provider_version": "2.13", "objective": PPO, "entropy": True, "entropy_gradient": False,
            "full_logits": True, "mode": "full", "metric": "seconds", "value": 0.5, "unit": "s",
        }
        | values
    )  # fmt: skip


def test_rows_are_appended_whole(tmp_path):
    path = tmp_path / "results" / "linear.csv"
    append_rows([row(ratio_to_floor=1.5)], path)
    append_rows([row(value=0.25), row(provider="trl", value="", notes="failed: X: a, b")], path)
    found = load_rows(path)
    assert [(r.provider, r.value, r.ratio_to_floor, r.notes) for r in found] == [
        ("eager", "0.5", "1.5", ""), ("eager", "0.25", "", ""), ("trl", "", "", "failed: X: a, b"),
    ]  # fmt: skip
    assert [(r.provider, r.value) for r in latest(found)] == [("eager", "0.25"), ("trl", "")]
    assert {file.name for file in path.parent.iterdir()} <= {"linear.csv", ".linear.csv.lock"}


def test_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "linear.csv"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda at: append_rows([row(value=at)], path), range(40)))
    assert sorted(int(found.value) for found in load_rows(path)) == list(range(40))


def test_a_link_is_written_through(tmp_path):
    link, target = tmp_path / "link.csv", tmp_path / "elsewhere" / "target.csv"
    target.parent.mkdir()
    append_rows([row()], target)
    link.symlink_to(target)
    append_rows([row()], link)
    assert link.is_symlink() and len(load_rows(target)) == 2


@pytest.mark.parametrize(("damage", "fields"), [("short,row\n", 2), ("1," * 29 + "1\n", 30), ("\n", 0)])
def test_a_damaged_row_is_named_before_anything_is_measured(damage, fields, tmp_path):
    path = tmp_path / "linear.csv"
    append_rows([row()], path)
    text = path.read_text() + damage
    path.write_text(text)
    done = CliRunner().invoke(app, ["run", "--csv", str(path)], env={"COLUMNS": "400"})
    assert done.exit_code == 2 and f"linear.csv:3 has {fields} fields, want 29" in done.output
    assert path.read_text() == text


def test_a_csv_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["run", "--csv", str(tmp_path / "file" / "a.csv")], env={"COLUMNS": "400"})
    assert done.exit_code == 2 and "cannot be written" in done.output


def test_other_columns_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="other.csv:1 has the columns a, b, want timestamp, commit"):
        append_rows([row()], path)
    assert path.read_text() == "a,b\n1,2\n"


def test_growth_compares_the_same_share_and_the_same_policy_tokens():
    rows = [
        row(tokens=100, policy_tokens=10, policy_share=10.0, value=1.0),
        row(tokens=200, policy_tokens=20, policy_share=10.0, value=2.1),
        row(tokens=200, policy_tokens=10, policy_share=5.0, value=1.01),
        row(tokens=200, policy_tokens=200, policy_share=100.0, value=9.0),
    ]
    table = growth_table(rows)
    assert [list(column.cells) for column in table.columns][3:] == [
        ["100 -> 200", "100 -> 200"], ["10 -> 20", "10 -> 10"], ["2.10", "1.01"],
    ]  # fmt: skip


def test_figures_are_drawn_from_rows(tmp_path):
    path = tmp_path / "linear.csv"
    rows = [
        row(dtype=dtype, provider=provider, ratio_to_floor=1.5, policy_share=share)
        for dtype in ("float32", "bfloat16")
        for provider in ("crest", "eager")
        for share in (10.0, 100.0)
    ]
    rows += [row(metric="memory_peak", value=1 << 29), row(provider="trl", value="", notes="failed: X: y")]
    append_rows(rows, path)
    out = tmp_path / "figures"
    done = CliRunner().invoke(app, ["plot", "--csv", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert sorted(file.name for file in out.iterdir()) == [
        "linear_memory_cpu_tiny_32.png",
        "linear_speed_cpu_tiny_32.png",
    ]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in out.iterdir())
    assert draw(load_rows(path)[-1:], out) == []


def test_figures_name_what_they_mark_cut_and_leave_out(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("crest_bench.plot._bars", lambda rows, *texts: drawn.append((rows, texts)))
    rows = [row(provider=name, ratio_to_floor=1.5) for name in ("crest", "eager", "trl")]
    draw(rows, tmp_path, ["trl", "liger"])
    ((kept, texts),) = drawn
    assert [each.provider for each in kept] == ["crest", "eager"] and "Left out: trl." in texts[-2]
    assert _label(row()) == "eager\nkeeps all logits, entropy without gradient"
    peer = row(provider="liger", full_logits="False", entropy="False", objective=CROSS_ENTROPY)
    assert _label(peer) == "liger\nonly cross-entropy, no entropy"
    assert _label(row(provider="crest", full_logits="False", entropy_gradient="True")) == "crest"
    # Geometric means: 2 (of 1 and 4) before 2.1.
    means = [row(ratio_to_floor=2.1), row(provider="trl", ratio_to_floor=1), row(provider="trl", ratio_to_floor=4)]
    assert _order(means, _ratio) == ["trl", "eager"]
    assert axis_end({"a": 2.0, "b": 4.0}) == pytest.approx(4.8)
    assert axis_end({"a": 2.0, "b": 4.1}) == pytest.approx(2.4)
    assert axis_end({"a": 3.0}) == pytest.approx(3.6)


def test_a_figure_is_of_one_machine(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("crest_bench.plot._bars", lambda rows, *_: drawn.extend(rows))
    old, new = (
        row(threads=threads, timestamp=f"2026-01-0{threads}T00:00:00+00:00", ratio_to_floor=1.5) for threads in (1, 2)
    )
    draw([new, old, row(threads=1, provider="trl", ratio_to_floor=2.0)], tmp_path)
    assert drawn == [new]
    # Memory of one thread, newer still, takes no figure of speed away.
    memory = row(threads=1, metric="memory_peak", value=5, timestamp="2026-02-01T00:00:00+00:00")
    drawn.clear()
    draw([new, old, memory], tmp_path)
    assert drawn == [new, memory]


def test_figures_name_the_commits_they_mix(tmp_path, monkeypatch):
    captions = []
    monkeypatch.setattr("crest_bench.plot._bars", lambda *given: captions.append(given[-2]))
    later = row(provider="trl", commit="def", timestamp="2026-02-01T00:00:00+00:00", ratio_to_floor=1.5)
    draw([later, row(ratio_to_floor=1.5)], tmp_path)
    draw([later], tmp_path)
    assert "Commits abc, def." in captions[0] and "Commit def." in captions[1]


def test_ratios_below_one_and_zeros_are_drawn(tmp_path):
    assert axis_end({"a": 0.0}) == 1.0 and axis_end({"a": 0.0, "b": 3.0}) == pytest.approx(3.6)
    assert _order([row(value=GIB), row(provider="trl", value=0)], _gib) == ["trl", "eager"]
    figures = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matplotlib.figure.Figure.savefig", lambda self, *_, **__: figures.append(self))
        patch.setattr("pathlib.Path.replace", lambda *_: None)
        draw([row(ratio_to_floor=0.5), row(provider="trl", ratio_to_floor=0.8)], tmp_path)
    (panel,) = figures[0].axes
    assert panel.get_xlim() == (0, 1.1)
    assert [(bar.get_x(), bar.get_width()) for bar in panel.patches] == [(0, 0.5), (0, 0.8)]


@pytest.mark.parametrize("option", ["--head", "--tokens", "--leave-out"])
def test_plot_refuses_what_is_not_in_the_rows(option, tmp_path):
    path = tmp_path / "linear.csv"
    append_rows([row(ratio_to_floor=1.5)], path)
    arguments = ["plot", "--csv", str(path), "--out", str(tmp_path), option, "99"]
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 2 and f"{option}" in done.output and "found 99" in done.output
    append_rows([row(metric="logp_error")], other := tmp_path / "other.csv")
    assert CliRunner().invoke(app, ["plot", "--csv", str(other)]).exit_code == 1


# --- commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--head", "gpt-9"], ["--head", "gpt-9", "smollm2-135m"]),
        (["--provider", "nobody"], ["--provider", "nobody", "crest-composable"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--metric", "beauty"], ["--metric", "beauty", "memory"]),
        (["--mode", "sideways"], ["--mode", "sideways", "backward"]),
        (["--device", "tpu"], ["--device", "tpu", "cpu"]),
        (["--share", "0"], ["--share", "0 < share <= 100"]),
        (["--share", "10", "--policy-tokens", "5"], ["--share", "--policy-tokens"]),
        (["--hidden", "8"], ["--hidden", "--vocab"]),
        (["--tokens", "8", "--policy-tokens", "9"], ["--policy-tokens", "9", "8 tokens"]),
        (["--provider", "cce", "--device", "cpu"], ["cce is left out: needs a GPU", "--provider"]),
    ],
)
def test_bad_options_are_refused_by_name(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert all(word in done.output for word in said), done.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_says_so():
    done = CliRunner().invoke(app, ["run", "--device", "cuda"], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and "torch sees no GPU" in done.output


@pytest.mark.parametrize("command", ["codegen", "traffic", "roofline"])
def test_without_triton_one_line_says_so(command, tmp_path, monkeypatch):
    monkeypatch.setattr("crest_bench.command.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [command])
    assert done.exit_code == 1 and "needs Triton" in done.output and not list(tmp_path.iterdir())


def test_results_and_commit_are_of_the_checkout_that_holds_the_package(tmp_path):
    here = Path(environment.__file__).parent
    assert environment.results() == here.parent / "results"
    # A copy installed into some other repository has neither.
    installed = tmp_path / "site-packages" / "crest_bench"
    installed.mkdir(parents=True)
    for name in ("__init__.py", "environment.py"):
        shutil.copy(here / name, installed)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    program = "from crest_bench import environment as e; print([e.__file__, e.commit(), str(e.results())])"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=installed.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str([str(installed / "environment.py"), "", "."])


def test_run_appends_what_it_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "linear.csv"
    arguments = ["run", "--hidden", "16", "--vocab", "64", "--tokens", "32", "--tokens", "64", "--share", "25"]
    arguments += ["--dtype", "float32", "--provider", "eager", "--metric", "speed", "--metric", "error"]
    for _ in range(2):
        done = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--repeats", "1", "--csv", str(path)])
        assert done.exit_code == 0, done.output
    assert done.output.count("h16-v64 8/32 float32") == 1  # progress, where there is no terminal
    assert "h16-v64: 8 policy tokens of 32" in done.output and "Growth with tokens" in done.output
    rows = list(csv.DictReader(path.open(newline="")))
    assert len(rows) == 2 * 2 * (3 * 3 + 4)  # runs, cases, modes of three providers and errors of one
    assert {(r["tokens"], r["policy_tokens"], float(r["policy_share"])) for r in rows} == {
        ("32", "8", 25), ("64", "16", 25),
    }  # fmt: skip
    assert all(math.isfinite(float(r["value"])) for r in rows)
    assert all(float(r["value"]) < 1e-5 for r in rows if r["metric"].endswith("error"))
