"""A router's side of the KV events, written from the description at the head of `serving/kv_events.py` alone."""

from typing import Any

import msgspec
import zmq

PATIENCE = 20.0  # seconds; nothing here takes one


class Client:
    """Holds exactly the set that one publisher has registered. Written from the description of the format alone."""

    def __init__(self, endpoint: str, replay_endpoint: str, topic: str = "", hwm: int = 0) -> None:
        self.registered: dict[Any, list[int]] = {}  # hash to the block's tokens
        self.sequence = -1  # number of the last batch folded
        self.num_snapshots = 0
        self.last_live = -1
        self.context = zmq.Context()
        self.context.rcvtimeo = int(PATIENCE * 1000)
        self.context.rcvhwm = (
            hwm  # messages that wait to be read, in each socket; 0 is no limit, as a replay may be long
        )
        self.sub = self.context.socket(zmq.SUB)
        self.sub.subscribe(topic)
        self.sub.connect(endpoint)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(replay_endpoint)

    def receive(self, timeout: float = PATIENCE) -> bool:
        """Fold one live batch, after what was missed before it. False if none came in time."""
        if not self.sub.poll(int(timeout * 1000)):
            return False
        _, number, payload = self.sub.recv_multipart()
        sequence = signed(number)
        if sequence < self.last_live:  # the engine was started anew
            self.take_snapshot()
        elif sequence > self.sequence + 1:
            self.catch_up()
        self.last_live = sequence
        self.fold_next(sequence, payload)
        return True

    def catch_up(self) -> None:
        """Ask for what is missing; where it is forgotten, for a snapshot. Also at the start, and in long silence."""
        is_complete = True
        for sequence, payload in self.replay(self.sequence + 1):
            is_complete = self.fold_next(sequence, payload) and is_complete
        if not is_complete:
            self.take_snapshot()

    def replay(self, start: int) -> list[tuple[int, bytes]]:
        self.dealer.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while (answer := self.answer())[1]:
            batches.append(answer)
        return batches

    def take_snapshot(self) -> None:
        self.dealer.send_multipart([b"", b"snapshot"])
        self.sequence, payload = self.answer()
        self.fold(payload)
        self.num_snapshots += 1

    def answer(self) -> tuple[int, bytes]:
        assert self.dealer.poll(int(PATIENCE * 1000)), "no answer"
        empty, _topic, number, payload = self.dealer.recv_multipart()
        assert empty == b""
        return signed(number), payload

    def fold_next(self, sequence: int, payload: bytes) -> bool:
        """Fold a batch if it is the next one. False if there is a gap before it."""
        if sequence == self.sequence + 1:
            self.fold(payload)
            self.sequence = sequence
        return sequence <= self.sequence

    def fold(self, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            match event:
                case {"type": "BlockStored", "block_hashes": hashes, "token_ids": token_ids, "block_size": size}:
                    parent = event["parent_block_hash"]
                    assert len(token_ids) == len(hashes) * size
                    for i, hash in enumerate(hashes):
                        assert parent is None or parent in self.registered, "a child came before its parent"
                        assert hash not in self.registered, "stored twice: a router that counts would never forget it"
                        self.registered[hash] = token_ids[i * size : (i + 1) * size]
                        parent = hash
                case {"type": "BlockRemoved", "block_hashes": hashes}:
                    for hash in hashes:
                        del self.registered[hash]
                case {"type": "AllBlocksCleared"}:
                    self.registered.clear()
                case _:
                    raise AssertionError(f"unknown event {event}")

    def close(self) -> None:
        self.context.destroy(linger=0)


def signed(number: bytes) -> int:
    assert len(number) == 8
    return int.from_bytes(number, "big", signed=True)
