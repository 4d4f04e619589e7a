"""Versions of a policy in two clusters, live: two agents, an aggregator, a controller and a real etcd."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedsched.adapters.etcd import EtcdStore
from fedsched.adapters.rpc import JobsClient
from fedsched.aggregator.app import Service
from fedsched.config import AggregatorConfig, ControllerConfig, RoundConfig
from fedsched.controller.app import Controller
from fedsched.core.cluster import ClusterRecord
from fedsched.core.gate import GateOutcome
from fedsched.core.job import JobPhase
from fedsched.core.versions import Comparison, Promotion, State, VersionName
from fedsched.errors import Conflict, FedschedError, InvalidInput, NotFound
from fedsched.policy import checkpoint
from fedsched.policy.checkpoint import Checkpoint
from fedsched.policy.dl2 import DL2, initial
from fedsched.policy.set import SetShape
from fedsched.policy.set import initial as set_initial
from fedsched.runtime import codec, keys
from tests.agent.live_agent import LiveAgent, live_agent
from tests.waiting import eventually

pytestmark = [pytest.mark.live, pytest.mark.xdist_group("promotion"), pytest.mark.timeout(300)]

WAIT_S = 90.0
SHIPPED = checkpoint.load(checkpoint.BUILTIN)


@pytest.fixture
def client(own_etcd_address: str, tmp_path: Path) -> Iterator[JobsClient]:
    """A controller's; operators talk to nobody else."""
    store = EtcdStore(own_etcd_address)
    config = ControllerConfig(
        listen="127.0.0.1:0", etcd=own_etcd_address, state_dir=tmp_path / "controller", lease_ttl_s=5
    )
    controller = Controller(config, store)
    with JobsClient(controller.address) as made:
        yield made
    controller.close()
    store.close()


@contextmanager
def agent(etcd_address: str, home: Path, cluster: str, **config: Any) -> Iterator[LiveAgent]:
    """An agent whose candidates are judged after a few slots, with a job that keeps it deciding."""
    promotion = {"slots_min": 5, "slots_max": 40, "margin": 0.05}
    with live_agent(etcd_address, home, cluster, promotion=promotion, **config) as made:
        yield made


def job(made: LiveAgent, name: str = "job") -> None:
    """There is something to decide in every slot."""
    made.assign(name, workers=(1, 2), ps=(0, 1), resize_cooldown_s=0.5)
    made.wait(name, JobPhase.RUNNING, JobPhase.RESIZING)


def done(made: LiveAgent, name: str = "job") -> None:
    made.cancel(name)
    made.wait(name, JobPhase.CANCELLED)


def record_of(made: LiveAgent) -> ClusterRecord:
    entry = made.store.get(keys.cluster(made.cluster))
    assert entry is not None
    return codec.loads(ClusterRecord, entry.value)


def decides(made: LiveAgent) -> str:
    """Digest of the weights that the agent's policy really has."""
    policy = made.policy
    assert isinstance(policy, DL2)
    return checkpoint.digest(policy.weights)


def settled(client: JobsClient, order: Promotion) -> Promotion:
    """What became of it."""

    def now() -> Promotion:
        return next(item for item in client.promotions(order.cluster) if item.seq == order.seq)

    eventually(lambda: now().state is not State.PENDING, f"{order.version} is decided about", WAIT_S)
    return now()


def known(client: JobsClient, *clusters: str) -> None:
    """The controller has heard of them."""
    eventually(lambda: set(clusters) <= {view.name for view in client.clusters() if view.record}, "it knows them")


def weights(path: Path, seed: int) -> Checkpoint:
    """Some weights for the shipped network, written to a file."""
    made = Checkpoint(initial(SHIPPED.shape, seed), SHIPPED.shape, {"seed": seed})
    made.save(path)
    return made


def compared(client: JobsClient, cluster: str) -> Comparison:
    found = client.comparisons(cluster)
    assert found, f"nothing is compared in {cluster}"
    return found[0]


def test_a_file_is_promoted_kept_over_a_restart_and_rolled_back(
    own_etcd_address: str, tmp_path: Path, client: JobsClient
) -> None:
    """The file may be deleted as soon as it decides; the other cluster is none the wiser."""
    file = tmp_path / "mine.safetensors"
    mine = weights(file, 5)
    home = tmp_path / "east"
    with agent(own_etcd_address, tmp_path / "west", "calm-west") as west:
        with agent(own_etcd_address, home, "file-east"):
            known(client, "file-east", "calm-west")
            order = client.promote("file-east", VersionName(checkpoint=str(file)), "li", "looks good")
            order = settled(client, order)
            assert (order.state, order.version.digest, order.by, order.why) == (
                State.ACTIVE,
                mine.digest,
                "li",
                "looks good",
            )
        file.unlink()
        with agent(own_etcd_address, home, "file-east") as east:
            assert decides(east) == mine.digest
            job(east)
            back = settled(client, client.rollback("file-east", "ana", "it was worse"))
            assert (back.state, back.version.digest) == (State.ACTIVE, SHIPPED.digest)
            assert decides(east) == SHIPPED.digest
            with pytest.raises(NotFound, match="no version decided in cluster file-east before"):
                client.rollback("file-east", "ana")
            done(east)
        story = [(item.action.value, item.by, item.state.value) for item in client.promotions("file-east")]
        assert story == [
            ("configured", "agent/file-east", "active"),
            ("promoted", "li", "active"),
            ("rolled back", "ana", "active"),
        ]
        assert [item.action.value for item in client.promotions("calm-west")] == ["configured"]
        assert west.store.get(keys.comparison(west.cluster)) is None


def test_what_cannot_decide_is_refused_with_the_reason(
    own_etcd_address: str, tmp_path: Path, client: JobsClient
) -> None:
    other = tmp_path / "set.safetensors"
    Checkpoint(set_initial(SetShape(), 1), SetShape(), {}).save(other)
    torn = tmp_path / "torn.safetensors"
    torn.write_bytes(checkpoint.BUILTIN.read_bytes()[:-100])
    with agent(own_etcd_address, tmp_path / "home", "refusing"):
        known(client, "refusing")
        with pytest.raises(NotFound, match="there is no cluster refused"):
            client.promote("refused", VersionName(version=1), "li")
        with pytest.raises(
            NotFound, match=r"policy dl2 has no version 99|the federation has no versions of policy dl2"
        ):
            client.promote("refusing", VersionName(version=99), "li")
        with pytest.raises(InvalidInput, match="runs policy dl2; weights of set do not fit"):
            client.promote("refusing", VersionName("set", checkpoint=str(other)), "li")
        for path, why in (
            (other, "holds weights of format"),
            (torn, "is no whole checkpoint"),
            (tmp_path / "gone", "cannot read .*No such file"),
        ):
            order = settled(client, client.promote("refusing", VersionName(checkpoint=str(path)), "li"))
            assert order.state is State.REFUSED
            assert re.search(why, order.message), order.message
        with pytest.raises(NotFound, match="no version decided in cluster refusing before"):
            client.rollback("refusing", "li")


def test_of_two_who_promote_in_the_same_moment_one_is_told_so(
    own_etcd_address: str, tmp_path: Path, client: JobsClient
) -> None:
    """Otherwise one of them believes for a week that the cluster runs what it does not."""
    files = [tmp_path / f"{seed}.safetensors" for seed in range(4)]
    digests = [weights(path, seed).digest for seed, path in enumerate(files)]
    with agent(own_etcd_address, tmp_path / "home", "raced"):
        known(client, "raced")
        barrier = threading.Barrier(len(files))

        def promote(index: int) -> Promotion | FedschedError:
            barrier.wait()
            try:
                return client.promote("raced", VersionName(checkpoint=str(files[index])), f"person-{index}")
            except FedschedError as problem:
                return problem

        with ThreadPoolExecutor(len(files)) as pool:
            answers = list(pool.map(promote, range(len(files))))
        orders = [answer for answer in answers if isinstance(answer, Promotion)]
        refused = [answer for answer in answers if not isinstance(answer, Promotion)]
        assert orders, answers
        assert all(isinstance(problem, Conflict) and "in the same moment" in problem.message for problem in refused)
        newest = max(orders, key=lambda order: order.seq)
        assert settled(client, newest).state is State.ACTIVE
        assert settled(client, newest).version.digest == digests[int(newest.by[-1])]
        states = [item.state for item in client.promotions("raced")]
        assert states.count(State.PENDING) == 0


def test_an_order_given_while_no_agent_lives_takes_effect_when_one_does(
    own_etcd_address: str, tmp_path: Path, client: JobsClient
) -> None:
    """The same as one killed between the order and its effect."""
    file = tmp_path / "mine.safetensors"
    mine = weights(file, 7)
    home = tmp_path / "home"
    with agent(own_etcd_address, home, "asleep"):
        known(client, "asleep")
    order = client.promote("asleep", VersionName(checkpoint=str(file)), "li")
    assert order.state is State.PENDING
    with agent(own_etcd_address, home, "asleep") as east:
        assert decides(east) == mine.digest
        assert settled(client, order).state is State.ACTIVE


def test_a_candidate_decides_beside_the_policy_goes_on_after_a_restart_and_is_promoted_only_when_wanted(
    own_etcd_address: str, tmp_path: Path, client: JobsClient
) -> None:
    home = tmp_path / "home"
    with agent(own_etcd_address, home, "shadowed") as east:
        known(client, "shadowed")
        job(east)
        client.shadow("shadowed", VersionName("set", checkpoint="builtin"), "li")
        eventually(
            lambda: bool(client.comparisons("shadowed")) and compared(client, "shadowed").cases >= 2,
            "both have decided some slots",
            WAIT_S,
        )
        before = compared(client, "shadowed")
        assert (before.active.policy, before.candidate.version.policy) == ("dl2", "set")
        assert before.candidate_ms[0] > 0
    with agent(own_etcd_address, home, "shadowed") as east:
        eventually(lambda: compared(client, "shadowed").cases >= 7, "they go on", WAIT_S)
        after = compared(client, "shadowed")
        assert after.cases > before.cases
        assert after.verdict.outcome in (GateOutcome.ACCEPTED, GateOutcome.REFUSED, GateOutcome.UNDECIDED)
        assert after.verdict.cases + after.verdict.failures > 0
        assert record_of(east).policy == "dl2"
        assert [item.action.value for item in client.promotions("shadowed")] == ["configured"]
        client.shadow("shadowed", None, "li")
        eventually(lambda: not compared(client, "shadowed").running, "it is ended", WAIT_S)
        client.shadow("shadowed", VersionName(checkpoint=str(tmp_path / "gone")), "li")
        eventually(lambda: "No such file" in compared(client, "shadowed").problem, "its file is missed", WAIT_S)
        done(east)


def test_a_version_of_the_federation_is_judged_by_each_cluster_and_can_be_fetched_again(
    own_etcd_address: str, tmp_path: Path, client: JobsClient
) -> None:
    """Rounds make versions; agents compare before they obey; an operator names any that is kept, here or not."""
    with ExitStack() as stack:
        store = EtcdStore(own_etcd_address)
        stack.callback(store.close)
        rounds = RoundConfig(interval_s=2.0, quorum=1, deadline_s=5.0, samples_min=2, batch_size=16)
        service = Service(
            AggregatorConfig(
                listen="127.0.0.1:0",
                etcd=own_etcd_address,
                state_dir=tmp_path / "aggregator",
                rounds=rounds,
                lease_ttl_s=5,
            ),
            store,
        )
        serving = threading.Thread(target=service.run, name="aggregator")
        serving.start()
        stack.callback(serving.join)
        stack.callback(service.stop)
        eventually(lambda: bool(service.address), "the aggregator serves", WAIT_S)
        made = [
            stack.enter_context(agent(own_etcd_address, tmp_path / name, f"fed-{name}", aggregator=service.address))
            for name in ("east", "west")
        ]
        for one in made:
            job(one)
        known(client, "fed-east", "fed-west")

        def accepted(cluster: str) -> list[Promotion]:
            return [item for item in client.promotions(cluster) if item.action.value == "accepted"]

        def judged() -> bool:
            ended = [item for item in client.comparisons() if item.cluster.startswith("fed-") and not item.running]
            return any(item.verdict.outcome is not GateOutcome.UNDECIDED for item in ended) or any(
                accepted(name) for name in ("fed-east", "fed-west")
            )

        eventually(judged, "a version was judged", WAIT_S)
        for path in (tmp_path / "west" / "versions").iterdir():
            path.unlink()  # as if it had joined later: the aggregator has to send it
        order = settled(client, client.promote("fed-west", VersionName(version=1), "li", "back to the first"))
        assert (order.state, order.version.version) == (State.ACTIVE, 1)
        eventually(lambda: record_of(made[1]).policy_version == 1, "it decides with version 1", WAIT_S)
        for one in made:
            done(one)
