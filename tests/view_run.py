"""A run's folder written by hand, for the tests of its page."""

import json

from crest_train.config import load_config, to_toml

HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=alert(1)> \u202eright to left\u202c \x1b[31mred"
)


def session(seed, group, rewards, credit, *, step=2, reply="ok", **changes):
    """Two turns of one action of two tokens each; the credit of the four tokens is given."""
    return {
        "batch": step,
        "group": group,
        "seed": seed,
        "num_turns": 2,
        "turn_reward": rewards,
        "ids": [5, 8, 9, 4, 6, 9],
        "texts": ["<user> go >", " move", " ;", "<user> on >", " mv", " ;"],
        "requests": [f"request {seed}", "second request"],
        "actions": [
            {"turn": 0, "start": 1, "tokens": [8, 9], "text": "move", "observation": reply, "logp": [-0.25, -2.5]}
            | {"entropy": [0.125, 0.75], "credit": credit[:2], "ratio": [1.5, 1.0], "token_weight": [0.1, 0.1]},
            {"turn": 1, "start": 4, "tokens": [6, 9], "text": "mv", "logp": [-0.5, -1.5], "entropy": [0.5, 0.625]}
            | {"credit": credit[2:], "ratio": [0.75, 1.0], "token_weight": [0.1, 0.1], "info": {"error": True}},
        ],
    } | changes


def write_run(folder, sessions, steps=4):
    """The folder with metrics of some steps and these sessions as its records."""
    folder.mkdir()
    config = load_config(None, {"rollout": {"sessions": 2, "group_size": 2}, "training": {"steps": steps}})
    (folder / "config.toml").write_text(to_toml(config))
    lines = [{"event": "step", "step": k, "turn_success": k / 8, "loss": 1 / k, "entropy": 0.5} for k in range(1, 5)]
    lines += [{"event": "evaluation", "step": k, "turn_success": k / 10} for k in (0, 4)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "records").mkdir()
    for step in {one["batch"] for one in sessions}:
        text = "".join(json.dumps(one) + "\n" for one in sessions if one["batch"] == step)
        (folder / "records" / f"step-{step:05d}.jsonl").write_text(text)
    return folder
