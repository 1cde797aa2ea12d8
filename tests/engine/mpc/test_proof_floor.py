"""The floor of a proof's time counts what its parties multiply, and changes nothing of it."""

from __future__ import annotations

import pytest
import torch

from uvcc_engine.bench.work import mpc_proofs, proof_floor
from uvcc_engine.bench.work.proof_floor import MachineRates, Multiplications, counting
from uvcc_engine.mpc.comparisons.selection import relu_only_protocol
from uvcc_engine.mpc.foundation.local import LocalPlanes
from uvcc_engine.mpc.foundation.roles import known
from uvcc_engine.mpc.foundation.runtime import Runtime
from uvcc_engine.mpc.kernels.choose import kernels_for
from uvcc_engine.mpc.products.arithmetic import public

KERNELS = kernels_for(torch.device("cpu"))


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**62), 2**62, shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_each_product_counts_by_its_way_and_stays_what_it_is() -> None:
    count = Multiplications()
    counted = counting(KERNELS, count)
    left, right = _words(3, 4), _words(4, 5)
    assert torch.equal(counted.right_factor([right], 3)([left]), KERNELS.right_factor([right], 3)([left]))
    assert (count.numbers, count.words) == (3 * 4 * 5, 0)
    u, v, weights = _words(2, 100), _words(2, 100), _words(8)
    assert torch.equal(counted.ternary_bits(u, v, weights), KERNELS.ternary_bits(u, v, weights))
    assert count.words == 729 * 8, "up to three terms share their products with the weights"
    x, y = _words(8, 32), _words(8, 32)
    assert torch.equal(counted.binary_product(x, y), KERNELS.binary_product(x, y))
    assert count.words == 729 * 8 + 3**3 * 32, "three products of halves for four"
    assert torch.equal(counted.pack(left, 2), KERNELS.pack(left, 2))
    assert (count.numbers, count.words) == (60, 729 * 8 + 27 * 32), "what multiplies nothing counts nothing"


@pytest.mark.ci(__file__)
def test_a_proof_s_floor_is_its_multiplications_at_the_machine_s_rates() -> None:
    assert MachineRates(2.0, 4.0).seconds(Multiplications(words=6, numbers=8)) == 5.0
    planes = LocalPlanes(4)

    def body(rt: Runtime) -> tuple[float, float, int]:
        floors = []
        for epoch, elements in enumerate((64, 6400)):
            rt.begin_epoch(epoch)
            mpc_proofs.open_ledger(rt, "relu_1e6_verified")
            rt.run(relu_only_protocol(rt, public(rt, torch.ones(elements))))
            kernels = rt.kernels
            floors.append(mpc_proofs.floor_s(rt))
            assert rt.kernels is kernels
        return floors[0], floors[1], len(known(rt.ledger))

    for few, many, left in planes.run_three(body):
        assert 0 < few < many
        assert left == 0, "it is proved as any other"


def test_a_row_without_a_proof_has_no_floor() -> None:
    assert LocalPlanes(5).run_three(mpc_proofs.floor_s) == [0.0] * 3
    assert proof_floor.machine_rates(KERNELS).numbers > 0
