"""Runs the methods on the built-in environment and writes desk.csv beside this file: held-out success, step by step.

    python train/results/desk.py --turns 8 --seeds 3 --methods grpo grpo_mean turn_grpo crest

Every run starts from the same warm start and sees the same sessions; reduction and clip are the same for all methods. A
run that was stopped goes on, a finished one is not repeated; rows of other settings stay in the file.
"""

import argparse
import csv
import os
from pathlib import Path

import torch
from crest_train.config import load_config
from crest_train.loop import train

RESULTS = Path(__file__).with_name("desk.csv")
COLUMNS = ("turns", "method", "seed", "step", "turn_success", "session_success", "minutes", "peak_memory_mib")
LIKE_THE_OTHERS = {"reduction": "token_mean", "surrogate": {"low": 0.2, "high": 0.28}}
METHODS = {
    "grpo": {"name": "grpo", "session_reward": "all", "options": LIKE_THE_OTHERS},
    "grpo_mean": {"name": "grpo", "session_reward": "mean", "options": LIKE_THE_OTHERS},
    "turn_grpo": {"name": "turn_grpo"},
    "crest": {"name": "crest"},
}


def run(turns: int, method: str, seed: int, steps: int, folder: Path) -> list[dict]:
    """The rows of one run: an evaluation each."""
    config = load_config(
        None,
        {
            "environment": {"options": {"num_turns": turns}},
            "method": METHODS[method],
            "training": {"steps": steps},
            "run": {"seed": seed, "threads": 1},
        },
    )
    lines = train(config, folder / f"K{turns}-{method}-seed{seed}").metrics()
    seconds = sum(value for line in lines for key, value in line.items() if key.endswith("_seconds"))
    summary = {"minutes": round(seconds / 60, 2), "peak_memory_mib": round(max(x["peak_memory_mib"] for x in lines))}
    return [
        {
            "turns": turns, "method": method, "seed": seed, "step": line["step"],
            "turn_success": round(line["turn_success"], 4), "session_success": round(line["session_success"], 4),
        } | summary
        for line in lines
        if line["event"] == "evaluation"
    ]  # fmt: skip


def write(rows: list[dict]) -> None:
    """Put the rows into the file, in place of those of the same runs."""
    new = {(str(row["turns"]), row["method"], str(row["seed"])) for row in rows}
    kept = list(csv.DictReader(open(RESULTS, newline=""))) if RESULTS.exists() else []
    kept = [row for row in kept if (row["turns"], row["method"], row["seed"]) not in new]
    everything = sorted(
        kept + rows, key=lambda row: (int(row["turns"]), row["method"], int(row["seed"]), int(row["step"]))
    )
    partial = RESULTS.with_suffix(f".{os.getpid()}")
    with open(partial, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(everything)
    partial.replace(RESULTS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8, help="user turns of a session")
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ...")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder for the run folders")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(given.seeds):
        for method in given.methods:
            write(run(given.turns, method, seed, given.steps, given.runs))
