"""A real Azurite (Azure's own storage emulator) with TLS on loopback.

Azure's SDKs use https with `<account>.blob.<domain>`. Here the domain is `localhost:<port>`, and
`any_host` makes such names this machine's, for one process.
"""

from __future__ import annotations

import ipaddress
import itertools
import shutil
import socket
import subprocess
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.conftest import free_port
from tests.waiting import until

# The emulator's published development account; it opens nothing else.
# https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "azureml"
HOUR = timedelta(hours=1)
MISSING = shutil.which("azurite-blob") is None
needs_azurite = pytest.mark.skipif(MISSING, reason="npm install -g azurite")


def connection(port: int) -> str:
    """The value of AZURE_STORAGE_CONNECTION_STRING."""
    endpoint = f"https://127.0.0.1:{port}/{ACCOUNT}"
    return f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={endpoint}"


def write_certificate(certificate: Path, key: Path) -> None:
    """A self-signed one, for an hour."""
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "distdl test")])
    names = [x509.DNSName("localhost"), x509.DNSName(f"{ACCOUNT}.blob.localhost")]
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), *names])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    made = made.public_key(private.public_key()).serial_number(x509.random_serial_number())
    made = made.not_valid_before(now - HOUR).not_valid_after(now + HOUR)
    made = made.add_extension(hosts, critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    certificate.write_bytes(made.sign(private, hashes.SHA256()).public_bytes(pem))
    key.write_bytes(private.private_bytes(pem, pkcs8, serialization.NoEncryption()))


class Azurite:
    """One emulator with one container, whose blobs are in a folder. `close` ends it."""

    def __init__(self, folder: Path, *options: str) -> None:
        folder.mkdir()
        self.certificate = folder / "cert.pem"
        self.key = folder / "key.pem"
        write_certificate(self.certificate, self.key)
        self.port = free_port()
        self._numbers = itertools.count(1)
        self.log = folder / "azurite.log"
        self.domain = f"localhost:{self.port}"  # the `endpoint` of a datastore
        command = [
            "azurite-blob",
            "--blobHost",
            "127.0.0.1",
            "--blobPort",
            str(self.port),
            "--location",
            str(folder),
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "--cert",
            str(self.certificate),
            "--key",
            str(self.key),
            *options,
        ]
        with self.log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(lambda: self._process.poll() or self.listens(), 30, self.log.read_text)
        self.new_container(CONTAINER)

    def listens(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def client(self, container: str):
        """A container for the account's owner, in any process."""
        from azure.storage.blob import ContainerClient

        credential = {"account_name": ACCOUNT, "account_key": KEY}
        options = {"credential": credential, "connection_verify": str(self.certificate)}
        return ContainerClient(f"https://127.0.0.1:{self.port}/{ACCOUNT}", container, **options)

    def new_container(self, name: str = "") -> str:
        name = name or f"upload-{next(self._numbers)}"
        self.client(name).create_container()
        return name

    def sas(self, container: str = CONTAINER) -> str:
        """A signature for a container, like Azure ML's for uploads."""
        from azure.storage.blob import ContainerSasPermissions, generate_container_sas

        options = {
            "permission": ContainerSasPermissions.from_string("racwdl"),
            "account_key": KEY,
            "expiry": datetime.now(UTC) + HOUR,
        }
        return generate_container_sas(ACCOUNT, container, **options)

    def contents(self, place: str) -> dict[str, bytes]:
        """The blobs below `container/folder`, or in `container`: name -> content."""
        container, _, folder = place.strip("/").partition("/")
        start = f"{folder}/" if folder else ""
        client = self.client(container)
        names = [blob.name for blob in client.list_blobs(start)]
        return {n.removeprefix(start): client.download_blob(n).readall() for n in names}

    def download(self, place: str, to: Path) -> None:
        to.mkdir(parents=True, exist_ok=True)
        for name, data in self.contents(place).items():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            (to / name).write_bytes(data)

    def upload(self, place: str, source: Path) -> None:
        """Stores the files of a folder below `container/folder`."""
        container, _, folder = place.partition("/")
        client = self.client(container)
        for path in (path for path in source.rglob("*") if path.is_file()):
            name = f"{folder}/{path.relative_to(source).as_posix()}"
            client.upload_blob(name, path.read_bytes(), overwrite=True)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
