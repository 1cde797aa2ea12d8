"""Random streams, rounds, opening, determinism."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from uvcc_engine.contract.errors import ConfigError, PeerLostError, ProtocolError
from uvcc_engine.mpc.comparisons import maximum, selection
from uvcc_engine.mpc.foundation import opening, prg
from uvcc_engine.mpc.foundation.local import LocalPlanes, rehearsal_keys
from uvcc_engine.mpc.foundation.prg import OWN, ChaChaStream, PairKeys, Stream, derive_key
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Round, Runtime, par
from uvcc_engine.mpc.foundation.share import Share, share_of, split
from uvcc_engine.mpc.functions import nonlinear
from uvcc_engine.mpc.products import arithmetic
from uvcc_engine.plane.api import Tag
from uvcc_engine.transcript.formats import kinds


def drawn(stream: Stream, *place: int, nbytes: int = 16) -> bytes:
    out = torch.empty(nbytes, dtype=torch.uint8)
    stream.draw(*place, out)
    return out.numpy().tobytes()


def counter_mode(place: str, piece: int, nbytes: int) -> bytes:
    """AES-128 in counter mode under the key of NIST SP 800-38A, F.5.1, from block 2 of a piece on."""
    key = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
    block = bytes.fromhex(place) + piece.to_bytes(2, "big") + (2).to_bytes(4, "big")
    return Cipher(algorithms.AES(key), modes.CTR(block)).encryptor().update(bytes(nbytes))


@pytest.mark.parametrize(("slack", "gcm"), [(0, True), (16, True), (16, False)])
def test_stream_is_aes_counter_mode(slack: int, gcm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prg, "gcm_is_quicker", lambda: gcm)
    stream = Stream(bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c"), "test")
    place = (0xF0F1F2F3, 0xF4F5, 0xF6F7F8F9)
    at = 0
    for nbytes in (1, 16, 100, 8191, 8192, 1 << 18, (1 << 18) + 1, 600_000, (1 << 19) + 8192):
        room = torch.zeros(nbytes + slack, dtype=torch.uint8)
        out = room[:nbytes]
        after = stream.draw(*place, at, out, room if slack else None)
        assert after == at + max(1, -(-nbytes // (1 << 18)))
        sizes = [min(1 << 18, nbytes - start) for start in range(0, nbytes, 1 << 18)]
        expected = b"".join(counter_mode("f0f1f2f3f4f5f6f7f8f9", at + i, size) for i, size in enumerate(sizes))
        assert out.numpy().tobytes() == expected, nbytes
        at = after


def test_what_is_drawn_into_given_memory_equals_what_is_drawn_into_new_memory() -> None:
    def body(rt: Runtime) -> list[torch.Tensor]:
        draws = rt.draws()
        given = torch.empty(50_000, dtype=torch.int64)
        draws.ring(OWN, 3)
        return [draws.ring(rt.party, 50_000, out=given), draws.ring(rt.next, 50_000)]

    out = LocalPlanes().run_three(body)
    # a component's two holders differ in which of the two they use
    for p in range(3):
        assert torch.equal(out[p][1], out[(p + 1) % 3][0])


def test_stream_refuses_to_repeat_itself() -> None:
    stream = Stream(bytes(16), "component 1")
    drawn(stream, 1, 0, 0, 0, nbytes=600_000)  # pieces 0, 1, 2
    for place in ((1, 0, 0, 0), (1, 0, 0, 2), (0, 0, 9, 0)):
        with pytest.raises(ProtocolError, match="mask reuse refused: stream component 1"):
            drawn(stream, *place)
    drawn(stream, 1, 0, 0, 3)
    drawn(stream, 1, 0, 1, 0)
    with pytest.raises(ProtocolError):
        drawn(stream, 1, 0, 0, 4)
    with pytest.raises(ProtocolError, match="more than 65536 pieces"):
        drawn(stream, 1, 0, 2, 65_536)


def test_streams_do_not_repeat_across_places_attempts_and_sessions() -> None:
    seen: set[bytes] = set()
    for sid in (b"a" * 32, b"b" * 32):
        for attempt in (0, 1):
            for label in ("component0", "component1", "own0"):
                stream = Stream(derive_key(b"k" * 32, sid, attempt, label), label)
                for place in ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0)):
                    seen.add(drawn(stream, *place))
    assert len(seen) == 2 * 2 * 3 * 5


def test_the_two_holders_of_a_component_draw_the_same() -> None:
    def body(rt: Runtime) -> dict[int, torch.Tensor]:
        draws = rt.draws()
        return {c: draws.ring(c, 100) for c in (rt.party, rt.next, OWN)}

    out = LocalPlanes().run_three(body)
    for c in range(3):
        assert torch.equal(out[c][c], out[(c + 2) % 3][c])
    values = [out[p][p] for p in range(3)] + [out[p][OWN] for p in range(3)]
    for i in range(6):
        for j in range(i):
            assert not torch.equal(values[i], values[j])


def test_zero_shares_sum_to_zero_and_hide() -> None:
    parts = LocalPlanes().run_three(lambda rt: arithmetic.zero_share(rt, (1000,)))
    assert not (parts[0] + parts[1] + parts[2]).any()
    assert all(part.unique().numel() == 1000 for part in parts)


def test_an_epoch_is_never_entered_twice() -> None:
    rt = LocalPlanes().runtimes[0]
    rt.begin_epoch(3)
    for again in (3, 2):
        with pytest.raises(ProtocolError, match="repeat masks"):
            rt.begin_epoch(again)
    rt.begin_epoch(4)
    assert rt.epoch == 4


def test_bad_keys_and_places_are_refused() -> None:
    with pytest.raises(ConfigError, match="'own'"):
        PairKeys(bytes(32), bytes(32), bytes(31))
    plane = LocalPlanes().planes[0]
    with pytest.raises(ConfigError, match="party 3"):
        Runtime(3, plane, rehearsal_keys(0)[0], bytes(32))
    with pytest.raises(ConfigError, match="sid_sub"):
        Runtime(0, plane, rehearsal_keys(0)[0], bytes(31))


def test_one_message_per_peer_and_round_however_many_protocols() -> None:
    parts = split(torch.arange(6.0), 16, lambda n: bytes(n))
    planes = LocalPlanes(keep=True)

    def body(rt: Runtime) -> int:
        x = share_of(parts, rt.party)
        rt.run(par(*[arithmetic.mul_protocol(rt, x, x) for _ in range(5)]))
        return rt.rounds

    assert planes.run_three(body) == [2, 2, 2]
    for received in planes.wire.received.values():
        assert len({(src, tag) for src, tag, _ in received}) == len(received)
    # left and right of the dealer hear from both others in round one, and from each other in round two
    assert [len(planes.wire.received[p]) for p in range(3)] == [3, 3, 0]


def test_protocols_of_different_length_run_side_by_side() -> None:
    parts = split(torch.tensor([-1.0, 2.0]), 16, lambda n: bytes(n))

    def body(rt: Runtime) -> list[torch.Tensor]:
        x = share_of(parts, rt.party)
        short, long = rt.run(par(arithmetic.mul_protocol(rt, x, x), selection.relu_only_protocol(rt, x)))
        return opening.open_many(rt, [short, long])

    square, relu = LocalPlanes().run_three(body)[1]
    assert square.tolist() == pytest.approx([1.0, 4.0], abs=2e-5)
    assert relu.tolist() == [0.0, 2.0]


def test_same_keys_and_inputs_give_the_same_messages() -> None:
    parts = split(torch.linspace(-3, 3, 60).reshape(6, 10), 16, random.Random(3).randbytes)

    def received(seed: int) -> dict[int, list[tuple[int, Tag, bytes]]]:
        planes = LocalPlanes(seed, keep=True)
        planes.run_three(lambda rt: nonlinear.softmax(rt, share_of(parts, rt.party)))
        return planes.wire.received

    assert received(1) == received(1)
    one, other = received(1), received(2)
    assert all(a[2] != b[2] for p in range(3) for a, b in zip(one[p], other[p], strict=True))


def test_a_message_of_another_size_names_its_sender() -> None:
    def cut(src: int, dst: int, tag: Tag, body: bytes) -> bytes:
        return body[:-8] if (src, dst) == (2, 0) else body

    planes = LocalPlanes(tamper=cut)
    parts = split(torch.ones(4), 16, lambda n: bytes(n))
    with pytest.raises(ProtocolError, match="party 2 sent") as caught:
        planes.run_three(lambda rt: arithmetic.mul(rt, share_of(parts, rt.party), share_of(parts, rt.party)))
    assert caught.value.party == 2


def test_a_party_that_stops_is_reported() -> None:
    def body(rt: Runtime) -> None:
        if rt.party == 1:
            raise PeerLostError("gone", party=1)
        rt.run(_wait(rt))

    with pytest.raises(PeerLostError):
        LocalPlanes().run_three(body)


def _wait(rt: Runtime) -> MpcProtocol[None]:
    message = Round()
    message.want(1, kinds.RESHARE, torch.int64, 4)
    yield message


@pytest.mark.parametrize("liar", [0, 1, 2])
@pytest.mark.parametrize("part", ["value", "hash"])
@pytest.mark.parametrize("everybody", [True, False])
def test_a_liar_in_an_opening_is_caught_and_the_pair_named(liar: int, part: str, everybody: bool) -> None:
    victim = (liar + 1) % 3 if part == "value" else (liar + 2) % 3

    def lie(src: int, dst: int, tag: Tag, body: bytes) -> bytes:
        if tag.kind == kinds.OPEN and (src, dst) == (liar, victim):
            return bytes([body[0] ^ 1]) + body[1:]
        return body

    parts = split(torch.tensor([1.0, 2.0]), 16, lambda n: bytes(n))
    with pytest.raises(ProtocolError, match="disagree on a share") as caught:
        LocalPlanes(tamper=lie).run_three(
            lambda rt: (
                opening.open_(rt, share_of(parts, rt.party))
                if everybody
                else opening.open_to(rt, share_of(parts, rt.party), victim)
            )
        )
    others = sorted({0, 1, 2} - {victim})
    assert str(liar) in str(others)
    assert all(str(p) in caught.value.what for p in others)


def test_opening_to_one_party_tells_the_others_nothing() -> None:
    parts = split(torch.tensor([1.5, -2.0]), 16, lambda n: bytes(n))
    planes = LocalPlanes(keep=True)
    out = planes.run_three(lambda rt: opening.open_to(rt, share_of(parts, rt.party), 1))
    assert out[0] is None
    assert out[2] is None
    assert out[1] is not None
    assert out[1].tolist() == [1.5, -2.0]
    assert planes.wire.received[0] == []
    assert planes.wire.received[2] == []


def test_a_training_step_of_a_small_network_takes_few_rounds(run: Callable[..., Any]) -> None:
    """Forward, softmax, backward and update of a 64-32-10 network, batch 32."""
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * 0.2

    x, w1, w2 = rand(32, 64), rand(64, 32), rand(32, 10)
    y = torch.nn.functional.one_hot(torch.arange(32) % 10, 10).to(torch.float64)

    def step(rt: Runtime, xs: Share, a: Share, b: Share, ys: Share) -> MpcProtocol[list[Share]]:
        hidden, bit = yield from selection.matmul_relu_protocol(rt, xs, a)
        logits, top = yield from maximum.matmul_max_protocol(rt, hidden, b)
        shifted = arithmetic.sub(logits, top.reshape(-1, 1))
        probability, _ = yield from nonlinear.softmax_of_shifted_protocol(rt, shifted)
        delta = arithmetic.sub(probability, ys)
        grad_b, back = yield from par(
            arithmetic.matmul_protocol(rt, hidden.T, delta, scale=0.1 / 32), arithmetic.matmul_protocol(rt, delta, b.T)
        )
        back = yield from arithmetic.mul_protocol(rt, back, bit)
        grad_a = yield from arithmetic.matmul_protocol(rt, xs.T, back, scale=0.1 / 32)
        return [arithmetic.sub(a, grad_a), arithmetic.sub(b, grad_b)]

    out = run(step, x, w1, w2, y)
    hidden = (x @ w1).clamp(min=0)
    delta = (hidden @ w2).softmax(-1) - y
    want_b = w2 - 0.1 / 32 * hidden.T @ delta
    want_a = w1 - 0.1 / 32 * x.T @ ((delta @ w2.T) * (hidden > 0))
    assert (out.values[0] - want_a).abs().max() < 1e-4
    assert (out.values[1] - want_b).abs().max() < 1e-4
    assert out.rounds <= 28


def test_chacha20_is_the_rfc_s_and_refuses_repeats() -> None:
    key = bytes(range(32))
    stream = ChaChaStream(key, "test")
    nonce = (3).to_bytes(2, "big") + (5).to_bytes(4, "big") + (6).to_bytes(2, "big") + (7).to_bytes(4, "big")
    library = Cipher(algorithms.ChaCha20(key, bytes(4) + nonce), mode=None).encryptor()
    assert drawn(stream, 5, 6, 7, 3, nbytes=600_000) == library.update(bytes(600_000))
    with pytest.raises(ProtocolError, match="mask reuse refused"):
        drawn(stream, 5, 6, 7, 3)
    drawn(stream, 5, 6, 7, 4)


def test_parties_may_agree_on_chacha20() -> None:
    three, keys = LocalPlanes(), rehearsal_keys(0)
    three.runtimes = [Runtime(p, three.planes[p], keys[p], bytes(32), prg="chacha20") for p in range(3)]
    parts = split(torch.tensor([-1.5, 2.0]), 16, random.Random(1).randbytes)
    found = three.run_three(lambda rt: opening.open_(rt, selection.relu(rt, share_of(parts, rt.party))[0]))
    assert found[0].tolist() == [0.0, 2.0]
    with pytest.raises(ConfigError, match="'rc4'"):
        Runtime(0, three.planes[0], keys[0], bytes(32), prg="rc4")


def test_a_task_whose_messages_came_while_another_s_were_looked_for_is_not_waited_for() -> None:
    planes = LocalPlanes().planes
    first, second = Tag(0, 1, 0, 1), Tag(0, 3, 0, 1)
    planes[0].send(1, first, b"a")
    assert not planes[1].arrived([(0, second)])  # which takes in what lies before it
    planes[1].wait_any([[(0, first)], [(0, second)]])
    assert bytes(planes[1].recv(0, first)) == b"a"
