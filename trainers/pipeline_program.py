"""Each pipeline rank's program: its work, and the exchanges between neighbours. TensorFlow-free.

An exchange is a rendezvous: both ranks must reach it. All exchanges of a plan have one total
order that every rank keeps, so the first unfinished one always has both its ranks on the way to
it: no plan can hang, whatever the work takes. Both directions travel in one exchange.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from trainers.pipeline_schedule import Work


class Message(NamedTuple):
    """A hidden state or its gradient, named by the pass that consumes it."""

    kind: Literal["forward", "backward"]
    stage: int  # g = chunk * p + rank of the consumer
    microbatch: int


class Exchange(NamedTuple):
    """A meeting with another pipeline rank; at most one message a direction."""

    peer: int
    send: Message | None
    receive: Message | None


class Program(NamedTuple):
    """What one pipeline rank does in a step, in order."""

    rank: int
    num_ranks: int
    num_chunks: int
    actions: tuple[Work | Exchange, ...]


def needed(work: Work, rank: int, num_ranks: int, num_chunks: int) -> Message | None:
    """Returns the message without which `work` cannot start, or None."""
    stage = work.chunk * num_ranks + rank
    is_end = stage == 0 if work.kind == "forward" else stage == num_ranks * num_chunks - 1
    return None if is_end else Message(work.kind, stage, work.microbatch)


def produced(work: Work, rank: int, num_ranks: int, num_chunks: int) -> tuple[int, Message] | None:
    """Returns (consumer's rank, message) that `work` makes, or None."""
    stage = work.chunk * num_ranks + rank + (1 if work.kind == "forward" else -1)
    if not 0 <= stage < num_ranks * num_chunks:
        return None
    return stage % num_ranks, Message(work.kind, stage, work.microbatch)


class _Simulation:
    """Runs all ranks' work on a simulated clock and notes where exchanges happen."""

    def __init__(
        self, orders: Sequence[Sequence[Work]], num_chunks: int, times: dict[str, float]
    ) -> None:
        self.orders, self.num_chunks, self.times = orders, num_chunks, times
        self.num_ranks = len(orders)
        self.actions: list[list[Work | Exchange]] = [[] for _ in orders]
        self.next = [0] * self.num_ranks
        self.free_at = [0.0] * self.num_ranks
        self.running: list[Work | None] = [None] * self.num_ranks
        self.inbox: list[set[Message]] = [set() for _ in orders]
        self.outbox: dict[tuple[int, int], list[Message]] = {}
        self.now = 0.0

    def run(self) -> None:
        while any(self.next[r] < len(self.orders[r]) for r in range(self.num_ranks)):
            self._finish_work()
            self._exchange()
            started = [self._start(rank) for rank in range(self.num_ranks)]
            busy = [self.free_at[r] for r in range(self.num_ranks) if self.running[r] is not None]
            assert any(started) or busy, f"no rank can go on: {self.next}"
            if busy:
                self.now = min(busy)
        self._finish_work()

    def _idle(self, rank: int) -> bool:
        return self.running[rank] is None

    def _finish_work(self) -> None:
        for rank, work in enumerate(self.running):
            if work is not None and self.free_at[rank] <= self.now:
                self.running[rank] = None
                made = produced(work, rank, self.num_ranks, self.num_chunks)
                if made is not None:
                    self.outbox.setdefault((rank, made[0]), []).append(made[1])

    def _exchange(self) -> None:
        # Even edges of the ring first, then odd ones, so that disjoint pairs meet side by side.
        moved = True
        while moved:
            moved = False
            pairs = {tuple(sorted(edge)) for edge, waiting in self.outbox.items() if waiting}
            for low, high in sorted(pairs, key=lambda pair: (pair[0] % 2, pair)):
                if self._awaited(low, high) or self._awaited(high, low):
                    down, up = self._take(low, high), self._take(high, low)
                    self.actions[low].append(Exchange(high, down, up))
                    self.actions[high].append(Exchange(low, up, down))
                    moved = True

    def _awaited(self, source: int, target: int) -> bool:
        """Whether the two meet now: both idle, and the target's next work waits for the source.

        Over several chunks a rank meets two neighbours, and a meeting that is put off delays the
        other one: there, whatever is ready goes.
        """
        ready = self.outbox.get((source, target), [])
        if not (ready and self._idle(source) and self._idle(target)):
            return False
        message = self._next_message(target)
        waits = message in ready and message not in self.inbox[target]
        return waits or self.num_chunks > 1

    def _next_message(self, rank: int) -> Message | None:
        if self.next[rank] == len(self.orders[rank]):
            return None
        return needed(self.orders[rank][self.next[rank]], rank, self.num_ranks, self.num_chunks)

    def _take(self, source: int, target: int) -> Message | None:
        waiting = self.outbox.get((source, target))
        if not waiting:
            return None
        message = waiting.pop(0)
        self.inbox[target].add(message)
        return message

    def _start(self, rank: int) -> bool:
        if not self._idle(rank) or self.next[rank] == len(self.orders[rank]):
            return False
        work = self.orders[rank][self.next[rank]]
        message = needed(work, rank, self.num_ranks, self.num_chunks)
        if message is not None:
            if message not in self.inbox[rank]:
                return False
            self.inbox[rank].remove(message)
        self.actions[rank].append(work)
        self.next[rank] += 1
        self.running[rank] = work
        self.free_at[rank] = self.now + self.times[work.kind]
        return True


def plan_programs(
    orders: Sequence[Sequence[Work]],
    num_chunks: int = 1,
    forward_time: float = 1.0,
    backward_time: float = 2.0,
) -> list[Program]:
    """Returns every pipeline rank's program.

    Args:
      orders: each rank's work in order.
      num_chunks: v.
      forward_time: of one pass; exchanges are placed by these durations. Others in reality cost
        waiting, never a hang.
      backward_time: of one pass.
    """
    simulation = _Simulation(
        orders, num_chunks, {"forward": forward_time, "backward": backward_time}
    )
    simulation.run()
    return [
        Program(rank, len(orders), num_chunks, tuple(actions))
        for rank, actions in enumerate(simulation.actions)
    ]


def simulated_seconds(
    programs: Sequence[Program],
    forward_time: float = 1.0,
    backward_time: float = 2.0,
    exchange_time: float = 0.0,
) -> float:
    """Returns how long all ranks together take, if exchanges are rendezvous.

    Args:
      programs: of all pipeline ranks.
      forward_time: of one pass through one chunk.
      backward_time: of one pass through one chunk.
      exchange_time: of one exchange.

    Raises:
      AssertionError: the programs wait for each other for ever, or expect different messages.
    """
    done, clock = [0] * len(programs), [0.0] * len(programs)
    moved = True
    while moved:
        moved = False
        for program in programs:
            rank, actions = program.rank, program.actions
            while done[rank] < len(actions):
                action = actions[done[rank]]
                if isinstance(action, Exchange):
                    others, at = programs[action.peer].actions, done[action.peer]
                    theirs = others[at] if at < len(others) else None
                    if not (isinstance(theirs, Exchange) and theirs.peer == rank):
                        break
                    pair = (action.send, action.receive)
                    assert pair == (theirs.receive, theirs.send), (action, theirs)
                    meeting = max(clock[rank], clock[action.peer]) + exchange_time
                    clock[rank] = clock[action.peer] = meeting
                    done[action.peer] += 1
                else:
                    clock[rank] += forward_time if action.kind == "forward" else backward_time
                done[rank] += 1
                moved = True
    for program in programs:
        assert done[program.rank] == len(program.actions), f"stuck at {done}"
    return max(clock)


def idle_share(programs: Sequence[Program], num_passes: int) -> float:
    """Returns the share of a step in which a rank waits, if a backward pass takes two forward ones.

    Unlike `pipeline_schedule.bubble_fraction` it holds for every schedule and number of
    microbatches.

    Args:
      programs: of all pipeline ranks.
      num_passes: of a rank forward, and as many backward.
    """
    return 1 - num_passes * (1 + 2) / simulated_seconds(programs)
