"""Which engine a configuration has, and what is refused before anything is played."""

import sys
from types import ModuleType

import pytest
from crest_train.config import load_config
from crest_train.engines import make_engine, vllm
from crest_train.engines.lockstep import LockstepEngine
from toy import toy_model


def section(**changes):
    return load_config(None, {"rollout": changes}).rollout


def test_the_built_in_engine_writes_with_the_model_itself():
    model = toy_model()
    engine = make_engine(section(), model)
    assert isinstance(engine, LockstepEngine) and engine.model is model


@pytest.mark.parametrize(
    ("engine", "module", "told"),
    [
        ("vllm", "vllm", "rollout.engine: vllm .*pip install vllm"),
        ("vllm_server", "requests", r"pip install .*\[server"),
    ],
)
def test_a_missing_package_is_told_with_what_brings_it(monkeypatch, engine, module, told):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=told):
        make_engine(section(engine=engine), toy_model())


def test_vllm_in_process_is_refused_for_several_processes(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setattr(vllm, "size", lambda: 2)
    with pytest.raises(ValueError, match='found vllm with 2 processes, wanted "vllm_server"'):
        make_engine(section(engine="vllm"), toy_model())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", "sglang"),
        ("server", "127.0.0.1:8000"),
        ("correction", 0.5),
        ("top_p", 0.0),
        ("top_k", -1),
        ("min_p", 1.5),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(key, value):
    with pytest.raises(ValueError, match=f"rollout.{key}"):
        section(**{key: value})


@pytest.mark.parametrize("engine", ["vllm", "vllm_server"])
def test_a_tied_head_that_vllm_would_not_reload_on_the_cpu_is_refused(engine):
    with pytest.raises(ValueError, match=f'found "{engine}" on the CPU with a policy whose head is tied'):
        make_engine(section(engine=engine), toy_model(tie_word_embeddings=True))
