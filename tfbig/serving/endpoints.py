"""The endpoints that write text: OpenAI's and SageMaker's, on one path through the server."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from tfbig.generation.completion import Completion, CompletionText
from tfbig.serve_config import ServeConfig
from tfbig.serving.access_log import log
from tfbig.serving.body import disconnected, read_json
from tfbig.serving.errors import RequestError
from tfbig.serving.event_stream import EventStream
from tfbig.serving.metrics import Metrics
from tfbig.serving.openai_format import Answer, ChatAnswer, Choice
from tfbig.serving.requests import GenerationRequest, RequestReader
from tfbig.serving.runner import Job, Runner
from tfbig.serving.served_model import ServedModel

CLIENT_LEFT = 499  # nginx's word for it; nobody receives it


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a JSON response."""
    return Response(orjson.dumps(body), status, headers, "application/json")


class Endpoints:
    """Answers requests for text.

    Args:
      model: that answers.
      runner: that writes.
      reader: of requests.
      config: limits.
      metrics: that are kept.
    """

    def __init__(
        self,
        model: ServedModel,
        runner: Runner,
        reader: RequestReader,
        config: ServeConfig,
        metrics: Metrics,
    ) -> None:
        self._model, self._runner, self._reader = model, runner, reader
        self._config, self._metrics = config, metrics

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        body = await self._body(request)
        return await self._answer(request, await self._completions(body), Answer)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        body = await self._body(request)
        return await self._answer(request, await self._chat(body), ChatAnswer)

    async def invocations(self, request: Request) -> Response:
        """POST /invocations: the body of Hugging Face's toolkit, or one of OpenAI's."""
        body = await self._body(request)
        if "messages" in body:
            return await self._answer(request, await self._chat(body), ChatAnswer)
        if "prompt" in body:
            return await self._answer(request, await self._completions(body), Answer)
        wanted = await asyncio.to_thread(self._reader.invocation, body)
        if wanted.stream:
            return await self._answer(request, wanted, Answer)
        answer = self._make_answer(wanted, Answer)
        if not await self._write(request, answer):
            return Response(status_code=CLIENT_LEFT)
        texts = [{"generated_text": choice.prefix + choice.text} for choice in answer.choices]
        n = wanted.num_choices
        groups = [texts[start : start + n] for start in range(0, len(texts), n)]
        several = isinstance(body.get("inputs"), list)
        return json_response(groups if several else groups[0])

    # Parts.

    # Chat templates and tokenizers take their time, in which other requests' pieces go out.

    async def _completions(self, body: Any) -> GenerationRequest:
        return await asyncio.to_thread(self._reader.completions, body)

    async def _chat(self, body: Any) -> GenerationRequest:
        return await asyncio.to_thread(self._reader.chat, body)

    async def _body(self, request: Request) -> Any:
        config = self._config
        body = await read_json(request, config.max_body_bytes, config.body_seconds)
        if config.log_prompts:
            log("body", request_id=request.state.request_id, body=body)
        return body

    def _make_answer(self, wanted: GenerationRequest, kind: type[Answer]) -> Answer:
        choices: list[Choice] = []
        for prompt, text, max_tokens in zip(
            wanted.prompts, wanted.prompt_texts, wanted.max_tokens, strict=True
        ):
            for index in range(wanted.num_choices):  # a prompt draws as it would alone
                completion = Completion(
                    prompt,
                    wanted.options,
                    max_tokens,
                    wanted.end_tokens,
                    index,
                    wanted.num_top_logprobs,
                )
                prefix = ""
                if wanted.echo:
                    prefix = self._model.tokenizer.decode(prompt) if text is None else text
                choices.append(Choice(completion, prefix))
        return kind(wanted, choices, self._model.name, self._model.tokenizer)

    async def _answer(
        self, request: Request, wanted: GenerationRequest, kind: type[Answer]
    ) -> Response:
        answer = self._make_answer(wanted, kind)
        if wanted.stream:
            job = self._submit(request, answer)  # a full queue is an error before the stream
            headers = {"X-Request-Id": request.state.request_id}
            deadline = job.submitted + self._config.request_seconds
            request.state.log_stream(CLIENT_LEFT)  # unless it says something else
            return EventStream(
                self._events(request, job, answer),
                functools.partial(self._close, request, job, answer),
                headers,
                deadline,
            )
        if not await self._write(request, answer):
            return Response(status_code=CLIENT_LEFT)
        return json_response(answer.body())

    def _submit(self, request: Request, answer: Answer) -> Job:
        tokenizer, stop = self._model.tokenizer, answer.request.stop
        job = Job([CompletionText(choice.completion, tokenizer, stop) for choice in answer.choices])
        self._runner.submit(job, self._config.request_seconds)
        return job

    async def _write(self, request: Request, answer: Answer) -> bool:
        """Writes the whole answer; False means that the client left."""
        job = self._submit(request, answer)
        left = asyncio.create_task(disconnected(request))
        writing = asyncio.create_task(self._collect(job, answer))
        try:
            await asyncio.wait({left, writing}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                return False
            writing.result()
            return True
        finally:
            for task in (left, writing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestError, Exception):
                    await task
            self._close(request, job, answer)

    async def _collect(self, job: Job, answer: Answer) -> None:
        async for index, piece in self._runner.pieces(job):
            answer.choices[index].add(piece)

    async def _events(
        self, request: Request, job: Job, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        try:
            for chunk in answer.first_chunks():
                yield _event(chunk)
            async for index, piece in self._runner.pieces(job):
                answer.choices[index].add(piece)
                following = answer.next_chunk(index, piece)
                if following is not None:
                    yield _event(following)
            if answer.request.include_usage:
                yield _event(answer.usage_chunk())
            yield b"data: [DONE]\n\n"
            request.state.log_stream(200)
        except RequestError as error:  # too late for a status: the stream ends with the error
            yield _event(error.body())
            request.state.log_stream(error.status)

    def _close(self, request: Request, job: Job, answer: Answer) -> None:
        self._runner.close(job)
        usage = answer.usage()
        self._metrics.prompt_tokens.inc(usage["prompt_tokens"])
        if job.first_token is not None:
            self._metrics.first_token_seconds.observe(job.first_token)
        request.state.fields = {
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "first_token_seconds": job.first_token,
            "finish_reasons": [choice.finish_reason or "cancelled" for choice in answer.choices],
        }
        if self._config.log_prompts:
            texts = [choice.text for choice in answer.choices]
            log("answer", request_id=request.state.request_id, texts=texts)


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
