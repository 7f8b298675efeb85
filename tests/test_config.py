"""Configuration: defaults are the default run, files round-trip, mistakes are named."""

import sys
import textwrap
from pathlib import Path

import pytest
import torch
from crest_train.config import Config, load_config, to_toml
from crest_train.credit import make_method
from crest_train.environments import ENVIRONMENTS, FIRST_HELD_OUT_SEED, make_environment
from crest_train.loading import check_policy_section
from toy import Toy

from crest_ops import PPOClip

RECIPES = Path(__file__).parents[1] / "train" / "recipes"


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.fixture
def own_module(tmp_path, monkeypatch):
    """Write modules of the user's own into the current folder, which is not on sys.path."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])

    def write(name, text):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / "here" / f"{name}.py").write_text(textwrap.dedent(text), encoding="utf-8")

    return write


def test_default_run():
    config = Config()
    assert (config.environment.name, config.method.name, config.policy.model) == ("desk", "crest", "desk")
    assert (config.rollout.sessions, config.rollout.group_size, config.training.steps) == (8, 8, 20)
    assert (config.training.rate, config.training.betas, config.training.minibatches) == (6e-4, (0.9, 0.95), 2)
    assert make_environment("desk", config.environment.options).num_turns == 8
    assert load_config() == config


def test_desk_recipe_is_the_default_run_spelled_out():
    recipe = load_config(RECIPES / "desk.toml").model_dump()
    default = Config().model_dump()
    environment, method = (recipe[table].pop("options") for table in ("environment", "method"))
    for table in ("environment", "method"):
        default[table].pop("options")
    assert recipe == default
    spelled, plain = make_environment("desk", environment), make_environment("desk", {})
    assert vars(spelled) == vars(plain)
    section = Config().method
    assert make_method(section.model_copy(update={"options": method}))[1] == make_method(section)[1]


def test_resolved_configuration_reads_back_equal(tmp_path):
    options = {"num_turns": 3, "coupled": 0.5, "words": ["a", 'b"c\n'], "deep": {"flag": True}}
    config = load_config(None, {"environment": {"options": options}, "training": {"rate": 1e-7}, "run": {"seed": 5}})
    assert load_config(written(tmp_path, to_toml(config))) == config
    assert load_config(written(tmp_path, to_toml(Config()))) == Config()


def test_overrides_win_over_the_file(tmp_path):
    path = written(tmp_path, '[method]\nname = "grpo"\n[training]\nsteps = 3\nrate = 1e-3\n')
    config = load_config(path, {"training": {"steps": 7}})
    assert (config.method.name, config.training.steps, config.training.rate) == ("grpo", 7, 1e-3)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (
            "[training]\nlearning_rate = 1\n",
            "unknown key 'training.learning_rate'; known keys here: steps, minibatches",
        ),
        ("[trainer]\nsteps = 1\n", "unknown key 'trainer'; known keys here: environment, policy"),
        ("[training]\nsteps = -1\n", "training.steps: .*greater than or equal to 0, found -1"),
        ("[training]\nsteps = 'many'\n", "training.steps: .*found 'many'"),
        ("training = 3\n", "training: "),
        ("[method]\nsession_reward = 'sum'\n", "method.session_reward: .*'all' or 'mean'"),
        ("[value]\nsource = 'continuations'\n", "value: wanted checkpoints = 1 or more where source is"),
        ("[rollout]\ntemperature = 0\n", "rollout.temperature: "),
        ("[evaluation]\ntemperature = 0\n", "evaluation.temperature: .*greater than 0, found 0"),
        ("[training]\nsteps = '1'\n", "training.steps: .*integer, found '1'"),
        ("[training]\nsteps = 1.0\n", "training.steps: .*integer.*, found 1.0"),
        ("[training]\nrate = true\n", "training.rate: .*number, found True"),
        ("[training]\nrate = '1e-3'\n", "training.rate: .*number, found '1e-3'"),
        ("[training]\nclip = inf\n", "training.clip: .*finite number, found inf"),
        ("[training]\nbetas = [0.9, 1.0]\n", "training.betas.1: .*less than 1, found 1.0"),
        ("[training]\nbetas = [-0.1, 0.9]\n", "training.betas.0: .*greater than or equal to 0, found -0.1"),
        ("[training]\nbetas = ['0.9', 0.9]\n", "training.betas.0: .*number, found '0.9'"),
        ("[training]\nbetas = [0.9]\n", "training.betas.1: Field required"),
        ("[training]\nbetas = 0.9\n", "training.betas: .*found 0.9"),
        ("[run]\nseed = true\n", "run.seed: .*integer, found True"),
        (f"[run]\nseed = {2**63}\n", "run.seed: .*less than or equal to"),
        ("[run]\nthreads = 1000000000000\n", "run.threads: .*less than or equal to"),
        ("[policy]\nmodel = 3\n", "policy.model: .*string, found 3"),
        ("[policy]\ndevice = 'foo'\n", "policy.device: .*cpu, cuda or cuda:0, .*found 'foo'"),
        ("[policy]\ndevice = 'meta'\n", "policy.device: .*found 'meta'"),
        ("[environment.options]\nwhen = 1979-05-27\n[run]\nthreads = '2'", "run.threads: .*found '2'"),
        ("[teacher]\ntemplate = '{foo}'\n", "teacher.template: .*{text} and {hint}.*found '{foo}'"),
        ("[teacher]\ntemplate = '{text} { {hint}'\n", "teacher.template: .*{text} and {hint}"),
        ("[teacher]\ntemplate = '{text} {}'\n", "teacher.template: "),
        ("[teacher]\ntemplate = '{text} {0}'\n", "teacher.template: "),
        ("[teacher]\ntemplate = '{text.x} {hint}'\n", "teacher.template: "),
        ("[teacher]\ntemplate = '{text:d} {hint}'\n", "teacher.template: "),
        ("[teacher]\ntemplate = '{text:{x}} {hint}'\n", "teacher.template: "),
        ("[teacher]\ntemplate = '}'\n", "teacher.template: "),
        ("steps: 3\n", "run.toml: is no TOML file"),
    ],
)
def test_mistakes_are_named(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_config(written(tmp_path, text), {"training": {}})


def test_cuda_is_asked_for_where_there_is_none(monkeypatch):
    def check(device):
        check_policy_section(load_config(None, {"policy": {"device": device}}).policy)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check("cpu")
    with pytest.raises(ValueError, match="^policy.device: torch finds no CUDA devices, found 'cuda'"):
        check("cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check("cuda:1")
    with pytest.raises(ValueError, match="^policy.device: .*2 CUDA devices, found 'cuda:2'"):
        check("cuda:2")


def test_whole_numbers_may_stand_where_any_may_and_betas_are_a_list(tmp_path):
    config = load_config(written(tmp_path, "[training]\nclip = 2\nbetas = [0, 0.5]\n[evaluation]\ntemperature = 0.5\n"))
    assert (config.training.clip, config.training.betas, config.evaluation.temperature) == (2.0, (0.0, 0.5), 0.5)
    braces = load_config(None, {"teacher": {"template": "{text} {{{hint:>3}}}"}}).teacher
    assert braces.template.format(text="a", hint="b") == "a {  b}"


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="none.toml: could not be read"):
        load_config(tmp_path / "none.toml")


def test_environments_by_name_and_by_import():
    assert {"alfworld", "bfcl", "desk"} <= set(ENVIRONMENTS)
    assert isinstance(make_environment("toy:Toy", {"turns": 2}), Toy)
    with pytest.raises(ValueError, match="unknown environment 'dsk'; known: alfworld, bfcl, desk"):
        make_environment("dsk", {})
    with pytest.raises(ValueError, match="desk has no option 'turns'; known: num_turns, coupled"):
        make_environment("desk", {"turns": 2})
    with pytest.raises(ValueError, match="could not import 'toy:Tay'"):
        make_environment("toy:Tay", {})
    assert FIRST_HELD_OUT_SEED == 2**30


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"num_turns": "8"}, "desk: num_turns: .*integer, found '8'"),
        ({"num_turns": 2.5}, "desk: num_turns: .*integer.*, found 2.5"),
        ({"num_turns": True}, "desk: num_turns: .*integer, found True"),
        ({"num_turns": [8]}, "desk: num_turns: .*integer, found "),
        ({"coupled": "x"}, "desk: coupled: .*number, found 'x'"),
    ],
)
def test_options_of_another_type_are_named(options, complaint):
    with pytest.raises(ValueError, match=f"^environment.options: {complaint}"):
        make_environment("desk", options)


def test_what_a_constructor_refuses_names_the_environment():
    with pytest.raises(ValueError, match="^environment: desk .* {'num_turns': 0}: num_turns is 0; wanted at least 1"):
        make_environment("desk", {"num_turns": 0})


def test_options_come_as_the_annotation_has_them(own_module):
    own_module(
        "annotated",
        """
        from pathlib import Path
        from toy import Toy
        class Own(Toy):
            def __init__(self, sizes: tuple[int, ...] = (), root: Path | None = None, other: Toy = None, **rest):
                super().__init__()
                self.given = sizes, root, other, rest
                self.lost = {}["key"] if rest.get("fail") else None
        class Unread(Toy):
            def __init__(self, size: "Missing", *, loud: bool = False):
                super().__init__()
        """,
    )
    made = make_environment("annotated:Own", {"sizes": [1, 2], "root": "data", "other": 3, "more": 4})
    assert made.given == ((1, 2), Path("data"), 3, {"more": 4})
    with pytest.raises(ValueError, match="annotated:Own: sizes.1: .*integer, found"):
        make_environment("annotated:Own", {"sizes": [1, "2"]})
    with pytest.raises(ValueError, match="annotated:Own .* options {'fail': True}: KeyError: 'key'"):
        make_environment("annotated:Own", {"fail": True})
    assert make_environment("annotated:Unread", {"size": "any"})
    with pytest.raises(ValueError, match="annotated:Unread could not be made with options {}: TypeError: .*'size'"):
        make_environment("annotated:Unread", {})


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("os:path", "'os:path' is a module; wanted a class"),
        ("os:getcwd", "os:getcwd makes a str, which has no reset, step"),
        (":X", "found ':X', wanted module:Class"),
        ("os:", "found 'os:', wanted module:Class"),
        ("nowhere_at_all:X", "could not import 'nowhere_at_all:X': No module named"),
        ("broken_syntax:X", "could not import 'broken_syntax:X': SyntaxError"),
        ("broken_import:X", "could not import 'broken_import:X': ZeroDivisionError"),
        ("broken_exit:X", "could not import 'broken_exit:X': SystemExit"),
    ],
)
def test_modules_that_make_no_environment_are_named(own_module, name, complaint):
    own_module("broken_syntax", "def (:")
    own_module("broken_import", "1 / 0")
    own_module("broken_exit", "raise SystemExit(3)")
    with pytest.raises(ValueError, match=f"^environment.name: {complaint}"):
        make_environment(name, {})


def test_methods_by_name():
    section = Config().method
    with pytest.raises(ValueError, match="unknown method 'cresst'; known: .*grpo"):
        make_method(section.model_copy(update={"name": "cresst"}))
    with pytest.raises(ValueError, match="crest has no option 'lambda'; known: lam, eps"):
        make_method(section.model_copy(update={"options": {"lambda": 1}}))
    with pytest.raises(ValueError, match="method.options: "):
        make_method(section.model_copy(update={"options": {"tau": -1.0}}))
    with pytest.raises(ValueError, match="method.options: .*hihg"):
        make_method(section.model_copy(update={"options": {"surrogate": {"hihg": 0.3}}}))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"unbiased": "no"}, "unbiased is 'no', want one like True"),
        ({"lam": True}, "lam is True, want one like 0.3"),
        ({"lam": "0.3"}, "lam is '0.3'"),
        ({"surrogate": "ppo"}, "surrogate is 'ppo'"),
        ({"surrogate": {"dual": True}}, "dual is True"),
        ({"surrogate": {"dual": "3"}}, "str"),
        ({"reduction": ["token_mean"]}, "reduction is "),
        ({"gate": "hope"}, "gate is 'hope', want one of 'surprisal', 'entropy'"),
    ],
)
def test_method_options_of_another_type_are_named(options, complaint):
    with pytest.raises(ValueError, match=f"^method.options: .*{complaint}"):
        make_method(Config().method.model_copy(update={"options": options}))


def test_a_table_changes_the_surrogates_fields():
    section = load_config(None, {"method": {"name": "grpo", "options": {"surrogate": {"high": 0.5}}}}).method
    assert make_method(section)[1].surrogate == PPOClip(0.2, 0.5)
