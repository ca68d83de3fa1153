"""The side effects of a submission: code and history to the store, then the objects of the job."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import quote

from distdl.launchers.common import forwarded, manifests_last, pack
from distdl.launchers.kubernetes.cluster import TRAINER, Cluster
from distdl.launchers.kubernetes.manifests import PART, KubernetesRequest
from distdl.launchers.kubernetes.pods import MOST_PARTS, Manifest
from distdl.stores import Store, open_store
from distdl.util.errors import Forgotten, StoreError, UserError

# Folders of a run that began elsewhere (with launcher=local), so that it can resume.
HISTORY = ("checkpoints", "logs", "tracking")
PATIENCE = 30.0  # seconds of retries while the store does not answer; short, as a user waits
PATHS = {
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
    "Service": "/api/v1/namespaces/{}/services",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Secret": "/api/v1/namespaces/{}/secrets",
    "TrainJob": f"/apis/{TRAINER[0]}/{TRAINER[1]}/namespaces/{{}}/{TRAINER[2]}",
}


# Of a bundle: what may be too much for ConfigMaps.
INPUTS = "inputs"
LARGE = ("code/project", INPUTS)


def path_of(kind: str, namespace: str, name: str = "") -> str:
    """Where the API server has objects of a kind, or one of them."""
    path = PATHS[kind].format(quote(namespace, safe=""))
    return f"{path}/{quote(name, safe='')}" if name else path


def submit(request: KubernetesRequest, cluster: Cluster) -> KubernetesRequest:
    """Creates the job. The request that is returned has the name that the job has got.

    Raises:
        UserError: The API server or the store refuses something. Then nothing of it stays in the
            cluster.
    """
    namespace = request.namespace
    kind = request.main()["kind"]
    while exists(cluster, path_of(kind, namespace, request.name)):
        request = request.again(request.names_taken + 1)
    archive = packed(request, whole=request.claim is not None)
    main = request.main()
    others = request.parts(archive)
    if request.spec.forward_env:
        others.append(request.secret_of(forwarded(request.spec)))
    if not request.is_trainjob:
        others.append(request.service())
    # Rights, quota and policies are known now, before anything is written or uploaded.
    for each in (main, *others):
        cluster.create(path_of(each["kind"], namespace), each, dry_run=True)
    upload(request)
    create(cluster, namespace, main, others)
    return request


def exists(cluster: Cluster, path: str) -> bool:
    try:
        cluster.read(path)
    except Forgotten:
        return False
    return True


def create(cluster: Cluster, namespace: str, main: Manifest, others: Sequence[Manifest]) -> None:
    """Creates what the pods need, then the job. The others then belong to it: the cluster removes
    them with it."""
    with contextlib.ExitStack() as undo:
        for each in (*others, main):
            made = cluster.create(path_of(each["kind"], namespace), each)
            place = path_of(each["kind"], namespace, each["metadata"]["name"])
            undo.callback(removed(cluster, place))
        owner = {
            "apiVersion": main["apiVersion"],
            "kind": main["kind"],
            "name": main["metadata"]["name"],
            "uid": made["metadata"]["uid"],
        }
        for each in others:
            place = path_of(each["kind"], namespace, each["metadata"]["name"])
            cluster.patch(place, {"metadata": {"ownerReferences": [owner]}})
        undo.pop_all()


def removed(cluster: Cluster, path: str) -> Callable[[], None]:
    def remove() -> None:
        with contextlib.suppress(UserError):  # the error that led here says more
            cluster.delete(path)

    return remove


def packed(request: KubernetesRequest, whole: bool) -> bytes:
    """The archive that travels with the job: the config and, unless the image has it, distdl. With
    `whole` also what otherwise is in the store: the user's code, and the run's inputs.

    Raises:
        UserError: It is larger than ConfigMaps should be.
    """
    left_out = {"code"} if request.settings.code else set[str]()
    if not whole:
        left_out |= {*LARGE}

    def is_sent(name: str) -> bool:
        return not any(name == each or name.startswith(f"{each}/") for each in left_out)

    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary, "archive")
        pack(Path(request.spec.bundle), archive, is_sent)
        size = archive.stat().st_size
        if size > PART * MOST_PARTS:
            weights = Path(request.spec.bundle, INPUTS).exists()
            parts = "code and weights have" if weights else "the code has"
            raise UserError.at(
                "launcher.store",
                what=f"{parts} {size / 1e6:.1f} MB packed; {PART * MOST_PARTS / 1e6:.1f} MB fit",
                remedy=(
                    "launcher.store=s3://... or azure://..., or launcher.code=FOLDER in the image"
                ),
                code="out-of-range",
            )
        return archive.read_bytes()


def upload(request: KubernetesRequest) -> None:
    """Uploads the user's code, the run's inputs and its history to a store on Blob or S3.

    Raises:
        UserError: The store refuses it, or has another run of this name.
    """
    if request.claim:
        return
    try:
        store = open_store(request.key, patience=PATIENCE)
        refuse_another_run(request, store)
        kept = (INPUTS,) if request.settings.code else LARGE
        if any(Path(request.spec.bundle, name).exists() for name in kept):
            send_large(request, store, kept)
        send_history(request, store)
    except StoreError as error:
        raise UserError.at(
            "launcher.store", what=str(error), remedy=error.remedy, code=error.code
        ) from error


def refuse_another_run(request: KubernetesRequest, store: Store) -> None:
    """Refuses a store that has another run of the same name (of another project): training would
    resume from that run's checkpoints."""
    config = Path(request.spec.bundle) / "config.yaml"
    if store.size("config.yaml") is not None and store.read("config.yaml") != config.read_bytes():
        raise UserError.at(
            "launcher.store",
            what=f"{request.key} has a run of the same name with another config",
            remedy="choose another name or launcher.store",
            code="mismatch",
        )


def send_large(request: KubernetesRequest, store: Store, folders: Sequence[str]) -> None:
    """Uploads folders of the bundle as one archive."""
    with tempfile.TemporaryDirectory() as temporary:
        archive = Path(temporary, "archive")
        within = tuple(f"{folder}/" for folder in folders)
        pack(Path(request.spec.bundle), archive, lambda name: name.startswith(within))
        store.replace(archive, request.bundle_uri.removeprefix(f"{request.key}/"))


def send_history(request: KubernetesRequest, store: Store) -> None:
    """Uploads what the store lacks of a run that began elsewhere."""
    run = Path(request.spec.store)
    paths = (path for top in HISTORY for path in (run / top).rglob("*"))
    names = [p.relative_to(run).as_posix() for p in paths if p.is_file() and not p.is_symlink()]
    stored = set(store.names()) if names else set()
    for name in manifests_last(names):
        if name not in stored:
            store.upload(run / name, name)
