"""The thread that writes: requests come in from the event loop, pieces of text go back to it."""

import asyncio
import math
import queue
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Sequence

from tfbig.generation.completion import Completion, CompletionText, Piece
from tfbig.generation.engine import Engine
from tfbig.serving.errors import RequestError

Event = tuple["Job", int, Piece | None]  # None: the engine failed
_LATE = -1  # in place of a completion's index: the deadline has passed


class Job:
    """The completions of one request.

    Made, read and closed on the event loop.

    Args:
      texts: of its completions.
    """

    def __init__(self, texts: Sequence[CompletionText]) -> None:
        self.texts = list(texts)
        self.loop = asyncio.get_running_loop()
        self.pieces: asyncio.Queue[tuple[int, Piece | None]] = asyncio.Queue()
        self.submitted = time.monotonic()
        self.first_token: float | None = None  # seconds after `submitted`
        self.num_open = len(self.texts)
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def completions(self) -> list[Completion]:
        """In the order of the request."""
        return [text.completion for text in self.texts]


class Runner:
    """Runs an engine in a thread of its own.

    Args:
      make_engine: makes the engine; again after a step of it has failed.
      queue_size: completions that may wait for a row.
      on_step: is told after each step (tokens written, completions running, waiting).
      rest: is called every `rest_seconds` in which there is nothing to write.
      rest_seconds: see `rest`.
    """

    def __init__(
        self,
        make_engine: Callable[[], Engine],
        queue_size: int,
        on_step: Callable[[int, int, int], None],
        rest: Callable[[], None] | None = None,
        rest_seconds: float = 5.0,
    ) -> None:
        self._make_engine, self._on_step = make_engine, on_step
        self._rest, self._rest_seconds = rest, rest_seconds if rest else None
        self._engine = make_engine()
        self._num_rows = self._engine.num_rows
        self._most_open = self._num_rows + queue_size
        self._new_jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._texts: dict[Completion, tuple[Job, int]] = {}
        self._num_open = 0  # completions of jobs that are not closed; the event loop's
        self._seconds = 1.0  # a running mean of how long a job takes; the event loop's
        self._thread = threading.Thread(target=self._run, name="generation", daemon=True)

    # On the event loop.

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Ends the thread after its present step.

        Args:
          timeout: seconds that are waited for it.
        """
        self._new_jobs.put(None)
        self._thread.join(timeout)

    @property
    def healthy(self) -> bool:
        """Whether the thread lives."""
        return self._thread.is_alive()

    def submit(self, job: Job, seconds: float) -> None:
        """Queues a job; `close` must follow.

        Args:
          job: new.
          seconds: after which its `pieces` end with an error.

        Raises:
          RequestError: too many wait already; 429 with when to try again.
        """
        if self._num_open + job.num_open > self._most_open:
            rounds = self._num_open / self._num_rows
            seconds = max(1, min(math.ceil(rounds * self._seconds / 2), 60))
            raise RequestError(
                f"{self._num_open} texts are being written or waiting: try again in {seconds} s.",
                429,
                "rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self._num_open += job.num_open
        # One clock for a job: waiting for each piece with one of its own costs more than the piece.
        job.deadline = job.loop.call_later(seconds, job.pieces.put_nowait, (_LATE, None))
        self._new_jobs.put(job)

    def close(self, job: Job) -> None:
        """Ends a submitted job, finished or not."""
        assert job.deadline is not None
        job.deadline.cancel()
        for completion in job.completions:
            completion.finish("cancelled")
        self._num_open -= job.num_open
        job.num_open = 0
        self._seconds += 0.1 * (time.monotonic() - job.submitted - self._seconds)

    async def pieces(self, job: Job) -> AsyncIterator[tuple[int, Piece]]:
        """Yields (index of the completion, piece) until all completions of a submitted job ended.

        Raises:
          RequestError: the deadline passed, or the engine failed.
        """
        num_going = len(job.texts)
        while num_going:
            index, piece = await job.pieces.get()
            if index == _LATE:
                raise RequestError(
                    "the request took longer than the server allows.",
                    504,
                    "timeout_error",
                    code="timeout",
                )
            if piece is None:
                raise RequestError("the model failed; the server's log says how.", 500, "api_error")
            num_going -= piece.finish_reason is not None
            yield index, piece

    # In the thread.

    def _run(self) -> None:
        while True:
            try:
                if not self._take_jobs():
                    return
                changed = self._engine.step()
                self._hand_out(changed)
                continue
            except Exception:
                traceback.print_exc()
            # Here, where no traceback holds on to the cache.
            self._fail_all()

    def _take_jobs(self) -> bool:
        """Queues new jobs at the engine, waiting for one when idle; False means the end."""
        wait = self._engine.idle
        while True:
            try:
                job = self._new_jobs.get(wait, self._rest_seconds if wait else None)
            except queue.Empty:
                if not wait or self._rest is None:
                    return True
                self._rest()
                continue
            if job is None:
                return False
            wait = False
            for index, completion in enumerate(job.completions):
                self._texts[completion] = (job, index)
                self._engine.add(completion)

    def _hand_out(self, changed: list[Completion]) -> None:
        events: dict[asyncio.AbstractEventLoop, list[Event]] = {}
        num_tokens = 0
        for completion in changed:
            if completion not in self._texts:
                continue  # its end was handed out before
            job, index = self._texts[completion]
            piece = job.texts[index].take()
            num_tokens += piece.num_tokens
            if piece.finish_reason is not None:
                del self._texts[completion]
            events.setdefault(job.loop, []).append((job, index, piece))
        self._deliver(events)
        self._on_step(num_tokens, self._engine.num_running, self._engine.num_waiting)

    def _fail_all(self) -> None:
        """Ends all jobs and begins with an empty cache."""
        events: dict[asyncio.AbstractEventLoop, list[Event]] = {}
        for job, index in self._texts.values():
            events.setdefault(job.loop, []).append((job, index, None))
        self._texts.clear()
        self._deliver(events)
        self._engine.close()  # first: there may be no room for two caches
        self._engine = self._make_engine()

    @staticmethod
    def _deliver(events: dict[asyncio.AbstractEventLoop, list[Event]]) -> None:
        """Hands events to their loops, in one call each."""
        for loop, of_loop in events.items():
            try:
                loop.call_soon_threadsafe(_put, of_loop)
            except RuntimeError:  # the loop has ended
                continue


def _put(events: list[Event]) -> None:
    for job, index, piece in events:
        if job.first_token is None and piece is not None and piece.num_tokens:
            job.first_token = time.monotonic() - job.submitted
        job.pieces.put_nowait((index, piece))
