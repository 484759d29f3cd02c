"""Reading requests: whatever comes, it is a request or an error that names what is wrong."""

import datetime

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfbig.errors import UserError
from tfbig.serving.chat import ChatTemplate
from tfbig.serving.errors import RequestError
from tfbig.serving.requests import GenerationRequest, Limits, RequestReader

FIELDS = (
    "model prompt max_tokens max_completion_tokens n best_of echo stop temperature top_p top_k"
    " min_p logprobs top_logprobs presence_penalty frequency_penalty repetition_penalty logit_bias"
    " seed suffix stream stream_options user stop_token_ids ignore_eos min_tokens messages inputs"
    " parameters tools response_format"
).split()


class Bytes:
    """A tokenizer whose tokens are bytes."""

    vocab_size, end_of_text_id = 257, 256

    def encode(self, text):
        return np.frombuffer(text.encode(), np.uint8)


def reader(template: str = "", **limits) -> RequestReader:
    tokenizer = Bytes()
    limits = {
        "max_length": 64,
        "max_tokens": 64,
        "max_choices": 4,
        "max_prompt_bytes": 64,
        **limits,
    }
    limits = Limits(**limits)
    return RequestReader(
        tokenizer, lambda text: tokenizer.encode(text).tolist(), ChatTemplate(template), limits, "m"
    )


SIMPLE = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
)


def nested(inner):
    return st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)


JSON = st.recursive(SIMPLE, nested, max_leaves=6)


READER = reader()


@settings(max_examples=400, deadline=None)
@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=6), kind=st.integers(0, 2))
def test_anything_is_a_request_or_an_error(body, kind):
    read = [READER.completions, READER.chat, READER.invocation][kind]
    try:
        request = read(body)
    except RequestError as error:
        assert 400 <= error.status < 500 and error.message
        assert error.body()["error"]["message"] == error.message
        return
    assert isinstance(request, GenerationRequest)
    assert len(request.prompts) * request.num_choices <= 4
    for prompt, max_tokens in zip(request.prompts, request.max_tokens, strict=True):
        assert prompt and max_tokens >= 1 and len(prompt) + max_tokens <= 64
        assert all(0 <= token < 257 for token in prompt)


def test_defaults():
    request = reader().completions({"prompt": "ab"})
    assert request.prompts == [[97, 98]] and request.max_tokens == [16]
    assert request.options.temperature == 1.0 and request.end_tokens == {256}
    assert reader().completions({"prompt": ""}).prompts == [[256]]
    assert reader().completions({"prompt": "a" * 60}).max_tokens == [4], "what there is room for"
    assert reader(max_tokens=5).completions({"prompt": "a"}).max_tokens == [5]
    other = reader().completions({"prompt": "ab"})
    assert request.options.seed != other.options.seed
    assert reader().completions({"prompt": "a", "seed": -1}).options.seed >= 0
    chat = reader().chat({"messages": [{"role": "user", "content": "a"}]})
    assert chat.max_tokens == [64 - len(b"user: a\n\nassistant:")]


def deep(levels: int) -> list:
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("field", FIELDS)
def test_deep_values(field):
    """What shows a value or compares it may not go down to its end."""
    prompt = {"prompt": "a", "inputs": "a", "messages": [{"role": "user", "content": "a"}]}
    for read, names in ((READER.completions, ["prompt"]), (READER.chat, ["messages"]),
                        (READER.invocation, ["inputs", "parameters"])):  # fmt: skip
        body = {name: prompt[name] for name in names if name in prompt} | {field: deep(5_000)}
        try:
            request = read(body)
        except RequestError as error:
            assert len(error.message) < 300
        else:
            assert request.prompts, "a field that the API does not look at"


def test_long_prompts_are_not_tokenized():
    class Asked(Exception):
        pass

    class Never(Bytes):
        def encode(self, text):
            raise Asked

    tokenizer = Never()
    limits = Limits(max_length=64, max_tokens=64, max_choices=4, max_prompt_bytes=64 * 3)
    one = RequestReader(tokenizer, tokenizer.encode, ChatTemplate(), limits, "m")
    for length, kind in ((64 * 3 + 1, RequestError), (64 * 3 - 20, Asked)):
        text = "a" * length
        messages = [{"role": "user", "content": text}]
        for read, body in ((one.completions, {"prompt": text}),
                           (one.completions, {"prompt": [text, "a"]}),
                           (one.chat, {"messages": messages}),
                           (one.invocation, {"inputs": text})):  # fmt: skip
            with pytest.raises(kind) as error:
                read(body)
            if kind is RequestError:
                assert error.value.code == "context_length_exceeded"
                assert "more than the model's 64 positions" in error.value.message


def test_a_chat_is_rendered_as_training_renders_it():
    from data_pipeline.chat import to_documents
    from data_pipeline.documents import ReadCounts
    from data_pipeline.input_files import RecordFormat

    messages = [("system", " Be brief.\n"), ("user", "\n2 + 2? \t"), ("assistant", " 4 ")]
    chat = [{"role": role, "content": text} for role, text in messages]
    (document,) = to_documents({"chat": chat}, RecordFormat(chat="chat"), ReadCounts())
    assert ChatTemplate().render(chat[:2]) == document.prompt


def test_what_transformers_gives_templates():
    """Loop controls, the date and JSON as it is: templates of many models use them."""
    message = {"role": "user", "content": "<ä>"}
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}"
        "{% endfor %}{{ strftime_now('%Y') }}"
    )
    shown = ChatTemplate(source).render([message, message])
    assert shown == f'{{"role": "user", "content": "<ä>"}}{datetime.date.today().year}'


def test_unknown_parameters_of_an_invocation():
    invocation = reader().invocation
    for body, words in (
        ({"parameters": {"max_new_token": 3}}, "Did you mean max_new_tokens"),
        ({"parameters": {"truncate": 5}}, "parameters has an unknown field 'truncate'"),
        ({"parameters": {"num_beams": 2}}, "num_beams is not supported"),
        ({"parameters": {"typical_p": 0.5}}, "typical_p is not supported"),
        ({"paramters": {}}, "the body has an unknown field 'paramters'"),
        ({"model": "other"}, "there is no model 'other'"),
    ):
        with pytest.raises(RequestError, match=words):
            invocation({"inputs": "a", **body})
    inert = {"num_beams": 1, "watermark": False, "typical_p": 1.0, "length_penalty": 1}
    assert not invocation({"inputs": "a", "parameters": inert}).stream
    assert invocation({"inputs": "a", "parameters": {"stream": True}}).stream
    assert invocation({"inputs": "a", "stream": True}).stream, "as Hugging Face's containers do"


def test_beam_search_is_refused():
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for read, body in ((reader().completions, {"prompt": "a"}), (reader().chat, chat)):
        with pytest.raises(RequestError, match="use_beam_search is not supported"):
            read({**body, "use_beam_search": True})
        assert read({**body, "use_beam_search": False})


def test_a_template_of_the_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"chat_template": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}'
        "{% endfor %}{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}\","
        ' "bos_token": {"content": "<s>"}}'
    )
    template = ChatTemplate.of_folder(tmp_path)
    message = {"role": "user", "content": "hi"}
    assert template.render([message]) == "<s>[user]hi" and not template.is_plain
    with pytest.raises(RequestError, match="refuses these messages: too long"):
        template.render([message] * 3)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert ChatTemplate.of_folder(tmp_path).render([message]) == "hi!"
    (tmp_path / "chat_template.jinja").write_text("{% for")
    with pytest.raises(UserError, match="chat template is damaged"):
        ChatTemplate.of_folder(tmp_path)


def test_a_template_sees_nothing_of_the_process():
    message = [{"role": "user", "content": "x"}]
    for source in (
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ):
        with pytest.raises(RequestError, match="refuses"):
            ChatTemplate(source).render(message)
