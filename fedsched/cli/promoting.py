"""Commands about which version decides in a cluster: policy promote, rollback, history, shadow, diff."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsched.cli.connect import Server, connect, user
from fedsched.cli.output import Format, Output, emit, note, span, table

if TYPE_CHECKING:
    from fedsched.adapters.rpc import JobsClient
    from fedsched.core.versions import Comparison, Promotion, VersionName

Cluster = Annotated[str, typer.Argument(help="Name of the cluster.")]
Which = Annotated[
    str | None,
    typer.Argument(
        metavar="[VERSION]", help="A version of the federation, such as 7 or v7, or `newest`.", show_default=False
    ),
]
Checkpoint = Annotated[
    str, typer.Option("--checkpoint", help="In place of a version: a file on the agent's machine, or builtin.")
]
Why = Annotated[str, typer.Option("--why", help="For the history.")]
WAIT_S = 10.0
"""How long a command waits for the agent to carry its order out."""
LOOK_EVERY_S = 0.2


def register(group: typer.Typer) -> None:
    """Add the commands to the group `policy`."""
    group.command()(promote)
    group.command()(rollback)
    group.command()(history)
    group.command()(shadow)
    group.command()(diff)


def promote(
    cluster: Cluster,
    version: Which = None,
    checkpoint: Checkpoint = "",
    why: Why = "",
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Have a version of its policy decide in a cluster, from the next decision on.

    It stays, whatever the federation makes, until another one is promoted; after `newest` the cluster accepts the
    federation's versions by itself again.
    """
    with connect(server) as client:
        ordered = client.promote(cluster, _named(version, checkpoint), user(), why)
        _show(_settled(client, ordered), output)


def rollback(cluster: Cluster, why: Why = "", server: Server = "", output: Output = Format.TABLE) -> None:
    """Have the version decide that did before; again, and it goes back one further."""
    with connect(server) as client:
        ordered = client.rollback(cluster, user(), why)
        _show(_settled(client, ordered), output)


def history(cluster: Cluster, server: Server = "", output: Output = Format.TABLE) -> None:
    """List which versions were to decide in a cluster: when, by whose order, why, and what became of it."""
    with connect(server) as client:
        found = client.promotions(cluster)
    if emit(found, output, [f"promotion/{order.cluster}/{order.seq}" for order in found]):
        return
    now_s = time.time()
    active = max((order.seq for order in found if order.state.value == "active"), default=0)
    table(
        ("ORDER", "VERSION", "DIGEST", "ACTION", "BY", "AGE", "STATE", "WHY"),
        [
            (
                order.seq,
                order.version,
                order.version.digest[:12],
                order.action.value + (", pinned" if order.pinned else ""),
                order.by,
                span(now_s - order.time_s),
                "decides" if order.seq == active else "decided" if order.state.value == "active" else order.state.value,
                "; ".join(filter(None, (order.why, order.message))),
            )
            for order in found
        ],
        spare=("DIGEST",),
    )


def shadow(
    cluster: Cluster,
    version: Which = None,
    checkpoint: Checkpoint = "",
    policy: Annotated[str, typer.Option("--policy", help="Another policy than the one that the cluster runs.")] = "",
    accept: Annotated[
        bool, typer.Option("--accept", help="Promote it as soon as it has shown that it does no harm.")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End the comparison.")] = False,
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Have a candidate decide beside the policy of a cluster, for comparison only; see `policy diff`."""
    from fedsched.errors import InvalidInput

    if not stop and version is None and not checkpoint and not policy:
        raise InvalidInput(
            "no candidate is named",
            f"name a version, --checkpoint or --policy; `fedsched policy diff {cluster}` shows what is compared now",
        )
    with connect(server) as client:
        named = None if stop else _named(version, checkpoint, policy)
        # Of all clusters, because among those one that cannot be read is left out, and keeps no other from beginning.
        compared = [
            item.candidate.version for item in client.comparisons("") if item.cluster == cluster and item.running
        ]
        candidate = client.shadow(cluster, named, user(), accept)
    if not emit({"cluster": cluster, "candidate": candidate}, output, [f"cluster/{cluster}"]):
        if candidate is None:
            print(f"nothing runs in the shadow of {cluster} any more")
        else:
            instead = "".join(f" in place of {other}" for other in compared if str(other) != str(candidate.version))
            print(
                f"{candidate.version} is to decide in the shadow of {cluster}{instead}; "
                f"`fedsched policy diff {cluster}` tells how it does, or why it cannot"
            )


def diff(
    cluster: Annotated[str, typer.Argument(metavar="[CLUSTER]", help="All, if none is named.")] = "",
    journal: Annotated[
        Path | None,
        typer.Option(
            "--journal",
            exists=True,
            dir_okay=False,
            help="An agent's journal.jsonl: compare --policy with what is recorded there.",
        ),
    ] = None,
    policy: Annotated[str, typer.Option("--policy", help="The candidate, with --journal.")] = "dl2",
    checkpoint: Checkpoint = "builtin",
    server: Server = "",
    output: Output = Format.TABLE,
) -> None:
    """Compare candidates with what decides: usable answers, agreement, estimated worth, time to answer, verdict.

    WORTH and MS are the candidate's, then those of what decides: the share of its best speed that each job gets, by the
    speeds seen so far, and the median time of an answer. CHANGE is that of WORTH, to 95 %; the verdict looks at it
    after 20, 40, 80 ... slots in which both were asked.
    """
    if journal is not None:
        found: tuple[Comparison, ...] = (_of_journal(journal, policy, checkpoint),)
    else:
        with connect(server) as client:
            found = client.comparisons(cluster)
    if not emit(found, output, [f"cluster/{item.cluster}" for item in found]):
        table(
            (
                "CLUSTER", "ACTIVE", "CANDIDATE", "STATE", "SLOTS", "USABLE", "AGREES", "WORTH", "CHANGE", "MS", "AGE",
                "VERDICT",
            ),
            [_row(item) for item in found],
            spare=("MS", "WORTH", "AGE"),
        )  # fmt: skip
        if not found:
            note("nothing was compared yet; `fedsched policy shadow CLUSTER ...` begins a comparison")


def _of_journal(journal: Path, policy: str, checkpoint: str) -> Comparison:
    from fedsched.config import PolicyConfig, parse
    from fedsched.sim.replaying import shadow as compare

    return compare(journal, parse(PolicyConfig, {"name": policy, "checkpoint": checkpoint}, "the candidate"))


def _row(item: Comparison) -> tuple[object, ...]:
    verdict = item.verdict
    return (
        item.cluster,
        item.active,
        item.candidate.version,
        "compared" if item.running else "ended",
        item.cases,
        f"{item.valid / item.cases:.0%}" if item.cases else None,
        f"{item.agreement:.0%}" if item.valid else None,
        f"{item.candidate_worth:.3g}/{item.active_worth:.3g}" if item.valid else None,
        f"{verdict.change:+.1%}±{verdict.error:.1%}" if verdict.error is not None else None,
        f"{item.candidate_ms[0]:.3g}/{item.active_ms[0]:.3g}" if item.valid else None,
        span(time.time() - item.newest_s),
        "; ".join(filter(None, (verdict.why, item.problem))),
    )


def _named(version: str | None, checkpoint: str, policy: str = "") -> VersionName:
    from fedsched.core.versions import VersionName
    from fedsched.errors import InvalidInput

    if checkpoint not in ("", "builtin"):
        checkpoint = str(Path(checkpoint).absolute())
    if version is None:
        if not checkpoint and not policy:
            raise InvalidInput("no version is named", "name one of `fedsched policy list`, newest, or --checkpoint")
        return VersionName(policy, checkpoint=checkpoint)
    if version == "newest":
        return VersionName(policy, newest=True, checkpoint=checkpoint)
    number = version.removeprefix("v")
    if not number.isdecimal() or not int(number):
        raise InvalidInput(
            f"{version} is no version; a number such as 7 or v7, or newest, was expected", "see `fedsched policy list`"
        )
    return VersionName(policy, int(number), checkpoint=checkpoint)


def _settled(client: JobsClient, ordered: Promotion) -> Promotion:
    """The order as it is once the agent has carried it out, or as it is when nobody waits any longer.

    Raises:
        Failed: its weights cannot be used.
    """
    from fedsched.errors import Failed

    order, until_s = ordered, time.monotonic() + WAIT_S
    while order.state.value == "pending" and time.monotonic() < until_s:
        time.sleep(LOOK_EVERY_S)
        order = next((item for item in client.promotions(order.cluster) if item.seq == order.seq), order)
    if order.state.value == "refused":
        raise Failed(
            f"{order.version} does not decide in cluster {order.cluster}: {order.message}",
            f"what decided before goes on; see `fedsched policy history {order.cluster}`",
        )
    return order


def _show(order: Promotion, output: Format) -> None:
    if emit(order, output, [f"promotion/{order.cluster}/{order.seq}"]):
        return
    if order.state.value == "active":
        follows = order.action.value == "promoted" and not order.pinned
        print(f"{order.version} decides in cluster {order.cluster} from the next slot on", end="")
        print("; it accepts the federation's newer ones again" if follows else "")
    elif order.state.value == "replaced":
        print(f"{order.version} does not decide in cluster {order.cluster}: {order.message}")
    else:
        waits = order.message or "takes effect when the cluster's agent is connected"
        print(f"{order.version} is ordered for cluster {order.cluster} and {waits}")
