"""Which prefixes this engine holds, told to KV-aware routers over ZeroMQ as vLLM (0.26) tells it.

**The stream.** A PUB socket at `endpoint`. A message is a batch, the net change of one engine step, in three frames:

    topic | sequence number, 8 bytes, big-endian | payload, MessagePack

Numbers run 0, 1, 2, ... A subscriber that reads too slowly loses whole batches, and sees it: a number is missing. The
payload is the array `[ts, events, data_parallel_rank]`, `ts` in wall-clock seconds. An event is a map with a `type`:

    BlockStored       block_hashes, parent_block_hash (nil at the head of a prompt), token_ids, block_size,
                      lora_id (nil), medium ("GPU"), lora_name (nil). Several hashes are a chain, each the child of the
                      one before, and token_ids has block_size tokens for each.
    BlockRemoved      block_hashes, medium. The last copy is gone.
    AllBlocksCleared  nothing more. Comes first in its batch.

A hash is an integer, the low 64 bits of the block's 16 bytes (`wire_hash`), as vLLM sends by default and as every
router reads; with `"use_int_block_hashes": false` it is all 16 bytes, which some routers refuse. The medium is that of
the cache the model reads, always "GPU": routers take "CPU" for a slower tier behind it. Ignore keys you do not know.

**Questions.** A ROUTER socket at `replay_endpoint`, if there is one. Ask from a DEALER, with an empty frame first:

    empty | 8 bytes   the batches from this number on, as far back as `buffer_steps`, each as
                          empty | topic | number | payload
                      and then the end marker: empty | empty | -1 as 8 bytes, two's complement | empty.
    empty | snapshot  the text b"snapshot": one message, empty | topic | number | payload. The payload is a batch with
                      AllBlocksCleared and a BlockStored for each registered block, parents before children; the number
                      is that of the last batch in it, -1 if there was none yet. No end marker follows.

An answer covers all that was flushed before the question came. Where it stops without its end marker, the client read
too slowly; ask again. (A server that knows no snapshots takes those 8 bytes for a number and sends the end marker.)

**A client** subscribes, takes a snapshot numbered n, ignores batches up to n and folds each later one. When a number
is missing it asks for a replay from the first it lacks; if the answer begins later than that, it takes a snapshot. A
number below the last live one means that the engine was started anew: take a snapshot. (The first batch of an engine
process is AllBlocksCleared, so that whoever folds without counting is right as well.) A subscription works from a
moment after the connection on, and loss at the end looks like silence: ask for a replay when nothing comes for long.
The tests of this file have such a client.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import zmq

from pagetable.memory import Cleared, Event, Removed, Stored

logger = logging.getLogger(__name__)

SNAPSHOT_REQUEST = b"snapshot"
END_OF_REPLAY = -1
LINGER_MS = 500  # how long close() lets the last batches travel

WireHash = int | bytes
_Endpoint = Annotated[str, msgspec.Meta(pattern=r"^(tcp://.+:([0-9]+|\*)|ipc://.+)$")]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)]
_ALLOWED = (
    "enable_kv_cache_events and use_int_block_hashes (true or false), publisher ('zmq' or 'null'), endpoint and "
    "replay_endpoint (tcp://HOST:PORT or ipc://PATH), buffer_steps, hwm and max_queue_size (1 or more), topic (a text)"
)


class KVEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `--kv-events-config` says, with vLLM's names."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"  # "null" publishes nothing
    # vLLM's default is every interface. Whoever connects reads every tenant's prompts, so here one has to ask for it.
    endpoint: _Endpoint = "tcp://127.0.0.1:5557"
    replay_endpoint: _Endpoint | None = None
    buffer_steps: _Count = 10_000  # batches kept for replay
    hwm: _Count = 100_000  # batches that wait for one slow subscriber before it loses some
    max_queue_size: _Count = 100_000  # batches that wait for the publishing thread before steps are merged into one
    topic: str = ""
    use_int_block_hashes: bool = True  # in vLLM the variable VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES

    @classmethod
    def parse(cls, given: str | bytes | Mapping[str, Any]) -> KVEventsConfig:
        """Read the JSON of `--kv-events-config`, or a mapping. ValueError names what is wrong and what is allowed."""
        try:
            return msgspec.convert(given, cls) if isinstance(given, Mapping) else msgspec.json.decode(given, type=cls)
        except msgspec.MsgspecError as error:
            raise ValueError(f"kv_events_config: {error}. Allowed are {_ALLOWED}") from None

    @property
    def publishes(self) -> bool:
        """Whether to build a `KVEventPublisher` at all."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


class BlockStored(msgspec.Struct, tag=True):
    """A chain of blocks was registered."""

    block_hashes: list[WireHash]
    parent_block_hash: WireHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = "GPU"
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """The last copies of these blocks are gone."""

    block_hashes: list[WireHash]
    medium: str | None = "GPU"


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is registered any more."""


def wire_hash(hash: bytes) -> int:
    """The integer that stands for a block's hash on the wire: its low 64 bits, as in vLLM."""
    return int.from_bytes(hash[-8:], "big")


@dataclass(slots=True)
class _Change:
    """Net change of the registered set. It never has more entries than the pool has blocks, twice over.

    Meaning: clear if `cleared`, then remove, then store. In this order parents precede children, as in the events.
    """

    cleared: bool = False
    removed: dict[bytes, None] = field(default_factory=dict)  # registered before this change
    stored: dict[bytes, Stored] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed or self.stored)

    def note(self, event: Event) -> None:
        match event:
            case Stored():
                self.stored[event.hash] = event
            case Removed():
                if self.stored.pop(event.hash, None) is None:
                    self.removed[event.hash] = None
            case Cleared():
                self.cleared = True
                self.removed.clear()
                self.stored.clear()


class KVEventPublisher:
    """A sink for the block manager's events that publishes them; the wire format is at the top of this file.

    The engine's thread calls the sink, `flush` once a step, and `close`; the first two never wait. Give it to
    the manager before the first block is registered. `endpoint` and `replay_endpoint` are where the sockets really are.
    """

    def __init__(self, config: KVEventsConfig) -> None:
        self._change = _Change()
        self._max_waiting = config.max_queue_size
        self._broadcaster = _Broadcaster(config)
        self.endpoint = self._broadcaster.endpoint
        self.replay_endpoint = self._broadcaster.replay_endpoint
        self._thread = threading.Thread(target=self._broadcaster.run, name="kv-events", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        """Take a note of one event."""
        self._change.note(event)

    def flush(self) -> None:
        """Hand the net change since the last flush to the publishing thread, as one batch; nothing if there is none.

        If that thread lags `max_queue_size` batches behind (vLLM would wait for it here), the change stays and is
        merged with that of the next step: the stream gets coarser, and loses nothing.
        """
        if self._change and len(self._broadcaster.waiting) < self._max_waiting:
            self._hand_over()

    def close(self) -> None:
        """Publish what was noted, and close the sockets. Waits for subscribers for half a second at most."""
        if not self._thread.is_alive():
            return
        if self._change:
            self._hand_over()
        self._broadcaster.stopping = True
        self._broadcaster.wake()
        self._thread.join(timeout=10)

    def _hand_over(self) -> None:
        self._broadcaster.waiting.append((time.time(), self._change))
        self._change = _Change()
        self._broadcaster.wake()


class _Broadcaster:
    """The publishing thread's side. It alone numbers batches and folds them, so a snapshot agrees with its number."""

    def __init__(self, config: KVEventsConfig) -> None:
        self.waiting: deque[tuple[float, _Change]] = deque()  # appended to by the engine's thread
        self.stopping = False
        self._topic = config.topic.encode()
        self._wire_hash = wire_hash if config.use_int_block_hashes else bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._sequence = -1  # of the last batch
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        # Each block as an encoded event: less than half the memory of its tokens as Python integers, and a snapshot is
        # quick. The dict keeps the order, so parents come before children.
        self._registered: dict[bytes, msgspec.Raw] = {}
        self._context = zmq.Context()
        try:
            self._open_sockets(config)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def _open_sockets(self, config: KVEventsConfig) -> None:
        self._bell, self._bell_button = self._context.socket(zmq.PAIR), self._context.socket(zmq.PAIR)
        self._bell.bind("inproc://bell")
        self._bell_button.connect("inproc://bell")
        self._pub = self._context.socket(zmq.PUB)
        self._pub.sndhwm = config.hwm
        self.endpoint = _attach(self._pub, "endpoint", config.endpoint, bind=_is_local(config.endpoint))
        self._router = self._context.socket(zmq.ROUTER)
        self._router.router_mandatory = True  # an answer that does not fit is an error, not a hole in the answer
        # Room for a whole replay where all before it was read: ZeroMQ may count half of what was read as unread.
        self._router.sndhwm = 2 * (config.buffer_steps + 2)
        self.replay_endpoint = None
        if config.replay_endpoint is not None:
            self.replay_endpoint = _attach(self._router, "replay_endpoint", config.replay_endpoint, bind=True)

    def wake(self) -> None:
        """Called by the engine's thread. A bell that cannot be rung has rings enough, or its thread is gone."""
        with suppress(zmq.ZMQError):
            self._bell_button.send(b"", zmq.NOBLOCK)

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            stopping = False
            while not stopping:
                ready = dict(poller.poll())
                stopping = self.stopping  # before the last look at what waits
                if self._bell in ready:
                    self._bell.recv()
                # With or without a bell: a question must not overtake what was flushed before it.
                for _ in range(len(self.waiting)):
                    self._publish(*self.waiting.popleft())
                if self._router in ready:
                    self._answer(*self._router.recv_multipart())
        except Exception:
            logger.exception("no more KV cache events are published")
        finally:
            self._context.destroy(linger=LINGER_MS)

    def _publish(self, ts: float, change: _Change) -> None:
        events: list[Any] = []
        if change.cleared:
            self._registered.clear()
            events.append(AllBlocksCleared())
        if change.removed:
            for hash in change.removed:
                self._registered.pop(hash, None)
            events.append(BlockRemoved([self._wire_hash(hash) for hash in change.removed]))
        for event in change.stored.values():
            self._registered[event.hash] = msgspec.Raw(self._encoder.encode(self._block_stored([event])))
        events += map(self._block_stored, _chains(change.stored.values()))
        self._sequence += 1
        payload = self._encode_batch(ts, events)
        self._sent.append((self._sequence, payload))
        self._pub.send_multipart((self._topic, _number(self._sequence), payload))  # drops where a subscriber is full

    def _block_stored(self, chain: list[Stored]) -> BlockStored:
        parent_hash = chain[0].parent_hash
        return BlockStored(
            block_hashes=[self._wire_hash(event.hash) for event in chain],
            parent_block_hash=None if parent_hash is None else self._wire_hash(parent_hash),
            token_ids=[token_id for event in chain for token_id in event.token_ids],
            block_size=len(chain[0].token_ids),
        )

    def _encode_batch(self, ts: float, events: list[Any]) -> bytes:
        return self._encoder.encode((ts, events, 0))

    def _answer(self, *frames: bytes) -> None:
        *envelope, request = frames
        try:
            if request == SNAPSHOT_REQUEST:
                snapshot = self._encode_batch(time.time(), [AllBlocksCleared(), *self._registered.values()])
                self._reply(envelope, self._topic, self._sequence, snapshot)
            elif len(request) == 8:
                start = int.from_bytes(request, "big")
                for sequence, payload in self._sent:
                    if sequence >= start:
                        self._reply(envelope, self._topic, sequence, payload)
                self._reply(envelope, b"", END_OF_REPLAY, b"")
            else:
                logger.warning("KV events: a question of %d bytes instead of 8 is ignored", len(request))
        except zmq.ZMQError as error:  # the client is gone, or does not read
            logger.warning("KV events: an answer was broken off: %s", error)

    def _reply(self, envelope: list[bytes], topic: bytes, sequence: int, payload: bytes) -> None:
        self._router.send_multipart([*envelope, topic, _number(sequence), payload], zmq.NOBLOCK)


def _number(sequence: int) -> bytes:
    return sequence.to_bytes(8, "big", signed=True)


def _is_local(endpoint: str) -> bool:
    """Whether to bind. As in vLLM, any other endpoint is a router's, to connect to; loopback we bind, vLLM does not."""
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    named = host in ("localhost", "0.0.0.0") or host.startswith("127.")
    return named or endpoint.startswith("ipc://") or "*" in endpoint or "::" in endpoint


def _attach(socket: zmq.Socket[bytes], name: str, endpoint: str, *, bind: bool) -> str:
    socket.ipv6 = "[" in endpoint
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"KV events: {name}={endpoint!r} cannot be used ({error}); give another") from error
    return socket.get_string(zmq.LAST_ENDPOINT) if bind else endpoint


def _chains(stored: Iterable[Stored]) -> Iterator[list[Stored]]:
    """Runs of blocks in which each is the child of the one before: one event tells them all."""
    chain: list[Stored] = []
    for event in stored:
        if chain and event.parent_hash != chain[-1].hash:
            yield chain
            chain = []
        chain.append(event)
    if chain:
        yield chain
