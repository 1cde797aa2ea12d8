"""Event files as TensorBoard's own writer makes them, in any pieces, with damage; its own reader is the reference."""

from __future__ import annotations

import os
import random
import struct
from pathlib import Path

import pytest

from uvcc_console.follow.tfevents import MOST, EventFile, masked_crc

tensorboard = pytest.importorskip("tensorboard")


@pytest.fixture
def written(tmp_path: Path) -> bytes:
    """A file with scalars in both of their forms, a text, a histogram and a long record."""
    from tensorboard.compat.proto import event_pb2, summary_pb2
    from tensorboard.plugins.scalar.summary import scalar_pb
    from tensorboard.plugins.text.summary import text_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path))
    for step in range(5):
        value = summary_pb2.Summary.Value(tag="loss", simple_value=2.0 - step / 4)
        other = summary_pb2.Summary.Value(tag="pic", image=summary_pb2.Summary.Image(encoded_image_string=b"x" * 50))
        summary = summary_pb2.Summary(value=[value, other])
        writer.add_event(event_pb2.Event(wall_time=1.0, step=step, summary=summary))
        writer.add_event(event_pb2.Event(wall_time=1.0, step=step, summary=scalar_pb("val/acc", step / 10)))
        writer.add_event(event_pb2.Event(wall_time=1.0, step=step, summary=text_pb("words", "hello")))
    writer.close()
    (path,) = tmp_path.glob("events.out.tfevents.*")
    return path.read_bytes()


def reference(data: bytes, folder: Path) -> list[tuple[int, str, float]]:
    """The scalars by TensorBoard's own reader."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (folder / "events.out.tfevents.1.x").write_bytes(data)
    found = EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0})
    found.Reload()
    out = [(e.step, tag, e.value) for tag in found.Tags()["scalars"] for e in found.Scalars(tag)]
    for tag in found.Tags()["tensors"]:
        if found.SummaryMetadata(tag).plugin_data.plugin_name == "scalars":
            out += [(e.step, tag, float(e.tensor_proto.float_val[0])) for e in found.Tensors(tag)]
    return sorted(out)


def test_it_finds_what_tensorboard_finds_in_any_pieces(written: bytes, tmp_path: Path) -> None:
    folder = tmp_path / "again"
    folder.mkdir()
    wanted = reference(written, folder)
    assert len(wanted) == 10
    for size in (1, 7, 64, len(written)):
        reader = EventFile()
        pieces = [written[i : i + size] for i in range(0, len(written), size)]
        found = [(s.step, tag, value) for p in pieces for s in reader.feed(p) for tag, value in s.values.items()]
        assert sorted(found) == wanted
        assert (reader.bad, reader.broken, reader.pending) == (0, False, 0)


def test_a_wrong_checksum_costs_one_record_and_a_wrong_length_the_rest(written: bytes) -> None:
    whole = len(EventFile().feed(written))
    (first,) = struct.unpack_from("<Q", written, 0)
    second = 12 + first + 4
    inside = bytearray(written)
    inside[second + 14] ^= 1
    reader = EventFile()
    assert len(reader.feed(bytes(inside))) == whole - 1
    assert (reader.bad, reader.broken) == (1, False)
    length = bytearray(written)
    length[second] ^= 1
    reader = EventFile()
    assert reader.feed(bytes(length)) == []
    assert (reader.bad, reader.broken) == (1, True)


def test_a_long_record_is_passed_over_without_being_kept(written: bytes) -> None:
    head = struct.pack("<Q", MOST + 1)
    long = head + struct.pack("<I", masked_crc(head)) + b"\0" * (MOST + 1) + b"\0\0\0\0"
    reader = EventFile()
    found = reader.feed(long[: MOST // 2])
    assert reader.pending < 64
    found += reader.feed(long[MOST // 2 :] + written)
    assert len(found) == len(EventFile().feed(written))


def test_no_bytes_raise(written: bytes) -> None:
    dice = random.Random(int(os.environ.get("UVCC_FUZZ_SEED", "17")))
    (first,) = struct.unpack_from("<Q", written, 0)
    start = 12 + first + 4
    (size,) = struct.unpack_from("<Q", written, start)
    for _ in range(2000):
        record = bytearray(written[start + 12 : start + 12 + size])
        for _ in range(dice.randrange(1, 5)):
            record[dice.randrange(len(record))] = dice.randrange(256)
        head = struct.pack("<Q", len(record))
        framed = (
            head + struct.pack("<I", masked_crc(head)) + bytes(record) + struct.pack("<I", masked_crc(bytes(record)))
        )
        EventFile().feed(framed)
        EventFile().feed(bytes(record))
