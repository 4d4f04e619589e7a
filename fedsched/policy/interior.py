"""Shares of time that make the least objective as great as can be: where the path of Gavel's solver ends.

The program has many optima wherever the cluster is not full, and Gavel takes what its solver, ECOS, returns. Which that
is depends on the path; so this follows the same one (Domahidi, Chu, Boyd, "ECOS: An SOCP solver for embedded systems",
ECC 2013, for linear constraints alone): three rounds of equilibration, the homogeneous self-dual embedding, Mehrotra's
predictor and corrector with its step lengths and limits. The answers agree to about 1e-6. Jobs that are alike get like
shares, and nobody's share is at a corner that another optimum would avoid.

Each step solves for a small block per job, plus one rank for each resource of each type, plus the objective.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

STEPS_MAX = 100
TOLERANCE = 1e-8
"""Of residuals and of the gap, absolute or relative."""
REGULARISATION = 2e-7
REFINEMENTS = 4
EQUILIBRATIONS = 3
STEP_FRACTION = 0.99
STEP_MAX = 0.999
CENTRING_MIN = 1e-4


def follow(worth: Array, loads: Array, rooms: Array, able: NDArray[np.bool_]) -> Array | None:
    """The shares by job and type; None where the path does not come to its end, which is for another method to solve.

    Args:
        worth: what a whole share does, by job and type.
        loads: of each resource of each type, what a job takes: jobs by types by resources.
        rooms: what there is of them: types by resources. The path depends on the units, as Gavel's does: its are GPUs.
        able: where a job can run; elsewhere its share is zero.
    """
    program = _Program.of(worth, loads, rooms, able)
    with np.errstate(all="ignore"):  # a path that leads nowhere ends with numbers that are none
        try:
            shares = _path(program)
        except np.linalg.LinAlgError:
            return None
    return shares if shares is not None and np.isfinite(shares).all() else None


@dataclass(slots=True)
class _Program:
    """Minimise `cost * t` over t and x with `-lift t - worth x <= 0` per job, x >= 0, `load x <= room`, `whole x <= 1`.

    All scaled. Constraints lie one after the other in one vector: objectives, signs, rooms, whole time.
    """

    cost: float
    lift: Array
    worth: Array
    sign: Array
    load: Array
    """Jobs by types by constraints on room."""
    whole: Array
    limits: Array
    able: NDArray[np.bool_]
    live: Array
    """One for each constraint that is there, zero for the sign of a share that is fixed."""
    unit: Array
    """Of each share, by which it was divided."""

    @classmethod
    def of(cls, worth: Array, loads: Array, rooms: Array, able: NDArray[np.bool_]) -> _Program:
        """Scaled so that all coefficients are of like size."""
        jobs, types = worth.shape
        ones = able.astype(np.float64)
        worth, whole, sign, lift = worth * ones, ones.copy(), np.ones((jobs, types)), np.ones(jobs)
        spread = np.zeros((jobs, types, types, rooms.shape[1]))
        spread[:, range(types), range(types), :] = loads * ones[:, :, None]
        load, room = spread.reshape(jobs, types, rooms.size), rooms.ravel()
        used = load.any(axis=(0, 1))
        load, room = load[:, :, used], room[used]
        unit, top = np.ones((jobs, types)), 1.0
        scale = [np.ones(jobs), np.ones((jobs, types)), np.ones(len(room)), np.ones(jobs)]
        for _ in range(EQUILIBRATIONS):
            by_job = np.sqrt(np.maximum(lift, worth.max(axis=1)))
            by_sign, by_room = np.sqrt(sign), np.sqrt(load.max(axis=(0, 1)))
            by_whole = _root(whole.max(axis=1))
            by_share = np.sqrt(np.maximum(np.maximum(worth, sign), np.maximum(load.max(axis=2, initial=0.0), whole)))
            by_top = np.sqrt(lift.max())
            lift = lift / by_job / by_top
            worth = worth / by_job[:, None] / by_share
            sign = sign / by_sign / by_share
            load = load / by_room / by_share[:, :, None]
            whole = whole / by_whole[:, None] / by_share
            unit, top = unit * by_share, top * by_top
            scale = [old * new for old, new in zip(scale, (by_job, by_sign, by_room, by_whole), strict=True)]
        limits = np.concatenate([np.zeros(jobs + jobs * types), room / scale[2], 1 / scale[3]])
        live = np.concatenate([np.ones(jobs), ones.ravel(), np.ones(len(room) + jobs)])
        return cls(1 / top, lift, worth, sign * ones, load, whole, limits, able, live, unit)

    def left(self, top: float, shares: Array) -> Array:
        """The left sides of all constraints."""
        return np.concatenate(
            [
                -self.lift * top - (self.worth * shares).sum(axis=1),
                (-self.sign * shares).ravel(),
                np.einsum("jtk,jt->k", self.load, shares),
                (self.whole * shares).sum(axis=1),
            ]
        )

    def gathered(self, prices: Array) -> tuple[float, Array]:
        """What prices of the constraints sum up to for t and for each share."""
        objectives, signs, rooms, wholes = self.parts(prices)
        shares = self.load @ rooms + self.whole * wholes[:, None]
        shares -= self.worth * objectives[:, None] + self.sign * signs
        return -float(self.lift @ objectives), shares

    def parts(self, vector: Array) -> tuple[Array, Array, Array, Array]:
        """Of a vector over the constraints, what belongs to each kind."""
        jobs, types, rooms = self.load.shape
        first, second = jobs + jobs * types, jobs + jobs * types + rooms
        return vector[:jobs], vector[jobs:first].reshape(jobs, types), vector[first:second], vector[second:]


def _root(values: Array) -> Array:
    """Square roots; one where there is nothing to scale."""
    return np.sqrt(np.where(values > 0, values, 1.0))


class _System:
    """One step's equations, factorised: `G' z = right`, `G x - weight z = below`.

    Signs are eliminated. What is left of a job, its shares and the prices of its objective and its time, is one small
    block; the prices of rooms and t tie the blocks together.
    """

    def __init__(self, program: _Program, weight: Array) -> None:
        self._program, self._weight = program, weight
        objectives, signs, rooms, wholes = program.parts(weight + REGULARISATION)
        jobs, types, count = program.load.shape
        self._pull = np.where(program.able, 1 / signs, 0.0)
        block = np.zeros((jobs, types + 2, types + 2))
        diagonal = np.where(program.able, program.sign**2 * self._pull, 1.0) + REGULARISATION
        block[:, range(types), range(types)] = diagonal
        block[:, :types, types] = block[:, types, :types] = -program.worth
        block[:, :types, types + 1] = block[:, types + 1, :types] = program.whole
        block[:, types, types], block[:, types + 1, types + 1] = -objectives, -wholes
        self._inverse = np.linalg.inv(block)
        self._ties = np.zeros((jobs, types + 2, count + 1))
        self._ties[:, :types, :count] = program.load
        self._ties[:, types, count] = -program.lift
        own = np.diag(np.append(-rooms, REGULARISATION))
        self._joint = np.linalg.inv(own - np.einsum("jsk,jst,jtl->kl", self._ties, self._inverse, self._ties))

    def solve(self, top: float, right: Array, below: Array) -> tuple[float, Array, Array]:
        """t, shares and prices."""
        program = self._program
        t, shares, prices = self._solve(top, right, below)
        for _ in range(REFINEMENTS):
            got_top, got_right = program.gathered(prices)
            missing = (below - program.left(t, shares) + self._weight * prices) * program.live
            step = self._solve(top - got_top, (right - got_right) * program.able, missing)
            t, shares, prices = t + step[0], shares + step[1], prices + step[2]
        return t, shares, prices

    def _solve(self, top: float, right: Array, below: Array) -> tuple[float, Array, Array]:
        program = self._program
        objectives, signs, rooms, wholes = program.parts(below)
        own = np.concatenate([right - program.sign * self._pull * signs, objectives[:, None], wholes[:, None]], axis=1)
        alone = np.einsum("jst,jt->js", self._inverse, own)
        joint = self._joint @ (np.append(rooms, top) - np.einsum("jsk,js->k", self._ties, alone))
        found = alone - np.einsum("jst,jtk,k->js", self._inverse, self._ties, joint)
        types = program.worth.shape[1]
        shares = found[:, :types]
        signs = -self._pull * (signs + program.sign * shares)
        return (
            float(joint[-1]),
            shares,
            np.concatenate([found[:, types], signs.ravel(), joint[:-1], found[:, types + 1]]),
        )


def _path(program: _Program) -> Array | None:
    live, limits = program.live, program.limits
    count = live.sum() + 1
    zero, ones = np.zeros(program.worth.shape), np.ones(len(live))
    start = _System(program, ones)
    t, shares, prices = start.solve(0.0, zero, limits)
    slacks = _positive(-prices, live)
    prices = _positive(start.solve(-program.cost, zero, 0 * ones)[2], live)
    tau = kappa = 1.0
    size = max(1.0, float(np.linalg.norm(limits)))
    for _ in range(STEPS_MAX):
        back_top, back = program.gathered(prices)
        right_top, right = -back_top - program.cost * tau, -back * program.able
        below = (slacks + program.left(t, shares) - limits * tau) * live
        value, dual = program.cost * t, float(limits @ prices)
        gap, offset = float((slacks * prices) @ live), kappa + value + dual
        mu = (gap + kappa * tau) / count
        if _is_there(program, (t, shares, slacks, prices, tau), (right_top, right, below), gap, value, dual, size):
            found: Array = np.where(program.able, shares / tau / program.unit, 0.0)
            return found
        system = _System(program, slacks / prices)
        one = system.solve(-program.cost, zero, limits * live)
        slope = kappa / tau - program.cost * one[0] - float(limits @ one[2])

        def direction(
            top: float,
            shape: Array,
            under: Array,
            rest: float,
            system: _System = system,
            one: tuple[float, Array, Array] = one,
            slope: float = slope,
        ) -> tuple[float, Array, Array, float]:
            two = system.solve(top, shape, under)
            tau_step = (rest + program.cost * two[0] + float(limits @ two[2])) / slope
            return two[0] + tau_step * one[0], two[1] + tau_step * one[1], two[2] + tau_step * one[2], tau_step

        _, _, price_step, tau_step = direction(right_top, right, slacks * live - below, offset - kappa)
        slack_step = (-slacks - slacks / prices * price_step) * live
        kappa_step = -kappa - kappa / tau * tau_step
        far = _length((slack_step / slacks, price_step * live / prices, tau_step / tau, kappa_step / kappa))
        centring = min(max((1 - far) ** 3, CENTRING_MIN), 1.0)
        slant = (slacks + (slack_step * price_step - centring * mu) / prices) * live
        bend = kappa * tau + kappa_step * tau_step - centring * mu
        rest = 1 - centring
        top_step, share_step, price_step, tau_step = direction(
            rest * right_top, rest * right, slant - rest * below, rest * offset - bend / tau
        )
        slack_step = (-slant - slacks / prices * price_step) * live
        kappa_step = -(bend + kappa * tau_step) / tau
        far = STEP_FRACTION * _length(
            (slack_step / slacks, price_step * live / prices, tau_step / tau, kappa_step / kappa)
        )
        t, shares = t + far * top_step, shares + far * share_step * program.able
        prices, slacks = prices + far * price_step * live, slacks + far * slack_step
        tau, kappa = tau + far * tau_step, kappa + far * kappa_step
    return None


def _positive(values: Array, live: Array) -> Array:
    """Moved so far that all are above zero; one where there is no constraint."""
    least = -float(values[live > 0].min())
    moved = values if least < 0 else values + (1 + least)
    result: Array = np.where(live > 0, moved, 1.0)
    return result


def _length(shrinking: tuple[Array, Array, float, float]) -> float:
    """How far everything stays positive."""
    most = max(float(-shrinking[0].min()), float(-shrinking[1].min()), -shrinking[2], -shrinking[3])
    return min(1 / most, STEP_MAX) if most > 0 else STEP_MAX


def _is_there(
    program: _Program,
    point: tuple[float, Array, Array, Array, float],
    residuals: tuple[float, Array, Array],
    gap: float,
    value: float,
    dual: float,
    size: float,
) -> bool:
    t, shares, slacks, prices, tau = point
    top, right, below = residuals
    reach = float(np.hypot(t, np.linalg.norm(shares))) + float(np.linalg.norm(slacks * program.live))
    primal = float(np.linalg.norm(below)) / tau / max(size + reach, 1.0)
    dual_size = max(1.0, program.cost) + float(np.linalg.norm(prices * program.live))
    dual_residual = float(np.hypot(top, np.linalg.norm(right))) / tau / dual_size
    relative = gap / -value if value < 0 else gap / -dual if dual < 0 else np.inf
    return primal < TOLERANCE and dual_residual < TOLERANCE and (gap < TOLERANCE or relative < TOLERANCE)
