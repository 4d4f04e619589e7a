"""The store's layout: one function per kind of key, so that no key is spelled twice."""

from fedsched.core.ids import ClusterName, JobId

ROOT = "/fedsched/v1/"

CLUSTERS = f"{ROOT}clusters/"
JOBS = f"{ROOT}jobs/"
POLICIES = f"{ROOT}policies/"
ROUNDS = f"{ROOT}rounds/"
CONTROLLERS = f"{ROOT}controllers/"
TERMS = f"{ROOT}terms/"
PROMOTIONS = f"{ROOT}promotions/"
CANDIDATES = f"{ROOT}candidates/"
COMPARISONS = f"{ROOT}comparisons/"
IDEMPOTENCY = f"{ROOT}idempotency/"
JOB_COUNTER = f"{ROOT}counters/job"


def cluster(name: ClusterName) -> str:
    """`ClusterRecord`, under the agent's lease."""
    return f"{CLUSTERS}{name}"


def term(name: ClusterName) -> str:
    """The cluster's fencing number as decimal text; only ever grows."""
    return f"{TERMS}{name}"


def job(job_id: JobId) -> str:
    """Prefix of all that is known of a job."""
    return f"{JOBS}{job_id}/"


def job_spec(job_id: JobId) -> str:
    """`JobSpec`, written once."""
    return f"{job(job_id)}spec"


def job_status(job_id: JobId) -> str:
    """`JobStatus`."""
    return f"{job(job_id)}status"


def job_transition(job_id: JobId, seq: int) -> str:
    """`Transition`, one key each, written in the transaction that changes the status."""
    return f"{job(job_id)}transitions/{seq:06d}"


def assignments(name: ClusterName) -> str:
    """Prefix of what a cluster's agent watches."""
    return f"{ROOT}assignments/{name}/"


def assignment(name: ClusterName, job_id: JobId) -> str:
    """`Assignment`."""
    return f"{assignments(name)}{job_id}"


def idempotency(key: str) -> str:
    """Job id that a submission with this idempotency key created."""
    return f"{IDEMPOTENCY}{key}"


def controller(controller_id: str) -> str:
    """`ControllerRecord`, under the controller's lease: where agents attach."""
    return f"{CONTROLLERS}{controller_id}"


def leader(role: str) -> str:
    """Id of the process that leads `role`, under its lease."""
    return f"{ROOT}leader/{role}"


def policy_versions(name: str) -> str:
    """Prefix of a policy's versions, and of the key that says which one is in force."""
    return f"{POLICIES}{name}/"


def policy_version(name: str, version: int) -> str:
    """`PolicyRecord`."""
    return f"{policy_versions(name)}{version:06d}"


def policy_active(name: str) -> str:
    """Version offered to the agents, as decimal text."""
    return f"{policy_versions(name)}active"


def promotions(name: ClusterName) -> str:
    """Prefix of the orders that a version of the policy decide in a cluster."""
    return f"{PROMOTIONS}{name}/"


def promotion(name: ClusterName, seq: int) -> str:
    """`Promotion`; written by whoever orders it, its outcome by the agent."""
    return f"{promotions(name)}{seq:06d}"


def candidate(name: ClusterName) -> str:
    """`Wish`: what somebody wants to see in the cluster's shadow."""
    return f"{CANDIDATES}{name}"


def comparison(name: ClusterName) -> str:
    """`Comparison` of the newest candidate, written by the agent."""
    return f"{COMPARISONS}{name}"


def round_record(number: int) -> str:
    """`RoundRecord`."""
    return f"{ROUNDS}{number:06d}"
