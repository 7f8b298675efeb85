"""The chat layout: pieces put end to end are what the template renders, for templates of every habit."""

import pytest
from crest_train.chat import make_chat
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from toy import toy_tokenizer
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
STRICT = (
    "<s>{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>"
    "{% else %}{{ raise_exception('no such role') }}{% endif %}{% endfor %}"
)


def byte_tokenizer(template):
    backend = Tokenizer(BPE())
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    specials = ["<|im_end|>", "<|im_start|>", "<s>", "</s>"]
    text = ["list the files in docs, then say done", "user\nassistant\ntool\nsystem\n"] * 3
    backend.train_from_iterator(text, BpeTrainer(special_tokens=specials, initial_alphabet=ByteLevel.alphabet()))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", additional_special_tokens=specials[1:]
    )
    tokenizer.chat_template = template
    return tokenizer


def message(role, content):
    return {"role": role, "content": content}


@pytest.mark.parametrize("template", [CHATML, DEFAULT_SYSTEM])
@pytest.mark.parametrize("system", ["", "Tools: ls, cd."])
def test_pieces_are_the_rendered_session(template, system):
    tokenizer = byte_tokenizer(template)
    chat = make_chat(tokenizer)
    prompt, opening = chat.open(system, "list docs")
    end = [chat.end_token]
    ids = prompt + opening
    ids += chat.encode("ls docs") + end + chat.reply("a.txt b.txt", None)
    ids += chat.encode("done") + end + chat.reply(None, "now a")
    ids += chat.encode("cat a") + end + chat.reply("no such file", "never mind")
    messages = [message("system", system)] if system else []
    messages += [message("user", "list docs"), message("assistant", "ls docs"), message("tool", "a.txt b.txt")]
    messages += [message("assistant", "done"), message("user", "now a"), message("assistant", "cat a")]
    messages += [message("tool", "no such file"), message("user", "never mind")]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(ids) == rendered
    assert ids == tokenizer.encode(rendered, add_special_tokens=False)
    assert tokenizer.decode(end) == "<|im_end|>"
    assert bool(prompt) == bool(system)


def test_prompt_is_shared_by_sessions_with_the_same_system_text():
    chat = make_chat(byte_tokenizer(CHATML))
    prompt, opening = chat.open("Tools.", "list docs")
    other, other_opening = chat.open("Tools.", "done")
    assert prompt == other and opening != other_opening
    assert chat.decode(prompt) == "<|im_start|>system\nTools.<|im_end|>\n<|im_start|>"


def test_reply_without_observation_or_request_opens_the_next_action():
    chat = make_chat(byte_tokenizer(CHATML))
    assert chat.decode(chat.reply(None, None)) == "\n<|im_start|>assistant\n"


def test_template_that_wants_users_and_assistants_to_alternate_gets_observations_as_a_user():
    chat = make_chat(byte_tokenizer(STRICT))
    assert chat.decode([chat.end_token]) == "</s>"
    assert chat.decode(sum(chat.open("Tools.", "list"), [])) == "<s>[INST] Tools.\n\nlist [/INST]"
    assert chat.decode(chat.reply("a.txt", None)) == "[INST] a.txt [/INST]"
    assert chat.decode(chat.reply("a.txt", "done")) == "[INST] a.txt\n\ndone [/INST]"


def test_word_level_layout():
    chat = make_chat(toy_tokenizer())
    text = chat.tokenizer.decode
    assert text(chat.open("", "say a")[1]) == "<user> say a >"
    assert text(chat.reply("no", None)) == "<obs> no >"
    assert text(chat.reply("no", "say b")) == "<obs> no <user> say b >"
    assert text(chat.reply(None, "say b")) == "<user> say b >"
    assert text([chat.end_token]) == ";"


def test_tokenizer_without_a_chat_template_is_refused():
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template.*set tokenizer.chat_template"):
        make_chat(tokenizer)


@pytest.mark.parametrize(
    ("template", "complaint"),
    [
        ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "no special token"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", "leaves out"),
    ],
)
def test_template_that_marks_no_end_or_drops_messages_is_refused(template, complaint):
    with pytest.raises(ValueError, match=complaint):
        make_chat(byte_tokenizer(template))


def test_special_tokens_in_an_action_stay_visible():
    chat = make_chat(byte_tokenizer(CHATML))
    assert chat.decode(chat.encode("ls <|im_start|>")) == "ls <|im_start|>"
