"""The official client against the server: both endpoints, streams, options, errors."""

import dataclasses
import math

import openai
import pytest

from tests.serving.conftest import MAX_LENGTH, NAME, serving
from tfbig.serving.chat import ChatTemplate

ASKED = {"model": NAME, "prompt": "def main(", "max_tokens": 12, "seed": 5}


def test_models(openai_client):
    (model,) = openai_client.models.list().data
    assert model.id == NAME and model.max_model_len == MAX_LENGTH and model.card["layers"] == 2
    assert openai_client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt-4'"):
        openai_client.models.retrieve("gpt-4")


def test_completions(openai_client, tokenizer):
    answer = openai_client.completions.create(**ASKED)
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert choice.finish_reason == "length" and choice.text and choice.logprobs is None
    prompt = len(tokenizer.encode(ASKED["prompt"]))
    assert answer.usage.prompt_tokens == prompt and answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == prompt + 12
    again = openai_client.completions.create(**ASKED)
    assert again.choices[0].text == choice.text and again.id != answer.id
    assert openai_client.completions.create(**{**ASKED, "seed": 6}).choices[0].text != choice.text
    ids = tokenizer.encode(ASKED["prompt"]).tolist()
    assert openai_client.completions.create(**{**ASKED, "prompt": ids}).choices[0].text == (
        choice.text
    )
    echoed = openai_client.completions.create(**ASKED, echo=True).choices[0].text
    assert echoed == ASKED["prompt"] + choice.text


def test_a_stream_is_the_whole_in_pieces(openai_client):
    options = {**ASKED, "n": 3, "logprobs": 2, "stop": ["q"]}
    whole = openai_client.completions.create(**options)
    texts, tokens, reasons, usage = [""] * 3, [[], [], []], [None] * 3, None
    stream = openai_client.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    num_chunks = 0
    for chunk in stream:
        num_chunks += 1
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert num_chunks > 10
    assert texts == [choice.text for choice in whole.choices] and len(set(texts)) == 3
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]
    assert usage == whole.usage


def test_logprobs(openai_client):
    found = openai_client.completions.create(**ASKED, temperature=0, logprobs=3).choices[0]
    logprobs = found.logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == 12
    for token, value, top in zip(
        logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert value == pytest.approx(max(top.values()))  # greedy
        assert token in top and sum(map(math.exp, top.values())) <= 1 + 1e-6
    assert logprobs.text_offset[0] == 0 and logprobs.text_offset == sorted(logprobs.text_offset)


def test_stop_and_end(openai_client):
    free = openai_client.completions.create(**ASKED).choices[0].text
    stop = free[4:7]
    found = openai_client.completions.create(**ASKED, stop=stop).choices[0]
    assert found.text == free[: free.index(stop)] and found.finish_reason == "stop"


def test_several_prompts(openai_client):
    prompts = ["one", "two and more"]
    found = openai_client.completions.create(
        model=NAME, prompt=prompts, n=2, max_tokens=5, temperature=0
    )
    texts = [choice.text for choice in found.choices]
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert texts[0] == texts[1] and texts[2] == texts[3] and texts[0] != texts[2]
    assert found.usage.completion_tokens == 20
    # With a seed, too, a prompt's texts are those it has alone.
    options = {"model": NAME, "n": 2, "max_tokens": 8, "seed": 3}
    found = openai_client.completions.create(**options, prompt=prompts)
    texts = [choice.text for choice in found.choices]
    for prompt in prompts:
        alone = openai_client.completions.create(**options, prompt=prompt)
        assert [choice.text for choice in alone.choices] == [texts.pop(0), texts.pop(0)]


def test_options(openai_client, tokenizer):
    def text(**extra):
        found = openai_client.completions.create(**ASKED, extra_body=extra)
        return found.choices[0].text

    greedy = openai_client.completions.create(**{**ASKED, "temperature": 0}).choices[0].text
    assert text(top_k=1) == text(min_p=1.0) == greedy
    assert text(top_k=-1, min_p=0) == text()
    (token,) = tokenizer.encode("q").tolist()
    assert text(logit_bias={str(token): 100}) == "q" * 12


def test_chat(openai_client):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    options = {"model": NAME, "messages": messages, "seed": 1, "max_completion_tokens": 9}
    answer = openai_client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    (choice,) = answer.choices
    assert answer.object == "chat.completion" and choice.message.role == "assistant"
    assert choice.message.content and choice.finish_reason == "length"
    content = choice.logprobs.content
    assert len(content) == 9 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert b"".join(bytes(e.bytes) for e in content).decode(errors="replace") == (
        choice.message.content
    )
    chunks = list(openai_client.chat.completions.create(**options, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == choice.message.content and chunks[-1].choices[0].finish_reason == "length"
    plain = "system: Be short.\n\nuser: Hello\n\nassistant:"
    same = openai_client.completions.create(model=NAME, prompt=plain, seed=1, max_tokens=9)
    assert same.choices[0].text == text
    longest = openai_client.chat.completions.create(
        model=NAME, messages=messages, extra_body={"ignore_eos": True}
    )
    assert longest.usage.total_tokens == MAX_LENGTH


def test_the_tokenizer_s_own_template(model, tokenizer):
    """From the messages to ids: its special tokens are tokens, and the answer follows them."""
    source = "<|endoftext|>{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    served = dataclasses.replace(model, template=ChatTemplate(source))
    with serving(served) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0) as client:
            options = {"model": NAME, "seed": 2, "max_tokens": 9}
            messages = [{"role": "user", "content": " def main("}]
            chat = client.chat.completions.create(**options, messages=messages)
            ids = [tokenizer.end_of_text_id, *tokenizer.encode("[user] def main(").tolist()]
            whole = client.completions.create(**options, prompt=ids)
            named = client.completions.create(**options, prompt="<|endoftext|>[user] def main(")
    assert chat.choices[0].message.content == whole.choices[0].text
    assert chat.usage.prompt_tokens == len(ids) < named.usage.prompt_tokens


BAD = {
    "model": ({"model": "gpt-4"}, openai.NotFoundError, "there is no model 'gpt-4'"),
    "n": ({"n": 0}, openai.BadRequestError, "n must be from 1 to 8"),
    "temperature": ({"temperature": 2.5}, openai.BadRequestError, "temperature must be from 0"),
    "length": ({"max_tokens": 127}, openai.BadRequestError, "ask for at most"),
    "suffix": ({"suffix": "x"}, openai.BadRequestError, "suffix is not supported"),
    "stop": ({"stop": [""]}, openai.BadRequestError, "a stop string has 1 to"),
    "bias": ({"logit_bias": {"x": 1}}, openai.BadRequestError, "'x' is no token id"),
    "ids": ({"prompt": [[1], [10**9]]}, openai.BadRequestError, "token ids below"),
    "best_of": ({"best_of": 3}, openai.BadRequestError, "best_of is not supported"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name, openai_client):
    fields, kind, words = BAD[name]
    with pytest.raises(kind, match=words) as error:
        openai_client.completions.create(**{**ASKED, **fields})
    assert error.value.body["type"] == "invalid_request_error"
    parameter = {"length": "max_tokens", "bias": "logit_bias", "ids": "prompt"}.get(name, name)
    assert error.value.body["param"] == parameter


def test_the_key(model):
    with serving(model, api_key="secret-ü") as address:

        def models(key):
            client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
            return client.models.list().data

        for wrong in ("secret", "secret-u", "x" * 5000):
            with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
                models(wrong)
        import httpx

        right = {"Authorization": "Bearer secret-ü".encode()}
        assert httpx.get(f"{address}/v1/models", headers=right).status_code == 200
        assert httpx.get(f"{address}/ping").status_code == 200, "probes have no key"
        assert httpx.post(f"{address}/invocations", json={"inputs": "a"}).status_code == 401
