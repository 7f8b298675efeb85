"""Environments in a process apart: a lost process costs the session that met it, and no other."""

import os
import signal

import pytest
import torch
from crest_train.chat import make_chat
from crest_train.environments import make_environment
from crest_train.environments.protocol import Role
from crest_train.rollouts import Sampling, rollout
from toy import toy_model, toy_tokenizer

OPTIONS = {"environment": "fragile:Fragile", "timeout": 5.0}


def begun(seed=1, **options):
    environment = make_environment("supervised", OPTIONS | options)
    assert environment.reset(seed) == f"session {seed}"
    return environment


def test_it_is_the_environment_in_another_process():
    environment = begun(7)
    assert (environment.system, environment.num_turns, environment.gold()) == ("say a", 1, "a\na\na")
    steps = [environment.step(action) for action in ("a", "b", "a")]
    assert [step.observation for step in steps] == ["7: a", "7: a b", "7: a b a"]
    assert steps[2].turn_reward == pytest.approx(2 / 3) and steps[2].done
    pids = {step.info["pid"] for step in steps}
    assert len(pids) == 1 and os.getpid() not in pids
    assert begun(8).step("a").info["pid"] in pids  # sessions share the process


def killed(environment):
    os.kill(environment.step("a").info["pid"], signal.SIGKILL)
    return environment.step("a")


def frozen(environment):
    os.kill(environment.step("a").info["pid"], signal.SIGSTOP)
    return environment.step("a")


@pytest.mark.parametrize(
    ("lose", "how"),
    [
        (lambda environment: environment.step("die"), "died"),
        (lambda environment: environment.step("hang"), "no answer within 1 s"),
        (killed, "died"),
        (frozen, "no answer within 1 s"),
    ],
    ids=["dies", "hangs", "killed", "frozen"],
)
def test_a_lost_process_costs_one_session(lose, how):
    other, environment = begun(2, timeout=1.0), begun(1, timeout=1.0)
    old = other.step("a").info["pid"]
    step = lose(environment)
    assert how in step.observation and step.turn_reward == 0 and step.done
    assert step.info["lost"] and step.info["error"] and step.info["role"] == Role.REGRESSION
    with pytest.raises(ValueError, match="its process was lost"):
        environment.step("a")

    step = other.step("b")  # the other session is played again in a new process, and goes on
    assert step.observation == "2: a b" and step.info["pid"] != old
    assert environment.reset(3) == "session 3" and environment.step("a").observation == "3: a"


def test_what_it_raises_is_told_and_loses_nothing():
    environment = begun()
    with pytest.raises(ValueError, match="environment fragile:Fragile: step raised KeyError: 'its own'"):
        environment.step("raise")
    assert environment.step("a").observation == "1: a"


def test_a_saved_session_is_played_again():
    environment, other = begun(4), begun(5)
    environment.step("b")
    state = environment.save()
    environment.step("a")
    other.restore(state)
    assert other.step("a").observation == "4: b a"


def test_a_session_that_cannot_begin_is_told():
    environment = make_environment("supervised", {"environment": "fragile:Nobody", "timeout": 5.0})
    with pytest.raises(ValueError, match="could not import 'fragile:Nobody'"):
        environment.reset(0)
    with pytest.raises(ValueError, match="timeout: found 0.0, wanted seconds above 0"):
        make_environment("supervised", OPTIONS | {"timeout": 0.0})


def test_lost_sessions_are_counted():
    environments = [make_environment("supervised", OPTIONS) for _ in range(3)]
    real = environments[1].step
    environments[1].step = lambda action: real("die")
    played = rollout(
        toy_model(),
        make_chat(toy_tokenizer()),
        environments,
        [1, 2, 3],
        generator=torch.Generator().manual_seed(0),
        sampling=Sampling(max_action_tokens=3),
    )
    assert played.lost_sessions == 1 and len(played.sessions[1].actions) == 1
    assert played.sessions[1].turn_reward == [0.0]
    assert [len(session.actions) for session in played.sessions] == [3, 1, 3]
