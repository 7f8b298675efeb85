"""The bfcl environment on a small API of our own: the same paths as the real sessions take, without a download."""

import json

import pytest
from crest_train.environments import bfcl, bfcl_rules
from crest_train.environments.bfcl import Bfcl
from crest_train.environments.bfcl_data import CATEGORIES, Benchmark, Session, session_id
from crest_train.environments.bfcl_prompt import json_schema, signature, tool_docs
from crest_train.environments.protocol import Role
from hypothesis import given, settings
from hypothesis import strategies as st
from lamp import SHARED, Lamp


class Desk:
    """Drawers with things in them; an error names the thing that it is about."""

    def __init__(self):
        self.drawers = {}
        self._open = self.drawers

    def _load_scenario(self, scenario, long_context=False):
        pass

    def make(self, name: str):
        if name in self.drawers:
            return {"error": f"make: '{name}' exists"}
        self.drawers[name] = {"kind": "drawer"}

    def take(self, name: str):
        if name not in self.drawers:
            return {"error": f"take: no '{name}'"}
        del self.drawers[name]

    def put(self, name: str, thing: str):
        if name not in self.drawers:
            return {"error": f"put: no '{name}'"}
        self.drawers[name][thing] = 1

    def open(self, name: str):
        self._open = self.drawers[name]


def _doc(name, properties=None, required=()):
    parameters = {"type": "dict", "properties": properties or {}, "required": list(required)}
    return {"name": name, "description": f"Tool {name}.", "parameters": parameters, "response": {"type": "dict"}}


TEXT = {"type": "string", "description": "Any."}
DOCS = (
    _doc("switch", {"on": {"type": "boolean", "description": "State."}}, ["on"]),
    _doc("colour", {"name": {"type": "string", "description": 'Which. [Enum]: ["red", "blue"]', "default": "red"}}),
    _doc("look"),
    _doc("write", {"text": TEXT}, ["text"]),
    _doc("power", {"base": {"type": "float", "description": ""}, "exponent": {"type": "float", "description": ""}}),
)


def _session(id, requests, gold, excluded=(), revealed=None, apis=("Lamp",)):
    category = id.removeprefix("multi_turn_").rpartition("_")[0]
    config = {"Lamp": {"on": False}}
    return Session(id, category, requests, gold, apis, config, frozenset(excluded), revealed or {})


BASE = _session(
    "multi_turn_base_0",
    ("Light, blue.", "How is it?", "Off again."),
    (("switch(True)", "colour(name = 'blue')"), ("look()",), ("switch(on=False)",)),
    excluded=["power"],
)
MISS_FUNC = _session(
    "multi_turn_miss_func_1",
    ("Light.", "Make it blue.", None),
    (("switch(on=True)",), (), ("colour(name='blue')",)),
    revealed={2: ("colour",)},
)
DRAWERS = _session(
    "multi_turn_base_5",
    ("A drawer.", "Ink."),
    (("make('pens')", "put('pens', 'red')"), ("put('pens', 'ink')",)),
    apis=("Desk",),
)


def _new_lamp(api, scenario, long_context):
    lamp = {"Lamp": Lamp, "Desk": Desk}[api]()
    lamp._load_scenario(scenario, long_context)
    return lamp


def _covers(ours, gold, turn):
    left = list(ours)
    return all(left.remove(reply) is None if reply in left else False for reply in gold)


def _same_state(ours, gold):
    return all(vars(ours[api]) == vars(gold[api]) for api in gold)


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    ids = [session_id(category, n) for category in CATEGORIES for n in range(200)]
    fillers = {
        id: _session(id, ("Look.",), (("look()",),), apis=("Lamp", "Fan")[: 1 + (i % 4 == 0)])
        for i, id in enumerate(ids)
    }
    sessions = fillers | {session.id: session for session in (BASE, MISS_FUNC, DRAWERS)}
    benchmark = Benchmark(sessions, {"Lamp": DOCS, "Fan": (), "Desk": ()}, _new_lamp, _same_state, _covers)
    monkeypatch.setattr(bfcl, "benchmark", lambda: benchmark)
    monkeypatch.setitem(SHARED, "colour", "red")


def _started(id="multi_turn_base_0", **options):
    env = Bfcl(**options)
    env.begin(id)
    return env


# ---- turns and rewards


def test_the_ground_truth_earns_every_turn_line_by_line_and_in_one_action():
    for whole in (False, True):
        env = Bfcl()
        assert env.begin("multi_turn_base_0") == "Light, blue." and env.num_turns == 3
        assert env.gold() == "switch(True)\ncolour(name='blue')\ndone"
        rewards, requests = [], []
        for _ in range(env.num_turns):
            for action in [env.gold()] if whole else env.gold().splitlines():
                step = env.step(action)
            rewards.append(step.turn_reward)
            requests.append(step.request)
        assert rewards == [1.0, 1.0, 1.0] and requests == ["How is it?", "Off again.", None] and step.done


@pytest.mark.parametrize(
    "actions, reward",
    [
        (["done"], 0.0),
        (["I cannot do that."], 0.0),
        (["switch(on=True)", "done"], 0.0),
        (["colour(name='blue')", "done"], 0.0),
        (["[switch(on=True), colour(name='green')]", "done"], 0.0),
        (["[switch(on=True), fly()]", "done"], 0.0),
        (["colour(name='blue')", "switch(on=True)", "Here you are."], 1.0),
        (["switch(on=", "fly()", "look()", "[switch(on=True), colour(name='blue')]\ndone"], 1.0),
    ],
)
def test_turn_reward(actions, reward):
    env = _started()
    steps = [env.step(action) for action in actions]
    assert [step.turn_reward for step in steps[:-1]] == [None] * (len(actions) - 1)
    assert steps[-1].turn_reward == reward and steps[-1].request == "How is it?"


def test_a_wrong_state_fails_later_turns_until_it_is_mended():
    env = _started()
    assert env.step("switch(on=True)\ndone").turn_reward == 0.0
    assert env.step("look()\ndone").turn_reward == 0.0
    assert env.step("switch(on=False)\ncolour(name='blue')\ndone").turn_reward == 1.0


def test_a_reply_of_an_earlier_turn_counts_but_each_turn_needs_a_call():
    env = _started()
    assert env.step("switch(True)\ncolour('blue')\nlook()\nlook()\ndone").turn_reward == 1.0
    assert env.step("done").turn_reward == 0.0


def test_a_tool_that_comes_later():
    env = _started("multi_turn_miss_func_1")
    assert "switch(on: bool)" in env.system and "colour" not in env.system and "power" in env.system
    assert env.step("switch(on=True)\ndone").request == "Make it blue."
    step = env.step("done")
    assert step.turn_reward == 1.0 and step.request.startswith("colour(name?: red|blue)\n")
    assert env.step("colour(name='blue')\ndone").turn_reward == 1.0


def test_a_turn_that_cannot_be_done_allows_no_call():
    env = _started("multi_turn_miss_func_1")
    env.step("switch(on=True)\ndone")
    assert env.step("look()\ndone").turn_reward == 0.0


def test_a_turn_without_an_end_is_cut_off_and_fails():
    env = _started(max_actions=2)
    assert env.step("switch(on=True)").turn_reward is None
    step = env.step("colour(name='blue')")
    assert (step.turn_reward, step.request, step.observation) == (0.0, "How is it?", "None")
    assert env.step("look()").turn_reward is None and env.step("done").turn_reward == 1.0


def _facts(*steps):
    names = ("error", "feedback", "redundant")
    return [tuple(step.info[name] for name in names) for step in steps]


def test_info_and_observation():
    env = _started()
    step = env.step("[switch(on=True), look()]")
    assert step.observation == '{"on": true}\n{"on": true, "colour": "red"}'
    steps = [step, env.step("look()"), env.step("look(1)"), env.step("look(")]
    assert _facts(*steps) == [(False, 1, False), (False, 1, True), (True, -1, False), (True, -1, False)]
    assert env.step(r"write('\ud800')").observation == "?"
    step = env.step("done")
    assert step.observation is None and _facts(step) == [(False, 0, False)]


def _judged(env, *actions):
    infos = [env.step(action).info for action in actions]
    return [(info["role"], info["error"], info["cause"]) for info in infos]


def test_roles_by_rule():
    """The turn's ground truth leaves the lamp on and blue."""
    env = _started()
    actions = ("look()", "look()", "switch(on=True)", "colour('green')", "colour('red')", "switch(on=False)", "look(")
    assert _judged(env, *actions) == [
        (Role.EXPLORATION, False, -1),
        (Role.NO_PROGRESS, False, -1),  # it was told already
        (Role.PROGRESS, False, -1),
        (Role.NO_PROGRESS, False, -1),  # wrong before and after
        (Role.NO_PROGRESS, False, -1),
        (Role.REGRESSION, False, -1),
        (Role.NO_PROGRESS, True, -1),
    ]
    assert _judged(env, "[switch(on=True), colour('blue')]\ndone") == [(Role.PROGRESS, False, -1)]
    assert _judged(env, "done") == [(Role.REGRESSION, False, -1)]  # nothing was looked up
    assert _judged(_started(max_actions=1), "switch(on=True)") == [(Role.REGRESSION, False, -1)]


def test_a_cause_is_the_action_that_left_what_the_error_names_otherwise_than_the_ground_truth_has_it():
    env = _started("multi_turn_base_5")  # wants the drawer "pens" with "red" in it, then "ink" in that
    assert _judged(env, "put('pen', 'red')", "put('pens', 'red')", "make('pens')", "take('pens')", "make('pen')") == [
        (Role.NO_PROGRESS, True, -1),  # "red" is wanted and was not put anywhere: from now on this is to blame
        (Role.NO_PROGRESS, True, -1),  # and this for "pens",
        (Role.PROGRESS, False, -1),  # until here
        (Role.REGRESSION, False, -1),
        (Role.REGRESSION, False, -1),
    ]
    assert _judged(env, "take('pens')", "make('pen')", "take('red')", "done") == [
        (Role.NO_PROGRESS, True, 3),
        (Role.NO_PROGRESS, True, 4),
        (Role.NO_PROGRESS, True, 0),
        (Role.REGRESSION, False, -1),
    ]
    env.begin("multi_turn_base_5")
    assert _judged(env, "done", "put('pens', 'ink')") == [
        (Role.REGRESSION, False, -1),
        (Role.NO_PROGRESS, True, 0),  # the turn that was to make it ended without
    ]


def test_state_keys_are_equal_for_equal_states_alone():
    def keys(*actions):
        env = _started("multi_turn_base_5")
        return [env.step(action).info["state_key"] for action in actions]

    start, failed, made, looked = keys("take('pens')", "make('pens')", "open('pens')", "take('pens')")
    assert start == failed and len({start, made, looked}) == 3  # a drawer that is open is another state
    assert keys("make('pens')", "take('pens')", "make('pens')", "done")[1:] == [made, start, made]
    assert keys("done", "done")[1] != start and all(0 <= key < 2**63 for key in (start, made))


def test_what_holds_itself_is_laid_out_once():
    desk = Desk()
    desk.drawers["a"] = desk.drawers
    assert bfcl_rules.layout({"Desk": desk}) == {("Desk", "_open"): ("Desk", "drawers")}


def test_a_session_that_is_over_or_not_begun():
    env = Bfcl()
    with pytest.raises(ValueError, match="call reset"):
        env.step("done")
    assert (env.system, env.num_turns) == ("", 0)
    env.begin("multi_turn_base_0")
    for _ in range(3):
        env.step("done")
    with pytest.raises(ValueError, match="over"):
        env.step("done")
    with pytest.raises(ValueError, match="multi_turn_base_900"):
        env.begin("multi_turn_base_900")


# ---- isolation, save and restore


def test_rollouts_share_nothing():
    first, second = _started(), _started()
    first.step("[switch(on=True), colour(name='green'), write(text='x')]")
    assert second.step("look()").observation == '{"on": false, "colour": "red"}'
    assert _started().step("look()").observation == '{"on": false, "colour": "red"}' and SHARED == {"colour": "red"}


def test_save_and_restore_are_exact_and_independent():
    env = _started()
    env.step("switch(on=True)")
    state = env.save()
    ends = []
    for _ in range(2):
        env.restore(state)
        assert env.step("look()").observation == '{"on": true, "colour": "red"}'
        ends.append((env.step("colour('blue')\ndone"), env.step("look()\ndone"), env.gold()))
        assert env.step("switch(on=False)\ndone").done
    assert ends[0] == ends[1] and ends[0][0].turn_reward == ends[0][1].turn_reward == 1.0
    other = _started("multi_turn_miss_func_1")
    other.restore(state)
    assert other.system == _started().system and other.gold().startswith("switch(True)")


# ---- text that is anything


FRAGMENTS = (
    "switch( colour( look() write( power( on=True name='blue' ) ] [ , \n done ``` ' \" = 9**9 1e999 -1 None {} \\ # : "
    "lambda x: x import os __import__('os') self. _secret() \0 \ud800 é [[ ]] exponent=10 base='a' async await := ; "
).split(" ")
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(TEXTS, min_size=1, max_size=4))
def test_no_text_raises(texts):
    env = _started(max_actions=3)
    for text in texts:
        step = env.step(text)
        assert (step.observation is None) or step.observation.encode()
        assert step.turn_reward in (None, 0.0, 1.0)
        if step.done:
            break


# ---- docs


def test_signature():
    assert tool_docs(DOCS, "compact").splitlines() == [
        "switch(on: bool)",
        "colour(name?: red|blue)",
        "look()",
        "write(text)",
        "power(base?: float, exponent?: float)",
    ]


def test_many_choices_are_left_out():
    many = {"type": "string", "description": "City. [Enum]: " + ", ".join("ABCDEFGHI")}
    assert signature(_doc("go", {"city": many}, ["city"])) == "go(city)"


def test_json_schema():
    nested = {"type": "array", "items": {"type": "float"}, "description": "Numbers."}
    found = json.loads(json_schema(_doc("mean", {"numbers": nested}, ["numbers"])))
    wanted = {"type": "array", "items": {"type": "number"}, "description": "Numbers."}
    parameters = {"type": "object", "properties": {"numbers": wanted}, "required": ["numbers"]}
    function = {"name": "mean", "description": "Tool mean.", "parameters": parameters}
    assert found == {"type": "function", "function": function}


@pytest.mark.parametrize("form", ["compact", "json"])
def test_excluded_tools_are_not_in_the_prompt(form):
    system = _started(tool_docs=form).system
    assert "switch" in system and "power" not in system


# ---- splits


def test_splits():
    train, evaluation = Bfcl("train"), Bfcl("eval")
    assert (len(train.session_ids), len(evaluation.session_ids)) == (100, 400)
    assert [train.session_of(seed) for seed in range(3)] == [session_id("base", n) for n in (0, 74, 148)]
    assert [evaluation.session_of(seed) for seed in range(5)] == [
        "multi_turn_base_1",
        "multi_turn_miss_func_1",
        "multi_turn_miss_param_1",
        "multi_turn_long_context_1",
        "multi_turn_base_75",
    ]
    trained = {train.session_of(seed) for seed in range(100)}
    evaluated = {evaluation.session_of(seed) for seed in range(400)}
    assert trained == {f"multi_turn_base_{n}" for n in range(0, 200, 2)}
    assert evaluated == {
        f"multi_turn_{category}_{n}"
        for category in ("base", "miss_func", "miss_param", "long_context")
        for n in range(1, 200, 2)
    }
    assert train.session_of(100) == train.session_of(0)
    assert Bfcl("eval", categories=["miss_param"]).session_of(1) == "multi_turn_miss_param_75"


def test_sessions_of_some_apis():
    # Of the toy sessions every fourth, and so every second of the even ones, needs the fan as well; base 0 does not.
    lamp = Bfcl(apis=["Lamp"])
    numbers = [int(id.rpartition("_")[2]) for id in lamp.session_ids]
    assert numbers[:3] == [0, 74, 22] and set(numbers) == {0, *range(2, 200, 4)}
    assert lamp.session_of(51) == lamp.session_of(0) == "multi_turn_base_0"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"split": "test"}, "split: found 'test', wanted one of train, eval"),
        ({"categories": ["bas"]}, "categories: .*wanted a list of base"),
        ({"categories": "base"}, "categories"),
        ({"categories": []}, "categories"),
        ({"tool_docs": "xml"}, "tool_docs: found 'xml', wanted one of compact, json"),
        ({"max_actions": 0}, "max_actions: found 0"),
        ({"apis": ["Lmap"]}, "apis: .*wanted a list of Desk, Fan, Lamp"),
        ({"apis": "Lamp"}, "apis"),
        ({"apis": ["Fan"]}, "no session can be played"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        Bfcl(**options)


def test_the_recipe_is_a_configuration_for_this_environment():
    from pathlib import Path

    from crest_train.config import load_config

    config = load_config(Path(__file__).parents[1] / "train" / "recipes" / "bfcl_smollm2.toml")
    assert (config.environment.name, config.policy.model, config.method.name) == ("bfcl", "smollm2", "crest")
    trained = config.environment.options | {"apis": None}
    evaluated = config.held_out_options() | {"apis": None}
    assert not {id.rpartition("_")[2] for id in Bfcl(**trained).session_ids} & {
        id.rpartition("_")[2] for id in Bfcl(**evaluated).session_ids
    }
