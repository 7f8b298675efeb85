"""The kernels as a Hugging Face Hub kernel: made by one command, loaded by `kernels`, used with torch and triton."""

import ast
import importlib.util
import json
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
    expanded = torch.ones(()).expand(5)
    with pytest.raises(ValueError, match="grad_logp"):
        kernel.token_stats_grad(logits.clone(), logits, TARGETS, ONE, entropy, normaliser, expanded, None, V)


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
