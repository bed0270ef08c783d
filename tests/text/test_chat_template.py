"""Chats read as transformers writes them; a hostile template gets nowhere; bad messages are named."""

import json
import threading
import time
from datetime import datetime

import pytest

from pagetable.text import ChatTemplateError, render_chat

USER = [{"role": "user", "content": "hi"}]
CHATS = [
    USER,
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<b>&'\"\n {{ x }} 世界</b>"}],
    [*USER, {"role": "assistant", "content": "hello "}, {"role": "user", "content": " bye\n"}],
]


@pytest.fixture(scope="module")
def theirs(smollm2_path):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_default_model_writes_chats_as_transformers_does(smollm2, theirs, chat, add_generation_prompt):
    options = {"add_generation_prompt": add_generation_prompt}
    assert render_chat(smollm2, chat, **options) == theirs.apply_chat_template(chat, tokenize=False, **options)
    expected = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **options)
    assert smollm2.encode(render_chat(smollm2, chat, **options), add_special_tokens=False) == expected


LLAMA3_LIKE = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif -%}
<|{{ message.role }}|>
{{ message.content | trim }}<|end|>
{% endfor %}
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}
{%- generation %}[{{ loops | default('none') }}]{% endgeneration %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f<>&'é"}}]])
def test_what_templates_use_works_as_in_transformers(theirs, tools):
    chat = [*CHATS[1], {"role": "skip", "content": "not this"}]
    expected = theirs.apply_chat_template(
        chat, chat_template=LLAMA3_LIKE, tools=tools, tokenize=False, add_generation_prompt=True, loops="x"
    )
    assert render_chat(LLAMA3_LIKE, chat, tools=tools, bos_token="<|im_start|>", loops="x") == expected


def test_begin_token_is_not_doubled(metaspace):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = metaspace.encode(render_chat(metaspace, USER, chat_template=template), add_special_tokens=False)
    assert ids[0] == 1
    assert ids.count(1) == 1
    assert metaspace.encode("the").count(1) == 1  # plain text still gets it


def test_text_parts_are_joined_by_line_breaks(smollm2):
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert render_chat(smollm2, parts) == render_chat(smollm2, [{"role": "user", "content": "a\nb"}])


def test_a_message_that_only_calls_tools_needs_no_content(smollm2):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}], "name": None}
    assert "<|im_start|>assistant\n<|im_end|>" in render_chat(smollm2, [*USER, call])
    shown = render_chat("{{ messages[0].name is defined }} {{ messages[0].tool_calls[0].function.name }}", [call])
    assert shown == "False f"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "must not be empty"),
        ("hi", "must be a list"),
        (None, "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (["hi"], r"messages\[0\] must be a dict"),
        ([{"content": "x"}], r"messages\[0\] must have a role"),
        ([{"role": 3, "content": "x"}], "must have a role"),
        ([*USER, {"role": "user"}], r"messages\[1\] must have content"),
        ([{"role": "user", "content": None}], "must have content"),
        ([{"role": "user", "content": 5}], "must have content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "'image_url'.*only text"),
        ([{"role": "user", "content": ["x"]}], "only text parts"),
        ([{"role": "user", "content": [{"type": "text"}]}], "no string under 'text'"),
        ([{"role": "user", "content": "x", "extra": object()}], r"messages\[0\].extra must be plain data"),
    ],
)
def test_bad_messages_are_named(smollm2, messages, named):
    with pytest.raises(ChatTemplateError, match=named):
        render_chat(smollm2, messages)


def test_data_that_contain_themselves_are_refused(smollm2):
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ChatTemplateError, match="nested too deeply"):
        render_chat(smollm2, USER, documents=loop)


def test_no_template_is_a_clear_error(metaspace):
    with pytest.raises(ChatTemplateError, match="no default chat template"):
        render_chat(metaspace, USER)


def test_template_can_be_overridden_by_text_or_name(smollm2):
    assert render_chat(smollm2, USER, chat_template="{{ messages[0].content }}{{ eos_token }}") == "hi<|im_end|>"
    assert render_chat(smollm2, USER, chat_template="default") == render_chat(smollm2, USER)


def test_strftime_now_gives_today():
    assert render_chat("{{ strftime_now('%Y') }}", USER) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_a_template_can_refuse_the_messages():
    with pytest.raises(ChatTemplateError, match="roles must alternate") as caught:
        render_chat("{{ raise_exception('roles must alternate') }}", USER)
    assert "jinja2" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__.values() | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set messages[0].role = 'x' %}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ namespace(__html__=1) }}",
        "{{ ('%s' | attr('__mod__'))(1) }}{{ '{0.__class__.__mro__}'.format(1).x.y }}",
        "{{ lipsum.__globals__.os }}{{ x.y.z }}",
        "{% include 'x' %}",
        "{% import 'os' as os %}",
    ],
)
def test_the_sandbox_holds(template):
    with pytest.raises(ChatTemplateError):
        render_chat(template, USER)
    assert USER == [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(9999) %}{% for a in r %}{% for b in r %}{% for c in r %}{% endfor %}{% endfor %}{% endfor %}",
        "{% for a in range(10 ** 9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'a' * 10 ** 12 }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{% for a in range(2000) %}{{ 'x' * 100000 }}{% endfor %}",
    ],
)
def test_runaway_templates_are_stopped(template):
    begin = time.perf_counter()
    with pytest.raises(ChatTemplateError):
        render_chat(template, USER)
    assert time.perf_counter() - begin < 20


@pytest.mark.parametrize(
    ("template", "named"),
    [
        ("{% for %}", "faulty, line 1"),
        ("a\n{% endif %}", "faulty, line 2"),
        ("{{ nothing.here.at_all }}", "nothing"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ messages[0].content | nofilter }}", "nofilter"),
    ],
)
def test_faulty_templates_are_named_errors(template, named):
    with pytest.raises(ChatTemplateError, match=named):
        render_chat(template, USER)


def test_loops_keep_their_jinja_abilities():
    template = (
        "{% for m in messages if m.role == 'user' %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}"
        "{{ loop.nextitem is defined }}{% else %}none{% endfor %}"
        "{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"
        "{% for x in missing %}never{% else %}empty{% endfor %}"
    )
    assert render_chat(template, USER) == "1/1TrueFalserolecontentempty"


def test_templates_render_in_threads(smollm2):
    expected, found = render_chat(smollm2, CHATS[2]), []
    threads = [threading.Thread(target=lambda: found.append(render_chat(smollm2, CHATS[2]))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_tojson_writes_plain_json():
    value = {"b": "<é>", "a": [1, None, True]}
    assert render_chat("{{ v | tojson }}", USER, v=value) == json.dumps(value, ensure_ascii=False)
