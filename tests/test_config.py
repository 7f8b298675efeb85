"""Configuration: defaults are the default run, files round-trip, mistakes are named."""

from pathlib import Path

import pytest
from crest_train.config import Config, load_config, to_toml
from crest_train.credit import make_method
from crest_train.environments import ENVIRONMENTS, FIRST_HELD_OUT_SEED, make_environment
from toy import Toy

from crest_ops import PPOClip

RECIPES = Path(__file__).parents[1] / "train" / "recipes"


def written(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_default_run():
    config = Config()
    assert (config.environment.name, config.method.name, config.policy.model) == ("desk", "crest", "desk")
    assert (config.rollout.sessions, config.rollout.group_size, config.training.steps) == (8, 8, 40)
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
        ("[rollout]\ntemperature = 0\n", "rollout.temperature: "),
        ("steps: 3\n", "run.toml: is no TOML file"),
    ],
)
def test_mistakes_are_named(tmp_path, text, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_config(written(tmp_path, text), {"training": {}})


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="none.toml: could not be read"):
        load_config(tmp_path / "none.toml")


def test_environments_by_name_and_by_import():
    assert set(ENVIRONMENTS) == {"bfcl", "desk"}
    assert isinstance(make_environment("toy:Toy", {"turns": 2}), Toy)
    with pytest.raises(ValueError, match="unknown environment 'dsk'; known: bfcl, desk"):
        make_environment("dsk", {})
    with pytest.raises(ValueError, match="desk has no option 'turns'; known: num_turns, coupled"):
        make_environment("desk", {"turns": 2})
    with pytest.raises(ValueError, match="could not import 'toy:Tay'"):
        make_environment("toy:Tay", {})
    assert FIRST_HELD_OUT_SEED == 2**30


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


def test_a_table_changes_the_surrogates_fields():
    section = load_config(None, {"method": {"name": "grpo", "options": {"surrogate": {"high": 0.5}}}}).method
    assert make_method(section)[1].surrogate == PPOClip(0.2, 0.5)
