"""Softmax cross-entropy and squared error on shares.

The gradient is softmax(z) - y and needs no logarithm. The loss itself is only for whoever watches: its branch runs
beside the division and the backward pass, adds no round of its own, and only the mean over the batch is opened.
"""

from __future__ import annotations

from dataclasses import dataclass

from uvcc_engine.model.functions import EXP_SCALE, to_exp_scale_protocol
from uvcc_engine.mpc.comparisons.maximum import argmax_one_hot_protocol, max_protocol
from uvcc_engine.mpc.foundation.opening import open_ring_protocol
from uvcc_engine.mpc.foundation.runtime import MpcProtocol, Runtime, par
from uvcc_engine.mpc.foundation.share import Share
from uvcc_engine.mpc.functions import exponential, softmax
from uvcc_engine.mpc.functions.exponential import INVERSE, LOG, SUM_LIMIT, exp_protocol
from uvcc_engine.mpc.functions.nonlinear import divide_protocol, log_protocol
from uvcc_engine.mpc.products.arithmetic import dot_protocol, mul_protocol, rescale_protocol, sub

_LEAST = 1.0 - 2.0**-8  # the largest power is 1, up to rounding
DEALER = 0
"""Who deals for the exponentials, whose tables are as large as those of a layer's comparisons: another party than for
layers, since a step waits for the fullest line."""


@dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """Logits less their maximum, (rows, classes), their exponentials, and the exponentials' row sums (rows, 1).

    ``inverse`` and ``log`` of the sums, if there are few classes (and the loss is wanted).
    """

    shifted: Share
    powers: Share
    total: Share
    inverse: Share | None = None
    log: Share | None = None


def powers_protocol(rt: Runtime, logits: Share, top: Share | None = None, *, loss: bool = True) -> MpcProtocol[Powers]:
    """Exponentials of the logits less their row maximum ``top``: 6 rounds, and 6 for the maximum of up to 10 classes.

    At a scale that the exponential does not take, 2 more, and the result has f = 16. ``loss``: whether it will be
    asked for.
    """
    if top is None:
        top = yield from max_protocol(rt, logits)
    shifted = yield from to_exp_scale_protocol(rt, sub(logits, top.map(lambda t: t.unsqueeze(-1))))
    if shifted.shape[-1] > SUM_LIMIT or rt.proves_everything:  # a look-up has no proof, a division has
        powers = yield from exp_protocol(rt, shifted)
        return Powers(shifted, powers, powers.sum(-1, keepdim=True))
    names = (INVERSE, LOG) if loss else (INVERSE,)
    return Powers(shifted, *(yield from exponential.powers_protocol(rt, shifted, names, dealer=DEALER)))


def product_powers_protocol(rt: Runtime, left: Share, right: Share, *, loss: bool = True) -> MpcProtocol[Powers]:
    """The powers of the logits ``left @ right``, with the product itself: 6 rounds. For what ``powers_fit``.

    ``left``: [rows, n]; ``right``: [n, classes].
    """
    names = (INVERSE, LOG) if loss else (INVERSE,)
    at = yield from softmax.matmul_powers_protocol(rt, left, right, names, f=min(left.f, EXP_SCALE), dealer=DEALER)
    return Powers(softmax.shifted(at), at.powers, at.total, *at.looked_up)


def gradient_protocol(rt: Runtime, at: Powers, targets: Share, *, weighted: bool = False) -> MpcProtocol[Share]:
    """softmax - y, the gradient of the summed cross-entropy by the logits: 2 rounds for up to 15 classes.

    ``targets`` and gradient: [rows, classes]. ``weighted``: targets of a row add up to what it counts, W, and the
    gradient is W softmax - y: 2 rounds more.
    """
    if at.inverse is None:
        classes = at.powers.shape[-1]
        probabilities = yield from divide_protocol(rt, at.powers, at.total, _LEAST, float(classes), parts=True)
    else:
        probabilities = yield from mul_protocol(rt, at.powers, at.inverse)
    if weighted:
        probabilities = yield from mul_protocol(rt, probabilities, targets.sum(-1, keepdim=True))
    return sub((yield from rescale_protocol(rt, probabilities, targets.f)), targets)


def total_loss_protocol(rt: Runtime, at: Powers, targets: Share, *, weighted: bool = False) -> MpcProtocol[Share]:
    """The summed cross-entropy of the rows, log(sum e^shifted) - shifted[label], still shared: one element.

    2 rounds for up to 15 classes, 10 for more; the logarithm and the product with the targets go side by side.
    ``weighted``: see :func:`gradient_protocol`; 2 rounds more.
    """
    counts = targets.sum(-1, keepdim=True) if weighted else None
    total, picked = yield from par(_logs_protocol(rt, at, counts), dot_protocol(rt, at.shifted, targets))
    return sub(total, picked)


def _logs_protocol(rt: Runtime, at: Powers, counts: Share | None) -> MpcProtocol[Share]:
    """The logarithms' sum over the rows, each as often as it ``counts``: one element at the scale of the logits."""
    logs = at.log
    if logs is None:
        logs = yield from log_protocol(rt, at.total, _LEAST, float(at.powers.shape[-1]))
    if counts is None:
        total = logs.sum(0)
        return total if at.log is None else (yield from rescale_protocol(rt, total, at.shifted.f))
    if at.log is not None:  # 26 bits longer, with which a product of a whole batch would pass the ring's end
        logs = yield from rescale_protocol(rt, logs, at.shifted.f)
    return (yield from dot_protocol(rt, logs, counts))


def mean_loss_protocol(rt: Runtime, at: Powers, targets: Share, *, weighted: bool = False) -> MpcProtocol[float]:
    """Open the mean cross-entropy of the batch; nothing else is revealed. 3 rounds for up to 15 classes.

    ``targets``: [rows, classes]. ``weighted``: see :func:`gradient_protocol`.
    """
    total = yield from total_loss_protocol(rt, at, targets, weighted=weighted)
    opened = yield from open_ring_protocol(rt, total)
    return float(opened.item()) / 2.0**total.f / at.powers.shape[0]


def hits_protocol(rt: Runtime, logits: Share, targets: Share) -> MpcProtocol[Share]:
    """How many rows have their largest logit (the first in a tie) at the target, still shared: one element.

    7 rounds for up to 10 classes. The count is exact: the one-hot argmax is an integer, and so is the product read at
    the targets' scale.
    """
    chosen = yield from argmax_one_hot_protocol(rt, logits)
    return (yield from dot_protocol(rt, targets, chosen))


def total_square_protocol(rt: Runtime, difference: Share, grad: Share | None = None) -> MpcProtocol[Share]:
    """Half the squared difference to the targets, summed over rows and outputs, still shared: one element. 2 rounds.

    The difference itself is the gradient of the summed loss, unless rows are weighted: then it is ``grad``.
    """
    return (yield from dot_protocol(rt, difference if grad is None else grad, difference, scale=0.5))


def correct_protocol(rt: Runtime, logits: Share, targets: Share) -> MpcProtocol[int]:
    """Open the count of :func:`hits_protocol`: 8 rounds for up to 10 classes.

    ``logits`` and ``targets``: [rows, classes].
    """
    hits = yield from hits_protocol(rt, logits, targets)
    opened = yield from open_ring_protocol(rt, hits)
    return int(opened.item()) >> targets.f
