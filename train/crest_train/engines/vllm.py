"""vLLM in the trainer's own process, on its device.

vLLM sets aside a share of the device's memory for itself (MEMORY), which the trainer then has not.
"""

import tempfile
from typing import Any

import torch
from transformers import PreTrainedModel

from crest_train.engines.merged import save_merged
from crest_train.engines.protocol import Answer
from crest_train.engines.vllm_requests import RequestWriter, checked_answer
from crest_train.model import context_length
from crest_train.ranks import size
from crest_train.sampling import Sampling

MEMORY = 0.35
"""Share of a GPU's memory that vLLM takes for weights and key-value cache."""


class VLLMEngine:
    """Writes with a copy of the policy that vLLM holds.

    Raises ValueError: vLLM is not installed, or the run has several processes.
    """

    lockstep = exact = False

    def __init__(self, model: PreTrainedModel):
        try:
            import vllm
        except ImportError as error:
            raise ValueError(f"rollout.engine: vllm cannot be imported ({error}); pip install vllm") from error
        if size() > 1:
            raise ValueError(f'rollout.engine: found vllm with {size()} processes, wanted "vllm_server" there')
        self.weights = tempfile.TemporaryDirectory(prefix="crest-weights-")
        save_merged(model, self.weights.name)
        self.llm = vllm.LLM(
            self.weights.name,
            skip_tokenizer_init=True,
            generation_config="vllm",  # nothing of the model's own
            dtype=str(model.dtype).removeprefix("torch."),
            max_model_len=context_length(model),
            gpu_memory_utilization=MEMORY,
            logprobs_mode="processed_logprobs",
        )

    def open(
        self, prompts: list[list[int]], sampling: Sampling, end_token: int, generator: torch.Generator
    ) -> RequestWriter:
        """Begin a row behind each prompt."""
        return RequestWriter(_Queue(self.llm.llm_engine), prompts, sampling, end_token, generator)

    def push(self, model: PreTrainedModel) -> None:
        """Save the weights (in the folder for temporary files: TMPDIR) and have vLLM load them."""
        save_merged(model, self.weights.name)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": self.weights.name})
        self.llm.reset_prefix_cache()


class _Queue:
    """Requests under way in vLLM's own queue."""

    def __init__(self, engine: Any):
        self.engine = engine
        self.limits: dict[int, int] = {}

    def send(self, row: int, ids: list[int], parameters: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        wanted = SamplingParams(**parameters, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        self.engine.add_request(str(row), {"prompt_token_ids": ids}, wanted)
        self.limits[row] = parameters["max_tokens"]

    def receive(self) -> list[tuple[int, Answer]]:
        answers = []
        while self.limits and not answers:
            for output in self.engine.step():
                row, written = int(output.request_id), output.outputs[0]
                logp = [known[token].logprob for token, known in zip(written.token_ids, written.logprobs, strict=True)]
                answers.append((row, checked_answer(written.token_ids, logp, self.limits.pop(row), _failed)))
        return answers


def _failed(words: str) -> RuntimeError:
    return RuntimeError(f"vllm {words}")
