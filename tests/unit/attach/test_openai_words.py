"""Texts to tokens and back: chat templates as transformers renders them, answers that grow token by token."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers.utils.chat_template_utils import render_jinja_template

from plexrl.attach.openai.refusals import Refusal
from plexrl.attach.openai.template import Template
from plexrl.attach.openai.words import Flow, Words, alphabet

TALK = [
    {"role": "system", "content": "Be <b>brief</b> & 'kind'."},
    {"role": "user", "content": "Grüße, 世界 {{ 7*7 }} {% raw %}"},
    {"role": "assistant", "content": "\n  hello  \n"},
    {"role": "user", "content": "<|im_end|>"},
]
TEMPLATES = {
    "loops and blocks": "{% for m in messages %}\n  {%- if loop.first %}[{% endif %}\n{{ m['role'] }}: "
    "{{ m.content | trim }}\n  {% if m.role == 'assistant' %}{% continue %}{% endif %}.\n{% endfor %}\n"
    "{% if add_generation_prompt %}>{% endif %}",
    "json": "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}{{ bos_token }}{{ tools is none }}",
    "generation": "{% for m in messages %}{% generation %}\n{{ m.content }}{% endgeneration %}{% endfor %}",
    "words of the caller": "{{ 'think' if enable_thinking else 'no' }}{% set ns = namespace(x=1) %}{{ ns.x }}",
}


@pytest.fixture(scope="module")
def words(tiny_model: Path) -> Words:
    return Words(tiny_model)


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(name: str):
    source, words = TEMPLATES[name], {"enable_thinking": True}
    template = Template(
        Path("/nowhere"), {"chat_template": source, "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    )
    expected, _ = render_jinja_template(
        [TALK], chat_template=source, add_generation_prompt=True, bos_token="<s>", eos_token="</s>", **words
    )
    assert template.render(TALK, words) == expected[0]


def test_the_folders_own_template_and_special_tokens(words: Words):
    text = words.template.render([{"role": "user", "content": "hi"}], {})
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens = words.encode(text, special=False)
    assert sum(words.special(token) for token in tokens) == 3
    assert words.decode(tokens) == "user\nhi\nassistant\n"


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no such role') }}", "{{ messages.pop() }}", "{{ ''.__class__.__mro__ }}", "{{ 1/0 }}"],
)
def test_what_a_template_does_not_take_is_the_callers(source: str):
    with pytest.raises(Refusal) as caught:
        Template(Path("/nowhere"), {"chat_template": source}).render(TALK, {})
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_without_a_template_there_is_no_chat():
    with pytest.raises(Refusal, match="no chat template"):
        Template(Path("/nowhere"), {}).render(TALK, {})


def test_a_folder_that_cannot_be_read_is_the_admins(tmp_path: Path):
    with pytest.raises(Refusal, match="cannot be read on this node") as caught:
        Words(tmp_path)
    assert caught.value.status == 500


def test_letters_of_byte_level_tokens():
    assert set(alphabet().values()) == set(pre_tokenizers.ByteLevel.alphabet())


def test_pieces_are_bytes(words: Words):
    euro = words.encode("€", special=False)
    assert [words.piece(token) for token in euro] == [("\ufffd", [0xE2]), ("\ufffd", [0x82]), ("\ufffd", [0xAC])]
    assert words.piece(words.encode("<|im_end|>", special=False)[0])[0] == "<|im_end|>"


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(1, 5), max_size=40))
def test_a_flow_says_the_text_and_takes_nothing_back(words: Words, text: str, cuts: list[int]):
    flow, tokens, said = Flow(words, ()), words.encode(text, special=False), ""
    while tokens:
        size = cuts.pop() if cuts else 1
        flow.push(tokens[:size])
        tokens = tokens[size:]
        assert flow.text.startswith(said)
        said = flow.text
    flow.end()
    assert flow.text == text
    assert flow.shown() == len(flow.offsets)


@given(
    text=st.text("ab\u00e9", max_size=30),
    stops=st.lists(st.text("ab\u00e9", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_a_stop_ends_the_text_and_is_never_shown(words: Words, text: str, stops: list[str]):
    flow, shown = Flow(words, tuple(stops)), ""
    for token in words.encode(text, special=False):
        flow.push([token])
        assert flow.text.startswith(shown)
        shown = flow.text
    flow.end()
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    # Of two stops the one that is whole first ends it; it may begin further right than another that never got whole.
    ends = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=None)
    assert flow.cut == bool(found)
    if ends is None:
        assert flow.text == text
    else:
        assert flow.text == text[: min(at for s in stops if (at := text[:ends].find(s)) >= 0)]
    assert all(offset < len(flow.text) for offset in flow.offsets[: flow.shown()])
