"""A volume that several pods write to, on clusters without a provisioner: a folder of one node."""

from __future__ import annotations

from e2e.kubectl import Kubectl, Object, wait_for

HOLDER = "volume-holder"
"""The pod that makes the folder, and takes it away."""
NODE_FOLDER = "/tmp"
"""The parent of the folder on the node; anybody may write there."""
HOSTNAME = "kubernetes.io/hostname"


class SharedVolume:
    """A ReadWriteMany claim. Pods that use it run on the node that has the folder."""

    def __init__(self, kubectl: Kubectl, image: str, claim: str) -> None:
        self._kubectl = kubectl
        self._image = image
        self._claim = claim
        self._name = f"{kubectl.namespace}-{claim}"
        self._folder = f"{NODE_FOLDER}/{self._name}"

    def make(self) -> None:
        self._kubectl.apply(self._holder())
        wait_for("the volume's folder is there", self._holds, 120)
        pod = self._kubectl.get("pod", HOLDER)
        assert pod is not None
        node = self._kubectl.get("node", pod["spec"]["nodeName"])
        assert node is not None
        self._kubectl.apply(*self._volume(node["metadata"]["labels"][HOSTNAME]))

    def remove(self) -> None:
        """When no pod uses it any more."""
        self._kubectl.exec(HOLDER, "rm", "-rf", self._folder)
        self._kubectl.delete("persistentvolumeclaim", self._claim)
        self._kubectl.delete("persistentvolume", self._name)
        self._kubectl.delete("pod", HOLDER, grace_s=1)

    def _holder(self) -> Object:
        script = f"mkdir -m 0777 {self._folder} && trap exit TERM && sleep infinity & wait"
        container = {
            "name": "holder",
            "image": self._image,
            "command": ["sh", "-c", script],
            "volumeMounts": [{"name": "node", "mountPath": NODE_FOLDER}],
            "readinessProbe": {"exec": {"command": ["test", "-d", self._folder]}},
        }
        spec = {
            "containers": [container],
            "volumes": [{"name": "node", "hostPath": {"path": NODE_FOLDER}}],
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
        }
        return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": HOLDER}, "spec": spec}

    def _holds(self) -> bool:
        pod = self._kubectl.get("pod", HOLDER) or {}
        said = pod.get("status", {}).get("conditions", [])
        return any(each["type"] == "Ready" and each["status"] == "True" for each in said)

    def _volume(self, hostname: str) -> tuple[Object, Object]:
        here = {"key": HOSTNAME, "operator": "In", "values": [hostname]}
        shared: Object = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": self._name},
            "spec": {
                **shared,
                "capacity": {"storage": "1Gi"},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": self._folder, "type": "Directory"},
                "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [here]}]}},
            },
        }
        claim = {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": self._claim},
            "spec": {
                **shared,
                "volumeName": self._name,
                "resources": {"requests": {"storage": "1Gi"}},
            },
        }
        return volume, claim
