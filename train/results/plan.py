"""What `crest_train.plan` predicts beside the peak of resident memory that a fresh process shows (Linux, CPU).

python train/results/plan.py [CASE ...]: all CASES, or those whose name holds a CASE; their rows in plan.csv beside this
file are made anew.
An update: a step on two sessions, a micro-batch each, by an optimizer that has its moments; a quarter of the tokens are
the policy's. A rollout: rows that all write until the session is so long, and no optimizer, measured or predicted.
Measured is the peak of resident memory less what the process holds once it has made a step on a tiny session; weights
are drawn, not read; one thread. Twice: with every block of 128 KiB or more given back when it is freed
(MALLOC_MMAP_THRESHOLD_=131072), which is what a plan can know of; and as glibc has it by default, whose heap keeps what
was freed below what is not.
"""

import csv
import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch
from crest_train.architectures import architecture
from crest_train.config import Config, load_config
from crest_train.engines.lockstep import LockstepEngine
from crest_train.loading import with_options
from crest_train.optimizer import make_optimizer
from crest_train.plan import SHARE, Planner, Sizes
from crest_train.sampling import Sampling
from crest_train.sessions import Action, Session, as_tensors
from crest_train.update import update
from transformers import AutoModelForCausalLM, PreTrainedModel

from crest_ops import Credit, PPOClip

RESULTS = Path(__file__).with_name("plan.csv")
ACTION = 8
RECOMPUTE, NARROW, ADAPTERS = {"gradient_checkpointing": True}, {"dtype": "bfloat16"}, {"lora": {"rank": 16}}
CASES = [
    ("update", "desk", {}, 4096, 0),
    ("update", "desk", {}, 16384, 0),
    ("update", "desk", RECOMPUTE, 16384, 0),
    ("update", "desk", RECOMPUTE, 32768, 0),
    ("update", "smollm2", {}, 512, 0),
    ("update", "smollm2", {}, 1024, 0),
    ("update", "smollm2", {}, 2048, 0),
    ("update", "smollm2", {}, 2048, 1024),
    ("update", "smollm2", RECOMPUTE, 2048, 0),
    ("update", "smollm2", RECOMPUTE, 4096, 0),
    ("update", "smollm2", NARROW, 512, 0),
    ("update", "smollm2", NARROW | RECOMPUTE, 1024, 0),
    ("update", "smollm2", ADAPTERS, 1024, 0),
    ("update", "smollm2", ADAPTERS | RECOMPUTE, 2048, 0),
    ("rollout", "smollm2", {}, 512, 256),
    ("rollout", "smollm2", NARROW, 512, 384),
]
"""Phase, policy, what [policy] has beside it, tokens of a session, those of its prompt."""
KEYS = ("phase", "model", "policy", "tokens", "prompt")
ROWS = 16
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}


def config_of(model: str, policy: dict, tokens: int, prompt: int) -> Config:
    """The configuration of a case: one session a micro-batch."""
    training = {"tokens_per_micro_batch": tokens, "minibatches": 1}
    return load_config(None, {"policy": {"model": model, **policy}, "training": training, "rollout": {"rows": ROWS}})


def measure(phase: str, model: str, policy: dict, tokens: int, prompt: int) -> float:
    """MiB that the phase takes above what the process holds before the policy is there."""
    torch.set_num_threads(1)
    config = config_of(model, policy, tokens, prompt)
    tiny = config_of("desk", policy, 64, 0)
    _update(_learner(tiny, 64), tiny, 64, 0)
    before = settled()
    if phase == "update":
        _update(_learner(config, tokens), config, tokens, prompt)
    else:
        _play(_learner(config, tokens), tokens, prompt)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before


def settled() -> float:
    """Resident MiB of this process, without what can be given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 2**10


def _learner(config: Config, tokens: int) -> PreTrainedModel:
    sizes = architecture(config.policy)
    sizes.max_position_embeddings = max(tokens, sizes.max_position_embeddings)
    dtype = getattr(torch, config.policy.dtype)
    model = AutoModelForCausalLM.from_config(sizes, dtype=dtype, attn_implementation="sdpa")
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.02)  # the built-in policy's is 0
    return with_options(model, config.policy).eval()


def _update(learner: PreTrainedModel, config: Config, tokens: int, prompt: int) -> None:
    optimizer = make_optimizer(learner, config.training)
    played = as_tensors([_session(tokens - prompt, [1] * prompt, seed) for seed in range(2)], 0.0)
    written_N = played.policy.flatten()
    credit = Credit(torch.randn(len(written_N)) * written_N, written_N / written_N.sum(), PPOClip())
    for parameter in learner.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(0)
    told = update(learner, optimizer, played, credit, config.training, temperature=1.0, generator=generator)
    assert told["trained_rows"] == 2 and not told["skipped_steps"]


def _session(tokens: int, prompt: list[int], seed: int) -> Session:
    ids = torch.randint(1, 70, (tokens,), generator=torch.Generator().manual_seed(seed)).tolist()
    every = round(ACTION / SHARE)
    starts = range(every - ACTION, tokens - ACTION + 1, every)
    actions = [
        Action(turn, at, ids[at : at + ACTION], [-4.0] * ACTION, [4.0] * ACTION) for turn, at in enumerate(starts)
    ]
    return Session(seed, "", prompt, len(actions), [], [], ids, actions, [1.0] * len(actions), cut=False)


def _play(learner: PreTrainedModel, tokens: int, prompt: int) -> None:
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(max_action_tokens=tokens - prompt)
    writer = LockstepEngine(learner).open([[1] * prompt] * ROWS, sampling, -1, generator)
    for row in range(ROWS):
        writer.ask(row, [1], tokens - prompt - 1)
    while answers := writer.answers():
        assert all(len(answer.tokens) == tokens - prompt - 1 for _, answer in answers)


def _fresh(case: tuple, environment: dict[str, str]) -> float:
    command = [sys.executable, __file__, "--here", json.dumps(case)]
    ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    if ran.returncode:
        raise SystemExit(ran.stderr)
    return float(ran.stdout)


def main() -> None:
    """Measure the cases and write their rows."""
    if sys.argv[1:2] == ["--here"]:
        print(measure(*json.loads(sys.argv[2])))
        return
    rows = {}
    if RESULTS.exists():
        with open(RESULTS, newline="", encoding="utf-8") as file:
            rows = {_name(*(row[key] for key in KEYS)): row for row in csv.DictReader(file)}
    for case in CASES:
        name = _name(*case[:2], json.dumps(case[2]), *case[3:])
        if sys.argv[1:] and not any(wanted in name for wanted in sys.argv[1:]):
            continue
        rows[name] = _row(case)
        print(name, *(f"{key} {value}" for key, value in rows[name].items() if key not in KEYS), flush=True)
        with open(RESULTS, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[name])
            writer.writeheader()
            writer.writerows(rows.values())


def _name(*values: object) -> str:
    return " ".join(map(str, values))


def _row(case: tuple) -> dict[str, object]:
    phase, *sizes = case
    plan = Planner(config_of(*sizes)).plan(Sizes(*sizes[2:]))
    predicted = (plan.phases[phase] - (plan.optimizer if phase == "rollout" else 0)) / 2**20
    measured, by_default = (_fresh(case, given) for given in (GIVEN_BACK, {}))
    return {
        **dict(zip(KEYS, (phase, sizes[0], json.dumps(sizes[1]), *sizes[2:]), strict=True)),
        "predicted_mib": round(predicted),
        "measured_mib": round(measured),
        "ratio": f"{predicted / measured:.3f}",
        "default_malloc_mib": round(by_default),
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
