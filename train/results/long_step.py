"""One training step on one very long trajectory of the built-in policy, and the most memory that it takes.

python train/results/long_step.py [TOKENS ...]: each in a fresh process; adds to long_step.csv beside this file.
A tenth of the tokens are the policy's, in actions of 8; layers recompute their activations; one thread.
"""

import csv
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from crest_train.config import PolicySection, TrainingSection
from crest_train.loading import prepared
from crest_train.optimizer import make_optimizer
from crest_train.policy import TinyConfig, TinyForCausalLM
from crest_train.sessions import Action, Session, as_tensors
from crest_train.update import update

from crest_ops import Credit, PPOClip

RESULTS = Path(__file__).with_name("long_step.csv")
VOCABULARY, ACTION, EVERY = 78, 8, 80


def session(tokens: int) -> Session:
    """A session of so many tokens, an action of 8 in every 80, each a turn of its own."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(1, VOCABULARY, (tokens,), generator=random).tolist()
    starts = range(EVERY - ACTION, tokens - ACTION + 1, EVERY)
    actions = [
        Action(turn, at, ids[at : at + ACTION], [-4.0] * ACTION, [4.0] * ACTION) for turn, at in enumerate(starts)
    ]
    return Session(0, "", [], len(actions), [], [], ids, actions, [1.0] * len(actions), cut=False)


def measure(tokens: int) -> dict[str, object]:
    """Seconds of the step, and the peak of this process's resident memory, before it and in it (MiB)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = TinyConfig(vocab_size=VOCABULARY, max_position_embeddings=tokens)
    model = prepared(TinyForCausalLM(config), PolicySection(gradient_checkpointing=True)).eval()
    torch.nn.init.normal_(model.head.weight, std=0.05)  # it starts at zero, where no gradient reaches the body
    played = as_tensors([session(tokens)], 0.0)
    written_N = played.policy.flatten()
    credit = Credit(torch.randn(tokens) * written_N, written_N / written_N.sum(), PPOClip())
    section = TrainingSection(minibatches=1)
    optimizer = make_optimizer(model, section)
    before, began = peak_mib(), time.perf_counter()
    metrics = update(
        model, optimizer, played, credit, section, temperature=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert metrics["trained_tokens"] == tokens and not metrics["skipped_steps"]
    seconds = time.perf_counter() - began
    return {
        "tokens": tokens,
        "seconds": f"{seconds:.1f}",
        "peak_mib": f"{peak_mib():.0f}",
        "before_mib": f"{before:.0f}",
        "torch": torch.__version__,
    }


def peak_mib() -> float:
    """The most resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    """Measure each length and write its row."""
    if sys.argv[1:2] == ["--here"]:
        row = measure(int(sys.argv[2]))
        csv.DictWriter(sys.stdout, row).writerow(row)
        return
    for tokens in sys.argv[1:] or ("4096", "16384", "65536"):
        line = subprocess.run([sys.executable, __file__, "--here", tokens], check=True, capture_output=True, text=True)
        new = not RESULTS.exists()
        with open(RESULTS, "a", encoding="utf-8") as file:
            file.write(("tokens,seconds,peak_mib,before_mib,torch\n" if new else "") + line.stdout.strip() + "\n")
        print(line.stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
