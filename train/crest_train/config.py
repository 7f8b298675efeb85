"""The configuration of a run: defaults are the default run, a TOML file changes them, unknown keys are refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib


class Section(BaseModel):
    """A table of the configuration file; its values are taken strictly ("1" and true are no numbers)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class EnvironmentSection(Section):
    """name: one of ENVIRONMENTS or "module:Class"; options: its constructor's arguments."""

    name: str = "desk"
    options: dict[str, Any] = {}


class LoraSection(Section):
    """Adapters of low rank (arXiv 2106.09685), through peft: W x + alpha / rank * B A x, A and B trained alone.

    rank: 0 for none. targets: names of the linear maps that get one, or "all-linear" for all but the head.
    """

    rank: int = Field(0, ge=0)
    alpha: float = Field(32.0, gt=0)
    targets: Literal["all-linear"] | list[str] = "all-linear"


class PolicySection(Section):
    """model: "desk" (the built-in small policy), "smollm2" (fetched), a folder that `save_pretrained` wrote, or a name
    on the Hugging Face Hub ("Qwen/Qwen3-4B").

    device: "cpu", "cuda" or "cuda:N". attention: "auto" is flash-attn's kernels where they are installed, for bfloat16
    on a GPU, else torch's. gradient_checkpointing: layers recompute their activations in the backward pass: less
    memory, a third more work. liger: Liger's RMSNorm, SwiGLU and rotary kernels, on a GPU. lora: train adapters alone.
    """

    model: str = "desk"
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"
    attention: Literal["auto", "sdpa", "flash_attention_2"] = "auto"
    gradient_checkpointing: bool = False
    liger: bool = False
    lora: LoraSection = LoraSection()

    @field_validator("device")
    @classmethod
    def _is_one(cls, device: str) -> str:
        kind, _, index = device.partition(":")
        if device != "cpu" and (kind != "cuda" or not (device == "cuda" or index.isdecimal())):
            raise ValueError("wanted cpu, cuda or cuda:0, cuda:1, ...")
        return device


class WarmStartSection(Section):
    """Imitation of ground-truth calls before the first step, for policies other than the built-in one.

    steps: optimizer steps (0: none); sessions: per step; hinted: share of sessions whose requests carry the ground
    truth (so that the self-teacher learns to read it); rate: learning rate of Adam.
    """

    steps: int = Field(0, ge=0)
    sessions: int = Field(4, ge=1)
    hinted: float = Field(0.35, ge=0, le=1)
    rate: float = Field(1e-4, gt=0)


class MethodSection(Section):
    """name: one of METHODS; options: fields of its config.

    session_reward: "all" (1 when every turn succeeded) or "mean" of the turn rewards, for methods that read it.
    """

    name: str = "crest"
    session_reward: Literal["all", "mean"] = "all"
    options: dict[str, Any] = {}


class RolloutSection(Section):
    """sessions: groups per step; group_size: rollouts of each; rows: sessions played at a time at most.

    engine: "transformers" (the model itself), "vllm" (in process) or "vllm_server" (running at the address `server`).
    top_p, top_k, min_p: cut the distribution behind the temperature (1, 0, 0: they do not). correction: largest
    importance weight where tokens were drawn from another distribution than the policy's (see correction.py).
    """

    sessions: int = Field(8, ge=1)
    group_size: int = Field(8, ge=1)
    rows: int = Field(128, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    max_action_tokens: int = Field(8, ge=1)
    engine: Literal["transformers", "vllm", "vllm_server"] = "transformers"
    server: str = Field("http://127.0.0.1:8000", pattern=r"^https?://\S+$")
    correction: float = Field(2.0, ge=1)


class TeacherSection(Section):
    """context: what the self-teacher sees beyond the policy (`contexts.CONTEXTS`).

    insert: "turn" (in the request, one hint for the whole turn), "step" (in the text before each action) or "anchor"
    (the same, with the hints of all actions that met the same state in the rollouts of the same session).
    template: the text with its hint, with {text} and {hint}. end: what ends each text of a hint made of several.
    """

    context: Literal[
        "ground_truth", "feedback", "next_observation", "future_trajectory", "successful_sibling", "hindsight_skill"
    ] = "ground_truth"
    insert: Literal["turn", "step", "anchor"] = "turn"
    template: str = "{text} <hint> {hint} </hint>"
    end: str = " ; "

    @field_validator("template")
    @classmethod
    def _can_be_filled_in(cls, template: str) -> str:
        wanted = "wanted a text with {text} and {hint}, other braces doubled"
        try:
            fields = {field for _, field, _, _ in Formatter().parse(template)} - {None}
            template.format(text="a", hint="b")
        except (ValueError, LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"{wanted} ({error})") from error
        if not fields <= {"text", "hint"}:
            raise ValueError(wanted)
        return template


Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]


class TrainingSection(Section):
    """steps: rollout-and-update rounds; minibatches and epochs: optimizer steps per round (minibatches x epochs).

    optimizer: "adam" in float32 arithmetic for any policy.dtype, or "adam_8bit" (bitsandbytes, on a GPU); rate, betas:
    of Adam; clip: largest gradient norm. tokens_per_micro_batch: in one forward and backward pass, padding counted; a
    longer session is a pass of its own.
    bad_steps: the run stops after so many steps in a row whose loss or gradient was not finite.
    """

    steps: int = Field(20, ge=0)
    minibatches: int = Field(2, ge=1)
    epochs: int = Field(1, ge=1)
    optimizer: Literal["adam", "adam_8bit"] = "adam"
    rate: float = Field(6e-4, gt=0)
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)  # a list in the file
    clip: float = Field(1.0, gt=0)
    bad_steps: int = Field(5, ge=1)
    tokens_per_micro_batch: int = Field(4096, ge=1)


class ValueSection(Section):
    """The value of a state, for the methods that need one (FACTOR, arXiv 2608.07118).

    source: "head" (a small network on the policy's hidden states) or "continuations" (sessions played on from restored
    states). hidden, rate, polyak, replay: width, learning rate, share of its averaged copy that stays, and steps that
    it learns from, of the head. checkpoints: states per session that are played on, continuations times for at most
    max_turns turns; 0: the head's targets are the rollouts' own returns.
    """

    source: Literal["head", "continuations"] = "head"
    hidden: int = Field(64, ge=1)
    rate: float = Field(1e-2, gt=0)
    polyak: float = Field(0.995, ge=0, lt=1)
    replay: int = Field(10, ge=1)
    checkpoints: int = Field(0, ge=0)
    continuations: int = Field(4, ge=1)
    max_turns: int = Field(15, ge=1)

    @model_validator(mode="after")
    def _has_states_to_play_on(self) -> "ValueSection":
        if self.source == "continuations" and not self.checkpoints:
            raise ValueError('wanted checkpoints = 1 or more where source is "continuations"')
        return self


class EvaluationSection(Section):
    """sessions: held-out sessions; every: steps between evaluations (0: only before and after).

    temperature: of sampling there.
    options: what the environment of evaluation has different from [environment.options].
    """

    sessions: int = Field(512, ge=1)
    every: int = Field(10, ge=0)
    temperature: float = Field(1.0, gt=0)
    options: dict[str, Any] = {}


class RunSection(Section):
    """seed: of everything drawn; threads: of torch (0: torch's own choice); checkpoint_every: steps (0: ends only).

    checkpoints_kept: the last ones, so that a damaged one costs the steps since the one before.
    records: steps between those whose sessions are kept token by token (see records.py), the last always; 0: none.
    trackers: where the run is shown while it goes on, beside metrics.jsonl.
    """

    seed: int = Field(0, ge=0, le=2**63 - 1)
    threads: int = Field(0, ge=0, le=1024)
    checkpoint_every: int = Field(10, ge=0)
    checkpoints_kept: int = Field(2, ge=1)
    records: int = Field(10, ge=0)
    trackers: list[Literal["tensorboard", "trackio", "wandb"]] = []


class Config(Section):
    """All tables; `Config()` is the default run."""

    environment: EnvironmentSection = EnvironmentSection()
    policy: PolicySection = PolicySection()
    warm_start: WarmStartSection = WarmStartSection()
    method: MethodSection = MethodSection()
    rollout: RolloutSection = RolloutSection()
    teacher: TeacherSection = TeacherSection()
    value: ValueSection = ValueSection()
    training: TrainingSection = TrainingSection()
    evaluation: EvaluationSection = EvaluationSection()
    run: RunSection = RunSection()

    def held_out_options(self) -> dict[str, Any]:
        """Options of the environment that evaluates."""
        return {**self.environment.options, **self.evaluation.options}


def load_config(path: Path | None = None, overrides: dict[str, dict[str, Any]] | None = None) -> Config:
    """The configuration of a TOML file (or the defaults), with overrides {table: {key: value}} on top.

    Raises ValueError that names the file and the key: not there, not TOML, unknown (with the known ones), wrong value.
    """
    tables: dict[str, Any] = {}
    if path is not None:
        try:
            tables = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path}: could not be read ({error.strerror})") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: is no TOML file ({error})") from error
    for table, changes in (overrides or {}).items():
        if isinstance(tables.setdefault(table, {}), dict):
            tables[table] |= changes
    try:
        return Config.model_validate(tables)
    except ValidationError as error:
        source = f"{path}: " if path else ""
        raise ValueError(source + "; ".join(_explain(problem) for problem in error.errors())) from error


def _explain(problem: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] != "extra_forbidden":
        return f"{key}: {problem['msg'].removeprefix('Value error, ')}, found {problem['input']!r}"
    *tables, _ = problem["loc"]
    section: type[BaseModel] = Config
    for table in tables:
        section = section.model_fields[table].annotation
    return f"unknown key {key!r}; known keys here: {', '.join(section.model_fields)}"


def differences(there: Config, here: Config) -> dict[str, tuple[Any, Any]]:
    """The keys (table.key) in which two configurations differ, with both values (None: not there)."""
    one, other = (dict(_flat(config.model_dump(mode="json"))) for config in (there, here))
    return {
        key: (one.get(key), other.get(key)) for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)
    }


def _flat(table: dict[str, Any], name: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{name}{key}.")
        else:
            yield name + key, value


def to_toml(config: Config) -> str:
    """The whole configuration as TOML that `load_config` reads back to an equal one."""
    lines: list[str] = []
    _write_table(config.model_dump(mode="json"), "", lines)
    return "\n".join(lines).strip() + "\n"


def _write_table(table: dict[str, Any], name: str, lines: list[str]) -> None:
    values = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if name and (values or not table):
        lines += ["", f"[{name}]"]
    lines += [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _write_table(value, f"{name}.{key}".lstrip("."), lines)
