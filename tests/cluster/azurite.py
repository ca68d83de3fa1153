"""A real Azurite (Azure's own storage emulator) with TLS, and the host names that it needs.

Azure's SDKs use https with `<account>.blob.<domain>`. Here the domain is `localhost:<port>`, and
`places.inside(command)` gives a command its own /etc/hosts, with such names.
"""

from __future__ import annotations

import datetime
import ipaddress
import itertools
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

# The emulator's published development account; it opens nothing else.
# https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "azureml"
VAULT = "distdl-test.vault.localhost"
NAMES = (f"{ACCOUNT}.blob.localhost", VAULT)


def why_not() -> str | None:
    """Why tests cannot use it; None if they can."""
    missing = [name for name in ("azurite-blob", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (npm install -g azurite; util-linux)"
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        return "no right to make a mount namespace (unshare --mount): run as root"
    return None


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def connection(port: int) -> str:
    """The value of AZURE_STORAGE_CONNECTION_STRING."""
    endpoint = f"https://127.0.0.1:{port}/{ACCOUNT}"
    return f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"


class Places:
    """Names and a certificate for what listens on loopback, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.certificate, self.key = folder / "cert.pem", folder / "key.pem"
        write_certificate(self.certificate, self.key)
        self.hosts = folder / "hosts"
        self.hosts.write_text("127.0.0.1 localhost " + " ".join(NAMES) + "\n")

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command, for whom NAMES are this machine. Nothing on this machine is changed."""
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, str(self.hosts), *command]


def write_certificate(certificate: Path, key: Path) -> None:
    """A self-signed one, for an hour."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distdl test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = [address, *map(x509.DNSName, ("localhost", *NAMES))]
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(private, hashes.SHA256())
    )
    certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    key.write_bytes(private.private_bytes(pem, pkcs8, serialization.NoEncryption()))


class Azurite:
    """One emulator with one container, whose blobs are in a folder. `close` ends it."""

    def __init__(self, places: Places, folder: Path, *options: str) -> None:
        self.port, self.places, self._numbers = free_port(), places, itertools.count(1)
        command = ["azurite-blob", "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        command += ["--location", str(folder), "--skipApiVersionCheck", "--disableTelemetry"]
        command += ["--cert", str(places.certificate), "--key", str(places.key), *options]
        folder.mkdir()
        self._log = (folder / "azurite.log").open("w+")
        self._process = subprocess.Popen(command, stdout=self._log, stderr=self._log)
        deadline = time.monotonic() + 30
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
                break
            assert self._process.poll() is None, (folder / "azurite.log").read_text()
            assert time.monotonic() < deadline, "azurite does not listen within 30 s"
            time.sleep(0.05)
        self.new_container(CONTAINER)

    @property
    def domain(self) -> str:
        """The `endpoint` of a datastore."""
        return f"localhost:{self.port}"

    def service(self):
        """A client of the account's owner, in this process, where NAMES are unknown."""
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient(
            f"https://127.0.0.1:{self.port}/{ACCOUNT}",
            credential={"account_name": ACCOUNT, "account_key": KEY},
            connection_verify=str(self.places.certificate),
        )

    def new_container(self, name: str = "") -> str:
        name = name or f"upload-{next(self._numbers)}"
        with self.service() as service:
            service.create_container(name)
        return name

    def sas(self, container: str = CONTAINER) -> str:
        """A signature for a container, like Azure ML's for uploads."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        return generate_container_sas(
            ACCOUNT,
            container,
            account_key=KEY,
            permission=ContainerSasPermissions.from_string("racwdl"),
            expiry=datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1),
        )

    def download(self, path: str, to: Path) -> None:
        """Writes the blobs below `container/path` into a folder."""
        container, _, folder = path.strip("/").partition("/")
        to.mkdir(parents=True, exist_ok=True)
        with self.service().get_container_client(container) as client:
            for blob in client.list_blobs(name_starts_with=f"{folder}/"):
                target = to / blob.name.removeprefix(f"{folder}/")
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(client.download_blob(blob.name).readall())

    def upload(self, target: str, source: Path) -> None:
        """Stores the files of a folder below `container/path`."""
        container, _, folder = target.partition("/")
        with self.service().get_container_client(container) as client:
            for path in sorted(p for p in source.rglob("*") if p.is_file()):
                name = f"{folder}/{path.relative_to(source).as_posix()}"
                client.upload_blob(name, path.read_bytes(), overwrite=True)

    def contents(self, start: str = "") -> dict[str, bytes]:
        """All blobs whose `container/name` starts so."""
        blobs = {}
        with self.service() as service:
            for container in service.list_containers():
                client = service.get_container_client(container.name)
                for blob in client.list_blobs():
                    name = f"{container.name}/{blob.name}"
                    if name.startswith(start):
                        blobs[name] = client.download_blob(blob.name).readall()
        return blobs

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        self._log.close()


def clean_environment() -> dict[str, str]:
    """The variables, without accounts, proxies and Azure settings."""
    drop = ("azure", "arm_", "msi_", "identity_", "obo_", "az_", "http_p", "https_p", "all_p")
    return {k: v for k, v in os.environ.items() if not k.lower().startswith(drop)}
