"""The three branches of one row and group over 32-bit floats, compiled: query by query, and back block by block.

Keys come in blocks of ``size``; a query's scores are the products of its group's heads and whole blocks, hidden at the
edges of what it sees. They stay in the first-level cache until they have weighed the values. Gradients go over blocks
with the queries that see them, a tile at a time, and compute the weights again. Each query's sums are taken in the
order of its blocks, so that what later tokens are never moves a bit of it.

Addresses and strides are bytes as integers, of rows that are contiguous; callers answer for the bounds. Panels are the
keys or values of a block turned around, ``[d, size]``. ``low`` and ``high`` [queries] are the first key that a query
sees and the one behind its last.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from uvcc_engine.nsa.loops.attention_cache import compiled_loop
from uvcc_engine.nsa.loops.float_rows import (
    get,
    put,
    row_add,
    row_dot,
    row_hide,
    row_peak,
    row_powers,
    row_set,
    row_slopes,
)
from uvcc_engine.nsa.loops.float_vectors import LANES
from uvcc_engine.nsa.loops.tile_products import FINE, multiply

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Picks = NDArray[np.int32]


@compiled_loop
def turn(x: int, x0: int, n: int, d: int, size: int, times: float, out: int) -> None:
    """The panels of ``x`` [n, d] times so much, of ``size`` rows each; rows behind the last one are 0."""
    factor, zero = np.float32(times), np.float32(0)
    for first in range(0, n, size):
        to = out + 4 * first * d
        for i in range(size):
            row = x + (first + i) * x0
            if first + i < n:
                for j in range(d):
                    put(to, j * size + i, get(row, j) * factor)
            else:
                for j in range(d):
                    put(to, j * size + i, zero)


@compiled_loop
def _blocks(t: int, size: int, low: Ints, high: Ints, skip: int, picks: Picks, order: Ints) -> int:
    """Puts the blocks that query ``t`` sees into ``order``, ascending: those picked for it, from ``skip`` on."""
    n = 0
    if t < skip:
        for j in range(low[t] // size, (high[t] - 1) // size + 1):
            order[n] = j
            n += 1
    else:
        for i in range(picks.shape[1]):
            if picks[t - skip, i] >= 0:
                order[n] = picks[t - skip, i]
                n += 1
    return n


@compiled_loop
def _most(size: int, low: Ints, high: Ints, skip: int, picks: Picks) -> int:
    """How many blocks a query sees at most."""
    most: int = picks.shape[1]
    for t in range(min(skip, low.shape[0])):
        most = max(most, int((high[t] - 1) // size + 1 - low[t] // size))
    return most


@compiled_loop
def queries_of_blocks(
    size: int, low: Ints, high: Ints, skip: int, picks: Picks, offset: Ints, entry: Picks, fill: bool
) -> None:
    """Counts the queries before each block into ``offset`` [blocks + 1], of zeros; or writes them down in ``entry``.

    Those of block j are entry[offset[j] : offset[j + 1]], ascending.
    """
    order = np.empty(_most(size, low, high, skip, picks), dtype=np.int64)
    place = offset.copy()
    for t in range(low.shape[0]):
        for i in range(_blocks(t, size, low, high, skip, picks, order)):
            j = order[i]
            if fill:
                entry[place[j]] = t
                place[j] += 1
            else:
                offset[j + 1] += 1
    if not fill:
        for j in range(1, offset.shape[0]):
            offset[j] += offset[j - 1]


@compiled_loop
def _score(shares: int, weights: Floats, begin: int, base: int, count: int) -> Any:
    """Of the shares of ``count`` compression blocks from ``base`` on, those from ``begin`` on, weighed."""
    total = np.float32(0)
    for k in range(weights.shape[0]):
        i = begin + k - base
        if 0 <= i < count:
            total += weights[k] * get(shares, i)
    return total


@compiled_loop
def pick(
    t: int, first: int, size: int, ratio: int, weights: Floats, shares: int, base: int, count: int, chosen: Any
) -> None:
    """Puts the blocks that the token at place ``t`` chooses into ``chosen`` [n_sel], ascending, -1 at the end for none.

    As ``index.top_blocks`` does: its document's first and the two local ones, then the best, ties to the lower block.
    """
    n_sel, local = chosen.shape[0], t // size
    chosen[:] = -1
    if local - first < n_sel:
        for i in range(local - first + 1):
            chosen[i] = first + i
        return
    most, before = n_sel - 3, weights.shape[0] - ratio
    best, number = np.empty(most, dtype=np.float32), np.empty(most, dtype=np.int64)
    for i in range(most):
        best[i], number[i] = np.float32(-1), first + 1 + i
    for j in range(first + 1, local - 1):
        value = _score(shares, weights, j * ratio - before, base, count)
        if most == 0 or not value > best[most - 1]:
            continue
        i = most - 1
        while i > 0 and value > best[i - 1]:
            best[i], number[i] = best[i - 1], number[i - 1]
            i -= 1
        best[i], number[i] = value, j
    chosen[0] = first
    for i in range(most):
        place = i + 1
        while chosen[place - 1] > number[i]:  # the first block is below all of them
            chosen[place] = chosen[place - 1]
            place -= 1
        chosen[place] = number[i]
    chosen[n_sel - 2], chosen[n_sel - 1] = local - 1, local


@compiled_loop
def _scores(
    rows: int, heads: int, dk: int, size: int, panels: int, low: int, high: int, order: Ints, n: int, at: int, line: int
) -> None:
    """The scores of a query's heads at ``rows`` and the first ``n`` blocks of ``order``, one behind the other."""
    step, fresh = np.intp(4), np.intp(1)  # numba would compile the product once more for each constant
    for i in range(n):
        first, place = order[i] * size, at + 4 * i * size
        begin, end = max(0, low - first), min(size, high - first)
        lane, past = begin // FINE * FINE, min(size, (end + FINE - 1) // FINE * FINE)
        panel, to = panels + 4 * (first * dk + lane), place + 4 * lane
        multiply(heads, past - lane, rows, 4 * dk, step, panel, 4 * size, dk, to, line, fresh)
        if begin > 0 or end < size:
            for r in range(heads):
                row_hide(place + r * line, size // LANES, begin, end)


@compiled_loop
def _weighed(
    heads: int,
    dv: int,
    size: int,
    values: int,
    low: int,
    high: int,
    order: Ints,
    n: int,
    weight: int,
    line: int,
    o: int,
) -> None:
    """The values of the same blocks, weighed and summed; those side by side in one product."""
    i, step = 0, np.intp(4)
    while i < n:
        run = i + 1
        while run < n and order[run] == order[run - 1] + 1:
            run += 1
        begin, end = max(order[i] * size, low), min((order[run - 1] + 1) * size, high)
        left = weight + 4 * (i * size + begin - order[i] * size)
        fresh = np.intp(i == 0)
        multiply(heads, dv, left, line, step, values + 4 * begin * dv, 4 * dv, end - begin, o, 4 * dv, fresh)
        i = run


@compiled_loop
def attend(
    heads: int,
    dk: int,
    dv: int,
    size: int,
    q: int,
    q0: int,
    panels: int,
    values: int,
    low: Ints,
    high: Ints,
    skip: int,
    picks: Picks,
    o: int,
    o0: int,
    peaks: int,
    totals: int,
    place: int,
    starts: Ints,
    ratio: int,
    weights: Floats,
    chosen: Picks,
) -> None:
    """What one branch reads, ``o``, with each row's greatest score and the sum of its weights, powers of 2.

    Queries from ``skip`` on see the blocks of ``picks`` [queries - skip, n_sel]. Of compressed keys the last queries
    choose blocks: as many as ``chosen`` has rows, each with the place of its document's first token in ``starts``; the
    first query's place is ``place``.
    """
    queries = low.shape[0]
    wide = _most(size, low, high, skip, picks)
    order, whole = np.empty(wide, dtype=np.int64), np.empty(heads, dtype=np.float32)
    space = np.empty((heads + 1) * wide * size + LANES, dtype=np.float32)
    score = (np.intp(space.ctypes.data) + 63) & ~63
    line = 4 * wide * size
    shares = score + heads * line
    for t in range(queries):
        n = _blocks(t, size, low, high, skip, picks, order)
        vectors, out = n * size // LANES, o + t * o0
        _scores(q + t * q0, heads, dk, size, panels, low[t], high[t], order, n, score, line)
        for r in range(heads):
            peak = row_peak(score + r * line, vectors)
            total = row_powers(score + r * line, vectors, peak)
            put(peaks, t * heads + r, peak)
            put(totals, t * heads + r, total)
            whole[r] = np.float32(1) / total
        _weighed(heads, dv, size, values, low[t], high[t], order, n, score, line, out)
        for r in range(heads):
            row_set(out + 4 * r * dv, out + 4 * r * dv, dv // LANES, whole[r])
        late = t - queries + chosen.shape[0]
        if late >= 0:
            row_set(shares, score, vectors, whole[0])
            for r in range(1, heads):
                row_add(shares, score + r * line, vectors, whole[r])
            base, count = order[0] * size, n * size
            pick(place + t, starts[t] // size, size, ratio, weights, shares, base, count, chosen[late])


@compiled_loop
def mix(queries: int, heads: int, dv: int, gates: int, o: int, o0: int, y: int, y0: int, fresh: int) -> None:
    """Sets, or adds to, ``y`` of each query and head what one branch read, times its gate."""
    for t in range(queries):
        for r in range(heads):
            to, at = y + t * y0 + 4 * r * dv, o + t * o0 + 4 * r * dv
            if fresh:
                row_set(to, at, dv // LANES, get(gates, t * heads + r))
            else:
                row_add(to, at, dv // LANES, get(gates, t * heads + r))


@compiled_loop
def dots(queries: int, heads: int, dv: int, dy: int, y0: int, o: int, o0: int, means: int) -> None:
    """The products of each query's and head's gradient and what it read, summed."""
    for t in range(queries):
        for r in range(heads):
            put(means, t * heads + r, row_dot(dy + t * y0 + 4 * r * dv, o + t * o0 + 4 * r * dv, dv // LANES))


@compiled_loop
def slopes(
    heads: int,
    dk: int,
    dv: int,
    size: int,
    tile: int,
    q: int,
    q0: int,
    dy: int,
    y0: int,
    panels: int,
    value_panels: int,
    keys: int,
    low: Ints,
    high: Ints,
    offset: Ints,
    entry: Picks,
    peaks: int,
    shares: int,
    means: int,
    dq: int,
    dq0: int,
    on_k: int,
    on_v: int,
) -> None:
    """Adds one branch's part to ``dq``, and to ``on_k`` and ``on_v`` of its keys.

    ``shares``: a row's gate over the sum of its weights; ``means``: what ``dots`` found.
    """
    most, one = tile * heads, np.float32(1)
    step, fresh, more = np.intp(4), np.intp(1), np.intp(0)
    space = np.empty(most * (2 * dk + dv + 2 * size) + LANES, dtype=np.float32)
    mine = (np.intp(space.ctypes.data) + 63) & ~63
    found, grad = mine + 4 * most * dk, mine + 8 * most * dk
    weight = grad + 4 * most * dv
    slope, line = weight + 4 * most * size, 4 * size
    for j in range(offset.shape[0] - 1):
        first = j * size
        for a in range(offset[j], offset[j + 1], tile):
            n = min(tile, offset[j + 1] - a)
            rows, begin, end = n * heads, size, 0
            for i in range(n):
                t = entry[a + i]
                row_set(mine + 4 * i * heads * dk, q + t * q0, heads * dk // LANES, one)
                row_set(grad + 4 * i * heads * dv, dy + t * y0, heads * dv // LANES, one)
                begin, end = min(begin, low[t] - first), max(end, high[t] - first)
            begin = max(0, begin) // LANES * LANES
            width = (min(size, end) + LANES - 1) // LANES * LANES - begin
            at_k, at_v = 4 * (first * dk + begin), 4 * (first * dv + begin)
            multiply(rows, width, mine, 4 * dk, step, panels + at_k, line, dk, weight, line, fresh)
            multiply(rows, width, grad, 4 * dv, step, value_panels + at_v, line, dv, slope, line, fresh)
            here = first + begin
            for i in range(n):
                t = entry[a + i]
                edge = here < low[t] or here + width > high[t]
                for r in range(heads):
                    row, at = (i * heads + r) * line, t * heads + r
                    if edge:
                        row_hide(weight + row, width // LANES, low[t] - here, high[t] - here)
                    kept = get(peaks, at), get(shares, at), get(means, at)
                    row_slopes(weight + row, slope + row, width // LANES, kept[0], kept[1], kept[2])
            multiply(width, dv, weight, step, line, grad, 4 * dv, rows, on_v + 4 * here * dv, 4 * dv, more)
            multiply(width, dk, slope, step, line, mine, 4 * dk, rows, on_k + 4 * here * dk, 4 * dk, more)
            multiply(rows, dk, slope, line, step, keys + 4 * here * dk, 4 * dk, width, found, 4 * dk, fresh)
            for i in range(n):
                row_add(dq + entry[a + i] * dq0, found + 4 * i * heads * dk, heads * dk // LANES, one)
