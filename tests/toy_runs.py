"""Runs of the trainer on the toy environment, and what two equal runs have in common."""

import torch
from crest_train.chat import make_chat
from crest_train.config import load_config
from crest_train.imitation import imitate
from crest_train.loop import train
from rich.console import Console
from safetensors.torch import load_file
from toy import HINT, toy_model, toy_tokenizer


def save_policy(folder):
    """Write a policy that does about half of the toy's turns."""
    model, tokenizer = toy_model(), toy_tokenizer()
    config = toy_config(folder, warm_start={"steps": 30, "rate": 3e-3, "sessions": 8})
    imitate(model, make_chat(tokenizer), config, Console(quiet=True))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def toy_config(folder, **changes):
    tables = {
        "environment": {"name": "toy:Toy", "options": {"turns": 2}},
        "policy": {"model": str(folder)},
        "rollout": {"sessions": 3, "group_size": 4, "max_action_tokens": 3},
        "teacher": {"template": HINT, "end": " "},
        "training": {"steps": 4, "rate": 1e-3, "tokens_per_micro_batch": 80},
        "evaluation": {"sessions": 20, "every": 2},
        "run": {"seed": 1, "threads": 1, "checkpoint_every": 2},
    }
    return load_config(None, {key: tables.get(key, {}) | changes.get(key, {}) for key in {**tables, **changes}})


def quiet_train(config, output):
    return train(config, output, Console(quiet=True))


def drawn(folder):
    """The metrics that the seed decides."""
    return [
        {key: value for key, value in line.items() if not key.endswith("_seconds") and key != "peak_memory_mib"}
        for line in folder.metrics()
    ]


def last_of(folder):
    """The folder of the run's last checkpoint."""
    return folder.last_checkpoint(Console(quiet=True)).path


def weights(folder):
    return load_file(last_of(folder) / "model.safetensors")


def assert_same_run(one, other):
    assert drawn(one) == drawn(other)
    assert all(torch.equal(tensor, weights(other)[name]) for name, tensor in weights(one).items())


def harm(path, damage):
    """Cut a file in half, change one bit of it, or remove it ("half", "one bit", "gone")."""
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "gone":
        path.unlink()
    elif damage == "half":
        path.write_bytes(content[:middle])
    else:
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
