"""JobSets of GKE: a job with a pod on every host of one or several TPU slices."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from t5x_lab.config.errors import UserError
from t5x_lab.launch.slices import CHIPS_PER_HOST, Slice

API = "jobset.x-k8s.io/v1alpha2"
GRACE_SECONDS = 120  # between SIGTERM and the end of a pod
IMAGE = "my-registry/t5x_lab"  # which users replace
_CONTAINER = "t5x-lab"


class Volume(NamedTuple):
    """A PersistentVolumeClaim that all pods mount at a path."""

    claim: str
    path: str


def make_jobset(
    name: str,
    code: str,
    slice_of_job: Slice,
    *,
    image: str,
    max_restarts: int,
    num_slices: int = 1,
    volumes: Sequence[Volume] = (),
    environment: Mapping[str, str] | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Returns a JobSet as `kubectl apply` reads it.

    A host that fails or is preempted restarts all of them, and the run continues from its last checkpoint. A mistake of the
    user's (exit status 2) ends the JobSet, because a restart would repeat it.

    Args:
      name: name of the JobSet.
      code: shell command of every host.
      slice_of_job: TPU slice.
      image: container image with t5x_lab.
      max_restarts: number of restarts.
      num_slices: number of slices, one job each.
      volumes: volumes of the pods.
      environment: additional environment variables.
      labels: labels of the JobSet.
    """
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": image,
        "command": ["bash", "-c", code],
        "resources": {"limits": {"google.com/tpu": min(slice_of_job.chips, CHIPS_PER_HOST)}},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "nodeSelector": {
            "cloud.google.com/gke-tpu-accelerator": slice_of_job.accelerator,
            "cloud.google.com/gke-tpu-topology": slice_of_job.topology,
        },
        "containers": [container],
    }
    if environment:
        container["env"] = [{"name": variable, "value": value} for variable, value in environment.items()]
    if volumes:
        names = [f"volume-{number}" for number in range(len(volumes))]
        container["volumeMounts"] = [{"name": n, "mountPath": volume.path} for n, volume in zip(names, volumes, strict=True)]
        claims = [{"claimName": volume.claim} for volume in volumes]
        pod["volumes"] = [{"name": n, "persistentVolumeClaim": claim} for n, claim in zip(names, claims, strict=True)]
    job = {
        "parallelism": slice_of_job.hosts,
        "completions": slice_of_job.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": [UserError.status]},
                }
            ]
        },
        "template": {"spec": pod},
    }
    metadata: dict[str, Any] = {"name": name, **({"labels": dict(labels)} if labels else {})}
    if num_slices > 1:  # each job has the node pool of one slice for itself
        metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    return {
        "apiVersion": API,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {
                "maxRestarts": max_restarts,
                "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": "run", "replicas": num_slices, "template": {"spec": job}}],
        },
    }
