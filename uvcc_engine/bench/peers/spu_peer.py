"""SPU on the work of ``bench mpc``: run by a Python that has it, ``ROWS RUNS PORTS``; prints seconds by row as JSON.

Three processes over loopback, ABY3 over the ring of 64 bits. It imports nothing of UVCC, which that Python need not
have.
"""

# mypy: ignore-errors

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BATCH, LAYERS = 128, (784, 128, 128, 10)


def works(np, jnp, jax):
    """Row -> (function, arguments)."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    def mlp_step(weights, x, y, rate=0.125):
        inputs, bits, value = [x], [], x
        for w in weights[:-1]:
            z = value @ w
            bits.append(z > 0)
            value = z * bits[-1]
            inputs.append(value)
        delta = jax.nn.softmax(value @ weights[-1], axis=-1) - y
        new = []
        for i in reversed(range(len(weights))):
            new.insert(0, weights[i] - (rate / BATCH) * (inputs[i].T @ delta))
            if i:
                delta = (delta @ weights[i].T) * bits[i - 1]
        return new

    def matmul(n):
        return lambda a, b: a @ b, (normal(n, n), normal(n, n))

    weights = [normal(a, b) * a**-0.5 for a, b in itertools.pairwise(LAYERS)]
    return {
        "matmul_1024": lambda: matmul(1024),
        "matmul_512": lambda: matmul(512),
        "matmul_256": lambda: matmul(256),
        "mul_1e6": lambda: (lambda a, b: a * b, (normal(10**6), normal(10**6))),
        "drelu_1e6": lambda: (lambda a: a > 0, (normal(10**6),)),
        "relu_1e6": lambda: (lambda a: jnp.maximum(a, 0), (normal(10**6),)),
        "mlp_step": lambda: (mlp_step, (weights, normal(BATCH, LAYERS[0]) * 0.3, normal(BATCH, LAYERS[-1]) * 0.1)),
    }


def party(rank, folder, ports):
    """One of the three: run every job, and as party 0 print the seconds."""
    from spu import api, libspu

    jobs = pickle.loads((folder / f"jobs{rank}.pickle").read_bytes())
    link = libspu.link.Desc()
    link.recv_timeout_ms = 600_000
    for k, port in enumerate(ports):
        link.add_party(f"p{k}", f"127.0.0.1:{port}")
    context = libspu.link.create_brpc(link, rank)
    runtime = api.Runtime(context, libspu.RuntimeConfig(protocol=libspu.ProtocolKind.ABY3, field=libspu.FieldType.FM64))
    out = {}
    for job in jobs:
        code = libspu.Executable(name=job["name"], input_names=job["in"], output_names=job["out"], code=job["code"])
        for name, share in zip(job["in"], job["shares"], strict=True):
            runtime.set_var(name, share)
        seconds = []
        for _ in range(job["runs"] + 1):  # the first one warms up
            context.barrier()
            begun = time.perf_counter()
            runtime.run(code)
            context.barrier()
            seconds.append(time.perf_counter() - begun)
        out[job["name"]] = seconds[1:]
        for name in [*job["in"], *job["out"]]:
            with contextlib.suppress(Exception):
                runtime.del_var(name)
    context.stop_link()
    if rank == 0:
        print(json.dumps(out))


def main():
    import jax
    import jax.numpy as jnp
    import numpy as np
    import spu.utils.frontend as front
    from spu import api, libspu

    rows, runs, ports = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
    config = libspu.RuntimeConfig(protocol=libspu.ProtocolKind.ABY3, field=libspu.FieldType.FM64)
    dealer = api.Io(3, config)
    secret = libspu.Visibility.VIS_SECRET
    jobs = [[], [], []]
    known = works(np, jnp, jax)
    for name in (row for row in rows if row in known):
        function, args = known[name]()
        flat, _ = jax.tree_util.tree_flatten((args, {}))
        inputs = [f"{name}_i{k}" for k in range(len(flat))]
        code, _ = front.compile(
            front.Kind.JAX,
            function,
            args,
            {},
            inputs,
            [secret] * len(flat),
            lambda outs, name=name: [f"{name}_o{k}" for k in range(len(outs))],
            copts=libspu.CompilerOptions(),
        )
        shares = [dealer.make_shares(np.array(x), secret) for x in flat]
        for rank in range(3):
            job = {"name": name, "code": code.code, "in": inputs, "out": list(code.output_names), "runs": runs}
            jobs[rank].append({**job, "shares": [s[rank] for s in shares]})
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(3):
            (Path(folder) / f"jobs{rank}.pickle").write_bytes(pickle.dumps(jobs[rank]))
        parties = [
            subprocess.Popen([sys.executable, __file__, str(rank), folder, ports], env=os.environ) for rank in range(3)
        ]
        return max(abs(one.wait()) for one in parties)


if __name__ == "__main__":
    if sys.argv[1] in ("0", "1", "2"):
        party(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","))
    else:
        sys.exit(main())
