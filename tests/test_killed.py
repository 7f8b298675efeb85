"""Runs that are killed at any moment and go on are the uninterrupted ones, to the last bit of all that they keep."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from crest_train.config import to_toml
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.run_folder import RunFolder
from killed import STAGES
from toy import WORDS, toy_tokenizer
from toy_runs import drawn, last_of, toy_config

TESTS = Path(__file__).parent
TIMES = 4
"""Of each kind: 20 moments in all."""
KINDS = {
    "llama": {},
    "reference": {"method": {"name": "trace", "session_reward": "mean"}},
    "value": {"method": {"name": "factor", "session_reward": "mean", "options": {"warmup": 1}}, "value": {"replay": 2}},
    "adapters": {"policy": {"dtype": "bfloat16", "lora": {"rank": 2}}},
    "built-in": {"warm_start": {"steps": 6, "rate": 5e-3, "sessions": 4}},
}


@pytest.fixture(scope="module")
def runs(policy_folder, tmp_path_factory):
    """The folder of the runs, and at what each of them was killed."""
    folder = tmp_path_factory.mktemp("killed")
    torch.manual_seed(0)
    tiny = TinyForCausalLM(TinyConfig(vocab_size=len(WORDS), eos_token_id=WORDS.index(";")))
    tiny.save_pretrained(folder / "tiny")
    toy_tokenizer().save_pretrained(folder / "tiny")
    paths = []
    for kind, changes in KINDS.items():
        model = folder / "tiny" if kind == "built-in" else policy_folder
        common = {
            "rollout": {"sessions": 2, "group_size": 3, "max_action_tokens": 3},
            "training": {"steps": 3, "rate": 1e-3, "tokens_per_micro_batch": 80},
            "evaluation": {"sessions": 4, "every": 2},
            "run": {"seed": 1, "threads": 1, "checkpoint_every": 2},
        }
        policy = changes.get("policy", {}) | {"model": str(model)}
        config = toy_config(policy_folder, **common | changes | {"policy": policy})
        paths.append(folder / f"{kind}.toml")
        paths[-1].write_text(to_toml(config))
    done = subprocess.run(
        [sys.executable, TESTS / "killed.py", folder, "0", str(TIMES)],
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        cwd=TESTS,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return folder, json.loads(done.stdout)


def kept(folder):
    """Everything that the last checkpoint holds, as the hashes of its files."""
    return json.loads((last_of(folder) / "manifest.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_killed_runs_go_on_bit_for_bit(runs, kind):
    home = runs[0] / str([*KINDS].index(kind))
    whole = RunFolder(home / "whole")
    assert sum(line.get("trained_rows", 0) > 0 for line in whole.metrics()) >= 2
    for place in range(TIMES):
        run = RunFolder(home / str(place))
        assert drawn(run) == drawn(whole)
        assert kept(run) == kept(whole)


def test_the_moments_are_all_over_the_run(runs):
    stages = runs[1]
    assert len(stages) == TIMES * len(KINDS)
    assert set(stages) == {*STAGES, "between"}
