"""What vLLM's engine and its server have in common: requests that carry a row's whole text, and pushed weights.

A request holds every token of its row, as ids: nothing is ever tokenised again. That costs little, since vLLM keeps the
keys and values of the beginning in its prefix cache (which every push empties).
"""

import random
from collections.abc import Callable
from typing import Any, Protocol

import torch

from crest_train.engines.protocol import Answer
from crest_train.ranks import rank
from crest_train.sampling import Sampling


class Requests(Protocol):
    """Requests under way, each with the number of its row."""

    def send(self, row: int, ids: list[int], parameters: dict[str, Any]) -> None:
        """Begin to have ids continued; parameters as in `vllm.SamplingParams`."""

    def receive(self) -> list[tuple[int, Answer]]:
        """Those that are finished; waits for one at least. Empty when none is under way."""


class RequestWriter:
    """Keeps the text of every row, and sends all of it each time that the row is asked for more.

    Every request has a seed of its own, made of one number of the generator and of its place, so that it does not
    depend on what was answered first. vLLM's sums do depend on what is in its batch: runs repeat only as far as these.
    """

    def __init__(
        self,
        requests: Requests,
        prompts: list[list[int]],
        sampling: Sampling,
        end_token: int,
        generator: torch.Generator,
    ):
        self.requests, self.sampling, self.end_token = requests, sampling, end_token
        self.texts = [list(prompt) for prompt in prompts]
        self.seed = int(torch.randint(2**62, (1,), generator=generator, device=generator.device))

    def ask(self, row: int, ids: list[int], limit: int) -> None:
        """Send the row's text with the ids behind it."""
        text = self.texts[row]
        text += ids
        seed = random.Random(f"{self.seed} {rank()} {row} {len(text)}").getrandbits(63)
        self.requests.send(row, list(text), parameters(self.sampling, self.end_token, limit, seed))

    def answers(self) -> list[tuple[int, Answer]]:
        """What is finished, put behind the rows' texts."""
        answers = self.requests.receive()
        for row, answer in answers:
            self.texts[row] += answer.tokens
        return answers


def parameters(sampling: Sampling, end_token: int, limit: int, seed: int) -> dict[str, Any]:
    """How vLLM is to sample, spelled out: what is left out, a server takes from its model's generation_config."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "max_tokens": limit,
        "seed": seed,
        "stop_token_ids": [end_token],
        "ignore_eos": True,  # the chat's end token is the only one that ends an action
        "logprobs": 0,  # of the sampled token alone
    }


def checked_answer(tokens: list[int], logp: list[float], limit: int, fail: Callable[[str], Exception]) -> Answer:
    """The answer made of them. Raises what `fail` makes of the words: none, too many, or not as many log-probs."""
    if not 0 < len(tokens) <= limit or len(logp) != len(tokens):
        raise fail(f"gave {len(tokens)} token ids and {len(logp)} log-probs, wanted as many, 1 to {limit}")
    unknown = [float("nan")] * len(tokens)
    return Answer(list(tokens), list(logp), unknown, list(unknown))
