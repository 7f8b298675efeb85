"""Decoding speed of the built-in policy beside a stock Hugging Face Llama of the same shape, step by step on the CPU.

Run `python -m crest_bench.decode`. B = rows.
"""

import inspect
import time
from statistics import median

import torch
import typer
from crest_train.cache import GrowingCache
from crest_train.environments.desk_world import VOCABULARY
from crest_train.policy import TinyConfig, TinyForCausalLM
from rich.console import Console
from rich.table import Table
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache


def make_policy() -> TinyForCausalLM:
    """The built-in policy, untrained."""
    return TinyForCausalLM(TinyConfig(vocab_size=len(VOCABULARY))).eval()


def make_llama() -> LlamaForCausalLM:
    """A Llama with as many layers and heads, of the same widths."""
    shape = TinyConfig(vocab_size=len(VOCABULARY))
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_blocks,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=1,
        max_position_embeddings=shape.max_position_embeddings,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def step_ms(model: PreTrainedModel, cache: Cache, *, rows: int, steps: int) -> float:
    """Milliseconds per step of feeding one token to each of `rows` rows, mean over positions 0 to `steps`."""
    cache_argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    ids = torch.randint(0, model.config.vocab_size, (rows, steps))
    began = time.perf_counter()
    for position in range(steps):
        model(input_ids=ids[:, position : position + 1], use_cache=True, **{cache_argument: cache})
    return 1e3 * (time.perf_counter() - began) / steps


def measure(*, rows: int = 64, steps: int = 200, repeats: int = 7) -> dict[str, list[float]]:
    """Milliseconds per step, `repeats` times, the contenders taking turns; the first round is thrown away."""
    contenders = {
        "built-in policy, growing cache": (make_policy(), GrowingCache),
        "built-in policy, DynamicCache": (make_policy(), DynamicCache),
        "Llama, DynamicCache": (make_llama(), DynamicCache),
        "Llama, growing cache": (make_llama(), GrowingCache),
    }
    rounds = [
        {name: step_ms(model, make_cache(), rows=rows, steps=steps) for name, (model, make_cache) in contenders.items()}
        for _ in range(repeats + 1)
    ]
    return {name: [taken[name] for taken in rounds[1:]] for name in contenders}


def main(rows: int = 64, steps: int = 200, repeats: int = 7, threads: int = 1) -> None:
    """Print milliseconds per step and how many times as long each contender takes as the built-in policy."""
    torch.set_num_threads(threads)
    milliseconds = measure(rows=rows, steps=steps, repeats=repeats)
    first = median(next(iter(milliseconds.values())))
    table = Table(title=f"{rows} rows, positions 0 to {steps}, {threads} thread(s), median (least) of {repeats}")
    for column in ("", "ms per step", "tokens/s", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, taken in milliseconds.items():
        middle = median(taken)
        speed = f"{1e3 * rows / middle:,.0f}"
        table.add_row(name, f"{middle:.2f} ({min(taken):.2f})", speed, f"{middle / first:.2f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
