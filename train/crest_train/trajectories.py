"""A static page of sampled sessions, every token of the policy coloured by its credit."""

from jinja2 import Environment
from transformers import PreTrainedTokenizerBase

from crest_ops import Credit
from crest_train.rollouts import Rollout, Session

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
body { font: 14px/1.7 system-ui, sans-serif; margin: 2em auto; max-width: 70em; padding: 0 1em; }
p { font-family: ui-monospace, monospace; margin: .3em 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.given { color: #888; }
b { border-radius: 3px; font-weight: normal; }
</style>
<h1>{{ title }}</h1>
<div>Grey: given. Black: written by the policy, on green where its credit is above 0, on red where below; hover for
numbers. Sessions with credit come first.</div>
{% for session in sessions %}
<h2>Session {{ session.seed }}{{ ", cut at the context's end" if session.cut }}</h2>
{% for turn in session.turns %}
<div>turn {{ loop.index }}, reward {{ turn.reward }}</div>
<p>{% for token in turn.tokens %}
{%- if token.given %}<span class="given">{{ token.text }}</span>
{%- else %}<b{% if token.colour %} style="background: {{ token.colour }}"{% endif %} title="{{ token.numbers }}">
{{- token.text }}</b>
{%- endif %}{% endfor %}</p>
{% endfor %}{% endfor %}
</html>
"""


def trajectories_page(
    title: str, rollout: Rollout, credit: Credit, tokenizer: PreTrainedTokenizerBase, shown: int
) -> str:
    """The page of `shown` sessions of a rollout, system prompts left out; all text escaped."""
    credit_BT = credit.credit_N.view_as(rollout.policy)
    strongest = float(credit_BT.abs().max()) or 1.0
    without_credit = (credit_BT == 0).all(1).tolist()
    rows = sorted(range(len(rollout.sessions)), key=lambda row: (without_credit[row], row))[:shown]
    gap = tokenizer.decode([0, 0]).removeprefix(tokenizer.decode([0])).removesuffix(tokenizer.decode([0]))

    def token(row: int, place: int) -> dict[str, object]:
        value, logp = float(credit_BT[row, place]), float(rollout.old_logp[row, place])
        return {
            "text": tokenizer.decode([rollout.sessions[row].ids[place]]) + gap,
            "given": not rollout.policy[row, place],
            "colour": value and f"rgba({'0, 150, 60' if value > 0 else '210, 40, 40'}, {abs(value) / strongest:.2f})",
            "numbers": f"credit {value:+.3f}, log-prob {logp:.3f}",
        }

    sessions = []
    for row in rows:
        session = rollout.sessions[row]
        turns = [
            {"reward": f"{reward:g}", "tokens": [token(row, place) for place in places]}
            for reward, places in zip(session.turn_reward, _places_of_turns(session), strict=True)
        ]
        sessions.append({"seed": session.seed, "cut": session.cut, "turns": turns})
    return Environment(autoescape=True).from_string(_PAGE).render(title=title, sessions=sessions)


def _places_of_turns(session: Session) -> list[range]:
    """Token places of each turn reached; what is given before a turn's first action belongs to it."""
    ends = [0] * len(session.turn_reward)
    for action in session.actions:
        ends[action.turn] = action.start + len(action.tokens)
    return [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
