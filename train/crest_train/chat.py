"""Lays a session out in a tokenizer's chat format, piece by piece, so that history is never encoded again.

The chat template is rendered once with stand-in texts; what lies between them is the layout. A session is then
opening + (action + reply)*, where an action ends with the end-of-action token (which the policy writes) and a reply is
everything up to where the policy writes again. Whatever a template does to older messages (dropping their thoughts,
say) is not repeated: tokens once shown stay as they were.
"""

from dataclasses import dataclass
from functools import lru_cache

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase

_SYSTEM, _REQUEST, _ACTION, _OBSERVATION, _NEXT = (f"@@{name}@@" for name in "SYSTEM REQUEST ACTION TOOL NEXT".split())


@dataclass(frozen=True, eq=False)
class Chat:
    """The pieces of one tokenizer's chat format.

    end_token: id of the token that ends an action.
    """

    tokenizer: PreTrainedTokenizerBase
    end_token: int
    bare_opening: str
    system_opening: tuple[str, str]
    after_request: str
    replies: dict[tuple[bool, bool], tuple[str, ...]]
    max_cached_texts: int = 1 << 16

    def __post_init__(self):
        cached = lru_cache(maxsize=self.max_cached_texts)
        object.__setattr__(self, "_ids", cached(lambda text: tuple(_encode(self.tokenizer, text))))
        object.__setattr__(self, "_text", cached(lambda ids: self.tokenizer.decode(list(ids))))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return list(self._ids(text))

    def decode(self, ids: list[int]) -> str:
        """The text of an action's tokens, special tokens shown."""
        return self._text(tuple(ids))

    def open(self, system: str, request: str) -> tuple[list[int], list[int]]:
        """Token ids (prompt, rest) up to where the policy writes first.

        The prompt holds the system text and is the same for all sessions that share it (empty when system is ""); it is
        cut behind its last special token, where no tokenizer merges across.
        """
        if not system:
            return [], self.encode(self.bare_opening + request + self.after_request)
        before, after = self.system_opening
        specials = (self.tokenizer.convert_ids_to_tokens(i) for i in self.tokenizer.all_special_ids)
        cut = max([after.rfind(token) + len(token) for token in specials if token in after], default=len(after))
        return self.encode(before + system + after[:cut]), self.encode(after[cut:] + request + self.after_request)

    def reply(self, observation: str | None, request: str | None) -> list[int]:
        """Token ids that follow the end of an action, up to where the policy writes next.

        observation: the tool's reply, request: the user's next request; either, both or none.
        """
        given = [text for text in (observation, request) if text is not None]
        layout = self.replies[observation is not None, request is not None]
        return self.encode(layout[0] + "".join(text + after for text, after in zip(given, layout[1:], strict=True)))


def make_chat(tokenizer: PreTrainedTokenizerBase) -> Chat:
    """Read the chat format off the tokenizer's template.

    Raises ValueError when the tokenizer has no chat template, or one that does not mark the end of a message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "tokenizer: found no chat template, wanted one; set tokenizer.chat_template (a Jinja template with system, "
            "user, assistant and tool roles), save the tokenizer and name its folder in policy.model"
        )
    user, action = _message("user", _REQUEST), _message("assistant", _ACTION)
    following = _message("user", _NEXT)
    bare_opening, after_request = _split(_render(tokenizer, [user]), _REQUEST)
    talk = [user, action]

    def after_action(*messages: dict) -> str:
        return _split(_render(tokenizer, [*talk, *messages]), _ACTION)[1]

    end_token, end_text = _end_of_action(tokenizer, _split(after_action(following), _NEXT)[0])

    def layout(texts: tuple[str, ...], alternatives: list[list[dict]]) -> tuple[str, ...]:
        tail = after_action(*_first_accepted(tokenizer, talk, texts, alternatives))
        return _split(tail[tail.index(end_text) + len(end_text) :], *texts)

    tool, asked = _message("tool", _OBSERVATION), _message("user", _OBSERVATION)
    together = _message("user", f"{_OBSERVATION}\n\n{_NEXT}")
    replies = {
        (False, False): layout((), [[]]),
        (False, True): layout((_NEXT,), [[following]]),
        (True, False): layout((_OBSERVATION,), [[tool], [asked]]),
        (True, True): layout((_OBSERVATION, _NEXT), [[tool, following], [together]]),
    }
    return Chat(tokenizer, end_token, bare_opening, _system_opening(tokenizer, user), after_request, replies)


def _system_opening(tokenizer: PreTrainedTokenizerBase, user: dict) -> tuple[str, str]:
    alternatives = [[_message("system", _SYSTEM), user], [_message("user", f"{_SYSTEM}\n\n{_REQUEST}")]]
    messages = _first_accepted(tokenizer, [], (_SYSTEM, _REQUEST), alternatives)
    return _split(_render(tokenizer, messages), _SYSTEM, _REQUEST)[:2]


def _first_accepted(tokenizer, talk: list[dict], texts: tuple[str, ...], alternatives: list[list[dict]]) -> list[dict]:
    """The first list of messages that the template renders with every text in it, once."""
    for messages in alternatives:
        try:
            rendered = _render(tokenizer, [*talk, *messages])
        except (TemplateError, ValueError):
            continue
        if all(rendered.count(text) == 1 for text in texts):
            return messages
    roles = " nor ".join("+".join(message["role"] for message in messages) or "nothing" for messages in alternatives)
    raise ValueError(f"tokenizer.chat_template: accepts no messages of role {roles} here; wanted a template that does")


def _end_of_action(tokenizer: PreTrainedTokenizerBase, tail: str) -> tuple[int, str]:
    """Id and text of the first special token after an assistant message."""
    special = set(tokenizer.all_special_ids)
    for token in _encode(tokenizer, tail):
        if token in special:
            return token, tokenizer.convert_ids_to_tokens(token)
    raise ValueError(
        f"tokenizer.chat_template: found no special token in {tail!r}, the text after an assistant message; "
        "wanted an end-of-message token there, so that the policy can end an action"
    )


def _render(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def _split(text: str, *marks: str) -> tuple[str, ...]:
    """The parts of a text between marks that occur in it in this order."""
    parts = []
    for mark in marks:
        before, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"tokenizer.chat_template: leaves out a message's content; wanted {mark} in its output")
        parts.append(before)
    return (*parts, text)
