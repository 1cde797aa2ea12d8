"""The training steps of ``bench epochs`` by MP-SPDZ's own machine learning, three parties over loopback.

UVCC_MPSPDZ names its folder, as for ``bench mpc``. Its layers, its stochastic gradient descent, replicated sharing
modulo 2^64, 16 fractional bits with probabilistic truncation. Rows are made up, which costs a step the same; its own
clock says how long.
"""

from __future__ import annotations

from typing import Final

from uvcc_engine.bench.peers import mpspdz

STEPS: Final = {"logistic": 20, "secureml": 10, "lenet": 2}
OPENED: Final = "opened"
"""Among a program's arguments: a step ends with one weight opened, before which all that it computed is checked."""
PROGRAM: Final = """
from Compiler import ml
program.options_from_args()
sfix.set_precision(16, 31)
what, steps, batch = program.args[1], int(program.args[2]), int(program.args[3])
layer = ml.keras.layers
models = {
    'logistic': [layer.Flatten(), layer.Dense(10, activation='softmax')],
    'secureml': [
        layer.Flatten(),
        layer.Dense(128, activation='relu'),
        layer.Dense(128, activation='relu'),
        layer.Dense(10, activation='softmax'),
    ],
    'lenet': [
        layer.Conv2D(20, 5, 1, 'valid', activation='relu'),
        layer.MaxPooling2D(2),
        layer.Conv2D(50, 5, 1, 'valid', activation='relu'),
        layer.MaxPooling2D(2),
        layer.Flatten(),
        layer.Dense(500, activation='relu'),
        layer.Dense(10, activation='softmax'),
    ],
}
model = ml.keras.models.Sequential(models[what])
model.compile(optimizer=ml.keras.optimizers.SGD(learning_rate=0.05))
model.build([batch, 28, 28], batch)
trainer = model.opt
trainer.report_loss = False
trainer.layers[-1].compute_loss = False
trainer.layers[0]._X.randomize(0, 1)
@for_range(batch)
def _(i):
    trainer.layers[-1].Y[i].assign_all(0)
    trainer.layers[-1].Y[i][i % 10] = sint(1)
trainer.reset()
rows = regint.Array(batch)
rows.assign(regint.inc(batch))
@for_range(steps)
def _(step):
    start_timer(1)
    trainer.forward(batch=rows, training=True)
    trainer.backward(batch=rows)
    trainer.update(0, step, batch=rows)
    if 'opened' in program.args:
        print_ln('%s', trainer.layers[0].W[0][0].reveal())
    stop_timer(1)
"""


def step_seconds(name: str, batch: int) -> tuple[float, str]:
    """Seconds of a step of the case ``name``; 0 and why, where it cannot be had."""
    home, absent = mpspdz.home()
    if home is None:
        return 0.0, absent
    if name not in STEPS:
        return 0.0, "no program for it"
    args = [name, str(STEPS[name]), str(batch), "trunc_pr", "split3"]
    seconds, why = mpspdz.seconds(home, "uvcc_training", PROGRAM, args)
    return seconds / STEPS[name], why
