"""crest-train plan and run --dry-run: bytes that can be counted by hand, recipes that fit, nothing written."""

import re
from pathlib import Path

import pytest
from crest_train.config import load_config
from crest_train.plan import Planner, Sizes
from crest_train.plan_report import bytes_of
from test_cli import complaint, crest_train
from toy import toy_model, toy_tokenizer
from transformers import LlamaConfig

RECIPES = Path(__file__).parents[1] / "train" / "recipes"
GB = 10**9
CARDS = {
    "bfcl_qwen3_4b.toml": (80 * GB, {}),
    "bfcl_qwen3_4b_lora.toml": (24 * GB, {}),
    "alfworld_qwen2.5_1.5b.toml": (48 * GB, {}),
}


def planner(policy, **tables):
    return Planner(load_config(None, {"policy": policy, **tables}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    toy_model().save_pretrained(path)
    toy_tokenizer().save_pretrained(path)
    return str(path)


@pytest.mark.parametrize(
    ("policy", "training", "per_weight", "per_learning"),
    [
        ({}, {}, 4, (4, 8)),  # float32: gradient 4, moments 8
        ({"dtype": "bfloat16"}, {}, 2, (2, 12)),  # and a float32 copy beside the moments
        ({"lora": {"rank": 4}}, {}, 4, (4, 8)),
    ],
    ids=["float32", "bfloat16", "adapters"],
)
def test_what_stays_is_arithmetic_on_the_parameters(folder, policy, training, per_weight, per_learning):
    plan = planner({"model": folder} | policy, training=training).plan(Sizes(64))
    base = sum(p.numel() for p in toy_model().parameters())
    # A [rank, in] and B [out, rank] of q, k, v, o and gate, up, down in both layers; H = 32, one key head of 8, I = 64.
    adapters = 2 * 4 * (2 * (32 + 32) + 2 * (32 + 8) + 3 * (32 + 64)) if "lora" in policy else 0
    learning = adapters or base
    assert plan.weights == pytest.approx(per_weight * (base + adapters), abs=256)  # and a few buffers
    assert plan.gradients == per_learning[0] * learning
    assert plan.optimizer == pytest.approx(per_learning[1] * learning, abs=256)


def test_cache_is_keys_and_values_of_all_rows_with_room_to_grow(folder):
    made = planner({"model": folder}, rollout={"sessions": 1, "group_size": 4}, evaluation={"sessions": 4})
    one_token = 2 * 2 * 8 * 4  # keys and values, two layers, a head of 8, float32
    for tokens in (400, 2000):
        cache = made.plan(Sizes(tokens)).cache
        assert 4 * tokens * one_token <= cache <= 4 * (tokens + max(128, tokens // 8) + 1) * one_token


def test_activations_grow_with_tokens_and_shrink_when_they_are_recomputed(folder):
    plain = [planner({"model": folder}).plan(Sizes(tokens)).activations for tokens in (8192, 16384)]
    recomputed = planner({"model": folder, "gradient_checkpointing": True}).plan(Sizes(8192)).activations
    assert plain[1] == pytest.approx(2 * plain[0], rel=0.05)
    # What is kept of a layer is what goes into it: H floats a token for each of two layers, and what follows them.
    assert 2 * 32 * 4 * 8192 <= recomputed < plain[0] / 3


def test_full_logits_are_counted_for_what_they_are(folder):
    plan = planner({"model": folder}).plan(Sizes(4096))
    assert plan.full_logits >= 2 * 4 * 4096 * toy_model().config.vocab_size  # float32, and their gradient


@pytest.mark.parametrize("memory", [2**29, 8 * GB, 400 * GB])
@pytest.mark.parametrize("recompute", [False, True])
def test_the_longest_trajectory_fits_and_a_longer_one_does_not(tmp_path, recompute, memory):
    # Of short trajectories the head's gradient of 26 MB is the most that a backward pass holds.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaConfig(vocab_size=50000, **sizes).save_pretrained(tmp_path)
    policy = {"model": str(tmp_path), "gradient_checkpointing": recompute}
    made = planner(policy, training={"tokens_per_micro_batch": 1})
    plan = made.plan(Sizes(4096))
    longest, full = made.longest(memory, plan, 0.25)
    assert 0 < full < longest
    assert made.plan(Sizes(longest)).phases["update"] <= memory < made.plan(Sizes(int(1.02 * longest))).phases["update"]
    assert made.plan(Sizes(full)).with_full_logits <= memory < made.plan(Sizes(int(1.02 * full))).with_full_logits


@pytest.mark.parametrize(
    ("text", "size"), [("80GB", 80 * GB), ("24GiB", 24 * 2**30), ("1.5 GB", 3 * GB // 2), ("512MiB", 2**29)]
)
def test_sizes_of_memory(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["80", "GB", "-1GB", "0GB", "1 TB", "1GB2"])
def test_sizes_that_are_none_are_refused(text):
    with pytest.raises(ValueError, match="--memory: found .*, wanted a size such as 80GB or 24GiB"):
        bytes_of(text)


@pytest.mark.parametrize("recipe", CARDS)
def test_recipes_fit_the_card_that_they_name(recipe):
    memory, tables = CARDS[recipe]
    made = Planner(load_config(RECIPES / recipe, tables))
    assert f"{memory // GB} GB" in (RECIPES / recipe).read_text()
    section = made.config.training
    plan = made.plan(Sizes(min(section.tokens_per_micro_batch, made.context)))
    assert plan.peak < memory


def test_crest_recipes_have_the_papers_settings():
    for recipe in ("bfcl_qwen3_4b.toml", "bfcl_qwen3_4b_lora.toml"):
        config = load_config(RECIPES / recipe)
        assert config.rollout.group_size == 16 and config.method.name == "crest"
        wanted = {"lam": 0.3, "eps": 0.28, "tau": 2.0, "rho": 0.5, "surrogate": {"low": 0.2, "high": 0.28}}
        assert config.method.options == wanted


DRY = [
    "desk.toml",
    "alfworld_qwen2.5_1.5b.toml",
    pytest.param("bfcl_qwen3_4b_lora.toml", marks=pytest.mark.fetched),
]


@pytest.mark.parametrize("recipe", DRY)
def test_dry_run_of_a_recipe_predicts_and_writes_nothing(recipe, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert crest_train(monkeypatch, "run", RECIPES / recipe, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "peak" in said and "nothing was trained or written" in said
    assert ("not checked here: policy.device" in said) == ("desk" not in recipe)
    assert list(tmp_path.iterdir()) == []


def test_dry_run_says_what_a_run_would_refuse(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.toml").write_text('[environment]\nname = "desk"\noptions = { num_turns = 0 }\n')
    (tmp_path / "model.toml").write_text('[policy]\nmodel = "no/such"\n')
    assert "num_turns" in complaint(monkeypatch, capsys, "run", tmp_path / "run.toml", "--dry-run")
    assert "no architecture of 'no/such'" in complaint(monkeypatch, capsys, "plan", tmp_path / "model.toml")
    assert "--memory" in complaint(monkeypatch, capsys, "plan", "--memory", "12")


def test_plan_prints_parts_and_what_fits(monkeypatch, capsys):
    assert crest_train(monkeypatch, "plan", "--memory", "4GiB", "--tokens", "2000") == 0
    said = capsys.readouterr().out
    for part in ("weights", "optimizer", "keys and values", "gradients", "activations", "With all logits"):
        assert part in said
    assert re.search(r"Longest trajectory whose update fits there: [\d,]+ tokens", said)
