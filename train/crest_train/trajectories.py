"""A static page of sampled sessions, every token of the policy coloured by its credit."""

from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from crest_ops import Credit
from crest_train.rollouts import Rollout

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 14px/1.6 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
p { font-family: ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.given { color: #777; } .token { border-radius: 3px; }
</style>
<h1>{{ title }}</h1>
<p class="given">Grey: given. Green: credit above 0, red: below. Hover over a token for its numbers.</p>
{% for session in sessions %}
<h2>Session {{ session.seed }}: turn rewards {{ session.rewards }}{{ ", cut at the context's end" if session.cut }}</h2>
<p>{% for token in session.tokens %}<span class="{{ 'given' if token.given else 'token' }}"
{%- if not token.given %} style="background: {{ token.colour }}" title="{{ token.numbers }}"{% endif %}>
{{- token.text }}</span>{% endfor %}</p>
{% endfor %}
</html>
"""


def trajectories_page(
    title: str, rollout: Rollout, credit: Credit, tokenizer: PreTrainedTokenizerBase, shown: int
) -> str:
    """The page of the first `shown` sessions of a rollout, system prompts left out; all text escaped."""
    credit_BT = credit.credit_N.view_as(rollout.policy)
    strongest = float(credit_BT.abs().max()) or 1.0
    gap = tokenizer.decode([0, 0]).removeprefix(tokenizer.decode([0])).removesuffix(tokenizer.decode([0]))
    sessions = []
    for row, session in enumerate(rollout.sessions[:shown]):
        values = zip(rollout.policy[row].tolist(), credit_BT[row].tolist(), rollout.old_logp[row].tolist(), strict=True)
        tokens = [
            {
                "text": tokenizer.decode([token]) + gap,
                "given": not written,
                "colour": f"rgba({'0, 150, 60' if value > 0 else '210, 40, 40'}, {abs(value) / strongest:.2f})",
                "numbers": f"credit {value:+.3f}, log-prob {logp:.3f}",
            }
            for token, (written, value, logp) in zip(session.ids, values, strict=False)
        ]
        rewards = " ".join(f"{reward:g}" for reward in session.turn_reward)
        sessions.append({"seed": session.seed, "rewards": rewards, "cut": session.cut, "tokens": tokens})
    page = Environment(autoescape=True).from_string(_PAGE)
    return page.render(title=title, sessions=sessions)
