"""KV events on real sockets: the bytes of vLLM's format, and that folding them gives the registered set, always."""

import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from pagetable.memory import BlockManager, Cleared, Freed, Removed, Stored
from pagetable.serving.kv_events import KVEventPublisher, KVEventsConfig, wire_hash
from tests.memory.plain_sequence import PlainSequence, admit, compute
from tests.serving.kv_events_client import PATIENCE, Client, signed

ANY_PORT = "tcp://127.0.0.1:*"


@pytest.fixture
def publish() -> Iterator[Callable[..., KVEventPublisher]]:
    opened: list[KVEventPublisher] = []

    def open_publisher(**options: Any) -> KVEventPublisher:
        options = {"enable_kv_cache_events": True, "endpoint": ANY_PORT, "replay_endpoint": ANY_PORT} | options
        opened.append(KVEventPublisher(KVEventsConfig.parse(options)))
        return opened[-1]

    yield open_publisher
    for publisher in opened:
        publisher.close()


@pytest.fixture
def join() -> Iterator[Callable[..., Client]]:
    opened: list[Client] = []

    def open_client(publisher: KVEventPublisher, **options: Any) -> Client:
        assert publisher.replay_endpoint is not None
        opened.append(Client(publisher.endpoint, publisher.replay_endpoint, **options))
        return opened[-1]

    yield open_client
    for client in opened:
        client.close()


def hash_of(i: int) -> bytes:
    return b"unused.." + i.to_bytes(8, "big")


def stored(i: int, parent: int | None = None) -> Stored:
    return Stored(i, hash_of(i), None if parent is None else hash_of(parent), (i, i, i, i))


def wait_until_subscribed(publisher: KVEventPublisher, client: Client) -> None:
    """A subscription works from some moment after the connection on: publish until something arrives, and read it."""
    deadline = time.monotonic() + PATIENCE
    while not client.sub.poll(20):
        assert time.monotonic() < deadline
        publisher(Cleared())
        publisher.flush()
    client.catch_up()
    while client.last_live < client.sequence:
        assert client.receive()


def registered_by(manager: BlockManager) -> dict[int, list[int]]:
    return {wire_hash(hash): list(manager.blocks[b].token_ids) for hash, b in manager.hash_to_block_id.items()}


class Storm:
    """Random requests on a small pool."""

    def __init__(self, manager: BlockManager, rng: random.Random) -> None:
        self.manager, self.rng = manager, rng
        self.live: list[PlainSequence] = []

    def blow(self) -> None:
        manager, rng = self.manager, self.rng
        seq = PlainSequence([rng.randrange(2) for _ in range(rng.randrange(1, 24))])
        has_room = manager.can_allocate(seq) >= 0
        if has_room:
            admit(manager, seq)
            compute(manager, seq)
            self.live.append(seq)
        if self.live and (not has_room or rng.random() < 0.4):
            manager.deallocate(self.live.pop(rng.randrange(len(self.live))))
        if rng.random() < 0.02:
            manager.reset_prefix_cache()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    seed = int(os.environ.get("PAGETABLE_SEED", time.time_ns() % 10**6))
    print(f"PAGETABLE_SEED={seed}")
    return random.Random(seed)


# ---------------------------------------------------------------- the wire format


def test_the_frames_are_byte_for_byte_those_of_vllm(publish, join):
    publisher = publish(topic="kv@pod@model")
    client = join(publisher, topic="kv@")
    wait_until_subscribed(publisher, client)
    before = time.time()
    for event in (Cleared(), stored(1), stored(2, 1), stored(3, 1), Freed(None, (1,))):
        publisher(event)
    publisher.flush()
    publisher(Removed(3, hash_of(3)))
    publisher.flush()

    topic, number, payload = client.sub.recv_multipart()
    assert topic == b"kv@pod@model"
    assert number == (client.sequence + 1).to_bytes(8, "big")
    ts, events, rank = msgspec.msgpack.decode(payload)
    assert before <= ts <= time.time()
    assert rank == 0
    unset = {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None}
    chain = {"block_hashes": [1, 2], "parent_block_hash": None, "token_ids": [1] * 4 + [2] * 4}
    branch = {"block_hashes": [3], "parent_block_hash": 1, "token_ids": [3] * 4}
    assert events == [
        {"type": "AllBlocksCleared"},
        {"type": "BlockStored"} | chain | unset,
        {"type": "BlockStored"} | branch | unset,
    ]
    assert payload[0] == 0x93  # an array of three
    assert payload[1] == 0xCB  # a double

    _, number, payload = client.sub.recv_multipart()
    assert number == (client.sequence + 2).to_bytes(8, "big")
    assert msgspec.msgpack.decode(payload)[1] == [{"type": "BlockRemoved", "block_hashes": [3], "medium": "GPU"}]


def test_a_replay_repeats_the_batches_and_ends_with_the_marker(publish, join):
    publisher = publish(topic="kv")
    client = join(publisher)
    for i in range(5):
        publisher(stored(i))
        publisher.flush()
    client.dealer.send_multipart([b"", (3).to_bytes(8, "big")])
    answers = [client.dealer.recv_multipart() for _ in range(3)]
    assert [frames[:3] for frames in answers[:2]] == [[b"", b"kv", n.to_bytes(8, "big")] for n in (3, 4)]
    assert [msgspec.msgpack.decode(frames[3])[1][0]["block_hashes"] for frames in answers[:2]] == [[3], [4]]
    assert answers[2] == [b"", b"", b"\xff" * 8, b""]


def test_a_question_may_come_from_a_plain_request_socket(publish, join):
    publisher = publish()
    client = join(publisher)
    publisher(stored(7))
    publisher.flush()
    with client.context.socket(zmq.REQ) as req:
        req.connect(publisher.replay_endpoint)
        req.send(b"snapshot")
        topic, number, payload = req.recv_multipart()
    assert (topic, signed(number)) == (b"", 0)
    assert [event["type"] for event in msgspec.msgpack.decode(payload)[1]] == ["AllBlocksCleared", "BlockStored"]


def test_nonsense_on_the_replay_socket_is_survived(publish, join):
    publisher = publish()
    client = join(publisher)
    for frames in ([b"", b"what?"], [b""], [b"a", b"b", b"c" * 9], [b"", (2**64 - 1).to_bytes(8, "big")]):
        client.dealer.send_multipart(frames)
    assert client.answer() == (-1, b"")  # of the last, which is a number
    publisher(stored(1))
    publisher.flush()
    client.catch_up()
    assert set(client.registered) == {1}


def test_a_hash_is_its_low_64_bits_or_on_request_all_bytes(publish, join):
    assert wire_hash(bytes(range(16))) == 0x08090A0B0C0D0E0F
    assert wire_hash(b"\x05") == 5  # a weak hash in a test
    publisher = publish(use_int_block_hashes=False)
    client = join(publisher)
    publisher(stored(1))
    publisher(stored(2, 1))
    publisher.flush()
    client.catch_up()
    assert set(client.registered) == {hash_of(1), hash_of(2)}


def test_the_largest_integer_hash_goes_through(publish, join):
    publisher = publish()
    client = join(publisher)
    publisher(Stored(0, b"\xff" * 16, None, (1,)))
    publisher.flush()
    client.catch_up()
    assert client.registered == {2**64 - 1: [1]}


# ---------------------------------------------------------------- a batch is a net change


def test_nothing_happened_nothing_is_sent(publish, join):
    publisher = publish()
    client = join(publisher)
    publisher.flush()
    publisher(Freed(None, (1,)))
    publisher.flush()
    publisher(stored(1))
    publisher(Removed(1, hash_of(1)))  # came and went in one step
    publisher.flush()
    assert client.replay(0) == []
    client.take_snapshot()
    assert (client.sequence, client.registered) == (-1, {})


def test_a_block_that_goes_and_comes_back_in_one_step_is_removed_and_stored(publish, join):
    publisher = publish()
    client = join(publisher)
    publisher(stored(1))
    publisher.flush()
    publisher(Removed(1, hash_of(1)))
    publisher(stored(1))
    publisher.flush()
    payload = client.replay(1)[0][1]
    assert [event["type"] for event in msgspec.msgpack.decode(payload)[1]] == ["BlockRemoved", "BlockStored"]


def test_a_reset_clears_and_what_follows_it_stays(publish, join):
    publisher = publish()
    client = join(publisher)
    manager = BlockManager(16, 4, events=publisher)
    admit(manager, seq := PlainSequence(list(range(9))))
    compute(manager, seq)
    publisher.flush()
    client.catch_up()
    assert len(client.registered) == 2
    manager.deallocate(seq)
    manager.reset_prefix_cache()
    admit(manager, seq := PlainSequence(list(range(5))))
    compute(manager, seq)
    publisher.flush()
    client.catch_up()
    assert client.registered == registered_by(manager)
    assert len(client.registered) == 1


# ---------------------------------------------------------------- folding gives the registered set


def test_folding_is_exact_at_every_flush_of_a_storm(publish, join, rng: random.Random):
    publisher = publish()
    manager = BlockManager(12, 4, events=publisher)
    live, asking = join(publisher), join(publisher)
    storm = Storm(manager, rng)
    for _ in range(400):
        storm.blow()
        if rng.random() < 0.5:
            publisher.flush()
            asking.catch_up()
            assert asking.registered == registered_by(manager)
        if rng.random() < 0.05:
            late = join(publisher)
            late.take_snapshot()
            assert (late.sequence, late.registered) == (asking.sequence, asking.registered)
            late.close()
    publisher.flush()
    asking.catch_up()
    while live.sequence < asking.sequence:
        assert live.receive()
    assert live.registered == asking.registered == registered_by(manager)
    assert live.num_snapshots == asking.num_snapshots == 0


def test_a_late_joiner_takes_a_snapshot_and_follows(publish, join, rng: random.Random):
    publisher = publish(buffer_steps=2)
    manager = BlockManager(12, 4, events=publisher)
    storm = Storm(manager, rng)
    for _ in range(100):
        storm.blow()
        publisher.flush()
    late = join(publisher)
    wait_until_live(publisher, manager, late)
    assert late.num_snapshots >= 1
    late.num_snapshots = 0
    for _ in range(100):
        storm.blow()
        publisher.flush()
        while late.receive(timeout=0.002):
            pass
    late.catch_up()
    assert late.registered == registered_by(manager)


def wait_until_live(publisher: KVEventPublisher, manager: BlockManager, client: Client) -> None:
    client.take_snapshot()
    deadline = time.monotonic() + PATIENCE
    while not client.receive(timeout=0.02):
        assert time.monotonic() < deadline
        manager.reset_prefix_cache()
        publisher.flush()


def ten_batches_of_which_seven_are_lost(publisher: KVEventPublisher, join: Callable[..., Client]) -> Client:
    client = join(publisher)
    wait_until_subscribed(publisher, client)
    for i in range(10):
        publisher(stored(i))
        publisher.flush()
    for _ in range(7):
        client.sub.recv_multipart()  # lost
    return client


def test_a_gap_is_closed_by_replay(publish, join):
    publisher = publish()
    client = ten_batches_of_which_seven_are_lost(publisher, join)
    while len(client.registered) < 10:
        assert client.receive()
    assert client.num_snapshots == 0


def test_a_gap_older_than_the_buffer_is_closed_by_a_snapshot(publish, join):
    publisher = publish(buffer_steps=3)
    client = ten_batches_of_which_seven_are_lost(publisher, join)
    while client.receive(timeout=1.0) and client.last_live < client.sequence:
        pass
    assert set(client.registered) == set(range(10))
    assert client.num_snapshots == 1


def test_a_restarted_engine_is_noticed(publish, join):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = {"endpoint": f"tcp://127.0.0.1:{port}", "replay_endpoint": f"ipc:///tmp/pagetable-kv-{os.getpid()}-{port}"}
    first = publish(**fixed)
    client = join(first)
    wait_until_subscribed(first, client)
    for i in range(50):
        first(stored(i))
        first.flush()
    while len(client.registered) < 50:
        assert client.receive()
    first.close()
    second = publish(**fixed)
    second(stored(99))
    deadline = time.monotonic() + PATIENCE
    while not client.receive(timeout=0.05):
        assert time.monotonic() < deadline
        second(Removed(99, hash_of(99)))
        second.flush()
        second(stored(99))
        second.flush()
    client.catch_up()
    assert set(client.registered) == {99}


# ---------------------------------------------------------------- the engine never waits


def test_a_slow_subscriber_blocks_nobody_and_sees_its_loss(publish, join):
    publisher = publish(hwm=1, buffer_steps=10)
    slow = join(publisher, hwm=1)
    wait_until_subscribed(publisher, slow)
    start = time.monotonic()
    for i in range(2000):  # 10 KB a batch: no buffer of the system holds all
        publisher(Stored(i, hash_of(i), None, tuple(range(4096))))
        publisher.flush()
    assert time.monotonic() - start < PATIENCE
    slow.catch_up()  # answered by the same thread, so all is published
    assert slow.num_snapshots == 1
    assert set(slow.registered) == set(range(2000))
    numbers = []
    while slow.sub.poll(500):
        numbers.append(signed(slow.sub.recv_multipart()[1]))
    assert numbers == sorted(numbers)
    assert len(numbers) < 2000


def test_a_client_that_never_reads_its_answers_blocks_nobody(publish, join):
    publisher = publish(buffer_steps=20)
    for i in range(20):
        publisher(Stored(i, hash_of(i), None, tuple(range(4096))))
        publisher.flush()
    deaf, other = join(publisher, hwm=1), join(publisher)
    for _ in range(300):  # 60 MB of answers, far more than fit
        deaf.dealer.send_multipart([b"", bytes(8)], zmq.NOBLOCK)
    publisher(stored(100))
    publisher.flush()
    other.catch_up()
    assert len(other.registered) == 21


def test_a_full_queue_merges_steps_and_loses_nothing(publish, join, rng: random.Random):
    publisher = publish(max_queue_size=1)
    client = join(publisher)
    manager = BlockManager(12, 4, events=publisher)
    storm = Storm(manager, rng)
    for _ in range(300):
        storm.blow()
        publisher.flush()
    while publisher._change:  # what a full queue left for the next step
        publisher.flush()
    batches = client.replay(0)
    assert [sequence for sequence, _ in batches] == list(range(len(batches)))
    client.catch_up()
    assert client.registered == registered_by(manager)


def test_closing_sends_what_was_noted_and_frees_the_ports(publish, join):
    publisher = publish()
    client = join(publisher)
    wait_until_subscribed(publisher, client)
    publisher(stored(1))
    publisher.close()
    publisher.close()
    assert client.receive()
    assert set(client.registered) == {1}
    publisher(stored(2))
    publisher.flush()  # a step that was still under way
    publish(endpoint=publisher.endpoint, replay_endpoint=publisher.replay_endpoint)


def test_the_publisher_connects_to_a_router_that_binds(publish):
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe("")
        port = router.bind_to_random_port("tcp://*")
        name = socket.gethostname()
        try:
            socket.create_connection((name, port), timeout=1).close()
        except OSError:
            pytest.skip("this machine cannot be reached by its own name")
        publisher = publish(endpoint=f"tcp://{name}:{port}")
        deadline = time.monotonic() + PATIENCE
        while not router.poll(20):
            assert time.monotonic() < deadline
            publisher(Cleared())
            publisher.flush()


# ---------------------------------------------------------------- configuration


def test_the_defaults_are_those_of_vllm_but_for_the_interface():
    config = KVEventsConfig.parse("{}")
    assert not config.publishes
    assert config.endpoint == "tcp://127.0.0.1:5557"
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.replay_endpoint, config.topic) == (None, "")
    assert KVEventsConfig.parse('{"enable_kv_cache_events": true}').publishes
    assert not KVEventsConfig.parse({"enable_kv_cache_events": True, "publisher": "null"}).publishes
    assert not KVEventsConfig.parse({"publisher": "zmq"}).publishes


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ('{"endpont": "tcp://*:5557"}', "endpont"),
        ('{"publisher": "kafka"}', "kafka|publisher"),
        ('{"enable_kv_cache_events": "yes"}', "enable_kv_cache_events"),
        ('{"buffer_steps": 0}', "buffer_steps"),
        ('{"hwm": 1.5}', "hwm"),
        ('{"max_queue_size": -1}', "max_queue_size"),
        ('{"endpoint": "localhost:5557"}', "endpoint"),
        ('{"endpoint": "tcp://localhost"}', "endpoint"),
        ('{"replay_endpoint": "inproc://replay"}', "replay_endpoint"),
        ('{"topic": 3}', "topic"),
        ("[]", "array"),
        ("{", "truncated"),
        ({"hwm": "many"}, "hwm"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(given: Any, named: str):
    with pytest.raises(ValueError, match=named) as refusal:
        KVEventsConfig.parse(given)
    assert "publisher ('zmq' or 'null')" in str(refusal.value)


def test_an_endpoint_in_use_is_refused_by_name(publish):
    taken = publish().endpoint
    with pytest.raises(OSError, match=f"replay_endpoint='{taken}'"):
        publish(replay_endpoint=taken)
    with pytest.raises(OSError, match=f"endpoint='{taken}'"):
        publish(endpoint=taken)


def test_an_endpoint_may_be_a_file(publish, join, tmp_path: Path):
    publisher = publish(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    client = join(publisher)
    wait_until_subscribed(publisher, client)
    publisher(stored(1))
    publisher.flush()
    assert client.receive()
    assert set(client.registered) == {1}
