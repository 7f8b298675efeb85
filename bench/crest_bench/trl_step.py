"""Peak memory and processor time of one training step's loss under TRL: its GRPOTrainer, ours, and all logits kept.

python -m crest_bench.trl_step: all CASES by all TRAINERS, each in a fresh process (Linux, CPU), to trl_step.csv in the
results. A step is forward and backward of one micro-batch of multi-turn rollouts, off policy, loss type dapo.
"""

import gc
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from crest_bench.command import say_written
from crest_bench.environment import commit, environment, results
from crest_bench.measure import peak_bytes, restart_peak
from crest_bench.rows_file import write_rows
from crest_ops.integrations.trl import CrestGRPOTrainer

CASES = (
    dict(hidden=64, vocab=151936),
    dict(hidden=576, vocab=49152),
)
ROWS, PROMPT, LENGTH, SHARE = 4, 16, 512, 0.25


class AllLogits(GRPOTrainer):
    """TRL's loss on the log-softmax of all logits of the completion, as without a fused head."""

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *_, **__):
        found = model(input_ids=input_ids, attention_mask=attention_mask, logits_to_keep=logits_to_keep + 1)
        logp = torch.log_softmax(found.logits[:, :-1].float() / self.temperature, -1)
        entropy = -(logp.exp() * logp).sum(-1)
        return logp.gather(-1, input_ids[:, -logits_to_keep:, None])[..., 0], entropy, None


TRAINERS = {
    "crest": (CrestGRPOTrainer, {}),
    "crest, entropy bonus (TRL's loss on linear_token_stats)": (CrestGRPOTrainer, {"entropy_coef": 1e-3}),
    "trl": (GRPOTrainer, {}),
    "all logits": (AllLogits, {}),
}


@dataclass(frozen=True)
class Row:
    """One measurement: bytes above model and batch, of them the parameters' gradients; processor seconds."""

    trainer: str
    hidden: int
    vocab: int
    tokens: int
    policy_share: float
    peak: int
    gradients: int
    seconds: float
    loss: float
    torch: str
    packages: str
    commit: str


def make_batch(vocab: int, length: int) -> dict[str, torch.Tensor]:
    """A batch as TRL makes it; of every 16 completion tokens the policy wrote the first SHARE."""
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(2, vocab, (ROWS, PROMPT + length), generator=random)
    written = (torch.arange(length) % 16 < 16 * SHARE).long().expand(ROWS, -1).contiguous()
    return {
        "prompt_ids": ids[:, :PROMPT],
        "prompt_mask": torch.ones(ROWS, PROMPT, dtype=torch.long),
        "completion_ids": ids[:, PROMPT:],
        "completion_mask": torch.ones(ROWS, length, dtype=torch.long),
        "tool_mask": written,
        "advantages": torch.tensor([1.0, -1.0, 0.5, -0.5]),
        "old_per_token_logps": torch.full((ROWS, length), -11.0),
        "num_items_in_batch": written.sum(),
    }


def measure(trainer: str, hidden: int, vocab: int) -> tuple[int, int, float, float]:
    """(peak, gradients, seconds, loss) of one step in this process, after two small ones."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = dict(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1, intermediate_size=2 * hidden)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, hidden_size=hidden, tie_word_embeddings=True, **sizes))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, ";": 1}, unk_token="<pad>")), pad_token="<pad>", eos_token=";"
    )
    kind, settings = TRAINERS[trainer]
    made = kind(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        processing_class=tokenizer,
        train_dataset=Dataset.from_dict({"prompt": [";"]}),
        args=GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            per_device_train_batch_size=ROWS,
            num_generations=ROWS,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            **settings,
        ),
    )
    made.current_gradient_accumulation_steps = 1
    model.train()
    for length in (16, 32, LENGTH):
        batch = make_batch(vocab, length)
        model.zero_grad()
        gc.collect()
        before, start = restart_peak("cpu"), time.process_time()
        loss = made.compute_loss(model, batch)
        loss.backward()
        seconds, peak = time.process_time() - start, peak_bytes("cpu") - before
    gradients = sum(p.grad.numel() * p.grad.element_size() for p in model.parameters())
    return peak, gradients, seconds, float(loss.detach())


def main(arguments: list[str]) -> None:
    if arguments:
        print(json.dumps(measure(**json.loads(arguments[0]))))
        return
    where, rows = environment("cpu"), []
    for case in CASES:
        for trainer in TRAINERS:
            job = json.dumps({"trainer": trainer, **case})
            command = [sys.executable, "-m", "crest_bench.trl_step", job]
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peak, gradients, seconds, loss = json.loads(told.splitlines()[-1])
            print(f"{peak / 2**20:7.0f} MiB {seconds:6.2f} s  {job}", flush=True)
            tokens, versions = ROWS * LENGTH, (where["torch"], where["packages"], commit())
            rows.append(Row(trainer, *case.values(), tokens, SHARE, peak, gradients, seconds, loss, *versions))
    path = results() / "trl_step.csv"
    write_rows(rows, path)
    say_written(path)


if __name__ == "__main__":
    main(sys.argv[1:])
