"""A policy's sizes and tokenizer without its weights: of a folder, a cache, the recipes, or the Hub."""

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from crest_train.config import PolicySection
from crest_train.environments.desk_world import VOCABULARY
from crest_train.fetch import ASSETS, path_of
from crest_train.lora import CONFIG
from crest_train.model import first_line
from crest_train.policy import TinyConfig
from crest_train.tokenizer import build_tokenizer

SHIPPED = Path(__file__).parents[1] / "recipes" / "architectures"
"""config.json of the recipes' models, by the last part of their names."""


def architecture(section: PolicySection) -> PretrainedConfig:
    """The configuration of policy.model, without its weights.

    Raises ValueError where it is found nowhere.
    """
    model = section.model
    if model == "desk":
        return TinyConfig(vocab_size=len(VOCABULARY))
    folder = Path(model).expanduser()
    if (folder / CONFIG).is_file():
        raise ValueError(f"policy.model: {model!r} holds adapters; wanted the model they are for, with [policy.lora]")
    shipped = SHIPPED / f"{folder.name}.json"
    if not folder.is_dir() and shipped.is_file():
        return AutoConfig.from_pretrained(shipped)
    try:
        return AutoConfig.from_pretrained(path_of(model) if model in ASSETS else model)
    except (OSError, ValueError) as error:
        raise ValueError(f"policy.model: found no architecture of {model!r} ({first_line(error)})") from error


def tokenizer_at_hand(section: PolicySection) -> PreTrainedTokenizerBase | None:
    """The tokenizer of policy.model; None where nothing on this machine has it."""
    if section.model == "desk":
        return build_tokenizer(VOCABULARY)
    try:
        place = path_of(section.model) if section.model in ASSETS else section.model
        return AutoTokenizer.from_pretrained(place, local_files_only=True)
    except (OSError, ValueError):
        return None
