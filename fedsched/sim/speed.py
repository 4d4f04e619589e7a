"""How fast simulated jobs train: Optimus's analytic form with coefficients of our own for eight kinds of model.

The numbers describe no particular hardware. They are chosen so that the kinds differ in what helps them: workers for
compute-bound ones (cnn, resnet, transformer), parameter servers for communication-bound ones (vgg, embedding), and
little of either for small ones (linear, mlp).
"""

from __future__ import annotations

from fedsched.policy.optimus import SpeedCurve

SPEEDS: dict[str, SpeedCurve] = {
    "linear": SpeedCurve((0.4, 0.20, 0.10, 0.02, 0.01)),
    "mlp": SpeedCurve((0.8, 0.10, 0.10, 0.01, 0.01)),
    "cnn": SpeedCurve((3.0, 0.10, 0.10, 0.01, 0.01)),
    "resnet": SpeedCurve((4.0, 0.15, 0.20, 0.02, 0.01)),
    "vgg": SpeedCurve((1.5, 0.20, 1.20, 0.02, 0.02)),
    "lstm": SpeedCurve((2.0, 0.50, 0.30, 0.05, 0.02)),
    "transformer": SpeedCurve((5.0, 0.20, 0.80, 0.02, 0.02)),
    "embedding": SpeedCurve((0.8, 0.20, 1.50, 0.03, 0.02)),
}
"""Epochs per second by job type; the policy never sees these."""
