"""The built-in tokenizer: one token per word, with the chat format of the built-in environment.

A session reads `<user> move f3 d1 > mv f3 d1 ; <obs> ok > done ; <user> ... >`: the policy writes what stands between
a `>` and the next `;`, which ends its action.
"""

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' -%}{{ '<user> ' ~ message.content ~ ' ' }}"
    "{%- elif message.role == 'tool' -%}{{ '<obs> ' ~ message.content ~ ' ' }}"
    "{%- elif message.role == 'assistant' -%}{{ '> ' ~ message.content ~ ' ; ' }}"
    "{%- else -%}{{ raise_exception('no role ' ~ message.role ~ ' in this format') }}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '>' }}{%- endif -%}"
)


def build_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """A tokenizer of one token per word (white space between), ids in the order of `words`, with the chat format.

    `words` must hold the markers `<pad> <unk> <user> <obs> > ;` of the chat format; `;` ends an action.
    """
    missing = {"<pad>", "<unk>", "<user>", "<obs>", ">", ";"} - set(words)
    if missing:
        raise ValueError(f"words lacks {sorted(missing)}; wanted the markers of the chat format among them")
    backend = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token=";",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
