"""A vLLM server: token ids over its OpenAI-compatible completions endpoint, weights through a folder that both see.

    VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs

on the machine of the trainer. The development mode has the endpoints that take new weights; the log-probs mode makes
the server tell with which probability a token was drawn (its default is that at temperature 1, before any cut).
"""

import tempfile
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from transformers import PreTrainedModel

from crest_train.engines.merged import save_merged
from crest_train.engines.protocol import Answer
from crest_train.engines.vllm_requests import RequestWriter, checked_answer, parameters
from crest_train.ranks import first_ahead, is_first
from crest_train.sampling import Sampling

COMMAND = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
"""How a server is started that this engine can use."""

TIMEOUT = 600
"""Seconds that a request may take."""

_COMPLETIONS = "/v1/completions"


class VLLMServerEngine:
    """Writes through the server at an address such as http://127.0.0.1:8000.

    Raises ConnectionError: no server there, one that answers with an error, or not as vLLM does. ValueError: `requests`
    is not installed, or the server's log-probs are not those of the distribution that it samples from.
    """

    lockstep = exact = False

    def __init__(self, server: str):
        try:
            import requests
            from urllib3 import Retry
        except ImportError as error:
            raise ValueError("rollout.engine: vllm_server needs requests; pip install 'crest-ops[server]'") from error
        self.server, self.error = server.rstrip("/"), requests.RequestException
        retries = Retry(total=2, read=0, backoff_factor=0.5, status_forcelist=(502, 503, 504), allowed_methods=None)
        retries.raise_on_status = False
        self.session = requests.Session()
        self.session.mount(self.server, requests.adapters.HTTPAdapter(pool_maxsize=1024, max_retries=retries))
        models = self.call("GET", "/v1/models")
        try:
            self.model = models["data"][0]["id"]
        except (TypeError, LookupError) as error:
            raise self._failed("/v1/models", f"gave {str(models)[:200]!r}, wanted a list of models") from error
        self._check_log_probs()
        self.weights = tempfile.TemporaryDirectory(prefix="crest-weights-")

    def open(
        self, prompts: list[list[int]], sampling: Sampling, end_token: int, generator: torch.Generator
    ) -> RequestWriter:
        """Begin a row behind each prompt; as many requests as there are rows are under way at a time."""
        return RequestWriter(_Threads(self, len(prompts)), prompts, sampling, end_token, generator)

    def push(self, model: PreTrainedModel) -> None:
        """Save the weights (in the folder for temporary files: TMPDIR) and have the server load them."""
        with first_ahead():
            if is_first():
                save_merged(model, self.weights.name)
                where = {"weights_path": self.weights.name}
                self.call("POST", "/collective_rpc", {"method": "reload_weights", "kwargs": where})
                if not self.call("POST", "/reset_prefix_cache")["success"]:
                    raise self._failed(
                        "/reset_prefix_cache", "kept what the old weights made: is it used by others too?"
                    )

    def complete(self, ids: list[int], wanted: dict[str, Any]) -> Answer:
        """One request and its answer; wanted: the sampling's parameters."""
        body = {"model": self.model, "prompt": ids, "return_token_ids": True, **wanted}
        found = self.call("POST", _COMPLETIONS, body)
        try:
            choice = found["choices"][0]
            tokens, logp, given = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["prompt_token_ids"]
        except (TypeError, LookupError) as error:
            words = "gave no token ids with log-probs, wanted those that vLLM 0.10.2 or newer returns"
            raise self._failed(_COMPLETIONS, words) from error
        if given != ids:
            raise self._failed(_COMPLETIONS, f"continued {len(given or [])} other token ids than the {len(ids)} sent")
        return checked_answer(tokens, logp, wanted["max_tokens"], lambda words: self._failed(_COMPLETIONS, words))

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that an endpoint answers, None when it answers nothing."""
        try:
            response = self.session.request(method, self.server + path, json=body, timeout=TIMEOUT)
        except self.error as error:
            reason = str(error).splitlines()[0][:200]
            raise ConnectionError(
                f"rollout.server: {self.server} cannot be reached ({reason}); start `{COMMAND}`"
            ) from error
        if not response.ok:
            hint = f"; start `{COMMAND}`" if response.status_code == 404 else ""
            raise self._failed(path, f"answered {response.status_code}: {response.text[:300]}{hint}")
        try:
            return response.json() if response.content else None
        except ValueError as error:
            raise self._failed(path, f"gave {response.text[:200]!r}, wanted JSON") from error

    def _check_log_probs(self) -> None:
        """A token that was the only one left by top_k = 1 was drawn with probability 1: that is what it must say."""
        one = parameters(Sampling(top_k=1), end_token=0, limit=1, seed=0)
        logp = self.complete([1, 2, 3], one).sampler_logp[0]
        if abs(logp) > 1e-3:
            raise ValueError(
                f"rollout.server: {self.server} gives log-probs of another distribution than it samples from (found "
                f"{logp:.3f} for the only token left by top_k = 1, wanted 0); start `{COMMAND}`"
            )

    def _failed(self, path: str, words: str) -> ConnectionError:
        return ConnectionError(f"rollout.server: {self.server}{path} {words}")


class _Threads:
    """Requests under way, each in a thread that waits for it."""

    def __init__(self, engine: VLLMServerEngine, most: int):
        self.engine, self.threads = engine, ThreadPoolExecutor(max(1, most))
        self.running: dict[Future[Answer], int] = {}

    def send(self, row: int, ids: list[int], parameters: dict[str, Any]) -> None:
        self.running[self.threads.submit(self.engine.complete, ids, parameters)] = row

    def receive(self) -> list[tuple[int, Answer]]:
        if not self.running:
            self.threads.shutdown()
            return []
        done, _ = wait(self.running, return_when=FIRST_COMPLETED)
        answers = [(self.running.pop(future), future.result()) for future in done]
        return sorted(answers, key=lambda answer: answer[0])
