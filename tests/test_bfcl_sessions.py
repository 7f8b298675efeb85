"""The bfcl environment on all 800 real sessions; runs where `crest-train fetch bfcl` was done."""

import importlib
import sys

import pytest
from crest_train.environments.bfcl import Bfcl
from crest_train.environments.bfcl_calls import parse, run
from crest_train.environments.bfcl_data import CATEGORIES, benchmark
from crest_train.environments.protocol import Role
from crest_train.fetch import path_of
from hypothesis import given, settings
from hypothesis import strategies as st


def _fetched(name: str) -> bool:
    try:
        path_of(name)
    except ValueError:
        return False
    return True


pytestmark = [
    pytest.mark.fetched,
    pytest.mark.skipif(not _fetched("bfcl"), reason="run `crest-train fetch bfcl` first"),
]
EMPTY = {"base": 3, "miss_func": 203, "miss_param": 203, "long_context": 3}
"""Turns without ground-truth calls, counted in the package's files."""
TURNS = {"base": 734, "miss_func": 934, "miss_param": 934, "long_context": 734}


@pytest.fixture
def package(monkeypatch):
    """The package's own executor, which evaluates text: for the trusted ground truth only."""
    monkeypatch.syspath_prepend(str(path_of("bfcl")))
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        monkeypatch.delitem(sys.modules, name)
    yield importlib.import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils")
    for name in [name for name in sys.modules if name.split(".")[0] == "bfcl_eval"]:
        del sys.modules[name]


def _ids(category):
    return [id for id, session in benchmark().sessions.items() if session.category == category]


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("whole", [False, True], ids=["by line", "whole"])
def test_the_ground_truth_earns_every_turn(category, whole):
    env = Bfcl(max_actions=40)
    rewards = []
    for id in _ids(category):
        env.begin(id)
        for _ in range(env.num_turns):
            for action in [env.gold()] if whole else env.gold().splitlines():
                step = env.step(action)
            rewards.append(step.turn_reward)
        assert step.done
    assert len(_ids(category)) == 200 and rewards == [1.0] * TURNS[category]


def test_rules_on_the_ground_truth_and_on_an_error_with_its_echo():
    env = Bfcl(max_actions=40)
    regressions = actions = 0
    for id in _ids("base"):
        env.begin(id)
        for _ in range(env.num_turns):
            steps = [env.step(action) for action in env.gold().splitlines()]
            assert steps[-1].info["role"] == Role.PROGRESS
            assert all(step.info["cause"] == -1 for step in steps)
            regressions += sum(step.info["role"] == Role.REGRESSION for step in steps)
            actions += len(steps)
    assert 0 < regressions < 0.02 * actions  # of a value that a later call of the turn sets once more
    env.begin("multi_turn_base_0")
    actions = env.gold().splitlines()
    assert actions[1] == "mkdir(dir_name='temp')"
    actions[1] = "mkdir(dir_name='tmp')"
    steps = [env.step(action) for action in actions[:-1]] + [env.step("cd(folder='temp')"), env.step("cd(folder='x')")]
    assert [(step.info["error"], step.info["cause"]) for step in steps] == [
        (False, -1),
        (False, -1),  # a wrong name: nothing fails yet
        (False, -1),  # moves the file to the name that it was to have as a folder
        (True, 2),
        (True, -1),
    ]


@pytest.mark.parametrize("wrong", ["done", "no_such_tool(x=1)\ndone", "Sorry, I cannot.", "cd(folder=\n"])
@pytest.mark.parametrize("category", CATEGORIES)
def test_wrong_actions_earn_nothing(category, wrong):
    env = Bfcl(max_actions=1)
    earned = 0.0
    for id in _ids(category):
        env.begin(id)
        earned += sum(env.step(wrong).turn_reward for _ in range(env.num_turns))
    # Only a turn that must not be answered by calls can be earned, by ending it.
    assert earned == (EMPTY[category] if wrong in ("done", "Sorry, I cannot.") else 0)


def test_a_wrong_argument_earns_nothing_and_spoils_the_state():
    env = Bfcl()
    env.begin("multi_turn_base_0")
    actions = env.gold().splitlines()
    assert actions[1] == "mkdir(dir_name='temp')"
    actions[1] = "mkdir(dir_name='tmp')"
    assert [env.step(action).turn_reward for action in actions] == [None, None, None, 0.0]
    assert env.step(env.gold()).turn_reward == 0.0


@pytest.mark.parametrize("category", CATEGORIES)
def test_replies_equal_those_of_the_packages_own_executor(category, package):
    new_env = Bfcl()
    for id in _ids(category):
        session = benchmark().sessions[id]
        new_env.begin(id)
        instances = new_env.save().instances
        for text in (text for turn in session.gold for text in turn):
            (call,), ends_turn = parse(text)
            (expected,), _ = package.execute_multi_turn_func_call(
                [text],
                dict(session.initial_config),
                list(session.api_names),
                "test",
                id,
                long_context=category == "long_context",
            )
            assert not ends_turn and run(call, instances).text == expected


def test_rollouts_do_not_reach_the_constants_of_the_modules():
    env = Bfcl()
    env.begin("multi_turn_long_context_150")
    (travel,) = [env.save().instances[api] for api in env.save().instances if api == "TravelAPI"]
    shared = type(travel)._load_scenario.__globals__["CREDIT_CARD_EXTENSION"]
    before = repr(shared)
    ours = env._state.instances["TravelAPI"].credit_card_list
    card = next(card for card in shared if card in ours)
    assert ours[card] == shared[card] and ours[card] is not shared[card]
    ours[card]["balance"] = -1.0
    assert repr(shared) == before
    env.begin("multi_turn_long_context_150")
    assert env._state.instances["TravelAPI"].credit_card_list[card] == shared[card]


def test_an_installed_package_is_left_alone(monkeypatch):
    theirs = type(sys)("bfcl_eval")
    monkeypatch.setitem(sys.modules, "bfcl_eval", theirs)
    path = list(sys.path)
    benchmark.cache_clear()
    benchmark()
    assert sys.modules["bfcl_eval"] is theirs and sys.path == path
    assert not [name for name in sys.modules if name.startswith("bfcl_eval.")]


def test_save_and_restore_replay_the_same():
    env = Bfcl()
    for id in _ids("base")[::10]:
        env.begin(id)
        env.step(env.gold())
        state, outcomes = env.save(), []
        for _ in range(2):
            env.restore(state)
            outcomes.append([env.step(env.gold()) for _ in range(env.num_turns - 1)])
        assert outcomes[0] == outcomes[1] and all(step.turn_reward == 1 for step in outcomes[0])


@pytest.mark.parametrize("form", ["compact", "json"])
def test_prompts_document_what_the_ground_truth_calls(form):
    env = Bfcl(tool_docs=form)
    for category in ("base", "miss_func"):
        for id in _ids(category):
            shown = env.begin(id) and env.system
            for _ in range(env.num_turns):
                # One session of miss_func calls in turn 1 what only turn 3 documents.
                for name in () if id == "multi_turn_miss_func_49" else (call.name for call in env._gold_calls()):
                    assert (f"\n{name}(" if form == "compact" else f'"name": "{name}"') in f"\n{shown}"
                step = env.step(env.gold())
                shown += f"\n{step.request}"


@pytest.mark.skipif(not _fetched("smollm2"), reason="run `crest-train fetch smollm2` first")
def test_prompt_lengths_in_tokens_of_smollm2():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path_of("smollm2"))
    lengths = {}
    for form in ("compact", "json"):
        env = Bfcl(tool_docs=form)
        prompts = {env.begin(id) and env.system for id in _ids("base")}
        lengths[form] = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert max(lengths["compact"]) < 700 < 2000 < min(lengths["json"])


VALUES = st.one_of(
    st.text(max_size=5),
    st.integers(-(10**18), 10**18),
    st.floats(),
    st.booleans(),
    st.none(),
    st.lists(st.text(max_size=2), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
    st.sampled_from(["..", "/", ".", "driver", "ABC", "2024-01-01", "document", "temp"]),
)
DOCS = [doc for docs in benchmark().docs.values() for doc in docs] if _fetched("bfcl") else []


@settings(max_examples=200, deadline=None)
@given(data=st.data(), seed=st.integers(0, 399))
def test_no_call_of_a_real_tool_raises(data, seed):
    env = Bfcl("eval")
    env.reset(seed)
    docs = env._docs(env._state.session)
    for doc in data.draw(st.lists(st.sampled_from(docs), max_size=6)):
        names = data.draw(st.permutations(list(doc["parameters"]["properties"])))
        values = {name: data.draw(VALUES) for name in names}
        text = ", ".join(f"{name}={value!r}" for name, value in values.items())
        step = env.step(f"{doc['name']}({text})")
        assert step.observation.encode() and step.turn_reward is None
    assert env.step("done").turn_reward in (0.0, 1.0)
    state = env.save()
    env.restore(state)
