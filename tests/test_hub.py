"""The kernels as a Hugging Face Hub kernel: made by one command, loaded by `kernels`, used with torch and triton."""

import ast
import importlib.util
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PUBLISH = ROOT / "kernels" / "publish.py"
NAMES = {
    "crest_segments", "policy_loss", "teacher_pair", "token_divergence", "token_divergence_grad", "token_stats",
    "token_stats_grad",
}  # fmt: skip
V = 37


def run_publish(out):
    return subprocess.run([sys.executable, str(PUBLISH), str(out)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    out = tmp_path_factory.mktemp("hub") / "somewhere" / "crest-kernels"
    done = run_publish(out)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def kernel(repository):
    """As `kernels` loads it, with nothing of this project but the folder."""
    return pytest.importorskip("kernels").get_local_kernel(repository)


def rows(seed=0, width=V):
    return torch.randn(1, 5, width, generator=torch.Generator().manual_seed(seed)) * 2


TARGETS = torch.tensor([3, 0, -1, 36, 7])
WANTED = TARGETS >= 0
ONE = torch.ones(1)


def exact_log_probs(logits):
    return torch.log_softmax(logits[0].double(), -1)


def test_statistics_and_their_gradient(kernel):
    logits = rows()
    logp, entropy, lse, sum_sq, normaliser = kernel.token_stats(logits, TARGETS, ONE, V, sum_sq=True)
    x = logits.double().requires_grad_()
    log_p = exact_log_probs(x)
    exact_logp = log_p.gather(1, TARGETS.clamp(min=0)[:, None])[:, 0]
    exact_entropy = -(log_p.exp() * log_p).sum(1)
    for found, exact in (
        (logp, exact_logp), (entropy, exact_entropy), (lse, x[0].logsumexp(1)), (sum_sq, (2 * log_p).exp().sum(1)),
    ):  # fmt: skip
        torch.testing.assert_close(found.double(), torch.where(WANTED, exact, 0).detach(), rtol=1e-5, atol=1e-5)
    factor = torch.tensor([0.5, -1.0, 2.0, 3.0, 0.1])
    grad = torch.full_like(logits, torch.nan)
    kernel.token_stats_grad(grad, logits, TARGETS, ONE, entropy, normaliser, factor, 0.3 * factor, V)
    (exact,) = torch.autograd.grad((WANTED * factor * (exact_logp + 0.3 * exact_entropy)).sum(), x)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-5)


def test_divergences_and_their_gradient(kernel):
    logits, teacher = rows(), rows(1, V + 3)
    *stats, normaliser = kernel.token_divergence(logits, teacher, TARGETS, ONE, V)
    logp, entropy, teacher_logp, reverse_kl, forward_kl = stats
    x = logits.double().requires_grad_()
    log_p, log_q = exact_log_probs(x), exact_log_probs(teacher[..., :V])
    exact_reverse = (log_p.exp() * (log_p - log_q)).sum(1)
    exact_forward = (log_q.exp() * (log_q - log_p)).sum(1)
    for found, exact in (
        (reverse_kl, exact_reverse), (forward_kl, exact_forward),
        (teacher_logp, log_q.gather(1, TARGETS.clamp(min=0)[:, None])[:, 0]),
    ):  # fmt: skip
        torch.testing.assert_close(found.double(), torch.where(WANTED, exact, 0).detach(), rtol=1e-5, atol=1e-5)
    grad, none = torch.full_like(logits, torch.nan), torch.zeros(5)
    kernel.token_divergence_grad(
        grad, logits, teacher, TARGETS, ONE, entropy, reverse_kl, forward_kl, normaliser, none, none, none + 1,
        none + 2, V,
    )  # fmt: skip
    (exact,) = torch.autograd.grad((WANTED * (exact_reverse + 2 * exact_forward)).sum(), x)
    torch.testing.assert_close(grad.double(), exact, rtol=1e-5, atol=1e-5)
    student_logp, *_, pair_logp = kernel.teacher_pair(logits, teacher, TARGETS, ONE, V)
    torch.testing.assert_close(student_logp, logp)
    torch.testing.assert_close(pair_logp, teacher_logp)


def test_the_policy_loss_turns_logits_into_their_gradient(kernel):
    logits, credit, weight = rows(), torch.tensor([1.0, -1.0, 5.0, 0.5, 2.0]), torch.full((5,), 0.25)
    x = logits.double().requires_grad_()
    logp = exact_log_probs(x).gather(1, TARGETS.clamp(min=0)[:, None])[:, 0]
    old_logp = logp.detach() - torch.tensor([0.1, -0.1, 0.0, 0.9, -0.5])
    ratio = (logp - old_logp).exp()
    surrogate = -torch.minimum(ratio * credit, ratio.clamp(0.8, 1.28) * credit)
    (exact,) = torch.autograd.grad((WANTED * weight * surrogate).sum(), x)
    gradient = logits.clone()
    found_logp, _, active = kernel.policy_loss(
        gradient[0], TARGETS, ONE, credit, weight, old_logp.float(), None, None, num_columns=V, logit_scale=1.0,
        softcap=0.0, kl_coef=0.0, entropy_coef=0.0, surrogate=(0, 0.2, 0.28, float("inf")),
    )  # fmt: skip
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_logp.double(), torch.where(WANTED, logp, 0).detach(), rtol=1e-5, atol=1e-5)
    assert active.tolist() == [True, True, False, False, True]  # not wanted; clipped


def test_what_a_kernel_would_misread_is_refused(kernel):
    logits = rows()
    bad = {
        "logits": (logits.double(), TARGETS, ONE, V),
        "logits is": (logits[..., ::2], TARGETS, ONE, 5),
        "columns": (logits, TARGETS, ONE, V + 1),
        "B \\* T = 4 rows": (logits, TARGETS[:4], ONE, V),
        "targets": (logits, TARGETS.int(), ONE, V),
        "temperature": (logits, TARGETS, torch.ones(5, dtype=torch.float64), V),
    }
    for message, arguments in bad.items():
        with pytest.raises(ValueError, match=message):
            kernel.token_stats(*arguments)
    _, entropy, _, _, normaliser = kernel.token_stats(logits, TARGETS, ONE, V)
    expanded, ones = torch.ones(()).expand(5), torch.ones(5)
    for message, per_row in (("grad_logp", (normaliser, expanded)), ("normaliser", (normaliser[:1], ones))):
        with pytest.raises(ValueError, match=f"^{message} is"):
            kernel.token_stats_grad(logits.clone(), logits, TARGETS, ONE, entropy, *per_row, None, V)
    with pytest.raises(ValueError, match=r"^normaliser is \[2, 5\].*\[4, 5\]"):
        kernel.token_divergence_grad(
            logits.clone(), logits, logits, TARGETS, ONE, ones, ones, ones, normaliser, ones, ones, ones, ones, V
        )
    with pytest.raises(ValueError, match="^kl_coef is 1.0, but ref_logp is None"):
        kernel.policy_loss(
            logits[0], TARGETS, ONE, ones, ones, None, None, None, num_columns=V, logit_scale=1.0, softcap=0.0,
            kl_coef=1.0, entropy_coef=0.0, surrogate=(0, 0.2, 0.28, float("inf")),
        )  # fmt: skip


def test_a_target_beyond_the_columns_is_an_excluded_one(kernel):
    """It reads nothing outside the row: log-prob -inf, gradient 0."""
    logits, beyond = rows(), torch.tensor([V, 10**12, -1, 36, 7])
    logp, entropy, _, _, normaliser = kernel.token_stats(logits, beyond, ONE, V)
    assert (logp == -torch.inf).tolist() == [True, True, False, False, False]
    grad = torch.full_like(logits, torch.nan)
    kernel.token_stats_grad(grad, logits, beyond, ONE, entropy, normaliser, torch.ones(5), torch.ones(5), V)
    assert not grad[0, :3].any() and grad[0, 3:].abs().sum(-1).gt(0).all()


SPAN_OF_TOKEN = torch.tensor([0, 0, 0, 1, 1, 1, 1])
SEGMENTS = {
    "logp": torch.tensor([-1.0, -0.2, -3.0, -0.7, -1.5, -2.0, -0.1]),
    "teacher_logp": torch.tensor([-0.5, -0.9, -1.0, -0.6, -2.5, -0.3, -0.4]),
    "old_logp": torch.tensor([-1.1, -0.3, -2.2, -0.9, -1.2, -2.1, -0.8]),
    "uncertainty": torch.tensor([1.1, 0.3, 2.2, 0.9, 1.2, 2.1, 0.8]),
    "live": torch.tensor([1, 1, 1, 1, 1, 0, 1], dtype=torch.bool),
    "turn_of_token": torch.tensor([0, 0, 1, 1, 2, -1, 2], dtype=torch.int32),
    "turn_advantage": torch.tensor([1.0, -2.0, 0.5]),
    "weight": torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
    "ends": torch.tensor([3, 7]),
}  # one span of three tokens, one of four
SETTINGS = dict(lam=0.3, eps=0.28, tau=2.0, rho=0.5, std_eps=1e-6, low=0.2, high=0.28, dual=None)


def test_the_segment_pass(kernel):
    """Against its docstring's formula in float64, token by token."""
    t = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in SEGMENTS.items()}
    logp = t["logp"].requires_grad_()
    A, live = t["turn_advantage"][t["turn_of_token"].clamp(min=0)], t["live"]
    z = torch.zeros(7).double()
    for span in (0, 1):
        here = live & (SPAN_OF_TOKEN == span)
        u = t["uncertainty"][here]
        z[here] = (u - u.mean()) / (u.std(correction=0) + 1e-6)
    w = (A.sign() * (t["teacher_logp"] - t["old_logp"]) / 2).exp()
    phi = 1 + (0.3 * (1 + 0.5 * (2 * z.sigmoid() - 1))).clamp(0, 0.3) * (w.clamp(1, 1.28) - 1)
    ratio = (logp - t["old_logp"]).exp()
    value = torch.where(live, t["weight"] * torch.maximum(-ratio * A * phi, -ratio.clamp(0.8, 1.28) * A * phi), 0)
    (slope,) = torch.autograd.grad(value.sum(), logp)
    found = kernel.crest_segments(**SEGMENTS, **SETTINGS)
    for tensor, exact in zip(found, (value, slope, ratio * live, live & (slope == 0), phi * live), strict=True):
        torch.testing.assert_close(tensor.double(), exact.detach().double(), rtol=1e-5, atol=1e-6)


def test_segments_that_a_kernel_would_misread_are_refused(kernel):
    doubled = SEGMENTS["logp"].repeat_interleave(2)
    bad = [
        ("logp", doubled[::2]), ("old_logp", SEGMENTS["old_logp"][:6]), ("teacher_logp", doubled[:7].double()),
        ("uncertainty", torch.ones(()).expand(7)), ("weight", [1.0] * 7), ("old_logp", None),
        ("live", SEGMENTS["live"].int()),
        ("turn_of_token", SEGMENTS["turn_of_token"].long()), ("turn_of_token", torch.full((7,), 3).int()),
        ("turn_of_token", torch.full((7,), -1).int()), ("turn_advantage", SEGMENTS["turn_advantage"].double()),
        ("turn_advantage", torch.ones(1, 3)), ("ends", torch.tensor([3, 6])), ("ends", torch.tensor([3, 8])),
        ("ends", torch.tensor([5, 3, 7])), ("ends", torch.tensor([-1, 7])), ("ends", torch.tensor(7)),
        ("ends", torch.tensor([3, 7], dtype=torch.int32)), ("ends", torch.zeros(0, dtype=torch.int64)),
    ]  # fmt: skip
    for name, value in bad:
        with pytest.raises(ValueError, match=rf"^{name}(\[\d\])? is "):
            kernel.crest_segments(**(SEGMENTS | {name: value}), **SETTINGS)
    with pytest.raises(ValueError, match="^tau is 0.0"):
        kernel.crest_segments(**SEGMENTS, **(SETTINGS | {"tau": 0.0}))
    none = {name: tensor[:0] for name, tensor in SEGMENTS.items()} | {"ends": torch.tensor([0])}
    assert [len(tensor) for tensor in kernel.crest_segments(**none, **SETTINGS)] == [0] * 5


def test_every_docstring_says_what_its_arguments_are(kernel):
    for name in NAMES:
        function = getattr(kernel, name)
        for argument in inspect.signature(function).parameters:
            assert re.search(rf"\b{argument}\b", function.__doc__), f"{name}: {argument}"


def test_the_layout_is_what_kernels_reads(repository):
    rust = pytest.importorskip("kernels._rust")
    variant = repository / "build" / "torch-universal"
    metadata = rust.Metadata.read_from_file(variant / "metadata.json")
    assert metadata.id.isidentifier() and str(metadata.name) == "crest-kernels" and metadata.license == "apache-2.0"
    metadata.digest.validate(rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant))
    assert {str(backend) for backend in rust.Build.open(repository).general.backends} == {"cuda", "rocm"}
    assert json.loads((variant / "metadata.json").read_text())["id"] == metadata.id
    assert {path.name for path in repository.iterdir()} == {"LICENSE", "README.md", "build", "build.toml", "torch-ext"}
    assert "Apache License" in (repository / "LICENSE").read_text()


def test_files_import_torch_triton_and_each_other(repository):
    standard = set(sys.stdlib_module_names)
    for source in repository.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= standard | {"torch", "triton"}, source
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert node.module.split(".")[0] in standard | {"torch", "triton"}, source


def test_the_card_names_every_function(repository, kernel):
    text = (repository / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: kernels\nlicense: apache-2.0\n")
    assert set(kernel.__all__) == NAMES
    for name in NAMES:
        assert f"| `{name}` | {getattr(kernel, name).__doc__.splitlines()[0]} |" in text


def test_a_fresh_process_needs_nothing_of_this_project(repository, tmp_path):
    """The folder that older versions of `kernels` look for gives the same functions."""
    nested = repository / "build" / "torch-universal" / "crest_kernels" / "__init__.py"
    code = (
        "import importlib.util, sys\n"
        "class Absent:\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('crest_ops', 'crest_kernels'): raise ImportError(name)\n"
        "sys.meta_path.insert(0, Absent)\n"
        f"spec = importlib.util.spec_from_file_location('older', {str(nested)!r})\n"
        "module = sys.modules['older'] = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "import torch\n"
        "found = module.token_stats(torch.zeros(1, 1, 4), torch.zeros(1, dtype=torch.int64), torch.ones(1), 4)\n"
        "print(*sorted(module.__all__), round(float(found[0].exp()), 6))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*sorted(NAMES), "0.25"]


def test_nothing_is_overwritten(repository, tmp_path):
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    (full / "notes.txt").write_text("mine")
    file.write_text("mine")
    for out, named in ((repository, repository), (full, full), (file, file), (file / "below", file)):
        done = run_publish(out)
        assert done.returncode == 1 and "Traceback" not in done.stderr and str(named) in done.stderr
    assert [path.name for path in full.iterdir()] == ["notes.txt"] and file.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]


def test_a_failure_leaves_nothing_behind(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("publish", PUBLISH)
    publish = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(publish)

    def fail():
        raise OSError("disk is full")

    monkeypatch.setattr(publish, "card", fail)
    with pytest.raises(OSError, match="full"):
        publish.publish(tmp_path / "out")
    assert not list(tmp_path.iterdir())
