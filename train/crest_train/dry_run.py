"""`crest-train run --dry-run`: everything that can be known before a run, with nothing trained and nothing written."""

from rich.console import Console

from crest_train.architectures import tokenizer_at_hand
from crest_train.chat import make_chat
from crest_train.config import Config
from crest_train.credit import make_method
from crest_train.draws import session_seeds
from crest_train.environments import make_environment
from crest_train.environments.protocol_checks import checked_opening
from crest_train.evaluate import sampling_of
from crest_train.loading import check_policy_section
from crest_train.optimizer import check_optimizer
from crest_train.plan import Planner, Sizes
from crest_train.plan_report import default_sizes, report
from crest_train.rollouts import demonstrate
from crest_train.sessions import Rollout
from crest_train.signals import check_environment


def dry_run(config: Config, console: Console) -> None:
    """Check the configuration, load its environment, open the first step's sessions and predict shapes and memory.

    Sessions are played by their ground truth, where the environment tells it and the policy's tokenizer is on this
    machine. What needs a GPU is checked where there is one. Raises ValueError that names what is wrong.
    """
    make_method(config.method)
    for options in (config.environment.options, config.held_out_options()):
        make_environment(config.environment.name, options)
    check_environment(config)
    elsewhere = _of_another_machine(config)
    planner = Planner(config)
    played = _demonstrated(config, planner, console)
    sizes = _sizes(config, planner, played, console)
    report(planner, sizes, console)
    if elsewhere:
        console.print(f"not checked here: {elsewhere}", highlight=False, markup=False, soft_wrap=True)
    console.print("dry run: nothing was trained or written", highlight=False)


def _of_another_machine(config: Config) -> str | None:
    """What this machine lacks of a GPU's; anything else that is wrong is raised."""
    try:
        check_policy_section(config.policy)
    except ValueError as error:
        if not str(error).startswith("policy.device"):
            raise
        return str(error)
    check_optimizer(config.training, config.policy.device)
    return None


def _demonstrated(config: Config, planner: Planner, console: Console) -> Rollout | None:
    """The first step's sessions by their ground truth, each once."""
    seeds = list(dict.fromkeys(session_seeds(config, 1)))
    environments = [make_environment(config.environment.name, config.environment.options) for _ in seeds]
    tokenizer = tokenizer_at_hand(config.policy)
    if tokenizer is None or not callable(getattr(environments[0], "gold", None)):
        checked_opening(environments[0], seeds[0])
        why = "its environment tells no ground truth" if tokenizer else "its tokenizer is not on this machine"
        console.print(f"{config.environment.name}: a session opens; not tokenised, as {why}", highlight=False)
        return None
    return demonstrate(planner.model, make_chat(tokenizer), environments, seeds, sampling=sampling_of(config))


def _sizes(config: Config, planner: Planner, played: Rollout | None, console: Console) -> Sizes:
    """Sessions twice as long behind their prompt as the ground truth; where it is not known, of a micro-batch."""
    if played is None:
        return default_sizes(planner)
    prompts, lengths = [len(session.prompt) for session in played.sessions], played.lengths.tolist()
    prompt, longest = max(prompts), max(lengths)
    console.print(
        f"{config.environment.name}: {len(lengths)} sessions of the first step; by their ground truth up to "
        f"{int(played.num_turns.max())} turns, {max(len(s.actions) for s in played.sessions)} actions and "
        f"{longest:,} tokens behind a prompt of up to {prompt:,}; planned for are twice as many",
        highlight=False,
        soft_wrap=True,
    )
    tokens = min(prompt + 2 * longest, planner.context)
    return Sizes(tokens, min(prompt, tokens - 3), played.sampled_tokens / played.fed_tokens)
