"""A small HTTP server that answers as vLLM's does: a Hugging Face model run plainly over each request's whole text.

Runs in threads of the test's process. What it was asked is in `calls`; `fault` changes its answers.
"""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from safetensors.torch import load_file
from toy import WORDS


class Served:
    """The state of the server.

    raw: log-probs at temperature 1, before any cut, as vLLM's default mode has them. off: what is added to the logit
    of the letter a, another engine's rounding made large. fault: (path, body) -> an answer in place of the right one.
    """

    def __init__(self, model, raw=False, off=0.0, fault=lambda path, body: None):
        self.model, self.raw, self.off, self.fault = model, raw, off, fault
        self.calls, self.lock = [], threading.Lock()
        self.address = ""

    def asked(self, path):
        """The bodies of the requests to one endpoint."""
        return [body for where, body in self.calls if where == path]

    def answer(self, path, body):
        with self.lock:
            self.calls.append((path, body))
            wrong = self.fault(path, body)
            if wrong is not None:
                return wrong
            if path == "/v1/models":
                return 200, {"data": [{"id": "policy"}]}
            if path == "/v1/completions":
                return 200, {"choices": [self.complete(body)]}
            if path == "/collective_rpc" and body["method"] == "reload_weights":
                weights = load_file(body["kwargs"]["weights_path"] + "/model.safetensors")
                self.model.load_state_dict(weights)
                return 200, {"results": [None]}
            return (200, {"success": True}) if path == "/reset_prefix_cache" else (404, {"detail": "Not Found"})

    @torch.no_grad()
    def complete(self, body):
        generator = torch.Generator().manual_seed(body["seed"])
        tokens, logps = [], []
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in body["stop_token_ids"]):
            logits = self.model(torch.tensor([body["prompt"] + tokens])).logits[0, -1].double()
            logits[WORDS.index("a")] += self.off
            whole = logits.log_softmax(-1)
            p = (logits / body["temperature"]).softmax(-1)
            if body["top_k"]:
                p = torch.where(p >= p.topk(body["top_k"]).values[-1], p, 0)
                p = p / p.sum()
            tokens.append(int(torch.multinomial(p, 1, generator=generator)))
            logps.append(float(whole[tokens[-1]] if self.raw else p[tokens[-1]].log()))
        return {"token_ids": tokens, "prompt_token_ids": body["prompt"], "logprobs": {"token_logprobs": logps}}


@contextmanager
def serving(model, **options):
    """A `Served` that listens at its address until the block ends."""
    state = Served(model, **options)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            length = int(self.headers.get("Content-Length", 0))
            status, answer = state.answer(self.path, json.loads(self.rfile.read(length)) if length else None)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
