"""The engine that writes through a vLLM server: what it sends and keeps, weights pushed, and a server that fails."""

import pytest
import torch
from crest_train import cli
from crest_train.chat import make_chat
from crest_train.config import load_config, to_toml
from crest_train.correction import rescore
from crest_train.rollouts import Sampling, rollout
from served import serving
from test_rollouts import expected_logp
from toy import WORDS, Toy, toy_model, toy_tokenizer
from toy_runs import drawn, quiet_train, save_policy, toy_config, weights

pytest.importorskip("requests")
from crest_train.engines.vllm_server import VLLMServerEngine  # noqa: E402

END = WORDS.index(";")


def play(engine, model, toys, **sampling):
    options = Sampling(**{"max_action_tokens": 4} | sampling)
    generator = torch.Generator().manual_seed(3)
    chat = make_chat(toy_tokenizer())
    return rollout(model, chat, toys, list(range(len(toys))), generator=generator, sampling=options, engine=engine)


def test_sessions_are_whole_token_for_token_and_the_log_probs_are_the_policys():
    model = toy_model()
    toys, others = ([Toy(1), Toy(3, "be brief"), Toy(2), Toy(4, "be brief")] for _ in range(2))
    with serving(toy_model()) as server:
        engine = VLLMServerEngine(server.address + "/")
        played = play(engine, model, toys, temperature=0.7)
        again = play(engine, model, others, temperature=0.7)
        requests = server.asked("/v1/completions")[1:]  # the first one asks what its log-probs mean
    assert torch.equal(played.ids, again.ids)
    for toy, session in zip(toys, played.sessions, strict=True):
        assert toy.heard == [action.text for action in session.actions]
        whole = session.prompt + session.ids
        asked = [body for body in requests if body["prompt"] == whole[: len(body["prompt"])]]
        assert {len(session.prompt) + action.start for action in session.actions} <= {len(b["prompt"]) for b in asked}
    assert all(body["stop_token_ids"] == [END] and body["temperature"] == 0.7 for body in requests)
    assert played.old_logp[played.policy].isnan().all() and played.entropy[played.policy].isnan().all()
    rescore(model, played, load_config(None, {"rollout": {"temperature": 0.7}}))
    for row, session in enumerate(played.sessions):
        wanted = expected_logp(model, session, 0.7)
        written = played.policy[row, : len(session.ids)]
        for found in (played.sampler_logp, played.old_logp):
            assert (found[row, : len(session.ids)] - wanted)[written].abs().max() < 1e-4
        told = [logp for action in session.actions for logp in action.logp]
        assert told == played.old_logp[row][played.policy[row]].tolist()
    assert (played.entropy[played.policy] > 0).all()


def test_context_and_action_limits_are_the_servers_too():
    with serving(toy_model()) as server:
        played = play(VLLMServerEngine(server.address), toy_model(context=20), [Toy(6)], max_action_tokens=3)
    session = played.sessions[0]
    assert session.cut and len(session.ids) <= 20
    assert all(body["max_tokens"] <= min(3, 20 - len(body["prompt"])) for body in server.asked("/v1/completions")[1:])


def test_a_run_trains_with_the_weights_that_it_pushes(tmp_path):
    policy = save_policy(tmp_path / "policy")
    with serving(toy_model(seed=5)) as server:  # other weights: the first push has to replace them
        engine = {"engine": "vllm_server", "server": server.address, "temperature": 0.8}
        config = toy_config(policy, rollout=engine, training={"steps": 3}, evaluation={"every": 0, "sessions": 10})
        folder = quiet_train(config, tmp_path / "run")
        served = server.model.state_dict()
    assert len(server.asked("/collective_rpc")) == len(server.asked("/reset_prefix_cache")) == 1 + 3
    assert all(torch.equal(served[name], tensor) for name, tensor in weights(folder).items())
    steps = [line for line in drawn(folder) if line["event"] == "step"]
    assert any(line["trained_rows"] for line in steps)
    for line in (line for line in steps if line["trained_rows"]):
        assert line["sampling/sampling_logp_difference/max"] < 1e-4
        assert line["sampling/importance_sampling_ratio/mean/turn_1"] == pytest.approx(1, abs=1e-4)
        assert line["ratio"] == pytest.approx(1, abs=0.05) and line["entropy"] > 0


def test_another_distribution_than_the_policys_is_weighed_and_told(tmp_path):
    policy = save_policy(tmp_path / "policy")
    with serving(toy_model(), off=2.0) as server:
        engine = {"engine": "vllm_server", "server": server.address, "correction": 1.25}
        config = toy_config(policy, rollout=engine, training={"steps": 1}, evaluation={"every": 0, "sessions": 2})
        line = next(line for line in drawn(quiet_train(config, tmp_path / "run")) if line["event"] == "step")
    assert line["sampling/importance_sampling_ratio/max"] == 1.25
    assert line["sampling/importance_sampling_ratio/min"] < 0.9
    assert 0 < line["sampling/importance_sampling_ratio/truncated"] < 1
    assert line["sampling/sampling_logp_difference/mean/turn_2"] > 0.01


def test_log_probs_of_another_distribution_are_refused():
    wanted = "top_k = 1, wanted 0.*processed_logprobs"
    with serving(toy_model(), raw=True) as server, pytest.raises(ValueError, match=wanted):
        VLLMServerEngine(server.address)


def bad(choice):
    """A fault: every completion after the first one, the engine's own, is the choice."""
    seen = []

    def fault(path, body):
        if path == "/v1/completions":
            seen.append(body)
            if len(seen) > 1:
                return 200, {"choices": [choice | {"prompt_token_ids": choice.get("prompt_token_ids", body["prompt"])}]}

    return fault


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (lambda path, body: (500, b"out of memory") if body else None, r"answered 500: out of memory"),
        (lambda path, body: (200, b"<html>"), r"/v1/models gave '<html>', wanted JSON"),
        (lambda path, body: (200, {"data": []}), r"/v1/models gave \"{'data': \[\]}\", wanted a list of models"),
        (
            lambda path, body: (404, b"{}") if path == "/collective_rpc" else None,
            "rpc answered 404: {}; .*DEV_MODE=1",
        ),
        (
            lambda path, body: (200, {"success": False}) if path == "/reset_prefix_cache" else None,
            "/reset_prefix_cache kept what the old weights made",
        ),
        (bad({"text": "a"}), "/v1/completions gave no token ids with log-probs, wanted .* vLLM 0.10.2"),
        (bad({"token_ids": [7], "logprobs": None}), "gave no token ids with log-probs"),
        (bad({"token_ids": [], "logprobs": {"token_logprobs": []}}), "gave 0 token ids and 0 log-probs"),
        (bad({"token_ids": [7, 8], "logprobs": {"token_logprobs": [-1.0]}}), "gave 2 token ids and 1 log-probs"),
        (
            bad({"token_ids": [7], "logprobs": {"token_logprobs": [-1.0]}, "prompt_token_ids": [1]}),
            r"continued 1 other token ids than the \d+ sent",
        ),
    ],
)
def test_a_server_that_answers_otherwise_is_told_with_what_it_said(fault, complaint):
    with serving(toy_model(), fault=fault) as server, pytest.raises(ConnectionError, match=complaint):
        engine = VLLMServerEngine(server.address)
        engine.push(toy_model())
        play(engine, toy_model(), [Toy(2), Toy(2)])


def test_no_server_is_one_line_and_nothing_is_trained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    toy_model().save_pretrained("policy")
    toy_tokenizer().save_pretrained("policy")
    with serving(toy_model()) as server:
        address = server.address
    config = toy_config("policy", rollout={"engine": "vllm_server", "server": address})
    (tmp_path / "c.toml").write_text(to_toml(config))
    monkeypatch.setattr("sys.argv", ["crest-train", "run", "c.toml", "--output", "run"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert f"rollout.server: {address} cannot be reached" in said and "vllm serve MODEL" in said
