"""What Kubernetes and SageMaker take, as far as deploy/'s files use it, and a check against it.

MPIJOB: kubeflow.org/v2beta1 as the MPI operator's custom resource definition has it
(github.com/kubeflow/mpi-operator, manifests/base/kubeflow.org_mpijobs.yaml), pods as in Kubernetes'
API reference (kubernetes.io/docs/reference/kubernetes-api, Pod v1).
TRAINING_JOB: SageMaker's CreateTrainingJob (docs.aws.amazon.com/sagemaker/latest/APIReference).

A shape is a type, a set of words, a pattern, [shape of the items], {"*": shape of all values}, or a
dict of fields, where a name that ends in ! must be there and no other name may.
"""

import re
from typing import Any

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(Ki|Mi|Gi|Ti)?")
S3 = re.compile(r"s3://[a-z0-9.-]+/.*")

CONTAINER = {
    "name!": NAME,
    "image!": str,
    "command": [str],
    "args": [str],
    "env": [{"name!": str, "value": str}],
    "resources": {"limits": {"*": (int, QUANTITY)}, "requests": {"*": (int, QUANTITY)}},
    "volumeMounts": [{"name!": NAME, "mountPath!": str, "readOnly": bool}],
}
VOLUME = {
    "name!": NAME,
    "persistentVolumeClaim": {"claimName!": NAME},
    "emptyDir": {"medium": {"", "Memory"}, "sizeLimit": QUANTITY},
}
REPLICAS = {
    "replicas": int,
    "restartPolicy": {"Never", "OnFailure"},
    "template!": {
        "metadata": {"labels": {"*": str}},
        "spec!": {
            "terminationGracePeriodSeconds": int,
            "securityContext": {"runAsUser": int},
            "containers!": [CONTAINER],
            "volumes": [VOLUME],
        },
    },
}
MPIJOB = {
    "apiVersion!": {"kubeflow.org/v2beta1"},
    "kind!": {"MPIJob"},
    "metadata!": {"name!": NAME, "namespace": NAME, "labels": {"*": str}},
    "spec!": {
        "slotsPerWorker": int,
        "runLauncherAsWorker": bool,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "sshAuthMountPath": str,
        "runPolicy": {
            "cleanPodPolicy": {"None", "Running", "All"},
            "ttlSecondsAfterFinished": int,
            "activeDeadlineSeconds": int,
            "backoffLimit": int,
            "suspend": bool,
        },
        "mpiReplicaSpecs!": {"Launcher!": REPLICAS, "Worker": REPLICAS},
    },
}
TRAINING_JOB = {
    "TrainingJobName!": re.compile(r"[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62}"),
    "RoleArn!": re.compile(r"arn:aws[a-z-]*:iam::\d{12}:role/.+"),
    "AlgorithmSpecification!": {
        "TrainingImage": str,
        "TrainingInputMode!": {"Pipe", "File", "FastFile"},
        "MetricDefinitions": [{"Name!": str, "Regex!": str}],
    },
    "HyperParameters": {"*": re.compile(r".{0,2500}")},
    "InputDataConfig": [
        {
            "ChannelName!": re.compile(r"[A-Za-z0-9._-]{1,64}"),
            "DataSource!": {
                "S3DataSource": {
                    "S3DataType!": {"ManifestFile", "S3Prefix", "AugmentedManifestFile"},
                    "S3Uri!": S3,
                    "S3DataDistributionType": {"FullyReplicated", "ShardedByS3Key"},
                },
                "FileSystemDataSource": {
                    "FileSystemId!": str,
                    "FileSystemAccessMode!": {"rw", "ro"},
                    "FileSystemType!": {"EFS", "FSxLustre"},
                    "DirectoryPath!": str,
                },
            },
            "InputMode": {"Pipe", "File", "FastFile"},
        }
    ],
    "OutputDataConfig!": {"S3OutputPath!": S3},
    "CheckpointConfig": {"S3Uri!": S3, "LocalPath": str},
    "ResourceConfig!": {"InstanceType": str, "InstanceCount": int, "VolumeSizeInGB!": int},
    "VpcConfig": {"SecurityGroupIds!": [str], "Subnets!": [str]},
    "StoppingCondition!": {"MaxRuntimeInSeconds": int, "MaxWaitTimeInSeconds": int},
    "EnableManagedSpotTraining": bool,
    "Environment": {"*": str},
}


def misfits(value: Any, shape: Any, where: str = "") -> list[str]:
    """Returns a line for each place where a value has not the shape."""
    if isinstance(shape, tuple):
        found = [misfits(value, one, where) for one in shape]
        return [] if not all(found) else found[0]
    if isinstance(shape, type):
        fits = isinstance(value, shape) and (shape is bool or not isinstance(value, bool))
        return [] if fits else [f"{where}: {value!r} is no {shape.__name__}"]
    if isinstance(shape, set):
        return [] if value in shape else [f"{where}: {value!r} is none of {sorted(shape)}"]
    if isinstance(shape, re.Pattern):
        fits = isinstance(value, str) and shape.fullmatch(value)
        return [] if fits else [f"{where}: {value!r} is not {shape.pattern}"]
    if isinstance(shape, list):
        if not isinstance(value, list):
            return [f"{where}: no list"]
        found = [misfits(one, shape[0], f"{where}[{i}]") for i, one in enumerate(value)]
        return [line for lines in found for line in lines]
    return _misfits_of_fields(value, shape, where)


def _misfits_of_fields(value: Any, shape: dict[str, Any], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: no mapping"]
    if "*" in shape:
        shape = dict.fromkeys(value, shape["*"])
    fields = {name.rstrip("!"): one for name, one in shape.items()}
    needed = {name[:-1] for name in shape if name.endswith("!")}
    found = [f"{where}.{name}: is missing" for name in sorted(needed - set(value))]
    found += [f"{where}.{name}: is not known" for name in sorted(set(value) - set(fields))]
    for name in value:
        if name in fields:
            found += misfits(value[name], fields[name], f"{where}.{name}")
    return found
